"""Tensors that are made once and kept as long as all that is kept fits into so many bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from threading import Lock

from torch import Tensor

Tensors = Mapping[str, Tensor]


class ByteCache:
    """Sets of tensors by key; the ones that were asked for longest ago go first. Threads may share one.

    Args:
        limit: bytes of everything that is kept. A set that is larger than this is made every time.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.bytes = 0
        self._kept: OrderedDict[Hashable, Tensors] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], Tensors]) -> Tensors:
        """What is kept under `key`, or what `make` gives."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = make()  # without the lock: nobody waits for another's
        with self._lock:
            if key in self._kept:
                return self._kept[key]
            self._kept[key] = made
            self.bytes += _bytes(made)
            while self.bytes > self.limit:
                _, oldest = self._kept.popitem(last=False)
                self.bytes -= _bytes(oldest)
        return made


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
