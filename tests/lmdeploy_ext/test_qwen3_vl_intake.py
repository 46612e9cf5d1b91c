"""The real TurboMind extension takes Qwen3-VL's requests, and ignores exactly what capability says it lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from turbomind_intake import Intake, intakes, skip_reason
from turbomind_qwen3_vl import Pair, video, write_video
from turbomind_requests import assert_sound, image, noise, text, user

SKIP_REASON = skip_reason()
pytestmark = pytest.mark.skipif(SKIP_REASON is not None, reason=str(SKIP_REASON))

A, B = noise(640, 480, 0), noise(64, 300, 1)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("turbomind")


@pytest.fixture(scope="module")
def requests_(qwen3_vl: Pair, qwen3_vl_moe: Pair, workspace: Path) -> list[dict[str, Any]]:
    clip = write_video(workspace / "a.mp4", 96, 64, 5, 2, 0)
    chats = [
        [user(image(A), text("what is it?"))],
        [user(image(B), video(clip), text("and that"), image(A))],
        [user(text("no image"))],
    ]
    return [pair.side.request(chat) for pair in (qwen3_vl, qwen3_vl_moe) for chat in chats]


@pytest.fixture(scope="module")
def taken(requests_: list[dict[str, Any]], workspace: Path) -> list[Intake]:
    return intakes(requests_, workspace, "bfloat16")


@pytest.mark.parametrize(("chat", "runs"), [(0, 1), (1, 5), (3, 1), (4, 5)])
def test_images_and_temporal_steps_arrive_at_their_ranges(
    chat: int, runs: int, requests_: list[dict[str, Any]], taken: list[Intake], qwen3_vl: Pair
) -> None:
    request, intake = requests_[chat], taken[chat]
    assert intake.input_embeddings is not None
    assert intake.input_embedding_ranges is not None
    assert intake.input_ids.dtype == intake.input_embedding_ranges.dtype == torch.int32
    assert intake.input_ids.tolist() == request["input_ids"]
    assert intake.input_embedding_ranges.tolist() == request["input_embedding_ranges"]
    assert len(intake.input_embedding_ranges) == runs
    assert torch.equal(intake.input_embeddings, torch.cat(request["input_embeddings"]).bfloat16())
    assert_sound(request, hidden=qwen3_vl.side.encoder.model.hf_config.text_config.hidden_size)


@pytest.mark.parametrize("chat", [2, 5])
def test_a_text_only_request_arrives_without_images(
    chat: int, requests_: list[dict[str, Any]], taken: list[Intake]
) -> None:
    assert taken[chat].input_ids.tolist() == requests_[chat]["input_ids"]
    assert taken[chat].input_embeddings is None
    assert taken[chat].input_embedding_ranges is None


def test_positions_and_deepstack_are_accepted_and_ignored(requests_: list[dict[str, Any]], taken: list[Intake]) -> None:
    for request in requests_:
        assert request["input_meta"].keys() == {"mrope_position_ids", "mrope_position_delta", "deepstack_embeds"}
    assert [intake.ignored for intake in taken] == [{"prompt", "input_meta"}] * 6
