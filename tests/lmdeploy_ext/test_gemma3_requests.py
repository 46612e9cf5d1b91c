"""Chats through LMDeploy's own ImageEncoder and MultimodalProcessor give the reference's ids and logits."""

from __future__ import annotations

import copy

import pytest
from turbomind_chats import CHATS, TEXTS
from turbomind_requests import (
    assert_equals_reference,
    assert_sound,
    assistant,
    image,
    noise,
    same,
    system,
    text,
    user,
)

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.benchmarks.reference import chat_from_lmdeploy
from turbovit.benchmarks.reference_gemma3 import Gemma3Reference

A, B = noise(300, 200, 0), noise(123, 457, 1)


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_gives_the_ids_and_logits_of_the_reference(
    name: str, side: LMDeploySide, reference: Gemma3Reference
) -> None:
    chat = CHATS[name]
    inputs = reference.inputs_from_messages(chat_from_lmdeploy(chat))
    assert_equals_reference(reference.compare(side.request(chat), inputs))


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_only_request_gives_the_ids_of_the_reference(
    name: str, side: LMDeploySide, reference: Gemma3Reference
) -> None:
    prompt = TEXTS[name]
    request = side.request(prompt)
    chat = [user(text(prompt))] if isinstance(prompt, str) else prompt
    assert_equals_reference(reference.compare(request, reference.inputs_from_messages(chat_from_lmdeploy(chat))))
    assert request.keys() == {"prompt", "input_ids"}
    assert request["input_ids"][:2].count(side.tokenizer.bos_token_id) == 1


def test_all_texts_of_a_system_message_are_kept(side: LMDeploySide, reference: Gemma3Reference) -> None:
    """The chat template, and so the reference, reads only the first of them."""
    request = side.request([system([text("Be brief."), text("Be kind.")]), user(image(A))])
    joined = [system("Be brief.\nBe kind."), user(image(A))]
    assert_equals_reference(reference.compare(request, reference.inputs_from_messages(chat_from_lmdeploy(joined))))


def test_a_request_is_sound_and_its_messages_stay_as_they_were(side: LMDeploySide) -> None:
    messages = [system([text("Be brief.")]), user(image(A), text("what?")), assistant([text("a dog")]), user(image(B))]
    before = copy.deepcopy(messages)
    first = side.request(messages)
    assert_sound(first, side.encoder.model.encoder.manifest.facts["hidden"])
    assert messages == before
    assert same(first, side.request(messages))
