"""preprocess and forward keep images and their tiles in order, whatever the batch and whoever else asks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from turbomind_llama4 import SMALL, SQUARE, TALL, WIDE, Pair
from turbomind_requests import assistant, image, noise, same, text, user

from turbovit.engines.bundle import Bundle
from turbovit.lmdeploy_ext import load_vision_model

PICTURES = [WIDE, SMALL, SQUARE, TALL]
TILES = (3, 1, 5, 3)  # with global views


@pytest.fixture(scope="module")
def model(tiny_llama4: Path, tiny_llama4_bundle: Bundle) -> Any:
    return load_vision_model(tiny_llama4, bundle=tiny_llama4_bundle.path, device="cpu")


def messages() -> list[dict[str, Any]]:
    """As LMDeploy hands them on, images loaded."""
    first, *others = [{"type": "image", "data": picture} for picture in PICTURES]
    return [user(text("a"), first), assistant("b"), user(*others)]


def test_there_is_one_entry_an_image_in_prompt_order(model: Any) -> None:
    steps = model.preprocess(messages())
    assert steps[:-1] == messages()
    assert [entry["image_tokens"] for entry in steps[-1]["content"]] == [144 * tiles for tiles in TILES]
    steps = model.forward(steps)
    assert [step["role"] for step in steps] == ["user", "assistant", "user", "preprocess", "forward"]
    assert [tensor.shape for tensor in steps[-1]["content"]] == [(144 * tiles, 64) for tiles in TILES]
    for tensor, picture in zip(steps[-1]["content"], PICTURES, strict=True):
        (alone,) = model.encoder.encode([picture])
        torch.testing.assert_close(tensor, alone.features, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("max_batch_size", "expected"), [(1, [1] * 12), (2, [2] * 6), (5, [5, 5, 2]), (100, [12])], ids=str
)
def test_the_batch_size_counts_tiles_and_changes_no_feature(
    max_batch_size: int, expected: list[int], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = model.forward(model.preprocess(messages()), 3)[-1]["content"]
    sizes, run = [], model.encoder.runner.run
    with monkeypatch.context() as patch:
        patch.setattr(model.encoder.runner, "run", lambda inputs: (sizes.append(len(inputs["pixels"])), run(inputs))[1])
        found = model.forward(model.preprocess(messages()), max_batch_size)[-1]["content"]
    assert sizes == expected
    for tensor, one in zip(found, wanted, strict=True):
        torch.testing.assert_close(tensor, one, rtol=0, atol=1e-5)


def test_concurrent_requests_of_other_tile_counts_are_independent(llama4: Pair) -> None:
    side = llama4.side
    sizes = [(336, 336), (672, 336), (600, 600), (100, 900), (8, 8), (336, 672)]
    chats = [[user(text(str(seed)), image(noise(*size, seed)))] for seed, size in enumerate(sizes)]
    bad = [user(image(5))]

    async def together() -> list[Any]:
        asked = [side.processor.get_prompt_input(chat, do_preprocess=True) for chat in (*chats[:3], bad, *chats[3:])]
        return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(together())
    assert isinstance(answers.pop(3), ValueError)
    assert len({len(answer["input_embeddings"]) for answer in answers}) > 3
    for answer, chat in zip(answers, chats, strict=True):
        assert same(answer, side.request(chat))
