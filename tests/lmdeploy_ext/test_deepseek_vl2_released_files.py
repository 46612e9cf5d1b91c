"""With the released tokenizer and processor settings, ids are those of the original's algorithm too."""

from __future__ import annotations

from typing import Any

import pytest
from turbomind_deepseek_vl2 import ASSISTANT, BOS, IMAGE, SMALL, SQUARE, TALL, USER, WIDE, Pair
from turbomind_requests import Message, assert_sound, assistant, image, system, text, user

from turbovit.benchmarks.reference import chat_from_lmdeploy

QUESTION = text("what is it?")
CHATS: dict[str, list[Message]] = {
    "one image": [user(image(WIDE), QUESTION)],
    "images between texts": [user(text(" look:\n"), image(SMALL), text("\nand "), image(SQUARE), text(" 日本🙂\t"))],
    "several turns": [system(" Be brief.\n"), user(image(TALL)), assistant("a dog "), user(QUESTION, image(SMALL))],
    "answer to continue": [user(image(SMALL), QUESTION), assistant("it is a")],
    "three images": [user(image(SMALL), image(WIDE)), assistant("//"), user(image(SQUARE))],
    "text only": [system([text("Be brief.")]), user(text("a "), text(" b")), assistant("c"), user(QUESTION)],
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_gives_the_ids_of_the_original(name: str, released_deepseek_vl2: Pair) -> None:
    request = released_deepseek_vl2.side.request(CHATS[name])
    inputs = released_deepseek_vl2.reference.inputs_from_messages(chat_from_lmdeploy(CHATS[name]))
    assert request["input_ids"] == inputs["input_ids"][0].tolist()
    assert request["input_ids"].count(0) == 1
    assert request["input_ids"].count(128815) == sum(map(len, request.get("input_embeddings", [])))
    if name != "text only":
        assert_sound(request, hidden=64)


def test_the_ids_of_the_first_words_are_the_released_ones(released_deepseek_vl2: Pair) -> None:
    request = released_deepseek_vl2.side.request([user(image(SMALL), text("\nwhat?")), assistant("no"), user(QUESTION)])
    ids: list[Any] = request["input_ids"]
    assert ids[:2] == [0, 128821]
    ((begin, end),) = request["input_embedding_ranges"]
    assert ids[begin:end] == [128815] * 421
    assert ids[ids.index(128822) + 3] == ids[ids.index(1)] == 1  # `:`, `no`, end of sentence
    assert ids[-2] == 128822
    assert request["prompt"].startswith(f"{BOS}{USER}: {IMAGE}\nwhat?\n\n{ASSISTANT}:no")


@pytest.mark.parametrize("prompt", [IMAGE, f"\n\n\nlook:\n{IMAGE}\n\n and {IMAGE}\n ", f"naïve 日本{IMAGE}🙂"])
def test_text_and_its_ids_give_the_ids_of_the_original(prompt: str, released_deepseek_vl2: Pair) -> None:
    pictures: list[Any] = [WIDE, SMALL][: prompt.count(IMAGE)]
    expected = released_deepseek_vl2.reference.inputs_from_prompt(prompt, pictures)["input_ids"][0].tolist()
    unexpanded = [0, *released_deepseek_vl2.reference.tokenizer.encode(prompt, add_special_tokens=False)]
    for given in (prompt, f"{BOS}{prompt}", unexpanded, expected):
        request = released_deepseek_vl2.side.request([user(text(given), *map(image, pictures))], do_preprocess=False)
        assert request["input_ids"] == expected
