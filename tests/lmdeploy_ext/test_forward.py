"""preprocess and forward keep images in order, whatever the batch and whoever else asks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from turbomind_requests import assistant, image, noise, same, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.engines.bundle import Bundle
from turbovit.engines.gemma3 import PAN_AND_SCAN_VARIABLE
from turbovit.lmdeploy_ext import load_vision_model

PICTURES = [noise(300, 300, 0), noise(640, 480, 1), noise(30, 20, 2)]
ROWS = (1, 3, 1)  # with crops


@pytest.fixture(scope="module")
def model(tiny_gemma3: Path, tiny_gemma3_bundle: Bundle) -> Any:
    return load_vision_model(tiny_gemma3, bundle=tiny_gemma3_bundle.path, device="cpu")


@pytest.fixture(autouse=True)
def _crops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PAN_AND_SCAN_VARIABLE, "1")


def messages() -> list[dict[str, Any]]:
    """As LMDeploy hands them on, images loaded."""
    first, *others = [{"type": "image", "data": picture} for picture in PICTURES]
    return [user(text("a"), first), assistant("b"), user(*others)]


def features(model: Any, max_batch_size: int) -> list[torch.Tensor]:
    return model.forward(model.preprocess(messages()), max_batch_size)[-1]["content"]


def test_there_is_one_entry_an_image_in_prompt_order(model: Any) -> None:
    steps = model.preprocess(messages())
    assert steps[:-1] == messages()
    assert steps[-1]["role"] == "preprocess"
    assert [entry["image_tokens"] for entry in steps[-1]["content"]] == [256 * rows for rows in ROWS]
    steps = model.forward(steps)
    assert [step["role"] for step in steps] == ["user", "assistant", "user", "preprocess", "forward"]
    alone = [one.features for one in model.encoder.encode(PICTURES)]
    assert [tensor.shape for tensor in steps[-1]["content"]] == [(256 * rows, 64) for rows in ROWS]
    for tensor, expected in zip(steps[-1]["content"], alone, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-5)


def test_the_batch_size_changes_no_feature(model: Any) -> None:
    expected = features(model, 1)
    for max_batch_size in (2, 100):
        for tensor, one in zip(features(model, max_batch_size), expected, strict=True):
            torch.testing.assert_close(tensor, one, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("max_batch_size", "expected"), [(3, [3, 3, 3, 2]), (8, [8, 3]), (100, [8, 3])])
def test_no_engine_run_is_larger_than_the_batch_size_or_the_bundles_limit(
    max_batch_size: int, expected: list[int], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def run(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sizes.append(len(inputs["pixels"]))
        return {"features": torch.zeros(len(inputs["pixels"]), 256, 64)}

    monkeypatch.setattr(model.encoder.runner, "run", run)
    steps = model.preprocess([user(*({"type": "image", "data": noise(8, 8, seed)} for seed in range(11)))])
    model.forward(steps, max_batch_size)
    assert sizes == expected


def test_concurrent_requests_get_their_own_images(side: LMDeploySide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PAN_AND_SCAN_VARIABLE, "0")
    chats = [[user(text(str(seed)), *(image(noise(40, 30, seed + n)) for n in range(seed % 3)))] for seed in range(8)]
    bad = [user(image(5))]

    async def together() -> list[Any]:
        asked = [side.processor.get_prompt_input(chat, do_preprocess=True) for chat in (*chats[:4], bad, *chats[4:])]
        return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(together())
    assert isinstance(answers.pop(4), ValueError)
    for answer, chat in zip(answers, chats, strict=True):
        expected = side.request(chat)
        assert answer["input_ids"] == expected["input_ids"]
        assert "input_embeddings" not in expected or same(answer, expected)
