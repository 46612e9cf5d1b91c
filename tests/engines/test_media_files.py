"""Files and data URLs: what is no regular file is refused at once, and no refusal quotes the data."""

from __future__ import annotations

import base64
import os
import socket
import threading
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbovit.engines.errors import InputError
from turbovit.engines.images import rgb_from_image
from turbovit.engines.limits import MEDIA_BYTES
from turbovit.engines.media_files import is_data_url, parts_of_data_url, read_file

DATA = bytes(range(256)) + b"\xfb\xff\xfe"  # its base64 has both letters that the alphabets differ in
STANDARD, URL_SAFE = base64.b64encode(DATA).decode(), base64.urlsafe_b64encode(DATA).decode()

GOOD = {
    "plain": f"data:image/png;base64,{STANDARD}",
    "with a parameter": f"data:image/png;charset=utf-8;base64,{STANDARD}",
    "upper case": f"DATA:IMAGE/PNG;BASE64,{STANDARD}",
    "URL-safe": f"data:image/png;base64,{URL_SAFE}",
    "no padding": f"data:image/png;base64,{STANDARD.rstrip('=')}",
    "percent-encoded": f"data:image/png;base64,{quote(STANDARD, safe='')}",
    "lines": "data:image/png;base64," + "\r\n".join(STANDARD[i : i + 76] for i in range(0, len(STANDARD), 76)),
    "encoded lines": f"data:image/png;base64,{STANDARD[:20]}%0A{STANDARD[20:]}%20",
    "spaces around": f"data: image/png ; base64 ,  {STANDARD} ",
}
BAD = {
    "not base64": "data:image/png,secret",
    "another encoding": "data:image/png;utf8,secret",
    "base64 not last": f"data:image/png;base64;charset=utf-8,{STANDARD}",
    "no comma": "data:image/png;base64secret",
    "nothing": "data:",
    "other letters": "data:image/png;base64,secret!!",
    "other alphabets": "data:image/png;base64,sécret00",
    "one letter too many": "data:image/png;base64,secre",
    "padding inside": "data:image/png;base64,sec=ret=",
}


def test_the_data_hold_what_tells_the_alphabets_apart() -> None:
    assert {"+", "/"} <= set(STANDARD)
    assert STANDARD.endswith("=")


@pytest.mark.parametrize("name", GOOD)
def test_a_data_url_is_decoded(name: str) -> None:
    assert is_data_url(GOOD[name])
    assert parts_of_data_url(GOOD[name]) == ("image/png", [DATA])


@pytest.mark.parametrize("name", BAD)
def test_a_data_url_that_is_no_base64_is_called_so_and_not_quoted(name: str) -> None:
    with pytest.raises(InputError, match="the data URL is not base64") as refusal:
        parts_of_data_url(BAD[name])
    assert "sec" not in str(refusal.value)


@settings(derandomize=True, deadline=None)
@given(st.binary(max_size=200), st.booleans(), st.booleans())
def test_any_bytes_come_back(data: bytes, url_safe: bool, padded: bool) -> None:
    encoded = (base64.urlsafe_b64encode if url_safe else base64.b64encode)(data).decode()
    assert parts_of_data_url(f"data:;base64,{encoded if padded else encoded.rstrip('=')}") == ("", [data])


def test_frames_are_parted_by_commas() -> None:
    assert parts_of_data_url("data:video/jpeg;base64,QQ==,Qg==") == ("video/jpeg", [b"A", b"B"])


def test_too_much_data_are_refused_undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEDIA_BYTES.variable, "100")
    with pytest.raises(InputError, match=r"at most 100 are allowed.*TURBOVIT_MAX_MEDIA_BYTES"):
        parts_of_data_url("data:image/png;base64," + "!" * 1000)


def test_a_regular_file_is_read_through_links(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "link") == read_file(str(tmp_path / "file")) == DATA


def odd_file(kind: str, folder: Path) -> Path:
    path = folder / "odd"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            os.chdir(folder)  # the name of a socket is short
            server.bind("odd")
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    return Path("/dev/zero") if kind == "device" else path


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device", "link to a device"])
def test_what_is_no_regular_file_is_refused_at_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = odd_file(kind, tmp_path)
    refusals: list[InputError] = []

    def read() -> None:
        for entry in (read_file, rgb_from_image):
            try:
                entry(path)
            except InputError as error:
                refusals.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it waits"
    words = "cannot be read" if kind == "socket" else f"it is a {kind.split()[-1]}, expected a regular file"
    assert [words in str(refusal) for refusal in refusals] == [True, True]


def test_a_file_that_is_too_large_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match=rf"{1 << 40} bytes, at most {MEDIA_BYTES.default} are allowed"):
        read_file(tmp_path / "sparse")


def test_a_file_whose_size_the_kernel_does_not_tell_holds_nothing() -> None:
    assert read_file("/proc/self/environ") == b""


@pytest.mark.parametrize(
    ("path", "words"), [("missing", "No such file"), ("a\0b", "NUL byte"), ("x" * 5000, "too long")]
)
def test_a_file_that_cannot_be_read_is_refused(path: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        read_file(str(tmp_path / path))
