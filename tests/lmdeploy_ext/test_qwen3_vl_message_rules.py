"""What a conversation with images and videos may hold: the rest is refused with its reason, and the next one works."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from turbomind_qwen3_vl import Pair, frames_from_seed, video, write_video
from turbomind_requests import Message, assistant, file_bytes, image, image_url, noise, same, system, text, user

from turbovit.engines.errors import InputError

A, B = noise(20, 10, 0), noise(10, 20, 1)
MARKER = "<IMAGE_TOKEN>"
RESERVED = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>")
CLIP = "CLIP"  # stands for the path of a sound video


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("videos") / "a.mp4", 64, 96, 4, 4, 0)


@pytest.fixture(scope="module")
def good(clip: Path, qwen3_vl: Pair) -> tuple[list[Message], dict[str, Any]]:
    chat = [user(video(clip), image(A), text("what is it?"))]
    return chat, qwen3_vl.side.request(chat)


def with_clip(messages: list[Message], clip: Path) -> list[Message]:
    """The messages with the path of the video that they name."""

    def part(one: Any) -> Any:
        return {**one, "video_url": {"url": str(clip)}} if one == video(CLIP) else one

    return [
        {**one, "content": list(map(part, one["content"]))} if isinstance(one["content"], list) else one
        for one in messages
    ]


def jpeg_frames(*frames: bytes) -> str:
    return "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in frames)


def jpeg(width: int, height: int) -> bytes:
    return file_bytes(noise(width, height, 0), "JPEG")


BAD: dict[str, tuple[list[Any], str]] = {
    "a video from the assistant": (
        [user(image(A)), assistant([text("x"), video(CLIP)])],
        r"message 1 \(assistant\), video 1: only messages of the roles user, tool can hold videos",
    ),
    "a video from the system": ([system([video(CLIP)]), user(text("x"))], r"message 0 \(system\), video 1: only mess"),
    "an image from the assistant": ([user(image(A)), assistant([image(A)])], r"message 1 \(assistant\), image 1: only"),
    "a video that is not there": (
        [user(video(CLIP)), assistant("x"), user(image(A), video(CLIP), image(B), video("/no.mp4"))],
        r"message 2 \(user\), video 2: .*URL",
    ),
    "a video without source": ([user(image(A), {"type": "video_url"})], r"message 0 \(user\), video 1: "),
    "a video that is a number": ([user(video(CLIP), {"type": "video", "video": 5})], r"message 0 \(user\), video 2: "),
    "a video that becomes an image": (
        [user({"type": "video_url", "video_url": {"url": "/a.mp4", "type": "image"}})],
        r"message 0 \(user\), video 1: a second 'type' or 'data'",
    ),
    "a sound": (
        [user(image(A), {"type": "audio_url"})],
        r"message 0 .* 'audio_url', expected a text or an image or a ",
    ),
    "frames of different sizes": (
        [user(video(jpeg_frames(jpeg(20, 30), jpeg(30, 20))))],
        r"message 0 \(user\), video 1: its frames have 2 sizes, expected one",
    ),
    "one frame": (
        [user(image(A), video(jpeg_frames(jpeg(20, 30))))],
        r"message 0 \(user\), video 1: it has 1 frames, expected",
    ),
    "a frame that is cut short": (
        [user(video(jpeg_frames(jpeg(90, 90), jpeg(90, 90)[:2000])))],
        r"message 0 \(user\), video 1: .*cut short",
    ),
    "a frame that is no image": (
        [user(video(jpeg_frames(b"junk")))],
        r"message 0 \(user\), video 1: .*no known format",
    ),
    "frames that are too narrow": (
        [user(video(jpeg_frames(*[jpeg(1, 300)] * 2)))],
        r"message 0 \(user\), video 1: .*aspect ratio",
    ),
    "an image that is too narrow": ([user(image(A), image(noise(1, 201, 0)))], r"message 0 \(user\), image 2: .*ratio"),
    "a reserved string in two parts": (
        [user(text("<|image_"), text("pad|>"), image(A))],
        "part 1 and what .* '<|image_pad|>'",
    ),
    "the other one in two parts": (
        [user(text("<|video_"), text("pad|>"), image(A))],
        "part 1 and what .* '<|video_pad|>'",
    ),
    "one in two parts, text only": ([user(text("<|video_"), text("pad|>"))], "part 1 and what .* '<|video_pad|>'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_conversation_is_refused_and_the_next_one_works(
    name: str, clip: Path, qwen3_vl: Pair, good: tuple[list[Message], dict[str, Any]]
) -> None:
    messages, reason = BAD[name]
    with pytest.raises(InputError, match=reason.replace("|", r"\|")):
        qwen3_vl.side.request(with_clip(messages, clip))
    assert same(qwen3_vl.side.request(good[0]), good[1])


@pytest.mark.parametrize("what", ["nothing", "junk", "half", "a picture", "a folder"])
def test_a_broken_video_file_is_refused_by_name(
    what: str, tmp_path: Path, clip: Path, qwen3_vl: Pair, good: tuple[list[Message], dict[str, Any]]
) -> None:
    path = tmp_path / "broken.mp4"
    sound = clip.read_bytes()
    contents = {"nothing": b"", "junk": b"junk" * 999, "half": sound[: len(sound) // 2], "a picture": jpeg(9, 9)}
    path.mkdir() if what == "a folder" else path.write_bytes(contents[what])
    with pytest.raises(InputError, match=r"message 0 \(user\), video 2: "):
        qwen3_vl.side.request([user(video(clip), image(A), video(path))])
    assert same(qwen3_vl.side.request(good[0]), good[1])


@pytest.mark.parametrize(
    "media_io_kwargs", [{"video": 5}, {"video": [1]}, {"image": "x"}, {"video": {"num_frames": "x"}}]
)
def test_media_options_that_are_none_are_refused(media_io_kwargs: dict[str, Any], clip: Path, qwen3_vl: Pair) -> None:
    with pytest.raises(InputError):
        qwen3_vl.side.request([user(video(clip))], media_io_kwargs=media_io_kwargs)


def test_frames_that_are_no_array_of_pixels_are_refused(qwen3_vl: Pair) -> None:
    model = qwen3_vl.side.encoder.model
    for data, metadata in (
        (None, {}),
        (np.zeros((4, 30, 20), np.uint8), {}),
        (np.zeros((4, 30, 20, 3), np.float32), {}),
        (np.zeros((0, 30, 20, 3), np.uint8), {}),
        (frames_from_seed(20, 30, 4, 0), {"frames_indices": [0, 1]}),
    ):
        part = {"type": "video", "data": data, "video_metadata": {"fps": 2.0, **metadata}}
        with pytest.raises(InputError, match=r"message 0 \(user\), video 1: it"):
            model.preprocess([user(part)])


@pytest.mark.parametrize("word", RESERVED)
@pytest.mark.parametrize(
    ("messages", "index"),
    [
        ([user(text("a {}"), image(A))], 0),
        ([user(video(CLIP), text("b"), text("{}c"))], 0),
        ([{"role": "user", "content": "a{}b"}], 0),
        ([system([text("a"), text("{}")]), user(text("x"))], 0),
        ([user(image(A)), assistant("it is {}"), user(text("x"))], 1),
        ([user(text("x")), {"role": "tool", "content": [text("{}"), image(A)]}], 1),
    ],
)
def test_a_reserved_string_is_refused_wherever_it_stands(
    messages: list[Message], index: int, word: str, clip: Path, qwen3_vl: Pair
) -> None:
    def filled(part: Any) -> Any:
        return {**part, "text": part["text"].replace("{}", word)} if part.get("type") == "text" else part

    chat = [
        {**one, "content": one["content"].replace("{}", word)}
        if isinstance(one["content"], str)
        else {**one, "content": list(map(filled, one["content"]))}
        for one in messages
    ]
    with pytest.raises(InputError) as caught:
        qwen3_vl.side.request(with_clip(chat, clip))
    assert f"message {index} ({messages[index]['role']}): its text holds {word!r}" in str(caught.value)


def test_a_string_prompt_has_the_same_rule(qwen3_vl: Pair) -> None:
    for word in RESERVED:
        with pytest.raises(InputError, match="its text holds"):
            qwen3_vl.side.request(f"what is {word}?")


def test_a_refusal_comes_before_a_video_is_loaded(qwen3_vl: Pair) -> None:
    for missing in (video("/nowhere.mp4"), image_url("/nowhere.png")):
        with pytest.raises(InputError, match="its text holds"):
            qwen3_vl.side.request([user(missing, text(RESERVED[3]))])


@pytest.mark.parametrize("first", ["video", "image", "text"])
def test_markers_are_the_places_of_images_and_of_no_video(first: str, clip: Path, qwen3_vl: Pair) -> None:
    marked = text(f"this {MARKER} and {MARKER}.")
    meant = [text("this "), image(A), text(" and "), image(B), text(".")]
    orders = {
        "video": ([video(clip), marked, image(A), image(B)], [video(clip), *meant]),
        "image": ([image(A), video(clip), marked, image(B)], [video(clip), *meant]),
        "text": ([marked, image(A), video(clip), image(B)], [*meant, video(clip)]),
    }
    given, expected = orders[first]
    assert same(qwen3_vl.side.request([user(*given)]), qwen3_vl.assert_proved([user(*expected)]))


@pytest.mark.parametrize("parts", [[text(f"{MARKER} {MARKER}"), image(A)], [text(MARKER), image(A), image(B)]])
def test_another_number_of_markers_is_text_and_a_video_is_no_image(
    parts: list[Any], clip: Path, qwen3_vl: Pair
) -> None:
    for chat in ([user(*parts)], [user(video(clip), *parts)], [user(text(MARKER), video(clip))]):
        request = qwen3_vl.assert_proved(chat)
        assert MARKER in request["prompt"]
