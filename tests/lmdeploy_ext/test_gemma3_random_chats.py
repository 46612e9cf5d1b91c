"""Whatever a conversation is made of, its token ids are those of the reference."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from turbomind_requests import Message, assistant, image, noise, system, text

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.benchmarks.reference import chat_from_lmdeploy
from turbovit.benchmarks.reference_gemma3 import Gemma3Reference

MARKER = "<IMAGE_TOKEN>"
PIECES = [
    *("\n", "\n\n", "\n\n\n", " ", "   ", "\t", "\r\n", "\x00", "\u200b", "\u3000", "▁"),
    *("a", "the dog", "é", "e\u0301", "日本", "🙂", "\ud7ff", "<", ">", "<<", "{{", "{% if %}", "\\n"),
    *("<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>", "<start_of_turn>model\n", "<0x0A>", "<unused0>"),
    *(MARKER, MARKER, "<IMAGE_TOKEN", "<image>", "<start_of_imag", "<|image_pad|>", "[multimodal]"),
]
PICTURES = [noise(9, 7, 0), noise(3, 30, 1)]

texts = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
text_parts = texts.map(text)
image_parts = st.sampled_from(PICTURES).map(image)
user_contents = st.one_of(texts, st.lists(st.one_of(text_parts, image_parts), max_size=5))
assistant_contents = st.one_of(texts, st.lists(text_parts, max_size=2))
system_contents = st.one_of(texts, texts.map(lambda value: [text(value)]))


users = user_contents.map(lambda content: {"role": "user", "content": content})
# Not blank: the reference strips a newline of the template's own where an answer to continue is.
continued = texts.map(lambda value: assistant(f"it is {value}"))


@st.composite
def chats(draw: st.DrawFn) -> list[Message]:
    messages = [system(content) for content in draw(st.lists(system_contents, max_size=1))]
    for _ in range(draw(st.integers(0, 2))):
        messages += [draw(users), assistant(draw(assistant_contents))]
    return [*messages, draw(users), *draw(st.lists(continued, max_size=1))]


def with_images_at_markers(message: Message) -> Message:
    """The parts that a message means in which there are as many markers as images."""
    content = message["content"]
    if isinstance(content, str):
        return message
    pictures = [part for part in content if part["type"] != "text"]
    if sum(part["text"].count(MARKER) for part in content if part["type"] == "text") != len(pictures):
        return message
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] == "text":
            first, *others = part["text"].split(MARKER)
            parts += [text(first), *(piece for other in others for piece in (pictures.pop(0), text(other)))]
    return {**message, "content": parts}


@pytest.fixture(scope="module", params=["sample", "released"])
def pair(request: pytest.FixtureRequest) -> tuple[LMDeploySide, Gemma3Reference]:
    """Both sides over one tokenizer."""
    names = {"sample": ("quick_side", "reference"), "released": ("released_side", "released_reference")}
    side, reference = map(request.getfixturevalue, names[request.param])
    return side, reference


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(messages=chats())
def test_ids_of_a_random_chat_are_the_references(
    messages: list[Message], pair: tuple[LMDeploySide, Gemma3Reference]
) -> None:
    side, reference = pair
    request = side.request(messages)
    meant = [with_images_at_markers(message) for message in messages]
    inputs = reference.inputs_from_messages(chat_from_lmdeploy(meant))
    assert request["input_ids"] == inputs["input_ids"][0].tolist()
    assert len(request.get("input_embeddings", [])) == len(inputs.get("pixel_values", []))
