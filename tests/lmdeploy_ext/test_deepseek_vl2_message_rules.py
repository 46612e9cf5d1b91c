"""What a conversation with DeepSeek-VL2 may hold, and its images: the rest is refused, and the next request works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import ExifTags, Image
from turbomind_deepseek_vl2 import SMALL, WIDE, Pair
from turbomind_requests import (
    Message,
    assistant,
    data_url,
    file_bytes,
    image,
    image_url,
    noise,
    same,
    system,
    text,
    user,
)

from turbovit.engines.errors import InputError

GOOD = [user(image(WIDE), text("what is it?"))]
VIDEO = {"type": "video_url", "video_url": {"url": "/nowhere.mp4"}}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
JPEG = file_bytes(noise(200, 200, 6), "JPEG")
BAD: dict[str, tuple[list[Any], str]] = {
    "an image from the system": ([system([image(SMALL)]), user(text("x"))], r"message 0 \(system\), image 1: only"),
    "an image from the assistant": (
        [user(image(SMALL)), assistant([text("x"), image(SMALL)])],
        r"message 1 \(assistant\), image 1: only messages of the roles user, tool",
    ),
    "an image from a tool": (
        [user(text("x")), {"role": "tool", "content": [image(SMALL)]}],
        r"message 1 \(tool\): this model's conversations are of user and assistant",
    ),
    "a system message later on": ([user(image(SMALL)), system("x"), user(text("y"))], r"message 1 \(system\): this"),
    "a system message alone": ([system("Be brief.")], "a system message alone"),
    "an unknown role": ([{"role": "narrator", "content": "x"}, user(image(SMALL))], r"message 0 \(narrator\)"),
    "a call of a tool": ([user(image(SMALL)), CALL, user(text("x"))], r"message 1 \(assistant\): .* no tool calls"),
    "a video": ([user(VIDEO)], r"message 0 \(user\): a part is of type 'video_url', expected a text or an image"),
    "an image that is a number": ([user(image(SMALL), image(5))], r"message 0 \(user\), image 2: its source is a int"),
    "a reserved string in two parts": (
        [user(text("<im"), text("age>"), image(SMALL))],
        r"\(user\): its part 1 and what",
    ),
    "a reserved string in two parts, text only": ([user(text("<im"), text("age>"))], r"\(user\): its part 1 and what"),
    "a JPEG cut in half": ([user(image(WIDE), image_url(data_url(JPEG[:900], "jpeg")))], "image 2: .*cut short"),
    "no bytes": ([user(image_url("data:image/png;base64,@@@@"))], "image 1: the data URL is not base64"),
    "a text renamed .png": ([user(image_url(data_url(b"this is a text file")))], "image 1: .*in no known format"),
    "no messages": ([], "there are no messages"),
}


@pytest.fixture(scope="module")
def expected(deepseek_vl2: Pair) -> dict[str, Any]:
    return deepseek_vl2.side.request(GOOD)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_conversation_is_refused_and_the_next_one_works(
    name: str, deepseek_vl2: Pair, expected: dict[str, Any]
) -> None:
    messages, reason = BAD[name]
    with pytest.raises(InputError, match=reason):
        deepseek_vl2.side.request(messages)
    assert same(deepseek_vl2.side.request(GOOD), expected)


@pytest.mark.parametrize(
    ("messages", "index"),
    [
        ([user(text("a <image>"), image(SMALL))], 0),
        ([user(text("<image>"))], 0),
        ([{"role": "user", "content": "a<image>b"}], 0),
        ([system("<image>"), user(image(SMALL))], 0),
        ([user(image(SMALL)), assistant("it is <image>"), user(text("x"))], 1),
    ],
)
def test_the_placeholder_is_refused_wherever_it_stands(messages: list[Message], index: int, deepseek_vl2: Pair) -> None:
    reason = re.escape(f"message {index} ({messages[index]['role']}): its text holds '<image>'")
    with pytest.raises(InputError, match=reason):
        deepseek_vl2.side.request(messages)


@pytest.mark.parametrize("parts", [[text("<image>")], [text("a")]])
def test_a_refusal_comes_before_an_image_is_loaded(parts: list[Any], deepseek_vl2: Pair) -> None:
    late_system = [user(image_url("/nowhere.png"), *parts), system("x")]
    with pytest.raises(InputError, match=r"its text holds '<image>'|message 1 \(system\): this model"):
        deepseek_vl2.side.request(late_system)


def test_tools_are_refused_and_none_is_fine(deepseek_vl2: Pair, expected: dict[str, Any]) -> None:
    for messages in (GOOD, [user(text("a"))]):
        with pytest.raises(InputError, match="has no tools: leave 'tools' out"):
            deepseek_vl2.side.request(messages, tools=[{"type": "function", "function": {"name": "look"}}])
    assert same(deepseek_vl2.side.request(GOOD, tools=None, chat_template_kwargs={"enable_thinking": True}), expected)


def test_markers_are_positions_only_where_they_are_as_many_as_the_images(deepseek_vl2: Pair) -> None:
    placed = [user(text("a <IMAGE_TOKEN> b <IMAGE_TOKEN>"), image(SMALL), image(WIDE))]
    by_hand = [user(text("a "), image(SMALL), text(" b "), image(WIDE))]
    assert same(deepseek_vl2.side.request(placed), deepseek_vl2.side.request(by_hand))
    deepseek_vl2.assert_proved([user(text("a <IMAGE_TOKEN>"), image(SMALL), image(WIDE))])


INVISIBLE = Image.new("RGBA", (256, 256), (255, 0, 0, 0))
ROTATED = Image.Exif()
ROTATED[ExifTags.Base.Orientation] = 6
FILES: dict[str, tuple[bytes, Image.Image]] = {
    "transparent red is red": (file_bytes(INVISIBLE), Image.new("RGB", (256, 256), (255, 0, 0))),
    "palette": (file_bytes(noise(90, 50, 1).quantize(16)), noise(90, 50, 1).quantize(16).convert("RGB")),
    "CMYK": (
        file_bytes(noise(90, 50, 2).convert("CMYK"), "TIFF"),
        noise(90, 50, 2).convert("CMYK").convert("RGB"),
    ),
    "EXIF": (file_bytes(noise(640, 300, 3), exif=ROTATED), noise(640, 300, 3).transpose(Image.Transpose.ROTATE_270)),
}


@pytest.mark.parametrize("name", FILES)
def test_an_image_gives_the_same_request_by_every_entry(name: str, deepseek_vl2: Pair, tmp_path: Path) -> None:
    data, meant = FILES[name]
    path = tmp_path / "a.png"
    path.write_bytes(data)
    expected = deepseek_vl2.side.request([user(image(meant))])
    for part in (
        image(Image.open(path)),
        {"type": "image", "image": str(path)},
        image_url(str(path)),
        image_url(data_url(data)),
    ):
        assert same(deepseek_vl2.side.request([user(part)]), expected)
