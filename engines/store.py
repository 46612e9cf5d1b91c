"""Where bundles live by default, and the index that spares hashing large files twice."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
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
# Two writes within one tick of the file system's clock leave the same times; kernels tick every 1 to 10 ms.
_TICK_NS = 20_000_000

# Path, device, inode, size in bytes, and times (ns) of the last change of the content and of the file itself. Anything
# may set the former (`cp -p`, archives, reproducible images); the latter no program can.
_Fingerprint = tuple[str, int, int, int, int, int]


@dataclass(frozen=True)
class _Entry:
    """A digest, and what the files were that it was computed from."""

    files: list[_Fingerprint]
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
    """sha256 of a file's bytes, hex.

    Args:
        use_cache: take it from the index where the file is as it was; False hashes every byte, and has the index
            believe that instead.
    """

    def compute() -> str:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest()

    return cached_digest(f"file:{path.resolve()}", [path], compute, use_cache=use_cache)


def cached_digest(key: str, files: list[Path], compute: Callable[[], str], *, use_cache: bool = True) -> str:
    """`compute()`, or what it gave before under `key` if no file was written or replaced since.

    A store that cannot be written is no error: the digest is then computed every time.

    Args:
        use_cache: False computes it in any case, and has the index believe that instead.
    """
    before = _fingerprints(files)
    known = _read_index().get(key) if use_cache else None
    if known is not None and known.files == before:
        return known.digest
    if _are_fresh(before):
        time.sleep(_TICK_NS / 1e9)
        before = _fingerprints(files)
    digest = compute()
    if _fingerprints(files) == before:
        _change_index(lambda index: index.__setitem__(key, _Entry(before, digest)))
    else:
        forget_digest(key)
    return digest


def forget_digest(key: str) -> None:
    """Have the index know nothing of `key`."""
    _change_index(lambda index: index.pop(key, None))


def _fingerprints(files: list[Path]) -> list[_Fingerprint]:
    return [_fingerprint(file) for file in files]


def _fingerprint(file: Path) -> _Fingerprint:
    """Of the file that a link leads to."""
    stat = file.stat()
    return str(file), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _are_fresh(files: list[_Fingerprint]) -> bool:
    """Whether one changed so lately that its next change might leave the same times."""
    now = time.time_ns()
    return any(abs(now - changed) < _TICK_NS for *_, changed in files)


def _read_index() -> dict[str, _Entry]:
    """What is known; nothing where the index is missing or damaged."""
    try:
        index = json.loads((home() / _INDEX).read_text(encoding="utf-8"))
        return {key: _entry_from_json(entry) for key, entry in index.items()}
    except Exception:  # JSON of another shape raises whatever it happens to raise
        return {}


def _entry_from_json(entry: Any) -> _Entry:
    files = [
        (str(file), int(device), int(inode), int(size), int(content), int(changed))
        for file, device, inode, size, content, changed in entry["files"]
    ]
    return _Entry(files, bytes.fromhex(entry["digest"]).hex())


def _change_index(change: Callable[[dict[str, _Entry]], object]) -> None:
    try:
        home().mkdir(parents=True, exist_ok=True)
        with FileLock(home() / f"{_INDEX}.lock"):
            index = {k: e for k, e in _read_index().items() if all(os.path.exists(file) for file, *_ in e.files)}
            change(index)
            temporary = home() / f"{_INDEX}.{os.getpid()}"
            temporary.write_text(json.dumps({k: asdict(e) for k, e in index.items()}), encoding="utf-8")
            os.replace(temporary, home() / _INDEX)
    except (OSError, NotImplementedError) as error:  # the latter is filelock's, where there are no locks
        logger.warning("the index in %s cannot be written (%s): hashes are computed again next time", home(), error)
