"""Which optimisation profile of a compiled engine takes an input, and how many rows it takes at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from turbovit.engines.bundle import Profile
from turbovit.engines.errors import EngineInputError


def profile_for(profiles: Sequence[Profile], symbols: Mapping[str, int]) -> int | None:
    """The first profile that holds the value of every symbol; 0 where the engine has none of its own."""
    if not profiles:
        return 0
    return next((number for number, profile in enumerate(profiles) if _holds(profile, symbols)), None)


def rows_per_run(profiles: Sequence[Profile], symbols: Mapping[str, int], batch: str) -> int:
    """The most rows of a batch that one run takes: all of them, or fewer that some profile holds.

    Args:
        symbols: values of all symbols, among them the rows there are.
        batch: the symbol that counts rows.

    Raises:
        EngineInputError: no profile holds even one row; lists what there is.
    """
    if profile_for(profiles, symbols) is not None:
        return symbols[batch]
    fewer = [min(symbols[batch], profile.ranges[batch][2]) for profile in profiles]
    taken = [rows for rows in fewer if profile_for(profiles, {**symbols, batch: rows}) is not None]
    if not taken:
        got = ", ".join(f"{value} {symbol}" for symbol, value in symbols.items())
        raise EngineInputError(f"{got}: no profile of this engine holds that; it has {described(profiles)}")
    return max(taken)


def described(profiles: Sequence[Profile]) -> str:
    """The profiles' ranges, as `turbovit build --profile` takes them."""
    return "; ".join(map(text_from_profile, profiles))


def text_from_profile(profile: Profile) -> str:
    """One profile's ranges, as `turbovit.export.profiles.profile_from_text` reads them."""
    return ",".join(f"{symbol}={':'.join(map(str, sizes))}" for symbol, sizes in profile.ranges.items())


def _holds(profile: Profile, symbols: Mapping[str, int]) -> bool:
    return all(low <= symbols[symbol] <= high for symbol, (low, _, high) in profile.ranges.items())
