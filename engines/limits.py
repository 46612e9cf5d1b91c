"""How much one request may bring, checked from headers before anything is decoded; every entry has the same names."""

from __future__ import annotations

import os
from dataclasses import dataclass

from turbovit.engines.errors import InputError


@dataclass(frozen=True)
class Limit:
    """A limit that an environment variable changes.

    Attributes:
        unit: of what it counts.
    """

    variable: str
    unit: str
    default: int

    @property
    def value(self) -> int:
        """The limit that holds now.

        Raises:
            InputError: the variable is set to something else than a positive number.
        """
        configured = os.environ.get(self.variable)
        if configured is None:
            return self.default
        if not configured.isdecimal() or int(configured) == 0:
            raise InputError(f"{self.variable}={configured!r} is not a positive number of {self.unit}")
        return int(configured)


# Pillow's own threshold for a suspected decompression bomb: a quarter of a gigabyte of RGB.
IMAGE_PIXELS = Limit("TURBOVIT_MAX_IMAGE_PIXELS", "pixels", 89_478_485)
_REQUEST_PIXELS_VARIABLE = "TURBOVIT_MAX_REQUEST_PIXELS"
_IMAGES_A_REQUEST = 4  # of the largest size
FRAMES = Limit("TURBOVIT_MAX_FRAMES", "frames", 768)
# What the largest image takes uncompressed.
MEDIA_BYTES = Limit("TURBOVIT_MAX_MEDIA_BYTES", "bytes", 256 << 20)


def request_pixels() -> Limit:
    """Pixels of all images and frames of a request; by default four times those of an image."""
    return Limit(_REQUEST_PIXELS_VARIABLE, "pixels", _IMAGES_A_REQUEST * IMAGE_PIXELS.value)


def check_image_size(size: tuple[int, int]) -> None:
    """Refuse an image of no pixels or too many.

    Args:
        size: width and height.

    Raises:
        InputError: says what was got and allowed, and which setting says so.
    """
    width, height = size
    if width < 1 or height < 1:
        raise InputError(f"the image is empty ({width}x{height})")
    limit = IMAGE_PIXELS.value
    if width * height > limit:
        raise InputError(
            f"the image has {width}x{height} = {width * height} pixels, at most {limit} are allowed: "
            f"send a smaller one, or set {IMAGE_PIXELS.variable}"
        )


def check_frames(frames: int) -> None:
    """Refuse a video of too many frames; raises as `check_image_size`."""
    if frames > FRAMES.value:
        raise InputError(
            f"the video has {frames} frames to look at, at most {FRAMES.value} are allowed: "
            f"ask for fewer, or set {FRAMES.variable}"
        )


def check_bytes(size: int) -> None:
    """Refuse a file that is too large to be read; raises as `check_image_size`."""
    if size > MEDIA_BYTES.value:
        raise InputError(
            f"the file has {size} bytes, at most {MEDIA_BYTES.value} are allowed: "
            f"send a smaller one, or set {MEDIA_BYTES.variable}"
        )


class RequestPixels:
    """Adds up the pixels of one request."""

    def __init__(self) -> None:
        self._limit = request_pixels()
        self._sum = 0

    def add(self, width: int, height: int, frames: int = 1) -> None:
        """Count an image, or so many frames of a video.

        Raises:
            InputError: with these the request has too many; the message says how many, and what to do.
        """
        self._sum += width * height * frames
        if self._sum > self._limit.value:
            shown = f"{width}x{height}" + (f" x {frames} frames" if frames > 1 else "")
            raise InputError(
                f"with this one ({shown}) the request has {self._sum} pixels, at most {self._limit.value} are allowed "
                f"for all its images and videos: send fewer or smaller ones, or set {self._limit.variable}"
            )
