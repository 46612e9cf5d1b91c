"""preprocess and forward keep images and their tiles in order, whatever the batch and whoever else asks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from turbomind_deepseek_vl2 import SQUARE, TALL, TOKENS, WIDE, Pair
from turbomind_requests import assistant, image, noise, same, text, user

from turbovit.engines.bundle import Bundle
from turbovit.lmdeploy_ext import load_vision_model


@pytest.fixture(scope="module")
def model(tiny_deepseek_vl2: Path, tiny_deepseek_vl2_bundle: Bundle) -> Any:
    return load_vision_model(tiny_deepseek_vl2, bundle=tiny_deepseek_vl2_bundle.path, device="cpu")


def messages(*pictures: Any) -> list[dict[str, Any]]:
    """As LMDeploy hands them on, images loaded."""
    first, *others = [{"type": "image", "data": picture} for picture in pictures]
    return [user(text("a"), first), assistant("b"), user(*others)]


def test_there_is_one_entry_an_image_in_prompt_order(model: Any) -> None:
    steps = model.preprocess(messages(WIDE, SQUARE))
    assert [entry["image_tokens"] for entry in steps[-1]["content"]] == [TOKENS["WIDE"], TOKENS["SQUARE"]]
    steps = model.forward(steps)
    assert [step["role"] for step in steps] == ["user", "assistant", "user", "preprocess", "forward"]
    for tensor, picture in zip(steps[-1]["content"], (WIDE, SQUARE), strict=True):
        (alone,) = model.encoder.encode([picture])
        torch.testing.assert_close(tensor, alone.features, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("max_batch_size", "expected"), [(1, [1] * 6), (4, [4, 2]), (100, [6])], ids=str)
def test_the_batch_size_counts_tiles_and_changes_no_feature(
    max_batch_size: int, expected: list[int], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = (WIDE, TALL, SQUARE)  # three: none is cut
    wanted = model.forward(model.preprocess(messages(*pictures)), 3)[-1]["content"]
    assert [len(one) for one in wanted] == [421] * 3
    sizes, run = [], model.encoder.runner.run
    with monkeypatch.context() as patch:
        patch.setattr(model.encoder.runner, "run", lambda inputs: (sizes.append(len(inputs["pixels"])), run(inputs))[1])
        found = model.forward(model.preprocess(messages(*pictures)), max_batch_size)[-1]["content"]
    assert sizes == expected
    for tensor, one in zip(found, wanted, strict=True):
        torch.testing.assert_close(tensor, one, rtol=0, atol=1e-5)


def test_concurrent_requests_of_other_tile_counts_are_independent(deepseek_vl2: Pair) -> None:
    side = deepseek_vl2.side
    sizes = [(384, 384), (700, 300), (600, 600), (8, 8)]
    chats = [[user(text(str(seed)), image(noise(*size, seed)))] for seed, size in enumerate(sizes)]
    bad = [user(image(5))]

    async def together() -> list[Any]:
        asked = [side.processor.get_prompt_input(chat, do_preprocess=True) for chat in (*chats[:2], bad, *chats[2:])]
        return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(together())
    assert isinstance(answers.pop(2), ValueError)
    for answer, chat in zip(answers, chats, strict=True):
        assert same(answer, side.request(chat))
