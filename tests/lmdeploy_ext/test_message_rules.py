"""What a conversation may hold: the rest is refused with its reason, and the next request works."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from turbomind_qwen3_vl import Pair
from turbomind_requests import Message, assistant, image, image_url, noise, same, system, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.engines.errors import InputError

A, B = noise(20, 10, 0), noise(10, 20, 1)
RESERVED = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
GOOD = [user(image(A), text("what is it?"))]
VIDEO = {"type": "video_url", "video_url": {"url": "/nowhere.mp4"}}

# Messages, and what their refusal says.
BAD: dict[str, tuple[list[Any], str]] = {
    "no messages": ([], "there are no messages"),
    "no role": ([{"content": "hi"}], "message 0: its role is None"),
    "no role beside an image": ([user(image(A)), {"content": "hi"}], "message 1: its role is None"),
    "a role that is no name": ([user(image(A)), {"role": ["user"], "content": "hi"}], "message 1: its role is"),
    "two users": ([user(text("a")), user(image(A))], "the chat template does not take this conversation: .*take turns"),
    "two users, text only": ([user(text("a")), user(text("b"))], "the chat template .*take turns"),
    "an unknown role": ([{"role": "narrator", "content": "x"}, user(image(A))], "the chat template .*take turns"),
    "a role of LMDeploy's own": ([{"role": "forward", "content": "x"}, user(image(A))], "the chat template"),
    "a content that is a number": ([{"role": "user", "content": 5}], r"message 0 \(user\): its content is a int"),
    "a content that is one part": ([{"role": "user", "content": text("x")}], r"message 0 \(user\): .* a dict"),
    "a part that is a string": ([user("hello", image(A))], r"message 0 \(user\): a part is a str"),
    "a part without type": ([user({"text": "x"}, image(A))], r"message 0 \(user\): a part is of type None"),
    "a part that is nearly an image": (
        [user(image(A), {"type": "image_file"})],
        r"message 0 \(user\): a part is of type 'image_file'",
    ),
    "a part of unknown type": ([user({"type": "input_image"})], r"message 0 \(user\): a part is of type 'input_image'"),
    "a video": (
        [user(text("x"), VIDEO)],
        r"message 0 \(user\): a part is of type 'video_url', expected a text or an im",
    ),
    "a video beside an image": ([user(image(A)), assistant("x"), user(VIDEO)], r"message 2 \(user\): .*'video_url'"),
    "a text part without text": ([user({"type": "text"}, image(A))], r"message 0 \(user\): a text part holds NoneType"),
    "half of a character": ([user(text("a\ud800"))], r"message 0 \(user\): its text holds '\\ud800' at 1"),
    "an image from the system": (
        [system([image(A)]), user(text("x"))],
        r"message 0 \(system\), image 1: only messages",
    ),
    "an image from the assistant": (
        [user(image(A)), assistant([text("x"), image(A), image(B)])],
        r"message 1 \(assistant\), image 1: only messages of the roles user, tool can hold images",
    ),
    "an image without data": ([user(image(A), {"type": "image_url"})], r"message 0 \(user\), image 2: "),
    "an image of two sources": (
        [user({"type": "image_url", "image_url": {"url": "/a.png", "data": "/b.png"}})],
        r"message 0 \(user\), image 1: a second 'type' or 'data'",
    ),
    "an image with data beside it": (
        [user({"type": "image", "image": "/a.png", "data": "/b.png"})],
        r"message 0 \(user\), image 1: a second 'type' or 'data'",
    ),
    "an image that becomes a text": (
        [user({"type": "image_url", "image_url": {"url": "/a.png", "type": "text", "text": "x"}})],
        r"message 0 \(user\), image 1: a second 'type' or 'data'",
    ),
    "an image that is a number": (
        [user(text("x"), image(A), image(5))],
        r"message 0 \(user\), image 2: its source is a int",
    ),
    "an image of another kind": (
        [user(image(np.zeros((4, 4)))), assistant("x")],
        r"message 0 \(user\), image 1: .*float",
    ),
    "a reserved string in two parts": (
        [user(text("<start_of_"), text("image>"), image(A))],
        r"message 0 \(user\): its part 1 and what .* make '<start_of_image>'",
    ),
    "a reserved string in two parts, text only": (
        [user(text("<end_of_"), text("image>"))],
        r"message 0 \(user\): its part 1 and what .* make '<end_of_image>'",
    ),
}


def with_word(message: Message, word: str) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content.replace("{}", word)}
    parts = [text(part["text"].replace("{}", word)) if part["type"] == "text" else part for part in content]
    return {**message, "content": parts}


@pytest.fixture(scope="module")
def expected(quick_side: LMDeploySide) -> dict[str, Any]:
    return quick_side.request(GOOD)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_conversation_is_refused_and_the_next_one_works(
    name: str, quick_side: LMDeploySide, expected: dict[str, Any]
) -> None:
    messages, reason = BAD[name]
    with pytest.raises(InputError, match=reason):
        quick_side.request(messages)
    assert same(quick_side.request(GOOD), expected)


@pytest.mark.parametrize("word", RESERVED)
@pytest.mark.parametrize(
    ("messages", "index"),
    [
        ([user(text("a {}"), image(A))], 0),
        ([user(image(A), text("b"), text("{}c"))], 0),
        ([user(text("{}"))], 0),
        ([{"role": "user", "content": "a{}b"}], 0),
        ([system("{}"), user(image(A))], 0),
        ([system([text("a"), text("{}")]), user(text("x"))], 0),
        ([user(image(A)), assistant("it is {}"), user(text("x"))], 1),
        ([user(image(A)), assistant([text("{}")])], 1),
        ([user(text("x")), assistant("x"), user(text("{}"))], 2),
        ([user(text("x")), {"role": "tool", "content": [text("{}"), image(A)]}, user(text("x"))], 1),
    ],
)
def test_a_reserved_string_is_refused_wherever_it_stands(
    messages: list[Message], index: int, word: str, quick_side: LMDeploySide, expected: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match=rf"message {index} \({messages[index]['role']}\): its text holds '{word}'"):
        quick_side.request([with_word(message, word) for message in messages])
    assert same(quick_side.request(GOOD), expected)


@pytest.mark.parametrize("word", [*RESERVED, "\ud800"])
def test_a_string_prompt_has_the_same_rules(word: str, quick_side: LMDeploySide) -> None:
    with pytest.raises(InputError, match=re.escape(f"message 0 (user): its text holds {word!r}")):
        quick_side.request(f"what is {word}?")


def test_a_refusal_comes_before_an_image_is_loaded(quick_side: LMDeploySide) -> None:
    with pytest.raises(InputError, match="its text holds '<start_of_image>'"):
        quick_side.request([user(image_url("/nowhere.png"), text("<start_of_image>"))])


def test_noise_would_be_seen(qwen3_vl: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """With LMDeploy's own callback a refused image is also reported as a crash in the event loop."""
    from lmdeploy.vl import engine

    monkeypatch.setattr(engine, "_raise_exception_on_finish", lambda task: task.result())
    with pytest.raises(InputError):
        qwen3_vl.side.request([user(image(noise(1, 300, 0)))])
    assert any("Exception in callback" in record.message for record in caplog.records)
    caplog.clear()
