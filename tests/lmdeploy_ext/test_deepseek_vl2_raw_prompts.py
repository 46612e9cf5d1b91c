"""Requests without chat template: text or token ids whose placeholders are the images' places."""

from __future__ import annotations

from typing import Any

import pytest
from turbomind_deepseek_vl2 import ASSISTANT, BOS, IMAGE, SMALL, SQUARE, TALL, USER, WIDE, Pair
from turbomind_requests import Message, assert_equals_reference, image, same, text, user

from turbovit.engines.errors import InputError

PROMPTS: dict[str, tuple[str, list[Any]]] = {
    "one image": (f"{IMAGE} what is it?", [SMALL]),
    "an image, nothing else": (IMAGE, [WIDE]),
    "two images": (f"this {IMAGE} and that {IMAGE}", [WIDE, SMALL]),
    "two images side by side": (f"{IMAGE}{IMAGE}", [SQUARE, TALL]),
    "three images, none cut": (f"{IMAGE}a{IMAGE}{IMAGE}", [WIDE, TALL, SQUARE]),
    "newlines and letters around": (f"\n\n{IMAGE}\n {IMAGE}\n\n🙂日本\t", [TALL, WIDE]),
    "a turn by hand": (f"{USER}: {IMAGE}\nwhat is it?\n\n{ASSISTANT}:", [WIDE]),
    "a marker that is text": (f"<IMAGE_TOKEN> {IMAGE}", [SMALL]),
}
GOOD = [user(text(IMAGE), image(WIDE))]


def raw(prompt: Any, pictures: list[Any]) -> list[Message]:
    """As LMDeploy's /generate endpoint puts it."""
    return [user(text(prompt), *map(image, pictures))]


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_is_the_references_with_one_bos(name: str, deepseek_vl2: Pair) -> None:
    prompt, pictures = PROMPTS[name]
    request = deepseek_vl2.side.request(raw(prompt, pictures), do_preprocess=False)
    inputs = deepseek_vl2.reference.inputs_from_prompt(prompt, pictures)
    assert_equals_reference(deepseek_vl2.reference.compare(request, inputs))
    assert len(request["input_embedding_ranges"]) == len(pictures)
    assert same(request, deepseek_vl2.side.request(raw(f"{BOS}{prompt}", pictures), do_preprocess=False))


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("do_preprocess", [False, True])  # ids say what they are
def test_ids_unexpanded_and_expanded_give_what_their_text_gives(
    do_preprocess: bool, name: str, deepseek_vl2: Pair
) -> None:
    prompt, pictures = PROMPTS[name]
    request = deepseek_vl2.side.request(raw(prompt, pictures), do_preprocess=False)
    unexpanded = [0, *deepseek_vl2.reference.tokenizer.encode(prompt, add_special_tokens=False)]
    expanded = deepseek_vl2.reference.inputs_from_prompt(prompt, pictures)["input_ids"][0].tolist()
    assert len(expanded) > len(unexpanded)
    for ids in (unexpanded, expanded):
        assert same(request, deepseek_vl2.side.request(raw(ids, pictures), do_preprocess=do_preprocess))


def test_the_prompt_of_a_chat_sent_raw_is_the_same_request(deepseek_vl2: Pair) -> None:
    chat = [user(text("this "), image(WIDE), text(" and\n"), image(SMALL), text(" compare "))]
    request = deepseek_vl2.side.request(chat)
    again = deepseek_vl2.side.request(raw(request["prompt"], [WIDE, SMALL]), do_preprocess=False)
    assert same(again, request)
    assert again["prompt"] == request["prompt"]


def test_with_preprocessing_the_same_text_is_a_message(deepseek_vl2: Pair) -> None:
    """In a folder that LMDeploy has no chat template for, both arrive with an empty one."""
    as_message, as_prompt = (deepseek_vl2.side.request("what is it?", do_preprocess=given) for given in (True, False))
    assert as_message["prompt"] == f"{BOS}{USER}: what is it?\n\n{ASSISTANT}:"
    assert as_prompt["prompt"] == "what is it?"
    assert len(as_message["input_ids"]) > len(as_prompt["input_ids"])
    with pytest.raises(InputError, match="its text holds '<image>'"):
        deepseek_vl2.side.request(raw(IMAGE, [SMALL]))
    assert deepseek_vl2.side.request(raw(IMAGE, [SMALL]), do_preprocess=False)["input_embedding_ranges"] == [[1, 422]]


def test_ids_without_images_stay_as_they_are(deepseek_vl2: Pair) -> None:
    for ids in ([0, 100, 101], [100, 101], [0, 0, 100]):
        assert deepseek_vl2.side.request([user(text(ids))], do_preprocess=False)["input_ids"] == ids


@pytest.mark.parametrize("prompt", ["what is it?", f"{BOS}what is it?", ""])
def test_a_text_only_prompt_has_one_bos(prompt: str, deepseek_vl2: Pair) -> None:
    bare = prompt.removeprefix(BOS)
    expected = deepseek_vl2.reference.inputs_from_prompt(bare, [])["input_ids"][0].tolist()
    for messages in (prompt, [user(text(prompt))]):
        assert deepseek_vl2.side.request(messages, do_preprocess=False) == {"prompt": prompt, "input_ids": expected}


BAD: dict[str, tuple[Any, list[Any], str]] = {
    "a placeholder too few": (IMAGE, [SMALL, WIDE], r"1 x \d+ \(<image>\) for 2 images"),
    "a placeholder too many": (IMAGE * 2, [SMALL], r"2 x \d+ \(<image>\) for 1 images"),
    "a placeholder without image": (IMAGE, [], r"1 x \d+ \(<image>\) for 0 images"),
    "no placeholder": ("what is it?", [SMALL], r"0 x \d+ \(<image>\) for 1 images"),
    "ids without the image's place": ([5, 6], [SMALL], r"0 x \d+ \(<image>\)"),
    "a negative id": ([-1], [SMALL], "hold -1"),
    "an id outside the vocabulary": ([10**9], [SMALL], "hold 1000000000"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_prompt_is_refused_and_the_next_one_works(name: str, deepseek_vl2: Pair) -> None:
    prompt, pictures, reason = BAD[name]
    expected = deepseek_vl2.side.request(GOOD, do_preprocess=False)
    with pytest.raises(InputError, match=reason):
        deepseek_vl2.side.request(raw(prompt, pictures), do_preprocess=False)
    assert same(deepseek_vl2.side.request(GOOD, do_preprocess=False), expected)


def expanded_ids(deepseek_vl2: Pair, prompt: str, *pictures: Any) -> list[int]:
    return deepseek_vl2.reference.inputs_from_prompt(prompt, list(pictures))["input_ids"][0].tolist()


def test_expanded_ids_of_other_images_are_refused(deepseek_vl2: Pair) -> None:
    wide = expanded_ids(deepseek_vl2, f"{IMAGE} a", WIDE)
    with pytest.raises(InputError, match=r"617 x \d+ \(<image>\) for 1 images"):
        deepseek_vl2.side.request(raw(wide, [SMALL]), do_preprocess=False)
    both = expanded_ids(deepseek_vl2, f"{IMAGE}a{IMAGE}", WIDE, TALL)  # as many tokens in all, but apart
    with pytest.raises(InputError, match=r"runs of \[617, 631\] image tokens, its images have \[631, 617\]"):
        deepseek_vl2.side.request(raw(both, [TALL, WIDE]), do_preprocess=False)
