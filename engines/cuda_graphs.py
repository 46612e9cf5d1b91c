"""A runner's own CUDA stream, and CUDA graphs of what runs on it, one a shape.

Nothing here has run on a GPU yet.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turbovit.engines.errors import RuntimeUnavailableError, TurbovitError

logger = logging.getLogger("turbovit")

GRAPHS_VARIABLE = "TURBOVIT_CUDA_GRAPHS"
_REMEMBERED = 256  # shapes that came once and have no graph
Key = tuple[tuple[str, tuple[int, ...]], ...]


class SideStream:
    """A stream of a runner's own that takes its turn in whatever stream the caller is on.

    What a turn queues comes after all that the caller's stream holds, and before all that it gets later. So tensors
    of the caller's stream are safe to read and write, whoever frees them then; and turns of several callers come one
    after the other, so that they may share memory. It is never the default stream, on which TensorRT would
    synchronise the whole device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)

    @property
    def handle(self) -> int:
        """The ``cudaStream_t``."""
        return self._stream.cuda_stream

    @contextmanager
    def turn(self) -> Iterator[None]:
        """What runs inside is queued on this stream, in its place in the caller's. Needs a lock around it."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # also where a part of it was queued and the next failed
            current.wait_stream(self._stream)

    def synchronize(self) -> None:
        """Wait until all turns are done."""
        self._stream.synchronize()

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work` recorded as a CUDA graph; calling the result queues it. Must be called inside a turn."""
        graph = torch.cuda.CUDAGraph()
        # Calls that other threads make meanwhile, such as the language model's, must not break the capture.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


@dataclass(frozen=True)
class ShapeGraph:
    """What one shape needs: buffers with fixed addresses and the graph between them.

    Attributes:
        keep: whatever else must live as long as the graph.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    replay: Callable[[], None]
    keep: Any = None

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        """Queue the graph on `inputs`; `outputs` are filled, so that nothing of the graph's own gets out."""
        for name, own in self.inputs.items():
            own.copy_(inputs[name])
        self.replay()
        for name, own in self.outputs.items():
            outputs[name].copy_(own)


class Graphs:
    """The graphs of the shapes used last, one for each that came again. Needs a lock around it."""

    def __init__(self, capacity: int, stream: SideStream):
        self._capacity = capacity
        self._stream = stream
        self._graphs: OrderedDict[Key, ShapeGraph] = OrderedDict()
        self._seen: OrderedDict[Key, None] = OrderedDict()

    def get(self, inputs: Mapping[str, Tensor], make: Callable[[], ShapeGraph]) -> ShapeGraph | None:
        """The graph for inputs of these very shapes, made by `make` the second time they come; else None.

        A graph that cannot be made is no error of the request's: it is logged, and no more are tried.
        """
        if not self._capacity:
            return None
        key = tuple((name, tuple(tensor.shape)) for name, tensor in sorted(inputs.items()))
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
            return None
        try:
            graph = make()
        except (RuntimeError, TurbovitError) as error:
            logger.warning("CUDA graphs are off from here on: the capture of %s failed: %s", key, error)
            self._capacity = 0
            return None
        del self._seen[key]
        self._graphs[key] = graph
        if len(self._graphs) > self._capacity:
            self._stream.synchronize()  # the one that goes may still be running
            self._graphs.popitem(last=False)
        return graph

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Free all graphs; the stream must be idle."""
        self._graphs.clear()


def graphs_wanted() -> int:
    """How many shapes shall have a CUDA graph at a time: ``$TURBOVIT_CUDA_GRAPHS``, by default none.

    Raises:
        RuntimeUnavailableError: the variable is not a number.
    """
    configured = os.environ.get(GRAPHS_VARIABLE, "0")
    if not configured.isdecimal():
        raise RuntimeUnavailableError(f"{GRAPHS_VARIABLE}={configured!r} is not a number of shapes to keep graphs for")
    return int(configured)
