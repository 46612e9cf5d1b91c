"""Every kind of image, through every entry, becomes the same RGB or is refused with a reason."""

from __future__ import annotations

import struct
import tracemalloc
import warnings
import zlib
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageFile

from turbovit.engines import images
from turbovit.engines.errors import InputError
from turbovit.engines.images import Alpha, rgb_from_bytes, rgb_from_image
from turbovit.engines.limits import IMAGE_PIXELS

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 4), dtype=np.uint8)  # height 5, width 7, RGBA
WHITE = [255, 255, 255]

# EXIF orientation -> what makes the stored rows and columns upright, by hand (TIFF 6.0, tag 274).
UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[:, ::-1],
    7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
    8: lambda a: a.swapaxes(0, 1)[::-1],
}


pytestmark = pytest.mark.filterwarnings("error")  # a warning of Pillow's must never end a request


@pytest.fixture(autouse=True)
def _pillow_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", False)


def file_bytes(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = orientation
    return tags


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *chunks: bytes) -> bytes:
    """A PNG by hand, for what Pillow does not write; `rows` as in the standard, unfiltered."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + body


def through_every_entry(data: bytes, folder: Path, alpha: Alpha = "white") -> np.ndarray:
    """The RGB array of an encoded image, once all entries agree on it."""
    path = folder / "image"
    path.write_bytes(data)
    lazy, loaded = Image.open(BytesIO(data)), Image.open(BytesIO(data))
    loaded.load()
    results = [rgb_from_bytes(data, alpha), *(rgb_from_image(i, alpha) for i in (lazy, loaded, path, str(path)))]
    for result in results:
        assert result.mode == "RGB"
        again = rgb_from_image(result, alpha)
        np.testing.assert_array_equal(np.asarray(again), np.asarray(results[0]), "a second call changes nothing")
    return np.asarray(results[0])


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("file_format", ["PNG", "TIFF", "WEBP", "JPEG"])
def test_exif_orientation_is_applied(orientation: int, file_format: str, tmp_path: Path) -> None:
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = file_bytes(Image.fromarray(PIXELS[..., :3]), file_format, exif=exif(orientation), **options)
    stored = PIXELS[..., :3]
    if file_format == "JPEG":  # lossy: what is stored is what a reader without EXIF sees
        stored = np.asarray(Image.open(BytesIO(data)))
    np.testing.assert_array_equal(through_every_entry(data, tmp_path), UPRIGHT[orientation](stored))


def test_a_640x480_photo_held_upright_becomes_480x640(tmp_path: Path) -> None:
    data = file_bytes(Image.new("RGB", (640, 480), "red"), "JPEG", exif=exif(6))
    assert through_every_entry(data, tmp_path).shape == (640, 480, 3)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "I;16", "I;16B", "I"])
def test_exif_orientation_of_every_mode(mode: str) -> None:
    image = Image.fromarray(PIXELS[..., :3]).convert("L").convert(mode if not mode.startswith("I;") else "I;16")
    expected = np.asarray(rgb_from_image(image.copy()))
    image.info["exif"] = exif(6).tobytes()
    np.testing.assert_array_equal(np.asarray(rgb_from_image(image)), UPRIGHT[6](expected))


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "JPEG"])
@pytest.mark.parametrize("junk", [b"junk", b"Exif\0\0junk", b"Exif\0\0II*\0\xff\xff\xff\xff"])
def test_unreadable_exif_is_no_orientation(file_format: str, junk: bytes, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")  # that Pillow warns of corrupt EXIF is right
    image = Image.fromarray(PIXELS[..., :3])
    data = file_bytes(image, file_format, exif=junk)
    np.testing.assert_array_equal(through_every_entry(data, tmp_path), np.asarray(Image.open(BytesIO(data))))


def palette_image(transparency: int | bytes) -> bytes:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.putpixel((1, 0), 2)
    return file_bytes(image, transparency=transparency)


# Two pixels: the first red (grey 76 where there is no colour) and transparent, the second opaque.
TRANSPARENT = {
    "RGBA": (file_bytes(Image.fromarray(np.array([[[255, 0, 0, 0], [0, 0, 255, 255]]], np.uint8))), [255, 0, 0]),
    "LA": (file_bytes(Image.fromarray(np.array([[[76, 0], [9, 255]]], np.uint8), "LA")), [76] * 3),
    "P": (palette_image(0), [255, 0, 0]),
    "P with one alpha an entry": (palette_image(bytes([0, 128, 255])), [255, 0, 0]),
    "RGB with tRNS": (
        file_bytes(Image.fromarray(np.array([[[255, 0, 0], [0, 0, 255]]], np.uint8)), transparency=(255, 0, 0)),
        [255, 0, 0],
    ),
    "L with tRNS": (file_bytes(Image.fromarray(np.array([[76, 9]], np.uint8)), transparency=76), [76] * 3),
    "1 with tRNS": (png(2, 1, 1, 0, b"\0\x40", png_chunk(b"tRNS", b"\0\0")), [0] * 3),
    "I;16 with tRNS": (png(2, 1, 16, 0, b"\0\x4c\x4c\x09\x09", png_chunk(b"tRNS", b"\x4c\x4c")), [76] * 3),
}


@pytest.mark.parametrize(("data", "colour"), TRANSPARENT.values(), ids=TRANSPARENT)
def test_transparent_pixels_become_white_or_keep_their_colour(data: bytes, colour: list[int], tmp_path: Path) -> None:
    white, dropped = (through_every_entry(data, tmp_path, alpha) for alpha in ("white", "drop"))
    assert white[0, 0].tolist() == WHITE
    assert dropped[0, 0].tolist() == colour
    np.testing.assert_array_equal(white[0, 1], dropped[0, 1])


def test_half_transparent_pixels_are_mixed_with_white(tmp_path: Path) -> None:
    alpha = PIXELS[..., 3:] / 255
    mixed = PIXELS[..., :3] * alpha + 255 * (1 - alpha)
    data = file_bytes(Image.fromarray(PIXELS))
    assert np.abs(through_every_entry(data, tmp_path).astype(float) - mixed).max() <= 1  # rounding
    np.testing.assert_array_equal(through_every_entry(data, tmp_path, "drop"), PIXELS[..., :3])


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK"])
def test_other_modes_become_rgb_as_pillow_converts_them(mode: str, tmp_path: Path) -> None:
    image = Image.fromarray(PIXELS[..., :3]).convert(mode)
    data = file_bytes(image, "TIFF" if mode == "CMYK" else "PNG")
    np.testing.assert_array_equal(through_every_entry(data, tmp_path), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["RGBX", "RGBa", "La", "PA", "LAB", "HSV", "YCbCr", "I;16L", "I;16N", "F"])
@pytest.mark.parametrize("alpha", ["white", "drop"])
def test_rare_modes_are_converted_or_refused(mode: str, alpha: Alpha) -> None:
    outcome(lambda: rgb_from_image(Image.new(mode, (3, 2)), alpha))


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I"])
def test_sixteen_bit_grey_is_divided_by_257(mode: str, tmp_path: Path) -> None:
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    expected = np.rint(values / 257).astype(np.uint8)
    array = values.astype({"I;16": "<u2", "I;16B": ">u2", "I": "=i4"}[mode])
    image = Image.frombytes(mode, (256, 256), array.tobytes())
    np.testing.assert_array_equal(np.asarray(rgb_from_image(image)), np.stack([expected] * 3, -1))
    if mode != "I":
        got = through_every_entry(file_bytes(image, "TIFF" if mode == "I;16B" else "PNG"), tmp_path)
        np.testing.assert_array_equal(got, np.stack([expected] * 3, -1))


def test_sixteen_bit_grey_without_a_bright_value_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    images._warn_of_dark_grey.cache_clear()
    for mode in ("I;16", "I"):
        rgb_from_image(Image.new(mode, (2, 2), 256))
        assert not caplog.records
    for mode in ("I;16", "I"):
        assert np.asarray(rgb_from_image(Image.new(mode, (2, 2), 255))).max() == 1
    (record,) = caplog.records
    assert (record.levelname, "no value above 255" in record.message) == ("WARNING", True)


@pytest.mark.parametrize("size", [(3000, 1), (1, 3000), (1025, 1025), (700, 3001)])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_an_image_of_several_bands_is_whole(
    orientation: int, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "_BAND", 1000)
    stored = np.random.default_rng(4).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    image = Image.fromarray(stored)
    whole = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    image.info["exif"] = exif(orientation).tobytes()
    expected = UPRIGHT[orientation](np.asarray(whole))
    np.testing.assert_array_equal(images.array_from_rgb(rgb_from_image(image)), expected)


@pytest.mark.parametrize("value", [-1, 65536])
def test_integers_beyond_16_bit_are_refused(value: int) -> None:
    with pytest.raises(InputError, match=rf"{value}.*expected 0\.\.65535"):
        rgb_from_image(Image.new("I", (2, 2), value))


def test_floating_point_pixels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="floating-point"):
        through_every_entry(file_bytes(Image.new("F", (2, 2), 0.5), "TIFF"), tmp_path)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
@pytest.mark.parametrize("truncated_allowed", [False, True])
def test_a_cut_file_is_refused_or_whole(
    file_format: str, truncated_allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    data = file_bytes(Image.fromarray(noise), file_format)
    whole = np.asarray(rgb_from_bytes(data))
    for length in [*range(0, len(data), 23), *range(len(data) - 20, len(data))]:
        monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", truncated_allowed)
        opened = outcome(partial(rgb_from_bytes, data[:length]))
        # What stands behind the last pixel (two checksums and the end marker) may be missing.
        assert opened is None or (length >= len(data) - 20 and np.array_equal(np.asarray(opened), whole))


def test_a_cut_image_object_is_refused_every_time() -> None:
    data = file_bytes(Image.fromarray(PIXELS).resize((300, 300)))
    image = Image.open(BytesIO(data[: len(data) // 2]))
    for _ in range(2):
        with pytest.raises(InputError, match="cut short"):
            rgb_from_image(image)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"empty\.png.*0 bytes"):
        rgb_from_image(tmp_path / "empty.png")


def test_text_that_is_called_png_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("this is no image")
    with pytest.raises(InputError, match=r"text\.png.*no known format \(it has 16 bytes\)"):
        rgb_from_image(tmp_path / "text.png")


@pytest.mark.parametrize("path", ["missing.png", ".", "nul\0byte"])
def test_a_path_that_cannot_be_read_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        rgb_from_image(tmp_path / path)


@pytest.mark.parametrize("side", [12_000, 20_000, 200_000])
@pytest.mark.parametrize("warning", ["ignore", "error"])
def test_a_huge_image_is_refused_from_its_header(side: int, warning: Any, tmp_path: Path) -> None:
    warnings.simplefilter(warning)
    path = tmp_path / "huge.png"
    path.write_bytes(png(side, side, 8, 2, b""))
    tracemalloc.start()
    with pytest.raises(InputError, match=rf"{side**2}.*{IMAGE_PIXELS.default}.*{IMAGE_PIXELS.variable}"):
        rgb_from_image(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_huge_image_object_is_refused_before_it_is_decoded() -> None:
    warnings.simplefilter("ignore")
    image = Image.open(BytesIO(png(12_000, 12_000, 8, 2, b"")))
    with pytest.raises(InputError, match="12000x12000"):
        rgb_from_image(image)


@pytest.mark.parametrize("file_format", ["PNG", "ICO"])
def test_the_limit_can_be_lowered(file_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_bytes(Image.new("RGB", (16, 16)), file_format, sizes=[(16, 16)])
    monkeypatch.setenv(IMAGE_PIXELS.variable, "256")
    assert rgb_from_bytes(data).size == (16, 16)
    monkeypatch.setenv(IMAGE_PIXELS.variable, "255")
    with pytest.raises(InputError, match="16x16 = 256 pixels, at most 255"):
        rgb_from_bytes(data)


def test_the_limit_can_be_raised_past_pillows_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # its error comes at twice that
    monkeypatch.setenv(IMAGE_PIXELS.variable, "256")
    assert rgb_from_bytes(file_bytes(Image.new("RGB", (16, 16)))).size == (16, 16)


@pytest.mark.parametrize("value", ["", "0", "-1", "1e6", "many"])
def test_a_limit_that_is_no_number_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMAGE_PIXELS.variable, value)
    with pytest.raises(InputError, match=f"{IMAGE_PIXELS.variable}={value!r}"):
        rgb_from_bytes(file_bytes(Image.new("RGB", (1, 1))))


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
def test_an_animation_gives_its_first_frame(file_format: str, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "lime", "blue")]
    data = file_bytes(frames[0], file_format, save_all=True, append_images=frames[1:], duration=40)
    np.testing.assert_allclose(through_every_entry(data, tmp_path)[0, 0], [255, 0, 0], atol=2)  # WebP is lossy


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 1), (5, 7, 3), (1, 500, 3), (500, 1, 3), (1, 1)])
def test_an_array_is_height_width_channels(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(2).integers(0, 256, shape, dtype=np.uint8)
    expected = array if shape[-1] == 3 else np.repeat(array.reshape(*shape[:2], 1), 3, axis=2)
    got = rgb_from_image(array)
    assert got.size == (shape[1], shape[0])
    np.testing.assert_array_equal(np.asarray(got), expected)


def test_an_array_with_alpha_obeys_the_alpha_rule() -> None:
    for alpha in ("white", "drop"):
        from_array, from_image = (rgb_from_image(i, alpha) for i in (PIXELS, Image.fromarray(PIXELS)))
        np.testing.assert_array_equal(np.asarray(from_array), np.asarray(from_image))


def test_an_array_need_not_be_contiguous_and_is_copied() -> None:
    array = PIXELS[::-1, ::2, :3].copy()[:, ::-1]
    got = rgb_from_image(array)
    before = array.copy()
    array[:] = 0
    np.testing.assert_array_equal(np.asarray(got), before)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4, 3), np.float32),
        np.zeros((4, 4, 3), np.int64),
        np.zeros((4, 4), bool),
        np.zeros((4, 4, 2), np.uint8),
        np.zeros((3, 4, 5), np.uint8),
        np.zeros((1, 4, 4, 3), np.uint8),
        np.zeros(4, np.uint8),
        np.array(0, np.uint8),
        np.zeros((0, 4, 3), np.uint8),
        np.zeros((4, 0), np.uint8),
    ],
    ids=lambda array: f"{array.dtype} {array.shape}",
)
def test_other_arrays_are_refused(array: np.ndarray) -> None:
    with pytest.raises(InputError, match=r"uint8|empty"):
        rgb_from_image(array)


@pytest.mark.parametrize("image", [None, 3, [[0]], b"bytes"])
def test_other_types_are_refused(image: Any) -> None:
    with pytest.raises(InputError, match=type(image).__name__):
        rgb_from_image(image)


def test_an_empty_image_object_is_refused() -> None:
    with pytest.raises(InputError, match="empty"):
        rgb_from_image(Image.new("RGB", (0, 4)))


def outcome(convert: Callable[[], Image.Image]) -> Image.Image | None:
    """The image, which must be RGB, or None where it is refused; any other exception is the test's failure."""
    try:
        image = convert()
    except InputError:
        return None
    assert image.mode == "RGB"
    assert not image.has_transparency_data
    return image


_NOISE = Image.fromarray(np.random.default_rng(3).integers(0, 256, (9, 11, 4), dtype=np.uint8))
VALID = [
    *(file_bytes(_NOISE.convert("RGB"), name, exif=exif(6)) for name in ("PNG", "JPEG", "WEBP", "TIFF")),
    *(file_bytes(_NOISE.convert(mode), "PNG") for mode in ("1", "L", "LA", "P", "RGBA", "I;16")),
    *(file_bytes(_NOISE.convert("RGB"), name) for name in ("GIF", "BMP", "PPM", "TGA", "ICO", "JPEG2000")),
    *(data for data, _ in TRANSPARENT.values()),
]
FUZZ = settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@FUZZ
@given(st.binary(max_size=64), st.sampled_from([b"", *(data[:20] for data in VALID)]))
def test_random_bytes_are_refused_or_an_image(data: bytes, beginning: bytes) -> None:
    outcome(lambda: rgb_from_bytes(beginning + data))


@FUZZ
@given(st.sampled_from(VALID), st.data(), st.sampled_from(["white", "drop"]))
def test_mutated_files_are_refused_or_an_image(valid: bytes, draw: st.DataObject, alpha: Alpha) -> None:
    data = bytearray(valid)
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, min(len(data), 200) - 1))] = draw.draw(st.integers(0, 255))
    outcome(lambda: rgb_from_bytes(bytes(data), alpha))
