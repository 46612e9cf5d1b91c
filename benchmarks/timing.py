"""Timing side by side: warm up, then rounds in which every contender runs once, in turns forwards and backwards.

A machine that slows down, or that somebody else uses for a while, then slows all contenders and not the last one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles

# Threads that wait for work spin for a while before they sleep: ONNX Runtime's and OpenMP's would take a core from the
# next contender. Longer than either spins.
SETTLE_SECONDS = 0.1


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


def alternating(
    contenders: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 1, settle: float = SETTLE_SECONDS
) -> dict[str, Spread]:
    """Seconds of every contender, each run alone.

    Args:
        contenders: by name; every call is one run, finished when it returns.
        rounds: how often each is timed.
        warm_up: how often each runs before that.
        settle: seconds of sleep before each run.
    """
    for run in contenders.values():
        for _ in range(warm_up):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        names = list(contenders)
        for name in names if number % 2 == 0 else reversed(names):
            time.sleep(settle)
            started = time.perf_counter()
            contenders[name]()
            seconds[name].append(time.perf_counter() - started)
    return {name: Spread(tuple(samples)) for name, samples in seconds.items()}


def paired_ratio(numerator: Spread, denominator: Spread) -> float:
    """The median over rounds of one contender's time as a share of another's: both saw the same machine."""
    return median(a / b for a, b in zip(numerator.samples, denominator.samples, strict=True))
