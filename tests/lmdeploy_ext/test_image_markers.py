"""LMDeploy's <IMAGE_TOKEN> says where images stand, in messages that have as many markers as images."""

from __future__ import annotations

from typing import Any

import pytest
from turbomind_requests import assistant, image, noise, same, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide

A, B = noise(20, 10, 0), noise(10, 20, 1)
MARKER = "<IMAGE_TOKEN>"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ([text(f"a {MARKER} b"), image(A)], [text("a "), image(A), text(" b")]),
        ([image(A), text(f"{MARKER}b")], [image(A), text("b")]),
        ([image(A), image(B), text(f"x{MARKER}y{MARKER}z")], [text("x"), image(A), text("y"), image(B), text("z")]),
        ([text(f"x{MARKER}"), image(A), text(f"{MARKER}y"), image(B)], [text("x"), image(A), image(B), text("y")]),
        ([text(f"{MARKER}{MARKER}"), image(B), image(A)], [image(B), image(A)]),
    ],
)
def test_as_many_markers_as_images_are_their_places(
    given: list[dict[str, Any]], meant: list[dict[str, Any]], quick_side: LMDeploySide
) -> None:
    assert same(quick_side.request([user(*given)]), quick_side.request([user(*meant)]))


@pytest.mark.parametrize(
    "parts",
    [
        [text(f"what is {MARKER}?"), image(A), image(B)],
        [text(f"{MARKER} and {MARKER}"), image(A)],
        [text(f"what is {MARKER}?")],
    ],
)
def test_any_other_number_of_markers_is_plain_text(parts: list[dict[str, Any]], quick_side: LMDeploySide) -> None:
    request = quick_side.request([user(*parts)])
    assert request["prompt"].count(MARKER) == parts[0]["text"].count(MARKER)
    assert len(request.get("input_embeddings", [])) == len(parts) - 1


def test_markers_of_one_message_are_not_places_in_another(quick_side: LMDeploySide) -> None:
    request = quick_side.request([user(image(A)), assistant(MARKER), user(text(MARKER))])
    assert request["prompt"].count(MARKER) == 2
    assert len(request["input_embeddings"]) == 1
