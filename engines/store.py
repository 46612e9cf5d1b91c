"""Where bundles live by default, and the index that spares hashing large files twice."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock
from platformdirs import user_cache_path

from turbovit.engines.errors import BuildError

logger = logging.getLogger("turbovit")

_CHUNK = 1 << 22
_INDEX = "index.json"


@dataclass(frozen=True)
class _Entry:
    """A digest, and path, size and modification time (ns) of the files it was computed from."""

    files: list[tuple[str, int, int]]
    digest: str


def home() -> Path:
    """``$TURBOVIT_HOME``, or ``~/.cache/turbovit``, or a temporary folder where the user's home cannot hold that.

    Raises:
        BuildError: there is no such place at all.
    """
    configured = os.environ.get("TURBOVIT_HOME")
    if configured:
        return Path(configured)
    usual = user_cache_path("turbovit")
    nearest = next(folder for folder in (usual, *usual.parents) if os.path.exists(folder))
    writable = os.access(nearest, os.W_OK | os.X_OK, effective_ids=True)
    return usual if nearest == usual or writable else _temporary_home(usual)


@cache
def _temporary_home(usual: Path) -> Path:
    """A folder that nobody else can write to; says once that the next machine will not have it."""
    advice = "set TURBOVIT_HOME to a folder that stays"
    try:
        folder = Path(tempfile.gettempdir()) / f"turbovit-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise BuildError(
            f"the store can be made neither as {usual} nor as a temporary folder ({error}): {advice}"
        ) from None
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise BuildError(f"{usual} cannot be made, and others can write to {folder}: {advice}")
    logger.warning("%s cannot be made, so the store is %s: %s", usual, folder, advice)
    return folder


def bundles_folder() -> Path:
    """The folder that holds the default store's bundles."""
    return home() / "bundles"


def file_sha256(path: Path, *, use_cache: bool = True) -> str:
    """sha256 of a file's bytes, hex; from the index where size and modification time are unchanged."""

    def compute() -> str:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest()

    return cached_digest(f"file:{path.resolve()}", [path], compute) if use_cache else compute()


def cached_digest(key: str, files: list[Path], compute: Callable[[], str]) -> str:
    """`compute()`, or what it gave before under `key` if no file's size or modification time has changed.

    A store that cannot be written is no error: the digest is then computed every time.
    """
    stats = [file.stat() for file in files]
    fingerprint = [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in zip(files, stats, strict=True)]
    known = _read_index().get(key)
    if known is not None and known.files == fingerprint:
        return known.digest
    digest = compute()
    try:
        _remember(key, _Entry(fingerprint, digest))
    except OSError as error:
        logger.warning("the index in %s cannot be written (%s): hashes are computed again next time", home(), error)
    return digest


def _read_index() -> dict[str, _Entry]:
    """What is known; nothing where the index is missing or damaged."""
    try:
        index = json.loads((home() / _INDEX).read_text(encoding="utf-8"))
        return {key: _entry_from_json(entry) for key, entry in index.items()}
    except Exception:  # JSON of another shape raises whatever it happens to raise
        return {}


def _entry_from_json(entry: Any) -> _Entry:
    files = [(str(file), int(size), int(mtime)) for file, size, mtime in entry["files"]]
    return _Entry(files, bytes.fromhex(entry["digest"]).hex())


def _remember(key: str, entry: _Entry) -> None:
    home().mkdir(parents=True, exist_ok=True)
    with FileLock(home() / f"{_INDEX}.lock"):
        index = {k: e for k, e in _read_index().items() if all(os.path.exists(file) for file, *_ in e.files)}
        index[key] = entry
        temporary = home() / f"{_INDEX}.{os.getpid()}"
        temporary.write_text(json.dumps({k: asdict(e) for k, e in index.items()}), encoding="utf-8")
        os.replace(temporary, home() / _INDEX)
