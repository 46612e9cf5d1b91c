"""Symbolic dimensions of engine inputs and outputs: ``7``, ``"images"`` or ``"4*merged"``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Dim = int | str


def split_dim(dim: Dim) -> tuple[int, str | None]:
    """``(factor, symbol)`` of a dimension; the symbol is None where the dimension is a number."""
    if isinstance(dim, int):
        return dim, None
    factor, star, symbol = dim.rpartition("*")
    return (int(factor) if star else 1), symbol


def bind(shape: Sequence[Dim], actual: Sequence[int], symbols: dict[str, int]) -> str | None:
    """Match `actual` against `shape`, adding the symbols' values to `symbols`.

    Returns:
        None where it fits, else the reason in words.
    """
    if len(shape) != len(actual):
        return f"{len(actual)} dimensions, expected {len(shape)}"
    for axis, (dim, size) in enumerate(zip(shape, actual, strict=True)):
        factor, symbol = split_dim(dim)
        if symbol is None:
            if size != factor:
                return f"{size} at axis {axis}, expected {factor}"
        elif size % factor or size == 0:
            return f"{size} at axis {axis}, expected a positive multiple of {factor} ({symbol})"
        elif symbols.setdefault(symbol, size // factor) != size // factor:
            return f"{size} at axis {axis}, expected {factor * symbols[symbol]} ({symbol} is {symbols[symbol]})"
    return None


def resolve(shape: Sequence[Dim], symbols: Mapping[str, int]) -> tuple[int, ...]:
    """The numbers of a symbolic shape."""
    return tuple(factor if symbol is None else factor * symbols[symbol] for factor, symbol in map(split_dim, shape))
