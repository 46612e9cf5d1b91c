"""Medians, turns and ratios."""

from __future__ import annotations

import time

import pytest

from turbovit.benchmarks.timing import Spread, alternating, paired_ratio


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
