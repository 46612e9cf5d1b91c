"""Images by every entry of LMDeploy: the same request however they arrive, or a refusal that names them."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import ExifTags, Image, ImageFile, ImageOps
from turbomind_requests import assistant, data_url, file_bytes, image, image_url, noise, same, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.engines.errors import InputError
from turbovit.engines.limits import IMAGE_PIXELS

SEMITRANSPARENT = noise(40, 30, 0, channels=4)
ROTATED = Image.Exif()
ROTATED[ExifTags.Base.Orientation] = 6

ENTRIES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "PIL image": lambda path: image(Image.open(path)),
    "PIL image as image": lambda path: {"type": "image", "image": Image.open(path)},
    "path": lambda path: image_url(str(path)),
    "path, not in a dict": lambda path: {"type": "image", "image": str(path)},
    "file URL": lambda path: image_url(path.as_uri()),
    "data URL": lambda path: image_url(data_url(path.read_bytes())),
}
FILES: dict[str, tuple[str, bytes, Image.Image]] = {
    "RGB": ("a.png", file_bytes(noise(40, 30, 1)), noise(40, 30, 1)),
    "grey": ("a.png", file_bytes(noise(40, 30, 2, channels=1)), noise(40, 30, 2, channels=1).convert("RGB")),
    "RGBA": (
        "a.png",
        file_bytes(SEMITRANSPARENT),
        Image.alpha_composite(Image.new("RGBA", (40, 30), "white"), SEMITRANSPARENT).convert("RGB"),
    ),
    "invisible": ("a.png", file_bytes(Image.new("RGBA", (9, 9), (255, 0, 0, 0))), Image.new("RGB", (9, 9), "white")),
    "EXIF": (
        "a.png",
        file_bytes(noise(40, 30, 3), exif=ROTATED),
        noise(40, 30, 3).transpose(Image.Transpose.ROTATE_270),
    ),
    "a name with a space": ("a b.png", file_bytes(noise(40, 30, 4)), noise(40, 30, 4)),
}


@pytest.mark.parametrize("file", FILES)
def test_an_image_gives_the_same_request_by_every_entry(file: str, quick_side: LMDeploySide, tmp_path: Path) -> None:
    name, data, meant = FILES[file]
    path = tmp_path / name
    path.write_bytes(data)
    expected = quick_side.request([user(image(meant))])
    for entry, part_from_path in ENTRIES.items():
        assert same(quick_side.request([user(part_from_path(path))]), expected), entry


def test_an_orientation_is_applied_exactly_once(quick_side: LMDeploySide) -> None:
    plain = quick_side.request([user(image(noise(640, 480, 5)))])
    for orientation in range(2, 9):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        data = file_bytes(noise(640, 480, 5), exif=exif)
        request = quick_side.request([user(image_url(data_url(data)))])
        upright = ImageOps.exif_transpose(Image.open(BytesIO(data)))
        assert same(request, quick_side.request([user(image(upright))])), orientation
        assert not same(request, plain), orientation


def png_of_size(width: int, height: int) -> bytes:
    """A PNG file whose header says so, with hardly a pixel behind it."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 10))


GOOD = [user(image(noise(20, 20, 7)))]
JPEG = file_bytes(noise(200, 200, 6), "JPEG")
BAD: dict[str, tuple[str, str]] = {
    "a JPEG cut in half": (data_url(JPEG[: len(JPEG) // 2], "jpeg"), "the image is damaged or cut short"),
    "no bytes": ("data:image/png;base64,", r"the image is empty \(0 bytes\)"),
    "junk": (data_url(b"this is a text file"), "the image is in no known format"),
    "a piece of base64": ("data:image/png;base64,abcde", "the data URL is not base64: its 5 characters"),
    "no base64": ("data:image/png;base64,@@@@", "the data URL is not base64: its 4 characters"),
    "another encoding": ("data:image/png;utf8,abc", "the data URL is not base64: expected data:"),
    "12000x12000": (data_url(png_of_size(12000, 12000)), "12000x12000 = 144000000 pixels, at most"),
    "100000x100000": (data_url(png_of_size(100_000, 100_000)), "pixels"),
    "a missing file": ("file:///nowhere/a.png", "No such file"),
    "a missing path": ("/nowhere/a.png", "it is no http, data or file URL, and as a path: .*No such file"),
    "a folder": ("/", "it is a folder, expected a regular file"),
    "a device": ("/dev/zero", "it is a device, expected a regular file"),
    "a file without a size": ("/proc/self/environ", r"the image is empty \(0 bytes\)"),
    "an address of this machine": ("http://127.0.0.1:9/a.png", "Blocked non-global IP"),
}


@pytest.fixture(scope="module")
def expected(quick_side: LMDeploySide) -> dict[str, Any]:
    return quick_side.request(GOOD)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_refused_by_name_and_the_next_one_works(
    name: str, quick_side: LMDeploySide, expected: dict[str, Any]
) -> None:
    url, reason = BAD[name]
    with pytest.raises(InputError, match=rf"^message 2 \(user\), image 2: .*{reason}") as refusal:
        quick_side.request([*GOOD, assistant("and?"), user(text("x"), image(noise(9, 9, 8)), image_url(url))])
    assert isinstance(refusal.value, ValueError)
    assert same(quick_side.request(GOOD), expected)


def test_a_refusal_stays_short_whatever_was_sent(quick_side: LMDeploySide) -> None:
    with pytest.raises(InputError) as refusal:
        quick_side.request([user(image_url("data:image/png;base64" + "A" * 100_000))])
    assert len(str(refusal.value)) < 400


def test_the_limit_on_pixels_holds_for_each_request(quick_side: LMDeploySide, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [user(image_url(data_url(file_bytes(noise(20, 10, 9)))))]
    quick_side.request(messages)
    monkeypatch.setenv(IMAGE_PIXELS.variable, "199")
    with pytest.raises(InputError, match=r"image 1: the image has 20x10 = 200 pixels, at most 199"):
        quick_side.request(messages)


@pytest.mark.parametrize("options", [None, {}, {"image": {}}, {"image": None, "video": {}}])
def test_the_rule_for_alpha_does_not_depend_on_a_requests_options(
    options: dict[str, Any] | None, quick_side: LMDeploySide
) -> None:
    _, data, meant = FILES["RGBA"]
    request = quick_side.request([user(image_url(data_url(data)))], media_io_kwargs=options)
    assert same(request, quick_side.request([user(image(meant))]))


def test_options_that_are_none_are_refused(quick_side: LMDeploySide) -> None:
    for options in ({"image": 5}, {"image": {"image_mode": "L"}}, {"video": {"num_frames": 4}}, [5]):
        with pytest.raises(InputError, match=r"media_io_kwargs (has 'image'|has 'video'|is \[5\])"):
            quick_side.request([user(image_url(data_url(file_bytes(noise(9, 9, 0)))))], media_io_kwargs=options)


class AnotherEncoder:
    """Stands in for the image encoder of a model that is not compiled; keeps the messages it was given."""

    _uses_new_preprocess = False
    model = SimpleNamespace()

    async def preprocess(self, messages: list[dict], **kwargs: Any) -> list[dict]:
        return messages

    async def wrap_for_pytorch(self, messages: list[dict], **kwargs: Any) -> dict[str, Any]:
        return {"messages": messages}


@pytest.mark.parametrize("file", FILES)
def test_other_models_get_the_image_that_lmdeploy_gives_them(
    file: str, quick_side: LMDeploySide, tmp_path: Path
) -> None:
    from lmdeploy.serve.processors import MultimodalProcessor

    name, data, _ = FILES[file]
    path = tmp_path / name
    path.write_bytes(data)
    processor = MultimodalProcessor(quick_side.tokenizer, quick_side.chat_template, AnotherEncoder(), backend="pytorch")
    for part in (image_url(str(path)), image_url(data_url(data))):
        answer = asyncio.run(processor.get_prompt_input([user(text("x"), part)], do_preprocess=True))
        loaded = answer["messages"][0]["content"][1]["data"]
        assert loaded.mode == "RGB"
        assert loaded.tobytes() == Image.open(path).convert("RGB").tobytes()
    with pytest.raises(ValueError, match=r"message 0 \(user\), image 1: "):
        asyncio.run(processor.get_prompt_input([user(image_url(data_url(b"junk")))], do_preprocess=True))


def test_cut_files_are_not_filled_with_grey(quick_side: LMDeploySide, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDeploy allows it for the whole process when it is imported; the first image of ours takes that back."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(InputError, match="cut short"):
        quick_side.request([user(image_url(BAD["a JPEG cut in half"][0]))])
