"""The demo proves every family of the table, and fails where a family is not proved."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from turbovit.benchmarks import demo
from turbovit.engines.families import FAMILIES, FamilyRow


@pytest.mark.parametrize("family", FAMILIES, ids=lambda row: row.name)
def test_every_family_is_proved_from_nothing(family: FamilyRow, tmp_path: Path) -> None:
    row = demo.demo(family, tmp_path, Console(file=io.StringIO()))
    assert row.ids_equal
    assert row.logits_error is not None
    assert row.logits_error <= 1e-4
    assert row.ranges >= 2
    assert "passed" in row.certificate


@pytest.mark.parametrize(
    ("ids_equal", "error", "proved"), [(True, 1e-6, True), (True, 2e-4, False), (False, None, False)]
)
def test_a_row_is_proved_only_with_equal_ids_and_logits(ids_equal: bool, error: float | None, proved: bool) -> None:
    row = demo.Row("gemma3", 1.0, "onnxruntime fp32 passed", 562, 2, ids_equal, error)
    assert row.proved is proved
    console = Console(file=io.StringIO(), width=140)
    console.print(demo.table_from_rows([row]))
    assert ("DIFFERENT" in console.file.getvalue()) is not ids_equal  # type: ignore[attr-defined]
