"""The real TurboMind extension takes Llama 4's requests: every tile arrives at its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from turbomind_intake import Intake, intakes, skip_reason
from turbomind_llama4 import SMALL, SQUARE, TALL, Pair
from turbomind_requests import image, text, user

SKIP_REASON = skip_reason()
pytestmark = pytest.mark.skipif(SKIP_REASON is not None, reason=str(SKIP_REASON))

CHATS = [
    [user(image(SQUARE), text("what is it?"))],
    [user(text("this"), image(SMALL), text("and that"), image(TALL))],
    [user(text("no image"))],
]


@pytest.fixture(scope="module")
def requests_(llama4: Pair) -> list[dict[str, Any]]:
    return [llama4.side.request(chat) for chat in CHATS]


@pytest.fixture(scope="module")
def taken(requests_: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[Intake]:
    return intakes(requests_, tmp_path_factory.mktemp("turbomind"), "bfloat16")


@pytest.mark.parametrize(("chat", "tiles"), [(0, 5), (1, 4)])
def test_tiles_arrive_in_the_engines_dtype_at_their_ranges(
    chat: int, tiles: int, requests_: list[dict[str, Any]], taken: list[Intake]
) -> None:
    request, intake = requests_[chat], taken[chat]
    assert intake.input_embeddings is not None
    assert intake.input_embedding_ranges is not None
    assert intake.input_ids.dtype == intake.input_embedding_ranges.dtype == torch.int32
    assert intake.input_ids.tolist() == request["input_ids"]
    assert intake.input_embedding_ranges.tolist() == request["input_embedding_ranges"]
    assert [end - begin for begin, end in intake.input_embedding_ranges.tolist()] == [144] * tiles
    assert intake.input_embeddings.shape == (144 * tiles, 64)
    assert torch.equal(intake.input_embeddings, torch.cat(request["input_embeddings"]).bfloat16())


def test_a_text_only_request_arrives_without_images(requests_: list[dict[str, Any]], taken: list[Intake]) -> None:
    assert taken[2].input_ids.tolist() == requests_[2]["input_ids"]
    assert taken[2].input_embeddings is None
    assert taken[2].input_embedding_ranges is None


def test_nothing_of_a_request_is_lost_but_its_text(taken: list[Intake]) -> None:
    assert [intake.ignored for intake in taken] == [{"prompt"}] * 3
