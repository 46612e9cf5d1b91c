"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from uuid import uuid4

from turbovit.engines.errors import BuildError


@contextmanager
def folder_in_one_step(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name once the block has ended well.

    Whatever ends the block otherwise, an exception, a full disk or Ctrl-C, removes it. `folder` must not exist or
    be empty.

    Raises:
        BuildError: `folder` is in use.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BuildError(f"{folder} exists and is not empty: delete it or choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f"{_prefix(folder)}{uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        yield temporary
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left of `folder`. The caller makes sure that no other process is at work on it."""
    for leftover in folder.parent.glob(f"{escape(_prefix(folder))}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _prefix(folder: Path) -> str:
    return f".{folder.name}.part-"
