"""Timing side by side: warm up, then rounds in which every contender runs once, in turns forwards and backwards.

A machine that slows down, or that somebody else uses for a while, then slows all contenders and not the last one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Stopwatch = Callable[[Callable[[], object]], float]  # runs it once, and gives the seconds that it took

# Threads that wait for work spin for a while before they sleep: ONNX Runtime's and OpenMP's would take a core from the
# next contender. Longer than either spins.
SETTLE_SECONDS = 0.1
_FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class Spread:
    """Raw samples and what they say, in the samples' unit.

    Attributes:
        low, high: the quartiles; the least and the largest where there are fewer than four samples.
    """

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def least(self) -> float:
        return min(self.samples)

    @property
    def low(self) -> float:
        return self._quartiles()[0]

    @property
    def high(self) -> float:
        return self._quartiles()[1]

    def _quartiles(self) -> tuple[float, float]:
        if len(self.samples) < 4:
            return min(self.samples), max(self.samples)
        first, _, third = quantiles(self.samples, n=4, method="inclusive")
        return first, third


def seconds_on_cpu(run: Callable[[], object]) -> float:
    """By the clock, until `run` returns."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def stopwatch(device: torch.device) -> Stopwatch:
    """How to time what runs on `device`.

    On CUDA it is between two events on the current stream: what a caller on that stream waits for.
    """
    if device.type != "cuda":
        return seconds_on_cpu
    import torch

    def seconds(run: Callable[[], object]) -> float:
        with torch.cuda.device(device):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(device)
            start.record()
            run()
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / 1e3

    return seconds


def alternating(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 1,
    settle: float = SETTLE_SECONDS,
    most_seconds: float = float("inf"),
    seconds_of: Stopwatch = seconds_on_cpu,
) -> dict[str, Spread]:
    """Seconds of every contender, each run alone.

    Args:
        contenders: by name; every call is one run, finished when it returns.
        rounds: how often each is timed.
        warm_up: how often each runs before that.
        settle: seconds of sleep before each run.
        most_seconds: after them no round begins, once there were three.
        seconds_of: times a run.
    """
    for run in contenders.values():
        for _ in range(warm_up):
            seconds_of(run)
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    began = time.perf_counter()
    for number in range(rounds):
        if number >= _FEWEST_ROUNDS and time.perf_counter() - began > most_seconds:
            break
        names = list(contenders)
        for name in names if number % 2 == 0 else reversed(names):
            time.sleep(settle)
            samples[name].append(seconds_of(contenders[name]))
    return {name: Spread(tuple(values)) for name, values in samples.items()}


def paired_ratio(numerator: Spread, denominator: Spread) -> float:
    """The median over rounds of one contender's time as a share of another's: both saw the same machine."""
    return median(a / b for a, b in zip(numerator.samples, denominator.samples, strict=True))
