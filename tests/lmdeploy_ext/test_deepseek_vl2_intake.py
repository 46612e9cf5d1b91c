"""The real TurboMind extension takes DeepSeek-VL2's requests: every image arrives at its place, as one range."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from turbomind_deepseek_vl2 import SMALL, SQUARE, TALL, TOKENS, WIDE, Pair
from turbomind_intake import Intake, intakes, skip_reason
from turbomind_requests import assistant, image, text, user

SKIP_REASON = skip_reason()
pytestmark = pytest.mark.skipif(SKIP_REASON is not None, reason=str(SKIP_REASON))

CHATS = [
    [user(image(SQUARE), text("what is it?"))],
    [user(image(WIDE), image(TALL))],  # their ranges touch
    [user(image(SMALL)), assistant("a dog"), user(image(WIDE), text("and"), image(TALL))],
    [user(text("no image"))],
]
LENGTHS = [[TOKENS["SQUARE"]], [TOKENS["WIDE"], TOKENS["TALL"]], [421] * 3]


@pytest.fixture(scope="module")
def requests_(deepseek_vl2: Pair) -> list[dict[str, Any]]:
    return [deepseek_vl2.side.request(chat) for chat in CHATS]


@pytest.fixture(scope="module")
def taken(requests_: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[Intake]:
    return intakes(requests_, tmp_path_factory.mktemp("turbomind"), "bfloat16")


@pytest.mark.parametrize(("chat", "lengths"), enumerate(LENGTHS))
def test_images_arrive_in_the_engines_dtype_at_their_ranges(
    chat: int, lengths: list[int], requests_: list[dict[str, Any]], taken: list[Intake]
) -> None:
    request, intake = requests_[chat], taken[chat]
    assert intake.input_embeddings is not None
    assert intake.input_embedding_ranges is not None
    assert intake.input_ids.dtype == intake.input_embedding_ranges.dtype == torch.int32
    assert intake.input_ids.tolist() == request["input_ids"]
    assert intake.input_embedding_ranges.tolist() == request["input_embedding_ranges"]
    assert [end - begin for begin, end in intake.input_embedding_ranges.tolist()] == lengths
    assert torch.equal(intake.input_embeddings, torch.cat(request["input_embeddings"]).bfloat16())


def test_a_text_only_request_arrives_without_images(requests_: list[dict[str, Any]], taken: list[Intake]) -> None:
    assert taken[3].input_ids.tolist() == requests_[3]["input_ids"]
    assert taken[3].input_embeddings is None
    assert taken[3].input_embedding_ranges is None


def test_nothing_of_a_request_is_lost_but_its_text(taken: list[Intake]) -> None:
    assert [intake.ignored for intake in taken] == [{"prompt"}] * 4
