"""Requests without chat template: text or token ids whose placeholders are the images' places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from turbomind_requests import Message, assert_equals_reference, image, noise, same, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.benchmarks.reference_gemma3 import Gemma3Reference
from turbovit.engines.gemma3 import PAN_AND_SCAN_VARIABLE

A, B = noise(900, 300, 0), noise(123, 457, 1)
BOI = "<start_of_image>"

PROMPTS: dict[str, tuple[str, list[Any]]] = {
    "one image": (f"{BOI} what is it?", [A]),
    "one image, nothing else": (BOI, [A]),
    "two images": (f"this {BOI} and that {BOI}", [A, B]),
    "two images side by side": (f"{BOI}{BOI}", [A, B]),
    "newlines that merge with the framing": (f"\n\n\nlook:\n{BOI}\n\n{BOI}\n ", [A, B]),
    "a turn by hand": (f"<start_of_turn>user\n{BOI}what is it?<end_of_turn>\n<start_of_turn>model\n", [A]),
    "a marker that is text": (f"<IMAGE_TOKEN> {BOI}", [A]),
}


def raw(prompt: Any, pictures: list[Any]) -> list[Message]:
    """As LMDeploy's /generate endpoint puts it."""
    return [user(text(prompt), *map(image, pictures))]


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_is_the_references_with_one_bos(name: str, side: LMDeploySide, reference: Gemma3Reference) -> None:
    prompt, pictures = PROMPTS[name]
    request = side.request(raw(prompt, pictures), do_preprocess=False)
    assert_equals_reference(reference.compare(request, reference.inputs_from_prompt(prompt, pictures)))
    assert same(request, side.request(raw(f"<bos>{prompt}", pictures), do_preprocess=False))


@pytest.mark.parametrize("prompt", ["what is it?", "<bos>what is it?"])
def test_a_text_only_prompt_has_one_bos(prompt: str, side: LMDeploySide, reference: Gemma3Reference) -> None:
    expected = reference.inputs_from_prompt("what is it?", [])["input_ids"][0].tolist()
    for messages in (prompt, [user(text(prompt))], [{"role": "user", "content": prompt}]):
        request = side.request(messages, do_preprocess=False)
        assert request == {"prompt": prompt, "input_ids": expected}


def test_texts_of_several_parts_and_messages_are_one_prompt(side: LMDeploySide) -> None:
    joined = side.request(raw(f"a {BOI} b", [A]), do_preprocess=False)
    parts = [user(text("a "), image(A)), {"role": "assistant", "content": f"{BOI} "}, user(text("b"))]
    assert same(joined, side.request(parts, do_preprocess=False))


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("do_preprocess", [False, True])  # ids say what they are
def test_ids_with_one_boi_an_image_give_what_their_text_gives(
    do_preprocess: bool, name: str, side: LMDeploySide, reference: Gemma3Reference
) -> None:
    prompt, pictures = PROMPTS[name]
    ids = reference.processor.tokenizer(prompt)["input_ids"]
    request = side.request(raw(prompt, pictures), do_preprocess=False)
    assert same(request, side.request(raw(ids, pictures), do_preprocess=do_preprocess))


@pytest.mark.parametrize("crops", ["0", "1"])
def test_ids_that_are_expanded_already_stay_as_they_are(
    crops: str, side: LMDeploySide, reference: Gemma3Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PAN_AND_SCAN_VARIABLE, crops)
    inputs = reference.inputs_from_prompt(f"this {BOI}\nand {BOI}", [A, B], do_pan_and_scan=crops == "1")
    request = side.request(raw(inputs["input_ids"][0].tolist(), [A, B]), do_preprocess=False)
    assert len(request["input_embeddings"]) == (5 if crops == "1" else 2)
    assert_equals_reference(reference.compare(request, inputs))


def test_ids_without_images_stay_as_they_are(side: LMDeploySide) -> None:
    for ids in ([2, 100, 101], [100, 101], [2, 2, 100]):
        assert side.request([user(text(ids))], do_preprocess=False)["input_ids"] == ids


def test_ids_that_no_text_gives_are_expanded_where_they_stand(side: LMDeploySide, reference: Gemma3Reference) -> None:
    tokenizer = reference.processor.tokenizer
    letters = tokenizer.convert_tokens_to_ids(list("the"))
    newline, soft = tokenizer.convert_tokens_to_ids("\n"), tokenizer.image_token_id
    given = [tokenizer.bos_token_id, *letters, newline, tokenizer.boi_token_id, newline, *letters]
    assert tokenizer(tokenizer.decode(given), add_special_tokens=False)["input_ids"] != given

    framing = tokenizer.convert_tokens_to_ids("\n\n")
    whole = [framing, tokenizer.boi_token_id, *[soft] * 256, tokenizer.eoi_token_id, framing]
    expected = torch.tensor([[*given[:5], *whole, *given[6:]]])
    request = side.request(raw(given, [B]), do_preprocess=False)
    pixels = reference.inputs_from_prompt(BOI, [B])["pixel_values"]
    inputs = {"input_ids": expected, "token_type_ids": (expected == soft).long(), "pixel_values": pixels}
    assert_equals_reference(reference.compare(request, inputs))
