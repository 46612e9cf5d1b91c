"""An image as a file holds it: its size from the header, and opening it for Pillow to decode.

`Image.open` decodes an icon, and makes room for the pixels of a WebP; their headers are read here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO

from PIL import BmpImagePlugin, Image, ImageFile, UnidentifiedImageError

from turbovit.engines import png
from turbovit.engines.errors import InputError
from turbovit.engines.limits import IMAGE_PIXELS, check_image_size

# Raster formats alone: Pillow would also hand PostScript to Ghostscript, and fetch what some stub formats refer to.
_FORMATS = ("AVIF", "BMP", "GIF", "ICO", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TGA", "TIFF", "WEBP")
_ICON = b"\0\0\1\0"
_ICON_ENTRY = struct.Struct("<BBBxHHII")  # width, height, colours, planes, bits a pixel, bytes, offset
_TIFF_TILE_WIDTH, _TIFF_TILE_LENGTH = 322, 323


@dataclass(frozen=True)
class EncodedImage:
    """An image that is not decoded yet; `size`, (width, height), was checked."""

    data: bytes = field(repr=False)
    size: tuple[int, int]


def encoded_image(data: bytes) -> EncodedImage:
    """Check an image file by its header.

    Raises:
        InputError: it is empty, in no known format, or too large; quotes nothing of the data.
    """
    if not data:
        raise InputError("the image is empty (0 bytes)")
    data = _prepared(data)
    size = _webp_size(data) or _icon_size(data) or open_image(data).size
    check_image_size(size)
    return EncodedImage(data, size)


def open_image(data: bytes) -> Image.Image:
    """What `Image.open` makes of data that are prepared; raises as `encoded_image`."""
    set_up_pillow()
    formats = _supported_formats()
    try:
        image = Image.open(BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        raise InputError(
            f"the image is in no known format (it has {len(data)} bytes); known are {', '.join(formats)}"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(
            f"{error} The image may have at most {IMAGE_PIXELS.value} pixels: send a smaller one, or set "
            f"{IMAGE_PIXELS.variable}"
        ) from None
    except Exception as error:  # a damaged header raises whatever the format's plugin happens to raise
        raise InputError(f"the image cannot be opened, its header is damaged ({type(error).__name__})") from None
    tags = getattr(image, "tag_v2", {})
    check_image_size((max(tags.get(_TIFF_TILE_WIDTH, 1), 1), max(tags.get(_TIFF_TILE_LENGTH, 1), 1)))
    return image


def set_up_pillow() -> None:
    """Undo what others set for the whole process."""
    # LMDeploy switches this on at import, and a cut file then decodes to grey bands.
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    if Image.MAX_IMAGE_PIXELS is not None:  # Pillow's own limit, which would win over a larger one of ours
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, IMAGE_PIXELS.value)


@cache
def _supported_formats() -> list[str]:
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]  # AVIF and WebP are missing from some Pillow builds


def _prepared(data: bytes) -> bytes:
    """The picture that Pillow would take of an icon, where that is a PNG; a PNG without metadata."""
    if data.startswith(_ICON):
        picture = data[_icon_offset(data) :]
        data = picture if picture.startswith(png.SIGNATURE) else data
    return png.without_metadata(data) if data.startswith(png.SIGNATURE) else data


def _icon_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of the picture that Pillow takes of an icon, from its own header; None for what is none."""
    if not data.startswith(_ICON):
        return None
    try:
        width, height = BmpImagePlugin.DibImageFile(BytesIO(data[_icon_offset(data) :])).size
    except Exception as error:
        raise InputError(f"the image cannot be opened, its header is damaged ({type(error).__name__})") from None
    return width, height // 2  # picture and mask


def _icon_offset(data: bytes) -> int:
    """Where the picture begins that Pillow takes: the largest by the directory, of equals that with the fewest bits."""
    count = int.from_bytes(data[4:6], "little")
    directory = data[6 : 6 + count * _ICON_ENTRY.size]
    if not count or len(directory) < count * _ICON_ENTRY.size:
        raise InputError("the image is damaged or cut short: its directory of icons is not whole")
    return min(_ICON_ENTRY.iter_unpack(directory), key=_icon_order)[-1]


def _icon_order(entry: tuple[int, ...]) -> tuple[int, int]:
    width, height, colours, _, bits, *_ = entry
    return -(width or 256) * (height or 256), bits or max(colours - 1, 0).bit_length() or 256


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a WebP's canvas; None for what is none, or has no such header.

    Reference: https://developers.google.com/speed/webp/docs/riff_container and RFC 6386 9.1.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    kind = data[12:16]
    if kind == b"VP8X":
        return (int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1)
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return ((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return (width & 0x3FFF, height & 0x3FFF)
    return None
