"""Chats through LMDeploy's own ImageEncoder and MultimodalProcessor give the reference's ids and logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from turbomind_llama4 import END, IMAGE, NEXT_COLUMN, NEXT_ROW, PATCH, SINGLE, SMALL, SQUARE, START, TALL, WIDE, Pair
from turbomind_requests import LOGITS_BOUND, Message, assistant, image, noise, same, system, text, user

from turbovit.benchmarks.reference import chat_from_lmdeploy

QUESTION = text("what is it?")
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {"at": "it"}}}]}

CHATS: dict[str, list[Message]] = {
    "image, then text": [user(image(SMALL), QUESTION)],
    "text, then image": [user(QUESTION, image(SQUARE))],
    "image only": [user(image(WIDE))],
    "one tile, two tiles, five": [user(image(SINGLE), image(TALL), image(SQUARE), QUESTION)],
    "tile counts that alternate": [user(image(WIDE), image(SMALL), image(TALL), image(SMALL))],
    "one image twice": [user(image(WIDE), image(WIDE), QUESTION)],
    "text, image, text, image": [user(text("this "), image(WIDE), text(" and that "), image(SMALL))],
    "images in two turns": [user(image(WIDE), QUESTION), assistant("a dog"), user(text("and here?"), image(TALL))],
    "image in the second turn only": [user(QUESTION), assistant([text("a dog")]), user(image(SMALL))],
    "text turn after an image": [user(image(SMALL)), assistant("a dog"), {"role": "user", "content": " and? "}],
    "turn without parts": [user(image(SMALL)), assistant([]), user(QUESTION)],
    "two users in a row": [user(image(SMALL)), user(image(WIDE))],
    "system message": [system(" Be brief.\n"), user(image(TALL), QUESTION)],
    "system message in a list": [system([text(" Be brief.\n")]), user(QUESTION, image(SMALL))],
    "answer to continue": [user(image(SMALL), QUESTION), assistant("it is a")],
    "a call of a tool": [user(image(SMALL), QUESTION), CALL, {"role": "tool", "content": "a dog"}],
    "texts around": [user(text("\n\n a "), text("  "), image(SMALL), text("\n"), image(WIDE), text(" 日本🙂\t"))],
    "strings of the chat template": [user(text("<|eot|><|header_start|>user<|begin_of_text|>"), image(SMALL))],
    "text that looks like an image": [user(text("<image> <|image_pad|> <|imag |patch|"), image(SMALL))],
    "a marker too few": [user(text("what is <IMAGE_TOKEN>?"), image(SMALL), image(WIDE))],
    "an image of one pixel": [user(image(noise(1, 1, 6)), QUESTION)],
    "a grey image": [user(image(noise(50, 40, 7, channels=1)), QUESTION)],
}
TEXTS: dict[str, list[Message]] = {
    "one message": [{"role": "user", "content": "what is it?"}],
    "several parts": [user(text("what "), text(" is it?"))],
    "no parts": [user()],
    "no content": [{"role": "user"}, assistant(None), user(QUESTION)],
    "several turns": [system("Be brief."), user(QUESTION), assistant("a dog"), user(text("a"), text("b"))],
    "an answer to continue": [user(QUESTION), assistant("it is")],
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_gives_the_ids_and_logits_of_the_reference(name: str, llama4: Pair) -> None:
    llama4.assert_proved(CHATS[name])


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_only_request_is_the_references_with_one_bos(name: str, llama4: Pair) -> None:
    request = llama4.assert_proved(TEXTS[name])
    assert request.keys() == {"prompt", "input_ids"}
    bos = llama4.side.tokenizer.bos_token_id
    assert request["input_ids"][0] == bos
    assert request["input_ids"].count(bos) == 1


def test_a_string_is_a_message(llama4: Pair) -> None:
    assert llama4.side.request("a ")["input_ids"] == llama4.side.request([user(text("a "))])["input_ids"]


@pytest.mark.parametrize("answer", [' a "dog"\n', "", [text(' a "dog"\n')], [text("a"), text("b")], []])
def test_a_tools_answer_is_written_as_the_template_writes_a_string(answer: Any, llama4: Pair) -> None:
    """It writes a list as JSON, which stock LMDeploy never gives it."""
    chat = [user(QUESTION), CALL, {"role": "tool", "content": answer}]
    string = answer if isinstance(answer, str) else "\n".join(part["text"] for part in answer)
    expected = llama4.reference.processor.apply_chat_template(
        [chat[0], {**CALL, "content": []}, {"role": "tool", "content": string}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert llama4.side.request(chat)["prompt"] == expected


def test_places_of_the_tiles_of_672x672(llama4: Pair) -> None:
    request = llama4.side.request([user(text("look"), image(SQUARE), QUESTION)])
    ids, ranges = request["input_ids"], request["input_embedding_ranges"]
    begins = (1, 146, 291, 436, 582)
    start = ids.index(llama4.side.tokenizer.model.model.convert_tokens_to_ids(START))
    assert ranges == [[start + begin, start + begin + 144] for begin in begins]
    places = {0: START, 145: NEXT_COLUMN, 290: NEXT_ROW, 435: NEXT_COLUMN, 580: NEXT_ROW, 581: IMAGE, 726: END}
    expected = [places.get(place, PATCH) for place in range(727)]
    assert llama4.side.tokenizer.model.model.convert_ids_to_tokens(ids[start : start + 727]) == expected


def test_an_image_larger_than_the_canvas_has_16_tiles_and_the_global_view(llama4: Pair) -> None:
    request = llama4.assert_proved([user(image(noise(1500, 1400, 8)), image(SMALL))])
    assert len(request["input_embeddings"]) == 18


def test_markers_are_the_places_of_as_many_images(llama4: Pair) -> None:
    by_marker = llama4.side.request([user(text("a <IMAGE_TOKEN> b <IMAGE_TOKEN>"), image(WIDE), image(SMALL))])
    by_part = llama4.side.request([user(text("a "), image(WIDE), text(" b "), image(SMALL))])
    assert same(by_marker, by_part)


def test_all_texts_of_a_system_message_are_kept(llama4: Pair) -> None:
    """The chat template, and so the reference, reads only the first of them."""
    parts = llama4.side.request([system([text("Be brief."), text("Be kind.")]), user(image(SMALL))])
    assert same(parts, llama4.assert_proved([system("Be brief.\nBe kind."), user(image(SMALL))]))


def test_the_same_request_again_is_the_same_and_its_messages_stay_as_they_were(llama4: Pair) -> None:
    chat = CHATS["images in two turns"]
    before = copy.deepcopy(chat)
    first, second = llama4.side.request(chat), llama4.side.request(chat)
    assert chat == before
    assert same(first, second)


@pytest.mark.parametrize("change", ["tiles swapped", "global view first", "one row moved", "no images", "another id"])
def test_what_is_slightly_wrong_does_not_pass_the_check(change: str, llama4: Pair) -> None:
    chat = [user(image(WIDE), QUESTION)]
    request: dict[str, Any] = llama4.side.request(chat)
    left, right, whole = request["input_embeddings"]
    changed: dict[str, dict[str, Any]] = {
        "tiles swapped": {"input_embeddings": [right, left, whole]},
        "global view first": {"input_embeddings": [whole, left, right]},
        "one row moved": {"input_embeddings": [torch.cat([left[:50], left[51:52], left[51:]]), right, whole]},
        "no images": {"input_embeddings": [], "input_embedding_ranges": []},
        "another id": {"input_ids": [*request["input_ids"][:-1], 0]},
    }
    inputs = llama4.reference.inputs_from_messages(chat_from_lmdeploy(chat))
    comparison = llama4.reference.compare({**request, **changed[change]}, inputs)
    assert comparison.ids_equal == (change != "another id")
    assert comparison.logits_error is None or comparison.logits_error > 10 * LOGITS_BOUND
