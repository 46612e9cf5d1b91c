"""The store's index spares hashing a file twice, and no state of it can do harm."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from turbovit.engines import store as module
from turbovit.engines.store import _fingerprint, bundles_folder, cached_digest, file_sha256, forget_digest, home

MTIME_NS = 1_700_000_000_123_456_789


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("TURBOVIT_HOME", str(folder))
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    write(path, b"some weights")
    return path


def write(path: Path, data: bytes, mtime_ns: int = MTIME_NS) -> None:
    path.write_bytes(data)
    os.utime(path, ns=(mtime_ns, mtime_ns))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def index(store: Path) -> dict[str, Any]:
    return json.loads((store / "index.json").read_text())


def test_the_home_is_configurable(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert home() == store
    assert bundles_folder() == store / "bundles"
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("TURBOVIT_HOME")
        else:
            monkeypatch.setenv("TURBOVIT_HOME", unset)
        assert home().name == "turbovit"
        assert home().is_absolute()


def test_an_unchanged_file_is_not_hashed_again(file: Path) -> None:
    computed = iter(["01", "02"])
    assert [cached_digest("key", [file], lambda: next(computed)) for _ in range(2)] == ["01", "01"]
    assert cached_digest("key", [file], lambda: next(computed), use_cache=False) == "02"
    assert cached_digest("key", [file], lambda: next(computed)) == "02"  # believed from now on


@pytest.mark.parametrize(("data", "mtime_ns"), [(b"other bytes!", MTIME_NS + 1), (b"other", MTIME_NS)])
def test_a_changed_file_is_hashed_again(file: Path, data: bytes, mtime_ns: int) -> None:
    file_sha256(file)
    write(file, data, mtime_ns)
    assert file_sha256(file) == sha256(data)
    assert file_sha256(file) == sha256(data)


def test_a_file_written_under_the_same_times_is_hashed_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_a_slow_clock(path: Path) -> tuple[Any, ...]:
        *rest, changed = _fingerprint(path)
        return (*rest, changed // 10_000_000 * 10_000_000)  # kernels tick every 10 ms at the slowest

    monkeypatch.setattr(module, "_fingerprint", by_a_slow_clock)
    for number in range(10, 30):
        data = f"weights {number}".encode()
        write(file, data)
        assert file_sha256(file) == sha256(data)


def test_a_file_replaced_by_one_of_the_same_size_and_time_is_hashed_again(file: Path, tmp_path: Path) -> None:
    file_sha256(file)
    write(tmp_path / "other", b"other bytes!")
    os.replace(tmp_path / "other", file)
    assert file_sha256(file) == sha256(b"other bytes!")


def test_a_link_that_leads_elsewhere_is_hashed_again(file: Path, tmp_path: Path) -> None:
    link, other = tmp_path / "link", tmp_path / "other"
    write(other, b"other bytes!")
    for target, data in ((file, b"some weights"), (other, b"other bytes!"), (file, b"some weights")):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        assert file_sha256(link) == sha256(data)


def test_what_changed_while_it_was_hashed_is_not_believed(file: Path, store: Path) -> None:
    def digest_and_write() -> str:
        write(file, b"other bytes!")
        return "01"

    assert cached_digest("key", [file], digest_and_write) == "01"
    assert index(store) == {}
    assert cached_digest("key", [file], lambda: "02") == "02"


def test_a_bit_that_rots_is_found_by_hashing_and_not_believed_any_more(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchanged = _fingerprint(file)
    monkeypatch.setattr(module, "_fingerprint", lambda path: unchanged)  # the disk rots, nothing writes
    assert file_sha256(file) == sha256(b"some weights")
    write(file, b"some weighty")
    assert file_sha256(file) == sha256(b"some weights")
    assert file_sha256(file, use_cache=False) == sha256(b"some weighty")
    assert file_sha256(file) == sha256(b"some weighty")


def test_a_digest_can_be_forgotten(file: Path, store: Path) -> None:
    cached_digest("key", [file], lambda: "01")
    forget_digest("key")
    forget_digest("key")
    assert index(store) == {}
    assert cached_digest("key", [file], lambda: "02") == "02"


def test_files_of_more_than_one_chunk_are_hashed_whole(file: Path) -> None:
    data = bytes(range(256)) * (5 << 12)  # 5 MiB, read in chunks of 4
    write(file, data)
    assert file_sha256(file) == sha256(data)


def test_a_digest_over_several_files_depends_on_each(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for path in files:
        write(path, b"x")
    computed = iter(["01", "02"])

    def digest() -> str:
        return cached_digest("key", files, lambda: next(computed))

    assert [digest(), digest()] == ["01", "01"]
    write(files[1], b"y", MTIME_NS + 1)
    assert digest() == "02"


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        file_sha256(tmp_path / "missing")


def test_vanished_files_are_dropped_from_the_index(file: Path, store: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write(other, b"other")
    file_sha256(file)
    file_sha256(other)
    assert len(index(store)) == 2
    file.unlink()
    write(other, b"other again", MTIME_NS + 1)
    file_sha256(other)
    assert list(index(store)) == [f"file:{other}"]


def test_a_home_that_cannot_be_made_is_only_logged(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TURBOVIT_HOME", str(file / "home"))  # a file is no folder, for root neither
    with caplog.at_level(logging.WARNING, "turbovit"):
        assert file_sha256(file) == sha256(b"some weights")
    assert "cannot be written" in caplog.text
    assert str(file / "home") in caplog.text


NO_ENTRIES: list[Any] = [None, 1, "x", [], {}, {"files": []}, {"digest": "00"}]
NO_FILES: list[Any] = [None, 1, "x", {}, [1], ["x"], [[]], [[1, 2, 3]], [["x", *"abcde"]], [["\0", 1, 1, 1, 1, 1]]]
NO_DIGESTS: list[Any] = [None, 1, "no hex", ["00"], {}]
# Whatever may stand in the index, JSON or not. KEY is the file's, FILES are what the index would say of it.
DAMAGED = [
    *(b"", b"{", b"\xff\xfe", b"null", b"3", b'"x"', b"[]", b'[{"files": []}]', b"[" * 100_000),
    *(json.dumps({"KEY": entry}).encode() for entry in NO_ENTRIES),
    *(json.dumps({"KEY": {"files": f, "digest": "00"}, "b": {"files": f, "digest": "00"}}).encode() for f in NO_FILES),
    *(json.dumps({"KEY": {"files": "FILES", "digest": digest}}).encode() for digest in NO_DIGESTS),
    b'{"KEY": {"files": [["x", Infinity, NaN, 1, 1, 1]], "digest": "00"}}',
    b'{"KEY": {"files": [["' + b"x" * 5000 + b'", 1, 1, 1, 1, 1]], "digest": "00"}}',
    # As it was before inode and time of change were part of it.
    b'{"KEY": {"files": [["x", 12, 1700000000123456789]], "digest": "00"}}',
]


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: ascii(content[:60]))
def test_a_damaged_index_is_replaced(content: bytes, file: Path, store: Path) -> None:
    fingerprint = json.dumps([_fingerprint(file)])
    content = content.replace(b"KEY", f"file:{file}".encode()).replace(b'"FILES"', fingerprint.encode())
    store.mkdir()
    (store / "index.json").write_bytes(content)
    assert file_sha256(file) == sha256(b"some weights")
    assert index(store)[f"file:{file}"]["digest"] == sha256(b"some weights")


def test_a_name_that_is_not_utf8_is_no_obstacle(tmp_path: Path, store: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9")
    write(path, b"x")
    assert [file_sha256(path), file_sha256(path)] == [sha256(b"x")] * 2
    assert len(index(store)) == 1


def test_concurrent_writers_lose_nothing(tmp_path: Path, store: Path) -> None:
    files = [tmp_path / f"file{number}" for number in range(24)]
    for number, path in enumerate(files):
        write(path, bytes([number]))
    script = "import sys; from pathlib import Path; from turbovit.engines.store import file_sha256\n"
    script += "for name in sys.argv[1:]: file_sha256(Path(name))"
    children = [subprocess.Popen([sys.executable, "-c", script, *map(str, files[part:16:2])]) for part in range(2)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(file_sha256, files[16:]))
    assert [child.wait(60) for child in children] == [0, 0]
    assert {key: entry["digest"] for key, entry in index(store).items()} == {
        f"file:{path}": sha256(bytes([number])) for number, path in enumerate(files)
    }
    assert sorted(path.name for path in store.iterdir()) == ["index.json", "index.json.lock"]
