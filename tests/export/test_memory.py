"""A build holds the weights once at a time: they are gone before a runtime loads its own copy."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from turbovit.export import build as build_module


def test_no_weight_outlives_the_export(tiny_gemma3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    original = build_module.derive_graph

    def derive(*arguments: Any) -> int:
        held.append(_float_bytes())
        return original(*arguments)

    monkeypatch.setattr(build_module, "derive_graph", derive)
    before = _float_bytes()
    build_module.build(tiny_gemma3, tmp_path / "bundle")
    weights = (tmp_path / "bundle" / "weights.fp32.bin").stat().st_size
    assert len(held) == 1
    assert held[0] - before < weights / 10


def _float_bytes() -> int:
    """Bytes of all float tensors that Python objects still refer to, each storage once."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = (item for item in gc.get_objects() if type(item) in kinds)
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.dtype.is_floating_point
    }
    return sum(storages.values())
