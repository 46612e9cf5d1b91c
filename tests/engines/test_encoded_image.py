"""Every format is refused from its header, nothing decoded; what is no pixel says nothing about the picture."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageFile

from turbovit.engines import png
from turbovit.engines.encoded_image import _supported_formats, encoded_image
from turbovit.engines.errors import InputError
from turbovit.engines.images import rgb_from_bytes
from turbovit.engines.limits import IMAGE_PIXELS

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))
MUCH = bytes(3 << 20)


def file_bytes(image: Image.Image, file_format: str, **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def icon(picture: bytes, side: int = 0, bits: int = 32) -> bytes:
    """An ICO of one picture, whose directory says that it is `side` wide and high (0 is 256)."""
    return b"\0\0\1\0\1\0" + struct.pack("<BBBBHHII", side, side, 0, 0, 1, bits, len(picture), 22) + picture


def bitmap(width: int, height: int) -> bytes:
    """The header of a bitmap as an icon has it: the height is of picture and mask together."""
    return struct.pack("<IiiHHIIiiII", 40, width, 2 * height, 1, 32, 0, 0, 0, 0, 0, 0)


def files(image: Image.Image) -> dict[str, bytes]:
    plain = {name: file_bytes(image, name) for name in _supported_formats() if name != "ICO"}
    return {
        **plain,
        "WEBP lossless": file_bytes(image, "WEBP", lossless=True),
        "WEBP extended": file_bytes(image, "WEBP", exif=b"Exif\0\0II*\0"),
        "WEBP animation": file_bytes(image, "WEBP", save_all=True, append_images=[image.rotate(180)]),
        "MPO of two": file_bytes(image, "MPO", save_all=True, append_images=[image]),
        "TIFF, LZW": file_bytes(image, "TIFF", compression="tiff_lzw"),
        "progressive JPEG": file_bytes(image, "JPEG", progressive=True),
        "interlaced GIF": file_bytes(image, "GIF", interlace=True),
        "ICO of a PNG": icon(plain["PNG"]),
        "ICO of a bitmap": file_bytes(image.resize((50, 50)), "ICO", sizes=[(50, 50)], bitmap_format="bmp"),
    }


FILES = files(PICTURE)


@pytest.fixture
def _no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever decodes, or makes room for pixels, fails the test."""

    def decode(*args: Any, **kwargs: Any) -> None:
        pytest.fail("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", decode)
    monkeypatch.setattr("PIL.WebPImagePlugin._webp.WebPAnimDecoder", decode)
    monkeypatch.setattr("PIL.IcoImagePlugin.IcoFile.getimage", decode)
    monkeypatch.setattr(Image.core, "new", decode)


def test_every_format_is_looked_at() -> None:
    assert set(_supported_formats()) <= {name.split()[0].rstrip(",") for name in FILES}


@pytest.mark.usefixtures("_no_decoding")
@pytest.mark.parametrize("name", FILES)
def test_the_size_comes_from_the_header(name: str) -> None:
    assert encoded_image(FILES[name]).size == ((50, 50) if name == "ICO of a bitmap" else PICTURE.size)


@pytest.mark.usefixtures("_no_decoding")
@pytest.mark.parametrize("name", FILES)
def test_what_is_too_large_is_refused_undecoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMAGE_PIXELS.variable, "1000")
    with pytest.raises(InputError, match=r"(60x40 = 2400|50x50 = 2500) pixels, at most 1000 are allowed"):
        encoded_image(FILES[name])


def png_header(width: int, height: int) -> bytes:
    return png.SIGNATURE + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) + chunk(b"IDAT", b"")


def chunk(kind: bytes, body: bytes, crc: int | None = None) -> bytes:
    sound = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", sound if crc is None else crc)


@pytest.mark.usefixtures("_no_decoding")
@pytest.mark.parametrize("inner", [png_header(13377, 13377), bitmap(13377, 13377)], ids=["PNG", "bitmap"])
@pytest.mark.parametrize("side", [0, 1, 32])
def test_an_icon_is_as_large_as_the_picture_in_it(inner: bytes, side: int) -> None:
    with pytest.raises(InputError, match="13377x13377 = 178944129 pixels"):
        encoded_image(icon(inner, side))


def test_of_an_icon_the_picture_is_taken_that_pillow_takes() -> None:
    pictures = [file_bytes(PICTURE.resize((side, side)).convert(mode), "PNG") for side, mode in
                ((16, "RGB"), (48, "L"), (48, "RGB"), (32, "RGB"))]  # fmt: skip
    offset, directory = 6 + 16 * len(pictures), b""
    for picture, (side, bits) in zip(pictures, ((16, 32), (48, 32), (48, 8), (32, 32)), strict=True):
        directory += struct.pack("<BBBBHHII", side, side, 0, 0, 1, bits, len(picture), offset)
        offset += len(picture)
    data = b"\0\0\1\0" + struct.pack("<H", len(pictures)) + directory + b"".join(pictures)
    expected = Image.open(BytesIO(data)).convert("RGB")
    assert rgb_from_bytes(data).tobytes() == expected.tobytes() == PICTURE.resize((48, 48)).tobytes()


@pytest.mark.parametrize("data", [b"\0\0\1\0", b"\0\0\1\0\5\0" + bytes(20), icon(b""), icon(b"\x28\0\0\0")])
def test_a_cut_icon_is_refused(data: bytes) -> None:
    with pytest.raises(InputError, match=r"cut short|damaged"):
        encoded_image(data)


def test_a_tiff_of_one_huge_tile_is_refused() -> None:
    tags = {256: 60, 257: 40, 258: 8, 259: 5, 262: 1, 277: 1, 322: 1 << 16, 323: 1 << 16, 324: 8, 325: 1}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    data = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    assert Image.open(BytesIO(data)).size == (60, 40)
    with pytest.raises(InputError, match="65536x65536"):
        encoded_image(data)


PNG = FILES["PNG"]
HEAD = PNG[: len(png.SIGNATURE) + 25]  # with IHDR
TEXTS = {
    "zTXt": chunk(b"zTXt", b"Comment\0\0" + zlib.compress(MUCH)),
    "iTXt": chunk(b"iTXt", b"Comment\0\1\0en\0\0" + zlib.compress(MUCH)),
    "tEXt": chunk(b"tEXt", b"Comment\0" + b"a" * len(MUCH)),
    "many zTXt": chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(1 << 20))) * 70,
    "large XMP": chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(MUCH)),
    "profile": chunk(b"iCCP", b"name\0\0" + zlib.compress(MUCH)),
    "broken profile": chunk(b"iCCP", b"name\0\0junk"),
    "unknown compression": chunk(b"zTXt", b"Comment\0\7junk"),
    "text, wrong checksum": chunk(b"tEXt", b"Comment\0hello", crc=1),
    "packed text, wrong checksum": chunk(b"zTXt", b"Comment\0\0" + zlib.compress(b"hello"), crc=1),
    "EXIF, wrong checksum": chunk(b"eXIf", b"II*\0junk", crc=1),
    "time, too short": chunk(b"tIME", b""),
    "size, too short": chunk(b"pHYs", b""),
    "frames, none": chunk(b"acTL", struct.pack(">II", 0, 0)),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("where", ["before the pixels", "behind them", "both"])
def test_metadata_of_a_png_say_nothing_about_its_pixels(text: str, where: str) -> None:
    data = PNG
    if where != "before the pixels":
        data = data[:-12] + TEXTS[text] + data[-12:]
    if where != "behind them":
        data = HEAD + TEXTS[text] + data[len(HEAD) :]
    for one in (data, icon(data)):
        assert rgb_from_bytes(one).tobytes() == PICTURE.tobytes()
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def orientation_texts() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    raw = f"\nexif\n      {len(exif.tobytes())}\n{exif.tobytes().hex()}\n"
    return {
        "eXIf": chunk(b"eXIf", exif.tobytes()[6:]),
        "XMP": chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp),
        "packed XMP": chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp)),
        "raw profile": chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw.encode())),
    }


@pytest.mark.parametrize("name", orientation_texts())
def test_an_orientation_in_a_png_stays(name: str) -> None:
    data = HEAD + TEXTS["zTXt"] + orientation_texts()[name] + PNG[len(HEAD) :]
    assert rgb_from_bytes(data).tobytes() == PICTURE.transpose(Image.Transpose.ROTATE_270).tobytes()


def test_a_png_without_metadata_is_not_copied() -> None:
    assert png.without_metadata(PNG) is PNG


@pytest.mark.parametrize("text", ["zTXt", "text, wrong checksum"])
def test_pixels_of_a_png_with_metadata_are_checked_all_the_same(text: str) -> None:
    data = HEAD + TEXTS[text] + PNG[len(HEAD) :]
    pixels = len(HEAD) + len(TEXTS[text])
    flipped = bytearray(data)
    flipped[pixels + 30] ^= 1  # in IDAT
    for bad in (bytes(flipped), data[: pixels + 40], data[: len(data) // 2], data[:pixels]):
        with pytest.raises(InputError, match=r"damaged|in no known format"):
            rgb_from_bytes(bad)


HUGE = np.random.default_rng(1).bytes(2 << 20)
XMP = b"<x>" + b"a" * (3 << 20) + b"</x>"


def large_exif() -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.ImageDescription] = "a" * (2 << 20)
    return exif


METADATA: dict[str, Callable[[], bytes]] = {
    "JPEG, profile": lambda: file_bytes(PICTURE, "JPEG", quality=95, icc_profile=HUGE),
    "JPEG, EXIF": lambda: file_bytes(PICTURE, "JPEG", quality=95, exif=b"Exif\0\0" + HUGE[:60000]),
    "JPEG, XMP": lambda: file_bytes(PICTURE, "JPEG", quality=95, xmp=XMP[:60000]),
    "JPEG, comment": lambda: file_bytes(PICTURE, "JPEG", quality=95, comment=HUGE[:60000]),
    "WEBP": lambda: file_bytes(PICTURE, "WEBP", lossless=True, icc_profile=HUGE, exif=b"Exif\0\0" + HUGE, xmp=XMP),
    "TIFF, profile": lambda: file_bytes(PICTURE, "TIFF", icc_profile=HUGE),
    "TIFF, XMP": lambda: file_bytes(PICTURE, "TIFF", tiffinfo={700: XMP}),
    "JPEG2000, comment": lambda: file_bytes(PICTURE, "JPEG2000", comment="a" * 60000),
    "GIF, comment": lambda: file_bytes(PICTURE.quantize(), "GIF", comment=HUGE),
    "AVIF": lambda: file_bytes(PICTURE, "AVIF", icc_profile=HUGE, exif=large_exif(), xmp=XMP),
}


@pytest.mark.filterwarnings("ignore")  # that Pillow warns of corrupt EXIF is right
@pytest.mark.parametrize("name", METADATA)
def test_large_or_broken_metadata_of_other_formats_say_nothing_either(name: str) -> None:
    if name.split(",")[0] not in _supported_formats():
        pytest.skip("Pillow was built without it")
    data = METADATA[name]()
    assert rgb_from_bytes(data).tobytes() == Image.open(BytesIO(data)).convert("RGB").tobytes()


@pytest.mark.parametrize("data", [b"root:x:0:0:root:/root", b"P6\nsecret 4", b"P3 2 2 255 secret", b"GIF89asecret"])
def test_a_refusal_quotes_nothing_of_the_data(data: bytes) -> None:
    with pytest.raises(InputError) as refusal:
        rgb_from_bytes(data)
    assert "secret" not in str(refusal.value)
    assert "root" not in str(refusal.value)
