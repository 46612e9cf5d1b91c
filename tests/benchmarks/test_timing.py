"""Medians, turns and ratios."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
import torch

from turbovit.benchmarks.timing import Spread, alternating, paired_ratio, stopwatch


def test_every_contender_is_warmed_up_and_runs_once_a_round_in_turns() -> None:
    calls: list[str] = []
    runs = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    spreads = alternating(runs, rounds=3, warm_up=2, settle=0)
    assert "".join(calls) == "aabbcc" + "abc" + "cba" + "abc"
    assert {name: len(spread.samples) for name, spread in spreads.items()} == {"a": 3, "b": 3, "c": 3}


def test_what_is_timed_is_the_run_and_not_the_pause_before_it() -> None:
    spreads = alternating({"sleep": lambda: time.sleep(0.02), "none": lambda: None}, rounds=3, settle=0.05)
    assert spreads["sleep"].median >= 0.02
    assert spreads["none"].median < 0.02


def test_the_spread_is_median_and_quartiles() -> None:
    spread = Spread((5.0, 1.0, 2.0, 3.0, 4.0))
    assert (spread.least, spread.low, spread.median, spread.high) == (1.0, 2.0, 3.0, 4.0)
    assert (Spread((3.0, 1.0)).low, Spread((3.0, 1.0)).high) == (1.0, 3.0)


def test_a_ratio_is_taken_round_by_round() -> None:
    slow_second_round = (Spread((1.0, 10.0, 1.0)), Spread((2.0, 20.0, 2.0)))
    assert paired_ratio(*slow_second_round) == pytest.approx(0.5)


def test_no_more_rounds_are_begun_when_the_time_is_over() -> None:
    spread = alternating({"a": lambda: time.sleep(0.01)}, rounds=1000, settle=0, most_seconds=0.1)["a"]
    assert 3 <= len(spread.samples) <= 12
    assert spread.least >= 0.01


def test_on_cuda_time_is_taken_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, other: Event) -> float:
            return 2.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("synchronise"))
    assert stopwatch(torch.device("cuda"))(lambda: log.append("call")) == 2.5e-3
    assert log == ["synchronise", "record", "call", "record", "wait"]
