"""The README shows what the benchmarks wrote, and nothing else of it changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from turbovit.benchmarks.readme import filled_readme
from turbovit.engines.errors import InputError

TEXT = "a\n<!-- bench encoder -->\nold\n<!-- end of bench -->\nb\n<!-- bench glue -->\nold\n<!-- end of bench -->\n"


def test_tables_take_their_places(tmp_path: Path) -> None:
    (tmp_path / "encoder.md").write_text("| new \\1 |\n")
    filled = filled_readme(TEXT, tmp_path)
    assert filled == TEXT.replace("old", "| new \\1 |", 1)
    assert filled_readme(filled, tmp_path) == filled


def test_a_readme_without_places_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no line <!-- bench NAME -->"):
        filled_readme("a\n", tmp_path)


def test_ours_has_a_place_for_every_benchmark() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    for name in ("encoder", "growth/encoder", "preprocess", "glue", "serve", "build", "growth/build"):
        assert text.count(f"<!-- bench {name} -->") == 1
