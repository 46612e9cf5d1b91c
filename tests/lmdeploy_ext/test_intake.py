"""The real TurboMind extension takes our requests, and holds exactly what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from turbomind_intake import Intake, intakes, skip_reason
from turbomind_requests import assert_sound, image, noise, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.engines.gemma3 import PAN_AND_SCAN_VARIABLE

SKIP_REASON = skip_reason()
pytestmark = pytest.mark.skipif(SKIP_REASON is not None, reason=str(SKIP_REASON))

CHATS = [
    [user(image(noise(640, 480, 0)), text("what is it?"))],
    [user(text("this"), image(noise(900, 300, 1)), text("and that"), image(noise(300, 300, 2)))],
    [user(text("no image"))],
]


@pytest.fixture(scope="module")
def requests_(side: LMDeploySide) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PAN_AND_SCAN_VARIABLE, "1")
        return [side.request(chat) for chat in CHATS]


@pytest.fixture(scope="module")
def taken(requests_: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[Intake]:
    workspace: Path = tmp_path_factory.mktemp("turbomind")
    return intakes(requests_, workspace, "bfloat16")


@pytest.mark.parametrize(("chat", "runs"), [(0, 3), (1, 5)])
def test_images_arrive_in_the_engines_dtype_at_their_ranges(
    chat: int, runs: int, requests_: list[dict[str, Any]], taken: list[Intake], side: LMDeploySide
) -> None:
    request, intake = requests_[chat], taken[chat]
    assert intake.input_embeddings is not None
    assert intake.input_embedding_ranges is not None
    assert intake.input_ids.dtype == intake.input_embedding_ranges.dtype == torch.int32
    assert intake.input_ids.tolist() == request["input_ids"]
    assert intake.input_embedding_ranges.tolist() == request["input_embedding_ranges"]
    assert len(intake.input_embedding_ranges) == runs
    assert torch.equal(intake.input_embeddings, torch.cat(request["input_embeddings"]).bfloat16())
    assert_sound(request, hidden=side.encoder.model.hf_config.text_config.hidden_size)


def test_a_text_only_request_arrives_without_images(requests_: list[dict[str, Any]], taken: list[Intake]) -> None:
    assert taken[2].input_ids.tolist() == requests_[2]["input_ids"]
    assert taken[2].input_embeddings is None
    assert taken[2].input_embedding_ranges is None


def test_nothing_of_a_request_is_lost_but_its_text(taken: list[Intake]) -> None:
    assert [intake.ignored for intake in taken] == [{"prompt"}] * 3
