"""With the released tokenizer and chat template, ids are those of the reference too."""

from __future__ import annotations

from typing import Any

import pytest
from turbomind_chats import CHATS, TEXTS
from turbomind_requests import assert_sound, image, noise, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.benchmarks.reference import chat_from_lmdeploy
from turbovit.benchmarks.reference_gemma3 import Gemma3Reference
from turbovit.engines.gemma3 import PAN_AND_SCAN_VARIABLE

BOI = "<start_of_image>"


def expected_ids(reference: Gemma3Reference, chat: list[dict[str, Any]], **options: Any) -> list[int]:
    return reference.inputs_from_messages(chat_from_lmdeploy(chat), **options)["input_ids"][0].tolist()


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_gives_the_ids_of_the_reference(
    name: str, released_side: LMDeploySide, released_reference: Gemma3Reference
) -> None:
    request = released_side.request(CHATS[name])
    assert request["input_ids"] == expected_ids(released_reference, CHATS[name])
    assert_sound(request, hidden=64)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_only_request_gives_the_ids_of_the_reference(
    name: str, released_side: LMDeploySide, released_reference: Gemma3Reference
) -> None:
    prompt = TEXTS[name]
    chat = [user(text(prompt))] if isinstance(prompt, str) else prompt
    assert released_side.request(prompt)["input_ids"] == expected_ids(released_reference, chat)


def test_crops_give_the_ids_of_the_reference(
    released_side: LMDeploySide, released_reference: Gemma3Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PAN_AND_SCAN_VARIABLE, "1")
    chat = [user(text("look:\n"), image(noise(900, 300, 0)), image(noise(300, 300, 1)), image(noise(300, 700, 2)))]
    request = released_side.request(chat)
    assert request["input_ids"] == expected_ids(released_reference, chat, do_pan_and_scan=True)
    assert len(request["input_embeddings"]) == 4 + 1 + 3


@pytest.mark.parametrize("prompt", [BOI, f"\n\n\nlook:\n{BOI}\n\n and {BOI}\n ", f"naïve 日本{BOI}🙂"])
def test_text_and_its_ids_give_the_ids_of_the_reference(
    prompt: str, released_side: LMDeploySide, released_reference: Gemma3Reference
) -> None:
    pictures = [noise(20, 30, seed) for seed in range(prompt.count(BOI))]
    expected = released_reference.inputs_from_prompt(prompt, pictures)["input_ids"][0].tolist()
    for given in (prompt, f"<bos>{prompt}", released_reference.processor.tokenizer(prompt)["input_ids"], expected):
        request = released_side.request([user(text(given), *map(image, pictures))], do_preprocess=False)
        assert request["input_ids"] == expected


def test_the_ids_are_those_of_the_model_card(released_side: LMDeploySide) -> None:
    request = released_side.request([user(image(noise(9, 9, 0)), text("what is it?"))])
    begin, end = request["input_embedding_ranges"][0]
    assert request["input_ids"][0] == 2
    assert request["input_ids"][begin - 1 : end + 1] == [255999, *[262144] * 256, 256000]
