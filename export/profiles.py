"""Optimisation profiles: the ranges of input shapes that an engine is compiled for, and how users give their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from turbovit.engines.bundle import Profile, TensorSpec
from turbovit.engines.errors import BuildError
from turbovit.engines.shapes import resolve

Range = tuple[int, int, int]
Shape = tuple[int, ...]

_RANGE = re.compile(r"(\w+)=(\d+):(\d+):(\d+)")


def profile_from_text(text: str, limits: Mapping[str, int], batch: str) -> Profile:
    """The profile of ``frames=1:1:2,merged=64:256:1024``: smallest, optimal and largest value of every symbol.

    Args:
        limits: the bundle's; their names are the symbols that a profile must give.
        batch: the symbol that counts rows. Its range starts at 1: a row alone must run.

    Raises:
        BuildError: a symbol is missing or unknown, or a range makes no sense or leaves the limits.
    """
    form = ",".join(f"{symbol}=MIN:OPT:MAX" for symbol in limits)
    found = [_RANGE.fullmatch(part.strip()) for part in text.split(",")]
    names = [match[1] for match in found if match]
    if None in found or sorted(names) != sorted(limits):
        raise BuildError(f"the profile is {text!r}, expected {form}")
    given = {match[1]: (int(match[2]), int(match[3]), int(match[4])) for match in found if match}
    for symbol, (low, best, high) in given.items():
        if not 1 <= low <= best <= high:
            raise BuildError(f"profile {text!r}: {symbol} is {low}:{best}:{high}, expected 1 <= MIN <= OPT <= MAX")
        if high > limits[symbol]:
            raise BuildError(
                f"profile {text!r}: at most {high} {symbol}, and the bundle's limit is {limits[symbol]}: "
                f"ask for fewer, or build with a larger limit"
            )
    if given[batch][0] != 1:
        raise BuildError(f"profile {text!r}: {batch} start at {given[batch][0]}, expected 1: one alone must run too")
    return Profile({symbol: given[symbol] for symbol in limits})


def buckets(limit: int, edges: Sequence[int]) -> list[Range]:
    """Ranges that together hold 1 to `limit`, one up to each edge below it; the optimum is half of the largest."""
    tops = [*(edge for edge in edges if edge < limit), limit]
    lows = [1, *(top + 1 for top in tops)]
    return [(low, max(low, top // 2), top) for low, top in zip(lows, tops, strict=False)]


def shapes_from_profile(profile: Profile, inputs: Sequence[TensorSpec]) -> dict[str, tuple[Shape, Shape, Shape]]:
    """(smallest, optimal, largest) shape of every input."""
    low, best, high = ({symbol: sizes[end] for symbol, sizes in profile.ranges.items()} for end in range(3))
    return {
        spec.name: (resolve(spec.shape, low), resolve(spec.shape, best), resolve(spec.shape, high)) for spec in inputs
    }
