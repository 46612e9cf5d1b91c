"""The one place that turns an image, however it arrives, into the RGB that all families use.

The same rule holds at every entry (PIL object, array, path, URL, data URL): EXIF orientation is applied first,
then alpha is composited on white or dropped, then the image becomes 8-bit RGB. 16-bit grey is divided by 257,
so that 65535 becomes 255; PIL itself would clip everything above 255 to white.
"""

from __future__ import annotations

import os
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from turbovit.engines.errors import InputError

Alpha = Literal["white", "drop"]
ImageLike = Image.Image | np.ndarray | str | Path

MAX_PIXELS_VARIABLE = "TURBOVIT_MAX_IMAGE_PIXELS"
# Pillow's own threshold for a suspected decompression bomb: a quarter of a gigabyte of RGB.
DEFAULT_MAX_PIXELS = 89_478_485
_SIXTEEN_BIT_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")
# Raster formats alone: Pillow would also hand PostScript to Ghostscript, and fetch what some stub formats refer to.
_FORMATS = ("AVIF", "BMP", "GIF", "ICO", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TGA", "TIFF", "WEBP")
_SMALLER = f"send a smaller one, or set {MAX_PIXELS_VARIABLE}"
# What makes an image of an EXIF orientation upright; 1 is.
_TRANSPOSE: dict[object, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def max_pixels() -> int:
    """How many pixels an image may have before it is decoded; ``$TURBOVIT_MAX_IMAGE_PIXELS`` changes it."""
    configured = os.environ.get(MAX_PIXELS_VARIABLE)
    if configured is None:
        return DEFAULT_MAX_PIXELS
    if not configured.isdecimal() or int(configured) == 0:
        raise InputError(f"{MAX_PIXELS_VARIABLE}={configured!r} is not a positive number of pixels")
    return int(configured)


def rgb_from_image(image: ImageLike, alpha: Alpha = "white") -> Image.Image:
    """A new RGB image, upright and without metadata, so that a second call changes nothing.

    Args:
        image: a PIL image, a path, or a uint8 array [height, width], [height, width, 1], [.., 3] or [.., 4].
        alpha: ``white`` composites transparent pixels on white, ``drop`` keeps their colour.

    Raises:
        InputError: the image cannot be decoded, is empty or too large, or has a mode that has no 8-bit meaning.
    """
    rgb = readable_rgb(image, alpha)
    if rgb is image:
        rgb = rgb.copy()
    rgb.info = {}  # an orientation or transparent colour that is still there would be applied again
    return rgb


def readable_rgb(image: ImageLike, alpha: Alpha = "white") -> Image.Image:
    """As `rgb_from_image`, for reading only: an image that is upright RGB already is not copied, but given back."""
    if isinstance(image, (str, Path)):
        try:
            return rgb_from_bytes(Path(image).read_bytes(), alpha)
        except (OSError, ValueError) as error:  # an InputError is a ValueError
            raise InputError(f"{str(image)!r}: {error}") from None
    if isinstance(image, np.ndarray):
        image = _image_from_array(image)
    elif not isinstance(image, Image.Image):
        raise InputError(f"an image is a PIL image, a uint8 array or a path, got {type(image).__name__}")
    _check_size(image.size)
    return _rgb(_upright(image), alpha)


def rgb_from_bytes(data: bytes, alpha: Alpha = "white") -> Image.Image:
    """As `rgb_from_image`, from an encoded file; the size is checked in its header, before decoding."""
    if not data:
        raise InputError("the image is empty (0 bytes)")
    _set_up_pillow()
    try:
        image = Image.open(BytesIO(data), formats=_supported_formats())
    except UnidentifiedImageError:
        raise InputError(
            f"the image is in no known format (its {len(data)} bytes begin with {data[:8]!r}); "
            f"known are {', '.join(_supported_formats())}"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(f"{error} The image may have at most {max_pixels()} pixels: {_SMALLER}") from None
    except Exception as error:  # a damaged header raises whatever the format's plugin happens to raise
        raise InputError(f"the image cannot be opened: {error}") from None
    return rgb_from_image(image, alpha)


@cache
def _supported_formats() -> list[str]:
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]  # AVIF and WebP are missing from some Pillow builds


def _set_up_pillow() -> None:
    # LMDeploy switches this on for the whole process at import, and a cut file then decodes to grey bands.
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    if Image.MAX_IMAGE_PIXELS is not None:  # Pillow's own limit, which would win over a larger one of ours
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels())


def _check_size(size: tuple[int, int]) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise InputError(f"the image is empty ({width}x{height})")
    limit = max_pixels()
    if width * height > limit:
        raise InputError(
            f"the image has {width}x{height} = {width * height} pixels, at most {limit} are allowed: {_SMALLER}"
        )


def _upright(image: Image.Image) -> Image.Image:
    _set_up_pillow()
    try:
        image.load()
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error and more
        raise InputError(f"the image is damaged or cut short: {error}") from None
    # Not ImageOps.exif_transpose: it rewrites the EXIF data too, and fails where they are odd but the pixels sound.
    try:
        transpose = _TRANSPOSE.get(image.getexif().get(ExifTags.Base.Orientation))
    except Exception:  # unreadable EXIF data say nothing about orientation
        transpose = None
    return image if transpose is None else image.transpose(transpose)


def _rgb(image: Image.Image, alpha: Alpha) -> Image.Image:
    if image.mode in _SIXTEEN_BIT_MODES:
        return _grey_from_sixteen_bit(image, alpha).convert("RGB")
    if image.mode == "F":
        raise InputError("the image has floating-point pixels (mode F): convert it to 8 bit, its range is unknown")
    try:
        if image.has_transparency_data:
            image = image.convert("RGBA")  # also where alpha is dropped: a palette's would make Pillow warn
            if alpha == "white":
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        plain = type(image) is Image.Image and image.mode == "RGB"  # a file's class knows more than its pixels
        return image if plain else image.convert("RGB")
    except Exception as error:  # Pillow lacks some conversions, and checks palettes and transparent colours late
        raise InputError(f"the image, of mode {image.mode}, cannot be converted to RGB: {error}") from None


def _grey_from_sixteen_bit(image: Image.Image, alpha: Alpha) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise InputError(f"the image's grey values span {values.min()}..{values.max()}, expected 0..65535 (16 bit)")
    grey = ((values + 128) // 257).astype(np.uint8)  # rounded
    if alpha == "white" and "transparency" in image.info:
        grey[values == image.info["transparency"]] = 255
    return Image.fromarray(grey)


def _image_from_array(array: np.ndarray) -> Image.Image:
    grey = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 1)
    if array.dtype != np.uint8 or not (grey or (array.ndim == 3 and array.shape[2] in (3, 4))):
        raise InputError(
            f"an image array is uint8 [height, width, 1, 3 or 4 channels] or [height, width], "
            f"got {array.dtype} {list(array.shape)}"
        )
    if array.size == 0:
        raise InputError(f"the image is empty (array of shape {list(array.shape)})")
    return Image.fromarray(array[..., 0] if grey and array.ndim == 3 else array)
