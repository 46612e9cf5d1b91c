"""Requests without chat template: text or token ids whose placeholders are the images' places."""

from __future__ import annotations

from typing import Any

import pytest
from turbomind_llama4 import END, IMAGE, NEXT_COLUMN, NEXT_ROW, PATCH, SINGLE, SMALL, START, TALL, WIDE, Pair
from turbomind_requests import Message, assert_equals_reference, image, same, text, user

from turbovit.engines.errors import InputError

BOS = "<|begin_of_text|>"
TURN = f"<|header_start|>user<|header_end|>\n\n{IMAGE}what is it?<|eot|><|header_start|>assistant<|header_end|>\n\n"
PROMPTS: dict[str, tuple[str, list[Any]]] = {
    "one tile": (f"{IMAGE} what is it?", [SMALL]),
    "an image, nothing else": (IMAGE, [WIDE]),
    "two images": (f"this {IMAGE} and that {IMAGE}", [WIDE, SMALL]),
    "two images side by side": (f"{IMAGE}{IMAGE}", [SINGLE, TALL]),
    "newlines and letters around": (f"\n\n{IMAGE}\n {IMAGE}\n\n🙂日本\t", [TALL, WIDE]),
    "a turn by hand": (TURN, [WIDE]),
    "a marker that is text": (f"<IMAGE_TOKEN> {IMAGE}", [SMALL]),
}
GOOD = [user(text(IMAGE), image(WIDE))]


def raw(prompt: Any, pictures: list[Any]) -> list[Message]:
    """As LMDeploy's /generate endpoint puts it."""
    return [user(text(prompt), *map(image, pictures))]


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_is_the_references_with_one_bos(name: str, llama4: Pair) -> None:
    prompt, pictures = PROMPTS[name]
    request = llama4.side.request(raw(prompt, pictures), do_preprocess=False)
    assert_equals_reference(llama4.reference.compare(request, llama4.reference.inputs_from_prompt(prompt, pictures)))
    assert same(request, llama4.side.request(raw(f"{BOS}{prompt}", pictures), do_preprocess=False))


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("do_preprocess", [False, True])  # ids say what they are
def test_ids_unexpanded_and_expanded_give_what_their_text_gives(do_preprocess: bool, name: str, llama4: Pair) -> None:
    prompt, pictures = PROMPTS[name]
    request = llama4.side.request(raw(prompt, pictures), do_preprocess=False)
    unexpanded = llama4.reference.processor.tokenizer(prompt)["input_ids"]
    expanded = llama4.reference.inputs_from_prompt(prompt, pictures)["input_ids"][0].tolist()
    assert len(expanded) > len(unexpanded)
    for ids in (unexpanded, expanded):
        assert same(request, llama4.side.request(raw(ids, pictures), do_preprocess=do_preprocess))


def test_ids_that_no_text_gives_are_expanded_where_they_stand(llama4: Pair) -> None:
    tokenizer = llama4.reference.processor.tokenizer
    letters, image_id = tokenizer.convert_tokens_to_ids(list("the")), tokenizer.convert_tokens_to_ids(IMAGE)
    given = [*letters, image_id, *letters]
    assert tokenizer(tokenizer.decode(given), add_special_tokens=False)["input_ids"] != given
    whole = tokenizer(START + IMAGE + PATCH * 144 + END, add_special_tokens=False)["input_ids"]
    request = llama4.side.request(raw(given, [SMALL]), do_preprocess=False)
    assert request["input_ids"] == [*letters, *whole, *letters]


def test_ids_without_images_stay_as_they_are(llama4: Pair) -> None:
    bos = llama4.side.tokenizer.bos_token_id
    for ids in ([bos, 100, 101], [100, 101], [bos, bos, 100]):
        assert llama4.side.request([user(text(ids))], do_preprocess=False)["input_ids"] == ids


@pytest.mark.parametrize("prompt", ["what is it?", f"{BOS}what is it?"])
def test_a_text_only_prompt_has_one_bos(prompt: str, llama4: Pair) -> None:
    expected = llama4.reference.inputs_from_prompt("what is it?", [])["input_ids"][0].tolist()
    for messages in (prompt, [user(text(prompt))]):
        assert llama4.side.request(messages, do_preprocess=False) == {"prompt": prompt, "input_ids": expected}


BAD: dict[str, tuple[str, list[Any], str]] = {
    "a placeholder too few": (IMAGE, [SMALL, WIDE], r"1 x '<\|image\|>' for 2 images"),
    "a placeholder too many": (IMAGE * 2, [SMALL], r"2 x '<\|image\|>' for 1 images"),
    "a placeholder without image": (IMAGE, [], r"1 x '<\|image\|>' for 0 images"),
    **{
        f"{word} beside it": (f"{IMAGE}{word}", [SMALL], "write one '<|image|>' for each image".replace("|", r"\|"))
        for word in (START, END, PATCH, NEXT_COLUMN, NEXT_ROW)
    },
    "an image expanded by hand": (START + IMAGE + PATCH * 144 + END, [SMALL], r"holds '<\|image_start\|>'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_prompt_is_refused_and_the_next_one_works(name: str, llama4: Pair) -> None:
    prompt, pictures, reason = BAD[name]
    expected = llama4.side.request(GOOD, do_preprocess=False)
    with pytest.raises(InputError, match=reason):
        llama4.side.request(raw(prompt, pictures), do_preprocess=False)
    assert same(llama4.side.request(GOOD, do_preprocess=False), expected)


def expanded_ids(llama4: Pair, *pictures: Any) -> list[int]:
    return llama4.reference.inputs_from_prompt(IMAGE * len(pictures), list(pictures))["input_ids"][0].tolist()


@pytest.mark.parametrize(
    ("given", "pictures", "reason"),
    [
        ((WIDE,), (TALL, SMALL), r"runs of \[144, 144, 144\] image tokens, its images have \[144, 144, 144, 144\]"),
        ((WIDE,), (SMALL,), r"runs of \[144, 144, 144\] image tokens, its images have \[144\]"),
        ((SMALL, SMALL), (WIDE,), r"runs of \[144, 144\] image tokens, its images have \[144, 144, 144\]"),
    ],
)
def test_expanded_ids_of_other_images_are_refused(
    given: tuple[Any, ...], pictures: tuple[Any, ...], reason: str, llama4: Pair
) -> None:
    with pytest.raises(InputError, match=reason):
        llama4.side.request(raw(expanded_ids(llama4, *given), list(pictures)), do_preprocess=False)


def test_tile_counts_that_agree_in_another_layout_are_refused(llama4: Pair) -> None:
    """Two tiles in a column stand for two in a row: as many features, but not this image."""
    with pytest.raises(InputError, match="image 2 are not those of an image of 1 rows and 2 columns of tiles"):
        llama4.side.request(raw(expanded_ids(llama4, SMALL, TALL), [SMALL, WIDE]), do_preprocess=False)


def test_ids_of_a_run_one_token_short_are_refused(llama4: Pair) -> None:
    ids = expanded_ids(llama4, SMALL)
    ids.remove(llama4.reference.processor.tokenizer.convert_tokens_to_ids(PATCH))
    with pytest.raises(InputError, match=r"runs of \[143\] image tokens, its images have \[144\]"):
        llama4.side.request(raw(ids, [SMALL]), do_preprocess=False)


@pytest.mark.parametrize(("ids", "reason"), [([5, 6], "0 x"), ([-1], "hold -1"), ([10**9], "hold 1000000000")])
def test_ids_without_the_images_place_or_outside_the_vocabulary_are_refused(
    ids: list[int], reason: str, llama4: Pair
) -> None:
    with pytest.raises(InputError, match=reason):
        llama4.side.request(raw(ids, [SMALL]), do_preprocess=False)
