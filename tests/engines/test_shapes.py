"""Symbolic shapes: splitting, matching with a reason where they do not fit, and back to numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbovit.engines.shapes import Dim, bind, resolve, split_dim


@pytest.mark.parametrize(
    ("dim", "expected"), [(7, (7, None)), ("images", (1, "images")), ("4*merged", (4, "merged")), ("16*a", (16, "a"))]
)
def test_a_dimension_is_a_factor_and_a_symbol(dim: Dim, expected: tuple[int, str | None]) -> None:
    assert split_dim(dim) == expected


def test_symbols_get_their_values_and_keep_them_over_several_tensors() -> None:
    symbols: dict[str, int] = {}
    assert bind(("frames", "4*merged", 3), (2, 24, 3), symbols) is None
    assert bind(("merged",), (6,), symbols) is None
    assert symbols == {"frames": 2, "merged": 6}
    assert resolve(("frames", "merged", "2*merged", 5), symbols) == (2, 6, 12, 5)


@pytest.mark.parametrize(
    ("shape", "actual", "reason"),
    [
        (("images", 3), (2,), "1 dimensions, expected 2"),
        (("images", 3), (2, 4), "4 at axis 1, expected 3"),
        (("images", 3), (0, 3), "0 at axis 0, expected a positive multiple of 1 (images)"),
        (("4*merged",), (6,), "6 at axis 0, expected a positive multiple of 4 (merged)"),
        (("a", "2*a"), (3, 8), "8 at axis 1, expected 6 (a is 3)"),
    ],
)
def test_what_does_not_fit_is_said_with_axis_found_and_expected(
    shape: tuple[Dim, ...], actual: tuple[int, ...], reason: str
) -> None:
    assert bind(shape, actual, {}) == reason


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from("abc")), max_size=5), st.tuples(*[st.integers(1, 99)] * 3))
def test_bind_finds_the_symbols_that_resolve_used(dims: list[tuple[int, str]], values: tuple[int, int, int]) -> None:
    known = dict(zip("abc", values, strict=True))
    shape = tuple(f"{factor}*{symbol}" for factor, symbol in dims)
    found: dict[str, int] = {}
    assert bind(shape, resolve(shape, known), found) is None
    assert found == {symbol: known[symbol] for _, symbol in dims}
