"""Timing several calls side by side: warmed up, in alternating order, every sample kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles

import torch

_WARM_UP = 2
_FEWEST = 3


@dataclass(frozen=True)
class Timing:
    """Samples of one call.

    Attributes:
        samples: milliseconds, in the order they were taken.
    """

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Milliseconds."""
        return median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """First and third quartile, in milliseconds."""
        low, _, high = quantiles(self.samples, n=4, method="inclusive")
        return low, high


def timed(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, seconds: float
) -> dict[str, Timing]:
    """Time every call once a round, the order turned round each time, so that drift hits all alike.

    Args:
        rounds: how many, unless `seconds` are over sooner; at least three.

    Returns:
        By the names of `calls`.
    """
    sample = _cuda_milliseconds if device.type == "cuda" else _milliseconds
    for call in calls.values():
        for _ in range(_WARM_UP):
            sample(call, device)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order, started = list(calls), time.perf_counter()
    for number in range(max(rounds, _FEWEST)):
        if number >= _FEWEST and time.perf_counter() - started > seconds:
            break
        for name in order:
            samples[name].append(sample(calls[name], device))
        order.reverse()
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def _cuda_milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Between two events on the current stream: what a caller on that stream waits for."""
    with torch.cuda.device(device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        call()
        end.record()
        end.synchronize()
    return start.elapsed_time(end)


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)
