"""What a request without chat template may hold: the rest is refused, and the next request works."""

from __future__ import annotations

from typing import Any

import pytest
from turbomind_requests import image, noise, same, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.engines.errors import InputError

A, B = noise(20, 10, 0), noise(10, 20, 1)
GOOD = [user(text("<start_of_image>"), image(A))]

RAW: dict[str, tuple[Any, str]] = {
    "no text": ([user(image(A))], "a raw prompt is text or one list of token ids, got no text"),
    "a placeholder too few": (
        [user(text("<start_of_image>"), image(A), image(B))],
        "1 x '<start_of_image>' for 2 images",
    ),
    "a placeholder too many": ([user(text("<start_of_image>" * 2), image(A))], "2 x '<start_of_image>' for 1 images"),
    "a placeholder without image": ("<start_of_image>", "1 x '<start_of_image>' for 0 images"),
    "a soft token": ([user(text("<start_of_image><image_soft_token>"), image(A))], "holds '<image_soft_token>'"),
    "an end of image": ("<end_of_image>", "holds '<end_of_image>'"),
    "ids beside text": ([user(text([5]), text("x"), image(A))], "one list of token ids, got TokenIds, Text"),
    "two lists of ids": ([user(text([5])), user(text([6]), image(A))], "one list of token ids, got TokenIds, TokenIds"),
    "ids without placeholder": ([user(text([5, 6]), image(A))], "0 x '<start_of_image>' for 1 images"),
    "no ids": ([user(text([]), image(A))], "0 x '<start_of_image>' for 1 images"),
    "a negative id": ([user(text([-1]), image(A))], "the token ids hold -1"),
    "an id outside the vocabulary": ([user(text([10**9]), image(A))], "the token ids hold 1000000000"),
    "ids that are no integers": ([user(text([1.5]), image(A))], "a text part holds list"),
}


@pytest.fixture(scope="module")
def expected(quick_side: LMDeploySide) -> dict[str, Any]:
    return quick_side.request(GOOD, do_preprocess=False)


@pytest.mark.parametrize("name", RAW)
def test_a_bad_raw_prompt_is_refused_and_the_next_one_works(
    name: str, quick_side: LMDeploySide, expected: dict[str, Any]
) -> None:
    prompt, reason = RAW[name]
    with pytest.raises(InputError, match=reason):
        quick_side.request(prompt, do_preprocess=False)
    assert same(quick_side.request(GOOD, do_preprocess=False), expected)


def test_ids_that_are_not_the_images_are_refused(quick_side: LMDeploySide) -> None:
    tokenizer = quick_side.tokenizer.model.model
    boi, soft = tokenizer.boi_token_id, tokenizer.image_token_id
    for ids, reason in (
        ([soft] * 255, r"runs of \[255\] image tokens, its images have \[256\]"),
        ([boi, *[soft] * 256, 5, boi], r"runs of \[256\] image tokens, its images have \[256, 256\]"),
        ([soft] * 512, r"runs of \[512\] image tokens, its images have \[256, 256\]"),
    ):
        pictures = [image(A)] if len(ids) == 255 else [image(A), image(B)]
        with pytest.raises(InputError, match=reason):
            quick_side.request([user(text(ids), *pictures)], do_preprocess=False)


def test_a_count_that_no_text_gives_is_refused_too(quick_side: LMDeploySide) -> None:
    tokenizer = quick_side.tokenizer.model.model
    ids = [*tokenizer.convert_tokens_to_ids(list("the")), tokenizer.boi_token_id, tokenizer.boi_token_id]
    with pytest.raises(InputError, match=rf"the token ids have 2 x {tokenizer.boi_token_id} .* for 1 images"):
        quick_side.request([user(text(ids), image(A))], do_preprocess=False)
