"""A PNG without what says nothing about its pixels.

Pillow refuses a file for a text or colour profile that unpacks to more than it wants to hold, and for a wrong checksum
of either. Chunks that are needed to decode (critical ones), transparency and orientation stay; all others go.
Reference: https://www.w3.org/TR/png-3, 5.3 (chunk layout) and 5.4 (ancillary bit).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MOST_UNPACKED = 1 << 20  # Pillow's own limit for one text
# Texts that Pillow looks for an orientation in.
_ORIENTATIONS = (b"XML:com.adobe.xmp", b"Raw profile type exif")
_HEAD = struct.Struct(">I4s")
_CRC = 4


def without_metadata(data: bytes) -> bytes:
    """`data` itself where nothing goes; what stands behind a chunk that is cut short stays as it is."""
    view = memoryview(data)
    kept, end, dropped = [view[: len(SIGNATURE)]], len(SIGNATURE), False
    for begin, end, kind in _chunks(data):
        if _is_needed(kind, view[begin:end]):
            kept.append(view[begin:end])
        else:
            dropped = True
    return b"".join([*kept, view[end:]]) if dropped else data


def _chunks(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Begin, end and type of every whole chunk; the last is IEND, or the one before a cut."""
    begin, kind = len(SIGNATURE), b""
    while begin + _HEAD.size <= len(data) and kind != b"IEND":
        length, kind = _HEAD.unpack_from(data, begin)
        end = begin + _HEAD.size + length + _CRC
        if end > len(data):
            return
        yield begin, end, kind
        begin = end


def _is_needed(kind: bytes, chunk: memoryview) -> bool:
    critical = not kind[0] & 0x20
    if critical or kind == b"tRNS":
        return True
    body, crc = chunk[_HEAD.size : -_CRC], int.from_bytes(chunk[-_CRC:], "big")
    if kind not in (b"eXIf", b"tEXt", b"zTXt", b"iTXt") or zlib.crc32(chunk[4:-_CRC]) != crc:
        return False
    return kind == b"eXIf" or _holds_orientation(kind, bytes(body))


def _holds_orientation(kind: bytes, body: bytes) -> bool:
    keyword, _, rest = body.partition(b"\0")
    if keyword not in _ORIENTATIONS:
        return False
    if kind == b"iTXt":  # a flag, a method, a language and a translated keyword stand before the text
        packed, text = rest[:1] == b"\1", rest[2:].split(b"\0", 2)[-1]
    else:
        packed, text = kind == b"zTXt", rest[1:]
    return not packed or _unpacks_within_limit(text)


def _unpacks_within_limit(packed: bytes) -> bool:
    unpacker = zlib.decompressobj()
    try:
        unpacker.decompress(packed, _MOST_UNPACKED)
    except zlib.error:
        return False
    return not unpacker.unconsumed_tail
