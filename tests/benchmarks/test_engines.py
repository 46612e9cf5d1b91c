"""`make engines`: every family is compiled ahead of time, and the table says what that took."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from turbovit.benchmarks.engines import CAPABILITIES, Row, compiled_family, table_from_rows
from turbovit.engines.families import FAMILIES, distinct_families

pytest.importorskip("tensorrt_rtx")

FAMILY_NAMES = [row.name for row in distinct_families()]


def test_every_tower_is_there_once() -> None:
    assert {row.tower for row in distinct_families()} == {row.tower for row in FAMILIES}
    assert len(FAMILY_NAMES) == len({row.tower for row in FAMILIES})
    assert "qwen3_vl" in FAMILY_NAMES  # the first of its tower


def test_the_table_shows_time_and_peak_memory(tmp_path: Path) -> None:
    row = compiled_family("gemma3", tmp_path, size="tiny", precision="bf16", capabilities=("8.9", "12.0"))
    assert row.engine.stat().st_size == row.engine_bytes > 0
    assert row.architectures == ("8.9", "12.0")
    assert min(row.seconds.values()) > 0
    assert 0.1 < row.peak_gib["compile"] < row.peak_gib["export"] < 4
    assert {"gemma3", "bf16,", "8.9,"} <= set(_printed([row]).split())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_full_size_tower_compiles_without_a_gpu(
    family: str, tmp_path: Path, record_property: pytest.RecordProperty, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.disk_usage(tmp_path).free < 12 << 30:
        pytest.skip("a full-size checkpoint, its graph and its engine take up to 8 GB of disk")
    row = compiled_family(family, tmp_path)
    shutil.rmtree(tmp_path)  # gigabytes
    record_property("compiled", repr(row))
    with capsys.disabled():
        print("\n" + _printed([row]))
    assert row.architectures == CAPABILITIES
    assert row.engine_bytes > 700e6  # half precision of at least 400 million parameters
    most = 8 if family == "llama4" else 6  # twice as many weights as the others
    assert max(row.peak_gib.values()) < most


def _printed(rows: list[Row]) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(table_from_rows(rows))
    return console.file.getvalue()  # type: ignore[attr-defined]
