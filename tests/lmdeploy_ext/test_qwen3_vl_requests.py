"""Chats with images through LMDeploy's own ImageEncoder and MultimodalProcessor, dense and MoE, are the reference's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from turbomind_qwen3_vl import Pair
from turbomind_requests import Message, assistant, image, noise, same, system, text, user

A, B, C = noise(300, 200, 0), noise(123, 457, 1), noise(300, 200, 2)
TINY, WIDE, TALL = noise(26, 28, 3), noise(600, 40, 4), noise(40, 600, 5)
QUESTION = text("what is it?")
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {"at": "it"}}}]}

CHATS: dict[str, list[Message]] = {
    "image, then text": [user(image(A), QUESTION)],
    "text, then image": [user(QUESTION, image(A))],
    "image only": [user(image(A))],
    "two images of equal grids": [user(image(A), image(C), QUESTION)],
    "two images of different grids": [user(image(A), image(B), QUESTION)],
    "one image twice": [user(image(A), image(A), QUESTION)],
    "grids that alternate": [user(image(A), image(B), image(C), image(B), image(A))],
    "six images between texts": [
        user(
            *(
                part
                for number, one in enumerate((A, TINY, WIDE, TALL, C, B))
                for part in (text(f"{number}\n"), image(one))
            )
        )
    ],
    "text, image, text, image": [user(text("this "), image(A), text(" and that "), image(B))],
    "images in two turns": [user(image(A), QUESTION), assistant("a dog"), user(text("and here?"), image(B))],
    "image in the second turn only": [user(QUESTION), assistant([text("a dog")]), user(image(B))],
    "text turn after an image": [user(image(A)), assistant("a dog"), {"role": "user", "content": " and? "}],
    "system message": [system(" Be brief.\n"), user(image(A), QUESTION)],
    "system message in a list": [system([text(" Be brief.\n")]), user(QUESTION, image(A))],
    "system message of two texts": [system([text("Be brief."), text("Be kind.")]), user(image(A))],
    "answer to continue": [user(image(A), QUESTION), assistant("it is a")],
    "answer to continue, in parts": [user(image(A), QUESTION), assistant([text("it is"), text(" a dog")])],
    "answer of a tool": [user(QUESTION), CALL, {"role": "tool", "content": [text("seen:"), image(A)]}],
    "texts around": [user(text("\n\n a "), text("  "), image(A), text("\n"), image(B), text(" 日本🙂\t"))],
    "image 1 high": [user(image(noise(150, 1, 6)), QUESTION)],
    "grey image": [user(image(noise(50, 40, 7, channels=1)), QUESTION)],
}
TEXTS: dict[str, Any] = {
    "one message": [{"role": "user", "content": "what is it?"}],
    "several parts": [user(text("what "), text(" is it?"))],
    "no parts": [user()],
    "no content": [{"role": "user"}, assistant(None), user(QUESTION)],
    "several turns": [system("Be brief."), user(QUESTION), assistant("a dog"), user(text("a"), text("b"))],
    "an answer to continue": [user(QUESTION), assistant("it is")],
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_gives_the_ids_logits_and_positions_of_the_reference(name: str, each_qwen3_vl: Pair) -> None:
    each_qwen3_vl.assert_proved(CHATS[name])


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_only_chat_is_the_references_with_delta_0(name: str, each_qwen3_vl: Pair) -> None:
    request = each_qwen3_vl.assert_proved(TEXTS[name])
    assert request.keys() == {"prompt", "input_ids", "input_meta"}
    assert request["input_meta"]["mrope_position_delta"] == 0


def test_a_string_is_a_message(qwen3_vl: Pair) -> None:
    assert qwen3_vl.side.request("a ")["input_ids"] == qwen3_vl.side.request([user(text("a "))])["input_ids"]


def test_text_after_an_image_request_has_positions_of_its_own(qwen3_vl: Pair) -> None:
    with_image = qwen3_vl.assert_proved(CHATS["image, then text"])
    assert with_image["input_meta"]["mrope_position_delta"] < 0
    request = qwen3_vl.assert_proved([user(QUESTION)])
    assert request["input_meta"]["mrope_position_delta"] == 0
    assert request["input_meta"]["mrope_position_ids"].tolist() == [list(range(len(request["input_ids"])))] * 3


@pytest.mark.parametrize("options", [{"chat_template_kwargs": {"add_vision_id": True}}, {"tools": TOOLS}])
def test_options_of_the_chat_template_reach_it(options: dict[str, Any], qwen3_vl: Pair) -> None:
    chat = [user(image(A), QUESTION), assistant("a dog"), user(image(B))]
    request = qwen3_vl.assert_proved(chat, **options)
    assert len(request["input_ids"]) > len(qwen3_vl.side.request(chat)["input_ids"])


def test_the_same_request_again_is_the_same_and_its_messages_stay_as_they_were(qwen3_vl: Pair) -> None:
    chat = CHATS["six images between texts"]
    before = copy.deepcopy(chat)
    first, second = qwen3_vl.side.request(chat), qwen3_vl.side.request(chat)
    assert chat == before
    assert same(first, second)
    levels = zip(first["input_meta"]["deepstack_embeds"], second["input_meta"]["deepstack_embeds"], strict=True)
    assert all(torch.equal(one, other) for one, other in levels)
