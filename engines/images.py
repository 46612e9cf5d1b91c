"""The one place that turns an image, however it arrives, into the RGB that all families use.

The same rule holds at every entry (PIL object, array, path, URL, data URL): EXIF orientation is applied first,
then alpha is composited on white or dropped, then the image becomes 8-bit RGB. 16-bit grey is divided by 257,
so that 65535 becomes 255; PIL itself would clip everything above 255 to white.

An image is taken in bands of rows, so that beside the file's pixels and the result nothing large is ever held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from PIL import ExifTags, Image

from turbovit.engines.encoded_image import EncodedImage, encoded_image, open_image, set_up_pillow
from turbovit.engines.errors import InputError
from turbovit.engines.limits import check_image_size
from turbovit.engines.media_files import read_file

logger = logging.getLogger("turbovit")

Alpha = Literal["white", "drop"]
T = TypeVar("T")
ImageLike = Image.Image | np.ndarray | str | Path | EncodedImage
Box = tuple[int, int, int, int]  # left, top, right, bottom

_SIXTEEN_BIT_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")
_BAND = 1 << 20  # pixels
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
# Of these, which make rows columns, and which put the last row first.
_ROWS_ARE_COLUMNS = frozenset(_TRANSPOSE[orientation] for orientation in (5, 6, 7, 8))
_LAST_ROW_FIRST = frozenset(_TRANSPOSE[orientation] for orientation in (3, 4, 6, 7))


def rgb_from_image(image: ImageLike, alpha: Alpha = "white") -> Image.Image:
    """A new RGB image, upright and without metadata, so that a second call changes nothing.

    Args:
        image: a PIL image, a path, an `EncodedImage`, or a uint8 array [height, width], [height, width, 1], [.., 3] or
            [.., 4].
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
        return _of_file(image, lambda encoded: readable_rgb(encoded, alpha))
    picture = _checked(image)
    if isinstance(picture, EncodedImage):
        opened = open_image(picture.data)
        check_image_size(opened.size)  # what is decoded may be another size than the header's
        picture = opened
    _load(picture)
    return _upright_rgb(picture, alpha)


def rgb_from_bytes(data: bytes, alpha: Alpha = "white") -> Image.Image:
    """As `rgb_from_image`, from an encoded file; the size is checked in its header, before decoding."""
    return readable_rgb(encoded_image(data), alpha)


def checked_size(image: ImageLike) -> tuple[int, int]:
    """Width and height of an image, which is not decoded for it; raises as `rgb_from_image`."""
    return _of_file(image, checked_size) if isinstance(image, (str, Path)) else _checked(image).size


def array_from_rgb(image: Image.Image) -> np.ndarray:
    """uint8 [height, width, 3], a copy of an RGB image's pixels."""
    width, height = image.size
    array = np.empty((height, width, 3), dtype=np.uint8)
    for band, (_, top, _, bottom) in _bands(image):
        array[top:bottom] = np.asarray(band)
    return array


def _of_file(path: str | Path, use: Callable[[EncodedImage], T]) -> T:
    """What `use` makes of an image file; errors name it."""
    try:
        return use(encoded_image(read_file(path)))
    except InputError as error:
        raise InputError(f"{str(path)!r}: {error}") from None


def _checked(image: ImageLike) -> Image.Image | EncodedImage:
    """An image that is no path, of an allowed size; an array becomes a PIL image."""
    if isinstance(image, np.ndarray):
        image = _image_from_array(image)
    elif not isinstance(image, (Image.Image, EncodedImage)):
        raise InputError(f"an image is a PIL image, a uint8 array or a path, got {type(image).__name__}")
    check_image_size(image.size)
    return image


def _load(image: Image.Image) -> None:
    set_up_pillow()
    try:
        image.load()
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error and more
        # An OSError is the decoder's own verdict; others may quote what they found.
        shown = error if isinstance(error, OSError) else type(error).__name__
        raise InputError(f"the image is damaged or cut short: {shown}") from None


def _upright_rgb(image: Image.Image, alpha: Alpha) -> Image.Image:
    transpose = _transposition(image)
    if image.mode == "F":
        raise InputError("the image has floating-point pixels (mode F): convert it to 8 bit, its range is unknown")
    if image.mode in _SIXTEEN_BIT_MODES:
        _check_grey_values(image)
    plain = type(image) is Image.Image and image.mode == "RGB"  # a file's class knows more than its pixels
    if plain and transpose is None and not image.has_transparency_data:
        return image
    width, height = image.size
    upright = Image.new("RGB", (height, width) if transpose in _ROWS_ARE_COLUMNS else (width, height))
    for band, (_, top, _, bottom) in _bands(image):
        rgb = _rgb(band, alpha)
        first = height - bottom if transpose in _LAST_ROW_FIRST else top
        place = (first, 0) if transpose in _ROWS_ARE_COLUMNS else (0, first)
        upright.paste(rgb if transpose is None else rgb.transpose(transpose), place)
    return upright


def _transposition(image: Image.Image) -> Image.Transpose | None:
    # Not ImageOps.exif_transpose: it rewrites the EXIF data too, and fails where they are odd but the pixels sound.
    try:
        return _TRANSPOSE.get(image.getexif().get(ExifTags.Base.Orientation))
    except Exception:  # unreadable EXIF data say nothing about orientation
        return None


def _bands(image: Image.Image) -> Iterator[tuple[Image.Image, Box]]:
    """Bands of whole rows from top to bottom, and where they stand."""
    width, height = image.size
    rows = max(1, _BAND // width)
    for top in range(0, height, rows):
        box = (0, top, width, min(top + rows, height))
        yield image.crop(box), box


def _rgb(image: Image.Image, alpha: Alpha) -> Image.Image:
    if image.mode in _SIXTEEN_BIT_MODES:
        return _grey_from_sixteen_bit(image, alpha).convert("RGB")
    try:
        if image.has_transparency_data:
            image = image.convert("RGBA")  # also where alpha is dropped: a palette's would make Pillow warn
            if alpha == "white":
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.convert("RGB")
    except Exception as error:  # Pillow lacks some conversions, and checks palettes and transparent colours late
        raise InputError(f"the image, of mode {image.mode}, cannot be converted to RGB: {error}") from None


def _check_grey_values(image: Image.Image) -> None:
    extremes = [(values.min(), values.max()) for values in (np.asarray(band) for band, _ in _bands(image))]
    lowest, highest = min(low for low, _ in extremes), max(high for _, high in extremes)
    if lowest < 0 or highest > 65535:
        raise InputError(f"the image's grey values span {lowest}..{highest}, expected 0..65535 (16 bit)")
    if highest <= 255:
        _warn_of_dark_grey()


@cache  # once a process
def _warn_of_dark_grey() -> None:
    logger.warning(
        "an image of 16-bit grey (PIL mode I or I;16) has no value above 255: divided by 257 it is nearly black. "
        "If its values are 8-bit ones, convert it to mode L"
    )


def _grey_from_sixteen_bit(image: Image.Image, alpha: Alpha) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
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
