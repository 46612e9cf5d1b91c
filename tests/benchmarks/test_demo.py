"""The demo proves every family of the table, and fails where a family is not proved."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from turbomind_cpu.build import skip_reason

from turbovit.benchmarks import demo, turbomind_column
from turbovit.benchmarks.turbomind_column import TurboMindColumn
from turbovit.engines.families import FAMILIES, FamilyRow


@pytest.mark.parametrize("family", FAMILIES, ids=lambda row: row.name)
def test_every_family_is_proved_from_nothing(
    family: FamilyRow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "turbomind_column", partial(turbomind_column.turbomind_column, languages=("mha",)))
    row = demo.demo(family, tmp_path, Console(file=io.StringIO()))
    assert row.proved
    assert row.ids_equal
    assert row.logits_error is not None
    assert row.logits_error <= 1e-4
    assert row.ranges >= 2
    assert "passed" in row.certificate
    if family.name == "deepseek_vl2" and skip_reason() is None:
        assert re.fullmatch(r"mha: (\d+ ){6}.*", row.turbomind.lines[0].replace(",", " "))


@pytest.mark.parametrize(
    ("ids_equal", "error", "proved"), [(True, 1e-6, True), (True, 2e-4, False), (False, None, False)]
)
def test_a_row_is_proved_only_with_equal_ids_and_logits(ids_equal: bool, error: float | None, proved: bool) -> None:
    row = demo.Row("gemma3", 1.0, "onnxruntime fp32 passed", 562, 2, ids_equal, error, TurboMindColumn(()))
    assert row.proved is proved
    console = Console(file=io.StringIO(), width=140)
    console.print(demo.table_from_rows([row]))
    assert ("DIFFERENT" in console.file.getvalue()) is not ids_equal  # type: ignore[attr-defined]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], TurboMindColumn]:
    """The column, with other code in place of the script that runs TurboMind."""

    def column(code: str) -> TurboMindColumn:
        (tmp_path / "run.py").write_text(code)
        monkeypatch.setattr(turbomind_column, "_SCRIPT", tmp_path / "run.py")
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
        return turbomind_column.turbomind_column("deepseek_vl2", tmp_path / "x")

    return column


def results(code: int = 0, **case: Any) -> str:
    """A script that writes these results."""
    agreement = {"overall": 0.006, "worst_row": 0.01, "lag": 0.0}
    found = {"tokens": [4, 5], "expected": [4, 5], "agreement": agreement, "problem": "", "passed": code == 0, **case}
    return f"""
import json, sys
json.dump({{"mla": [{found!r}]}}, open(sys.argv[sys.argv.index("--json") + 1], "w"))
sys.exit({code})
"""


def test_the_column_says_what_turbomind_answered(script: Callable[[str], TurboMindColumn]) -> None:
    assert script(results()) == TurboMindColumn(("mla: 4 5, as the reference",))
    other = script(results(expected=[4, 6]))
    assert other == TurboMindColumn(("mla: 4 5", "reference: 4 6", "logits 0.6% off, within bounds"))
    wrong = script(results(code=1, expected=[7, 6], problem="logits are not finite"))
    assert wrong.failed
    assert wrong.lines[1:] == ("reference: 7 6", "logits 0.6% off, NOT within bounds logits are not finite")


def test_the_column_says_why_turbomind_was_not_run(
    script: Callable[[str], TurboMindColumn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert script("print('written for another TurboMind'); exit(3)") == TurboMindColumn(
        ("not run: written for another TurboMind",)
    )
    assert script("raise SystemExit('no memory')") == TurboMindColumn(("failed: no memory",), failed=True)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    column = turbomind_column.turbomind_column("deepseek_vl2", tmp_path)
    assert column == TurboMindColumn(("not run: no g++ to compile its kernels for CPUs",))
    monkeypatch.setattr(turbomind_column, "_SCRIPT", tmp_path / "gone.py")
    column = turbomind_column.turbomind_column("deepseek_vl2", tmp_path)
    assert column == TurboMindColumn(("not run: its kernels for CPUs come with a checkout",))
    assert turbomind_column.turbomind_column("gemma3", tmp_path) == TurboMindColumn(("no language half",))


def test_a_wrong_answer_of_turbomind_fails_the_demo() -> None:
    row = demo.Row("deepseek_vl2", 1.0, "passed", 9, 2, True, 1e-6, TurboMindColumn(("mla: 4 5",), failed=True))
    assert row.close
    assert not row.proved
