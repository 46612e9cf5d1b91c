"""A runner's stream takes its turn in the caller's; seen from streams that record, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fake_tensorrt import FakeStream

from turbovit.engines.cuda_graphs import Graphs, ShapeGraph, SideStream

CUDA = torch.device("cuda", 1)


@dataclass
class RecordingStream:
    name: str
    events: list[Any]
    cuda_stream: int = 7

    def wait_stream(self, other: RecordingStream) -> None:
        self.events.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.events.append(f"wait for {self.name}")


@dataclass
class RecordingGraph:
    events: list[Any] = field(default_factory=list)

    def replay(self) -> None:
        self.events.append("replay")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    callers = RecordingStream("the caller's", seen)

    @contextmanager
    def stream(chosen: RecordingStream) -> Iterator[None]:
        seen.append(f"on {chosen.name}")
        yield
        seen.append(f"off {chosen.name}")

    @contextmanager
    def graph(graph: RecordingGraph, stream: RecordingStream, capture_error_mode: str) -> Iterator[None]:
        seen.append(f"capture on {stream.name}, {capture_error_mode}")
        yield
        seen.append("captured")

    def current(device: torch.device) -> RecordingStream:
        assert device == CUDA
        return callers

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: RecordingStream("ours", seen))
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: RecordingGraph(seen))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return seen


def test_a_turn_comes_after_what_the_caller_has_queued_and_before_what_follows(events: list[Any]) -> None:
    stream = SideStream(CUDA)
    assert stream.handle == 7
    with stream.turn():
        events.append("work")
    assert events == ["ours waits for the caller's", "on ours", "work", "off ours", "the caller's waits for ours"]


def test_the_caller_waits_also_for_a_turn_that_failed_half_way(events: list[Any]) -> None:
    with pytest.raises(ValueError, match="half way"), SideStream(CUDA).turn():
        raise ValueError("half way")
    assert events[-1] == "the caller's waits for ours"


def test_a_capture_is_on_our_stream_and_leaves_other_threads_alone(events: list[Any]) -> None:
    replay = SideStream(CUDA).captured(lambda: events.append("work"))
    assert events == ["capture on ours, thread_local", "work", "captured"]
    replay()
    assert events[-1] == "replay"
    SideStream(CUDA).synchronize()
    assert events[-1] == "wait for ours"


def test_torch_has_what_is_called_with_these_parameters() -> None:
    import inspect

    assert {"stream", "capture_error_mode"} <= set(inspect.signature(torch.cuda.graph.__init__).parameters)
    assert hasattr(torch.cuda.Stream, "wait_stream")
    assert hasattr(torch.cuda.Stream, "cuda_stream")
    assert hasattr(torch.cuda.CUDAGraph, "replay")


def test_a_graph_is_for_the_full_shape_of_every_input() -> None:
    """Not for a number of values, nor of tokens: another shape has its own even where both are the same."""
    graphs = Graphs(8, FakeStream())
    made: list[ShapeGraph] = []

    def make() -> ShapeGraph:
        made.append(ShapeGraph({}, {}, lambda: None))
        return made[-1]

    shapes = [((2, 6), (4,)), ((3, 4), (4,)), ((12, 1), (4,)), ((2, 6), (2, 2))]
    inputs = [{"x": torch.zeros(x), "y": torch.zeros(y)} for x, y in shapes]
    assert [graphs.get(tensors, make) for tensors in inputs] == [None] * 4
    first = [graphs.get(tensors, make) for tensors in inputs]
    assert [id(graph) for graph in first] == [id(graph) for graph in made]
    assert [graphs.get(tensors, make) is graph for tensors, graph in zip(inputs, first, strict=True)] == [True] * 4
    assert len(made) == len(graphs) == 4
