"""With the released tokenizer and chat template, ids are those of the reference too."""

from __future__ import annotations

from typing import Any

import pytest
from turbomind_llama4 import IMAGE, SMALL, SQUARE, TALL, WIDE, Pair
from turbomind_requests import Message, assert_sound, assistant, image, system, text, user

from turbovit.benchmarks.reference import chat_from_lmdeploy

QUESTION = text("what is it?")
CHATS: dict[str, list[Message]] = {
    "one image": [user(image(WIDE), QUESTION)],
    "images between texts": [user(text(" look:\n"), image(SMALL), text("\nand "), image(SQUARE), text(" 日本🙂\t"))],
    "several turns": [system(" Be brief.\n"), user(image(TALL)), assistant("a dog "), user(QUESTION, image(SMALL))],
    "answer to continue": [user(image(SMALL), QUESTION), assistant("it is a")],
    "strings of the chat template": [user(text("<|eot|><|begin_of_text|> <image>"), image(SMALL))],
    "text only": [system([text("Be brief.")]), user(text("a "), text(" b")), assistant("c"), user(QUESTION)],
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_gives_the_ids_of_the_reference(name: str, released_llama4: Pair) -> None:
    request = released_llama4.side.request(CHATS[name])
    inputs = released_llama4.reference.inputs_from_messages(chat_from_lmdeploy(CHATS[name]))
    assert request["input_ids"] == inputs["input_ids"][0].tolist()
    assert request["input_ids"].count(200000) == (2 if name == "strings of the chat template" else 1)  # BOS
    assert len(request.get("input_embeddings", [])) == len(inputs.get("pixel_values", []))
    if name != "text only":
        assert_sound(request, hidden=64)


@pytest.mark.parametrize("prompt", [IMAGE, f"\n\n\nlook:\n{IMAGE}\n\n and {IMAGE}\n ", f"naïve 日本{IMAGE}🙂"])
def test_text_and_its_ids_give_the_ids_of_the_reference(prompt: str, released_llama4: Pair) -> None:
    pictures: list[Any] = [WIDE, SMALL][: prompt.count(IMAGE)]
    expected = released_llama4.reference.inputs_from_prompt(prompt, pictures)["input_ids"][0].tolist()
    tokenizer = released_llama4.reference.processor.tokenizer
    for given in (prompt, f"<|begin_of_text|>{prompt}", tokenizer(prompt)["input_ids"], expected):
        request = released_llama4.side.request([user(text(given), *map(image, pictures))], do_preprocess=False)
        assert request["input_ids"] == expected


def test_the_ids_around_the_tiles_are_the_released_ones(released_llama4: Pair) -> None:
    ids = released_llama4.side.request([user(image(SQUARE), QUESTION)])["input_ids"]
    start = ids.index(200080)
    places = {0: 200080, 145: 200084, 290: 200085, 435: 200084, 580: 200085, 581: 200090, 726: 200081}
    assert ids[start : start + 727] == [places.get(place, 200092) for place in range(727)]
