"""Pan and scan through LMDeploy: crops are counted, framed and ordered as the reference does it."""

from __future__ import annotations

import pytest
from turbomind_requests import assert_equals_reference, assert_sound, image, noise, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.benchmarks.reference import chat_from_lmdeploy
from turbovit.benchmarks.reference_gemma3 import Gemma3Reference
from turbovit.engines.errors import InputError
from turbovit.engines.gemma3 import PAN_AND_SCAN_VARIABLE

# Crops besides the whole image, by `Gemma3ImageProcessor.pan_and_scan_batched`.
CROPS = {
    (1920, 1080): 2,
    (900, 300): 3,
    (300, 900): 3,
    (1601, 397): 4,  # at most 4, and the last one is narrower
    (397, 1601): 4,
    (3000, 260): 4,
    (640, 480): 2,
    (400, 300): 0,  # crops would be under 256
    (300, 301): 0,
    (512, 512): 0,
}


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PAN_AND_SCAN_VARIABLE, "1")


@pytest.mark.parametrize("size", CROPS)
def test_an_image_has_one_run_a_crop(
    size: tuple[int, int], quick_side: LMDeploySide, reference: Gemma3Reference
) -> None:
    messages = [user(text("look:\n"), image(noise(*size, seed=0)), text("\nwhat is it?"))]
    request = quick_side.request(messages)
    assert len(request["input_embedding_ranges"]) == 1 + CROPS[size]
    assert_sound(request, hidden=64)
    inputs = reference.inputs_from_messages(chat_from_lmdeploy(messages), do_pan_and_scan=True)
    assert request["input_ids"] == inputs["input_ids"][0].tolist()


def test_images_with_and_without_crops_in_one_request(side: LMDeploySide, reference: Gemma3Reference) -> None:
    pictures = [noise(300, 300, 0), noise(901, 300, 1), noise(300, 700, 2), noise(300, 300, 3)]
    messages = [user(*(part for picture in pictures for part in (image(picture), text("and"))))]
    request = side.request(messages)
    assert len(request["input_embeddings"]) == 1 + 4 + 3 + 1
    inputs = reference.inputs_from_messages(chat_from_lmdeploy(messages), do_pan_and_scan=True)
    assert_equals_reference(reference.compare(request, inputs))


def test_the_switch_holds_for_each_request(quick_side: LMDeploySide, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [user(image(noise(900, 300, 0)))]
    runs = []
    for value in ("1", "0", "on", "OFF"):
        monkeypatch.setenv(PAN_AND_SCAN_VARIABLE, value)
        runs.append(len(quick_side.request(messages)["input_embeddings"]))
    monkeypatch.delenv(PAN_AND_SCAN_VARIABLE)
    runs.append(len(quick_side.request(messages)["input_embeddings"]))
    assert runs == [4, 1, 4, 1, 1]


def test_another_word_for_the_switch_is_refused(quick_side: LMDeploySide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PAN_AND_SCAN_VARIABLE, "perhaps")
    with pytest.raises(InputError, match="TURBOVIT_PAN_AND_SCAN='perhaps', expected one of 1, true, on, 0"):
        quick_side.request([user(image(noise(8, 8, 0)))])


def test_crops_in_another_order_do_not_pass_the_check(side: LMDeploySide, reference: Gemma3Reference) -> None:
    messages = [user(image(noise(900, 300, 0)))]
    request = side.request(messages)
    whole, first, second, third = request["input_embeddings"]
    inputs = reference.inputs_from_messages(chat_from_lmdeploy(messages), do_pan_and_scan=True)
    swapped = {**request, "input_embeddings": [whole, second, first, third]}
    error = reference.compare(swapped, inputs).logits_error
    assert error is not None
    assert error > 0.01
