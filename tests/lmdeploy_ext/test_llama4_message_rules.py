"""What a conversation with Llama 4 may hold: the rest is refused with its reason, and the next request works."""

from __future__ import annotations

import re
from typing import Any

import pytest
from turbomind_llama4 import RESERVED, SMALL, WIDE, Pair
from turbomind_requests import Message, assistant, image, image_url, same, system, text, user

from turbovit.engines.errors import InputError

GOOD = [user(image(WIDE), text("what is it?"))]
VIDEO = {"type": "video_url", "video_url": {"url": "/nowhere.mp4"}}
BAD: dict[str, tuple[list[Any], str]] = {
    "an image from the system": ([system([image(SMALL)]), user(text("x"))], r"message 0 \(system\), image 1: only"),
    "an image from the assistant": (
        [user(image(SMALL)), assistant([text("x"), image(SMALL)])],
        r"message 1 \(assistant\), image 1: only messages of the roles user, tool",
    ),
    "an image from a tool, which the template writes as JSON": (
        [user(text("x")), {"role": "tool", "content": [image(SMALL)]}],
        r"message 1 \(tool\), image 1: the chat template writes messages of the role tool as data",
    ),
    "a video": ([user(VIDEO)], r"message 0 \(user\): a part is of type 'video_url', expected a text or an image"),
    "an image that is a number": ([user(image(SMALL), image(5))], r"message 0 \(user\), image 2: its source is a int"),
    "a reserved string in two parts": (
        [user(text("<|im"), text("age|>"), image(SMALL))],
        r"\(user\): its part 1 and what .* '<\|image\|>'",
    ),
    "a separator in two parts": (
        [user(text("<|pat"), text("ch|>"), image(SMALL))],
        r"part 1 and what .* '<\|patch\|>'",
    ),
}


@pytest.fixture(scope="module")
def expected(llama4: Pair) -> dict[str, Any]:
    return llama4.side.request(GOOD)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_conversation_is_refused_and_the_next_one_works(
    name: str, llama4: Pair, expected: dict[str, Any]
) -> None:
    messages, reason = BAD[name]
    with pytest.raises(InputError, match=reason):
        llama4.side.request(messages)
    assert same(llama4.side.request(GOOD), expected)


@pytest.mark.parametrize("word", RESERVED)
@pytest.mark.parametrize(
    ("messages", "index"),
    [
        (lambda word: [user(text(f"a {word}"), image(SMALL))], 0),
        (lambda word: [user(text(word))], 0),
        (lambda word: [{"role": "user", "content": f"a{word}b"}], 0),
        (lambda word: [system(word), user(image(SMALL))], 0),
        (lambda word: [system([text("a"), text(word)]), user(text("x"))], 0),
        (lambda word: [user(image(SMALL)), assistant(f"it is {word}"), user(text("x"))], 1),
        (lambda word: [user(text("x")), {"role": "tool", "content": word}], 1),
    ],
)
def test_a_reserved_string_is_refused_wherever_it_stands(messages: Any, index: int, word: str, llama4: Pair) -> None:
    chat: list[Message] = messages(word)
    reason = re.escape(f"message {index} ({chat[index]['role']}): its text holds {word!r}")
    with pytest.raises(InputError, match=reason):
        llama4.side.request(chat)


def test_a_refusal_comes_before_an_image_is_loaded(llama4: Pair) -> None:
    with pytest.raises(InputError, match=r"its text holds '<\|patch\|>'"):
        llama4.side.request([user(image_url("/nowhere.png"), text("<|patch|>"))])
