"""What is kept is bounded by bytes, and what was asked for last stays."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from turbovit.engines.byte_cache import ByteCache


def tensors(size: int) -> Mapping[str, Tensor]:
    return {"a": torch.zeros(size - 4, dtype=torch.uint8), "b": torch.zeros(1)}


def test_the_ones_asked_for_longest_ago_go_first() -> None:
    cache = ByteCache(100)
    first, second = cache.get(1, lambda: tensors(40)), cache.get(2, lambda: tensors(60))
    assert cache.bytes == 100
    assert cache.get(1, lambda: tensors(40)) is first
    cache.get(3, lambda: tensors(50))
    assert cache.bytes == 90
    assert cache.get(1, lambda: tensors(40)) is first
    assert cache.get(2, lambda: tensors(60)) is not second


def test_what_is_larger_than_all_room_is_not_kept() -> None:
    cache = ByteCache(100)
    large = cache.get(1, lambda: tensors(101))
    assert cache.bytes == 0
    assert cache.get(1, lambda: tensors(101)) is not large


def test_threads_get_their_own_keys_tensors_and_the_bound_holds() -> None:
    cache = ByteCache(500)
    sizes = [10 + number % 37 for number in range(4000)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda size: cache.get(size, lambda: tensors(size)), sizes))
    assert [sum(tensor.nbytes for tensor in one.values()) for one in found] == sizes
    kept = {size: one for size, one in zip(sizes, found, strict=True) if cache.get(size, dict) is one}
    assert sum(kept) <= cache.bytes <= 500
