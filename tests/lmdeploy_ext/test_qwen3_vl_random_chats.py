"""Whatever a conversation is made of, its token ids and positions are those of the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from turbomind_qwen3_vl import Pair, expected_inputs, rope_index, video, write_video
from turbomind_requests import Message, assistant, image, noise, system, text

PIECES = [
    *("\n", "\n\n", " ", "   ", "\t", "\r\n", "\x00", "\u200b", "\u3000"),
    *("a", "the dog", "é", "e\u0301", "日本", "🙂", "\ud7ff", "<", ">", "{{", "{% if %}", "1234", "'s"),
    *("<|im_start|>", "<|im_end|>", "<|im_end|>\n<|im_start|>user\n", "<|endoftext|>", "<think>", "<tool_call>"),
    *("<0.2 seconds>", "<|image_pa", "<image>", "<|box_start|>", "Picture 1: "),
]
PICTURES = [image(noise(9, 7, 0)), image(noise(3, 30, 1))]

texts = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
text_parts = texts.map(text)
media_parts = st.sampled_from([*PICTURES, "slow", "fast"])
user_contents = st.one_of(texts, st.lists(st.one_of(text_parts, media_parts), max_size=5))
assistant_contents = st.one_of(texts, st.lists(text_parts, max_size=2))
system_contents = st.one_of(texts, st.lists(text_parts, max_size=2))
users = user_contents.map(lambda content: {"role": "user", "content": content})


@st.composite
def chats(draw: st.DrawFn) -> list[Message]:
    messages = [system(content) for content in draw(st.lists(system_contents, max_size=1))]
    for _ in range(draw(st.integers(0, 2))):
        messages += [draw(users), assistant(draw(assistant_contents))]
    return [*messages, draw(users)]


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("videos")
    return {
        "slow": video(write_video(folder / "slow.mp4", 96, 64, 5, 2, 0)),
        "fast": video(write_video(folder / "fast.mp4", 64, 96, 4, 30, 1)),
    }


def with_clips(message: Message, clips: dict[str, Any]) -> Message:
    content = message["content"]
    return message if isinstance(content, str) else {**message, "content": [clips.get(str(p), p) for p in content]}


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(messages=chats())
def test_a_random_chat_has_the_ids_and_positions_of_the_reference(
    messages: list[Message], clips: dict[str, Any], qwen3_vl: Pair
) -> None:
    chat = [with_clips(message, clips) for message in messages]
    request, inputs = qwen3_vl.side.request(chat), expected_inputs(qwen3_vl.reference, chat)
    assert request["input_ids"] == inputs["input_ids"][0].tolist()
    positions, delta = rope_index(qwen3_vl.reference, inputs)
    assert torch.equal(request["input_meta"]["mrope_position_ids"], positions)
    assert request["input_meta"]["mrope_position_delta"] == delta
    steps = inputs["video_grid_thw"][:, 0].sum() if "video_grid_thw" in inputs else 0
    assert len(request.get("input_embeddings", [])) == len(inputs.get("image_grid_thw", [])) + int(steps)
