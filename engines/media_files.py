"""Reading what a request names or carries: regular files, within the limit on bytes, and data URLs."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from pathlib import Path
from urllib.parse import unquote_to_bytes

from turbovit.engines.errors import InputError
from turbovit.engines.limits import check_bytes

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_SCHEME = "data:"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_WHITESPACE = b"\t\n\f\r "


def read_file(path: str | Path) -> bytes:
    """The bytes of a regular file; never waits, as opening a pipe would.

    Raises:
        InputError: it is no regular file, is too large, or cannot be read.
    """
    # No controlling terminal, and no waiting for who writes into a pipe.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags)
        try:
            size = _checked_size(os.fstat(descriptor))
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read(size)  # and no more, should it grow
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InputError(f"the file cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise error if isinstance(error, InputError) else InputError("its path holds a NUL byte") from None


def _checked_size(status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise InputError(f"it is {kind}, expected a regular file")
    check_bytes(status.st_size)
    return status.st_size


def is_data_url(url: str) -> bool:
    """Whether a URL carries the data itself."""
    return url[: len(_SCHEME)].lower() == _SCHEME


def parts_of_data_url(url: str) -> tuple[str, list[bytes]]:
    """The media type of a data URL, without its parameters, and its data; more than one where commas part them.

    The data are base64 of either alphabet, with or without padding; whitespace and percent-encoding are undone, as
    browsers do (RFC 2397, and "forgiving-base64 decode" of https://infra.spec.whatwg.org).

    Raises:
        InputError: it is not base64, or is too large. The message quotes none of the data.
    """
    header, comma, body = url[len(_SCHEME) :].partition(",")
    media_type, *parameters = (piece.strip().lower() for piece in header.split(";"))
    if not comma or not parameters or parameters[-1] != "base64":
        raise InputError("the data URL is not base64: expected data:<type>;base64,<data>")
    check_bytes(len(body) * 3 // 4)
    return media_type, [_bytes_from_base64(piece) for piece in body.split(",")]


def _bytes_from_base64(text: str) -> bytes:
    try:
        encoded = unquote_to_bytes(text) if "%" in text else text.encode("ascii")
        encoded = encoded.translate(_URL_SAFE, _WHITESPACE)
        if len(encoded) % 4 == 0:
            encoded = re.sub(rb"={1,2}\Z", b"", encoded)
        return base64.b64decode(encoded + b"=" * (-len(encoded) % 4), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise InputError(f"the data URL is not base64: its {len(text)} characters cannot be decoded") from None
