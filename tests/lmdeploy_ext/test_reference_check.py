"""The check of requests against the reference is sharp: what is slightly wrong does not pass it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from turbomind_requests import LOGITS_BOUND, assert_equals_reference, image, noise, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.benchmarks.reference import chat_from_lmdeploy
from turbovit.benchmarks.reference_gemma3 import Gemma3Reference

MESSAGES = [user(image(noise(300, 200, 0)), text("and"), image(noise(200, 300, 1)))]
CLEARLY = 100 * LOGITS_BOUND


@pytest.fixture(scope="module")
def request_(side: LMDeploySide) -> dict[str, Any]:
    return side.request(MESSAGES)


@pytest.fixture(scope="module")
def inputs(reference: Gemma3Reference) -> Mapping[str, torch.Tensor]:
    return reference.inputs_from_messages(chat_from_lmdeploy(MESSAGES))


@pytest.fixture(scope="module")
def logits(reference: Gemma3Reference, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return reference.logits(inputs)


def test_the_unchanged_request_passes(
    request_: dict[str, Any], inputs: Mapping[str, torch.Tensor], reference: Gemma3Reference
) -> None:
    assert_equals_reference(reference.compare(request_, inputs))


def test_another_id_does_not_pass(
    request_: dict[str, Any], inputs: Mapping[str, torch.Tensor], reference: Gemma3Reference
) -> None:
    ids = request_["input_ids"]
    for changed in ([*ids[:-1], ids[-1] - 1], ids[1:], [*ids, ids[-1]]):
        assert not reference.compare({**request_, "input_ids": changed}, inputs).ids_equal


def test_two_images_swapped_do_not_pass(
    request_: dict[str, Any], logits: torch.Tensor, reference: Gemma3Reference
) -> None:
    swapped = request_["input_embeddings"][::-1]
    spliced = reference.spliced_logits({**request_, "input_embeddings": swapped})
    assert (spliced - logits).abs().max() > CLEARLY


@pytest.mark.parametrize("shift", [-1, 1])
def test_ranges_that_are_off_by_one_do_not_pass(
    shift: int, request_: dict[str, Any], logits: torch.Tensor, reference: Gemma3Reference
) -> None:
    first, second = request_["input_embedding_ranges"]
    shifted = [first, [position + shift for position in second]]
    spliced = reference.spliced_logits({**request_, "input_embedding_ranges": shifted})
    assert (spliced - logits).abs().max() > CLEARLY


def test_one_token_of_another_place_does_not_pass(
    request_: dict[str, Any], logits: torch.Tensor, reference: Gemma3Reference
) -> None:
    first, second = request_["input_embeddings"]
    moved = second.clone()
    moved[100] = second[101]
    spliced = reference.spliced_logits({**request_, "input_embeddings": [first, moved]})
    assert (spliced - logits).abs().max() > CLEARLY


def test_placeholders_left_as_they_are_do_not_pass(
    request_: dict[str, Any], logits: torch.Tensor, reference: Gemma3Reference
) -> None:
    text_only = {"input_ids": request_["input_ids"]}
    assert (reference.spliced_logits(text_only) - logits).abs().max() > CLEARLY
