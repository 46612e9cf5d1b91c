"""The check of Qwen3-VL's requests is sharp: what is slightly wrong does not pass it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from turbomind_qwen3_vl import Pair, expected_inputs, video, write_video
from turbomind_requests import LOGITS_BOUND, Message, assert_equals_reference, image, noise, text, user

CLEARLY = 100 * LOGITS_BOUND


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> list[Message]:
    """An image, a video of one step and another image, all with 64 tokens."""
    path = write_video(tmp_path_factory.mktemp("videos") / "a.mp4", 256, 256, frames=2, fps=4, seed=0)
    return [user(image(noise(256, 256, 0)), video(path), image(noise(256, 256, 1)), text("what is it?"))]


@pytest.fixture(scope="module")
def request_(qwen3_vl: Pair, chat: list[Message]) -> dict[str, Any]:
    request = qwen3_vl.side.request(chat)
    assert [end - begin for begin, end in request["input_embedding_ranges"]] == [64, 64, 64]
    return request


@pytest.fixture(scope="module")
def inputs(qwen3_vl: Pair, chat: list[Message]) -> Mapping[str, torch.Tensor]:
    return expected_inputs(qwen3_vl.reference, chat)


def error(pair: Pair, request: Mapping[str, Any], inputs: Mapping[str, torch.Tensor], **meta: Any) -> float:
    changed = {**request, "input_meta": {**request["input_meta"], **meta}}
    found = pair.reference.compare(changed, inputs).logits_error
    assert found is not None
    return found


def test_the_unchanged_request_passes(
    qwen3_vl: Pair, request_: dict[str, Any], inputs: Mapping[str, torch.Tensor]
) -> None:
    assert_equals_reference(qwen3_vl.reference.compare(request_, inputs))


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1)])
@pytest.mark.parametrize("what", ["features", "level 0", "level 1", "level 2", "all levels"])
def test_two_items_swapped_do_not_pass(
    what: str, order: tuple[int, ...], qwen3_vl: Pair, request_: dict[str, Any], inputs: Mapping[str, torch.Tensor]
) -> None:
    if what == "features":
        request = {**request_, "input_embeddings": [request_["input_embeddings"][index] for index in order]}
        assert error(qwen3_vl, request, inputs) > CLEARLY
        return
    levels = list(request_["input_meta"]["deepstack_embeds"])
    for number, level in enumerate(levels):
        if what in (f"level {number}", "all levels"):
            levels[number] = torch.cat([level.split(64)[index] for index in order])
    assert error(qwen3_vl, request_, inputs, deepstack_embeds=levels) > CLEARLY


def test_levels_in_another_order_do_not_pass(
    qwen3_vl: Pair, request_: dict[str, Any], inputs: Mapping[str, torch.Tensor]
) -> None:
    levels = request_["input_meta"]["deepstack_embeds"][::-1]
    assert error(qwen3_vl, request_, inputs, deepstack_embeds=levels) > CLEARLY


def test_without_deepstack_it_does_not_pass(
    qwen3_vl: Pair, request_: dict[str, Any], inputs: Mapping[str, torch.Tensor]
) -> None:
    levels = request_["input_meta"]["deepstack_embeds"]
    assert error(qwen3_vl, request_, inputs, deepstack_embeds=[]) > CLEARLY
    assert error(qwen3_vl, request_, inputs, deepstack_embeds=levels[:-1]) > CLEARLY


def test_without_mrope_it_does_not_pass(
    qwen3_vl: Pair, request_: dict[str, Any], inputs: Mapping[str, torch.Tensor]
) -> None:
    plain = torch.arange(len(request_["input_ids"])).expand(3, -1)
    assert error(qwen3_vl, request_, inputs, mrope_position_ids=plain) > CLEARLY


def test_rows_and_columns_swapped_do_not_pass(
    qwen3_vl: Pair, request_: dict[str, Any], inputs: Mapping[str, torch.Tensor]
) -> None:
    swapped = request_["input_meta"]["mrope_position_ids"][[0, 2, 1]]
    assert error(qwen3_vl, request_, inputs, mrope_position_ids=swapped) > CLEARLY


def test_another_video_of_the_same_shape_does_not_pass(qwen3_vl: Pair, tmp_path: Path) -> None:
    chats = [[user(video(write_video(tmp_path / f"{seed}.mp4", 64, 64, 4, 2, seed)))] for seed in (0, 1)]
    first, second = (qwen3_vl.side.request(chat) for chat in chats)
    assert first["input_ids"] == second["input_ids"]
    assert error(qwen3_vl, first, expected_inputs(qwen3_vl.reference, chats[1])) > CLEARLY
