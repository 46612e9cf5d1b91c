"""With the released tokenizer, processors and chat template, ids are those of the reference too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from turbomind_qwen3_vl import Pair, expected_inputs, loaded, video, write_video
from turbomind_requests import Message, assert_sound, assistant, image, noise, system, text, user

A, B = noise(300, 200, 0), noise(123, 457, 1)
QUESTION = text("what is it?")
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {"at": "it"}}}]}
I, V = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"  # noqa: E741


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("videos") / "a.mp4", 96, 64, 5, 2, 0)


def chats(clip: Path) -> dict[str, list[Message]]:
    return {
        "one image": [user(image(A), QUESTION)],
        "image only": [user(image(A))],
        "several images": [user(text("this "), image(A), text("\n"), image(B), text(" 日本🙂\t"), image(A))],
        "a video": [user(video(clip), QUESTION)],
        "image, video, image": [user(image(A), video(clip), text("and"), image(B))],
        "two turns": [system("Be brief."), user(image(A)), assistant("a dog"), user(video(clip), QUESTION)],
        "system message of two texts": [system([text("Be brief."), text("Be kind.")]), user(image(A))],
        "answer to continue": [user(image(A), QUESTION), assistant("it is a")],
        "answer of a tool": [user(QUESTION), CALL, {"role": "tool", "content": [text("seen:"), image(A)]}],
        "text only": [user(text("what "), text(" is it?"))],
        "text in turns": [system([text("Be brief.")]), user(QUESTION), assistant(" a dog\n"), user(text("\n\nand?"))],
    }


@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"chat_template_kwargs": {"add_vision_id": True}}], ids=str)
@pytest.mark.parametrize("name", chats(Path()))
def test_a_chat_gives_the_ids_of_the_reference(
    name: str, options: dict[str, Any], clip: Path, released_qwen3_vl: Pair
) -> None:
    chat = chats(clip)[name]
    request = released_qwen3_vl.side.request(chat, **options)
    inputs = expected_inputs(released_qwen3_vl.reference, chat, **options)
    assert request["input_ids"] == inputs["input_ids"][0].tolist()
    if not name.startswith("text"):
        assert_sound(request, hidden=64)


@pytest.mark.parametrize("prompt", [I, f"\n\n\nlook:\n{I}\n\n and {V}\n ", f"naïve 日本{V}🙂{I}", V])
def test_text_and_its_ids_give_the_ids_of_the_reference(prompt: str, clip: Path, released_qwen3_vl: Pair) -> None:
    side, reference = released_qwen3_vl.side, released_qwen3_vl.reference
    pictures, videos = [B] * prompt.count(I), [loaded(str(clip), {})] * prompt.count(V)
    media = [*map(image, pictures), *(video(clip) for _ in videos)]
    expected = reference.inputs_from_prompt(prompt, pictures, videos)["input_ids"][0].tolist()
    for given in (prompt, reference.processor.tokenizer(prompt)["input_ids"], expected):
        assert side.request([user(text(given), *media)], do_preprocess=False)["input_ids"] == expected


def test_the_ids_are_those_of_the_model_card(released_qwen3_vl: Pair) -> None:
    request = released_qwen3_vl.side.request([user(image(noise(26, 28, 0)), QUESTION)])
    begin, end = request["input_embedding_ranges"][0]
    assert end - begin == 72
    assert request["input_ids"][:2] == [151644, 872]  # <|im_start|>user, and no BOS before it
    assert request["input_ids"][begin - 1 : end + 1] == [151652, *[151655] * 72, 151653]
