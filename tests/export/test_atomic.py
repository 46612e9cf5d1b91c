"""A folder appears whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from turbovit.engines.errors import BuildError
from turbovit.export.atomic import folder_in_one_step, remove_leftovers


def test_the_folder_appears_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "parent/bundle"
    with folder_in_one_step(folder) as temporary:
        (temporary / "file").write_text("content")
        assert not folder.exists()
        assert temporary.parent == folder.parent  # one file system, so that the rename is one step
    assert (folder / "file").read_text() == "content"
    assert [path.name for path in folder.parent.iterdir()] == ["bundle"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_whatever_ends_the_block_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> NoReturn:
        with folder_in_one_step(tmp_path / "bundle") as temporary:
            (temporary / "file").write_text("content")
            raise error

    with pytest.raises(error):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_filled_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"

    def fill_meanwhile() -> None:
        with folder_in_one_step(folder) as temporary:
            (temporary / "file").write_text("ours")
            folder.mkdir()
            (folder / "file").write_text("theirs")

    with pytest.raises(OSError, match="not empty"):
        fill_meanwhile()
    assert (folder / "file").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bundle").write_text("a file")
    with pytest.raises(BuildError, match="exists and is not empty"), folder_in_one_step(tmp_path / "bundle"):
        pytest.fail("the block must not run")


def test_only_leftovers_of_this_folder_are_removed(tmp_path: Path) -> None:
    kept = [".bundle", ".bundle2.part-00000000", "bundle.part-00000000", ".b.part-00000000"]
    for name in [*kept, ".bundle.part-00000000", ".bundle.part-ffffffff"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("content")
    remove_leftovers(tmp_path / "bundle")
    assert {path.name for path in tmp_path.iterdir()} == {*kept}
