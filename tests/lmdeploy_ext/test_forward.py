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

PICTURES = [noise(300, 300, 0), noise(900, 300, 1), noise(256, 800, 2), noise(30, 20, 3)]  # rows: 1, 4, 4, 1


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
    assert [entry["image_tokens"] for entry in steps[-1]["content"]] == [256, 1024, 1024, 256]
    steps = model.forward(steps)
    assert [step["role"] for step in steps] == ["user", "assistant", "user", "preprocess", "forward"]
    alone = [one.features for one in model.encoder.encode(PICTURES)]
    assert [tensor.shape for tensor in steps[-1]["content"]] == [(256 * rows, 64) for rows in (1, 4, 4, 1)]
    for tensor, expected in zip(steps[-1]["content"], alone, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-5)


def test_the_batch_size_changes_no_feature(model: Any) -> None:
    expected = features(model, 1)
    for max_batch_size in (2, 3, 100):
        for tensor, one in zip(features(model, max_batch_size), expected, strict=True):
            torch.testing.assert_close(tensor, one, rtol=0, atol=1e-5)


def test_no_engine_run_is_larger_than_the_batch_size_or_the_bundles_limit(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    run = model.encoder.runner.run

    def counted(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sizes.append(len(inputs["pixels"]))
        return run(inputs)

    monkeypatch.setattr(model.encoder.runner, "run", counted)
    for max_batch_size, expected in ((3, [3, 3, 3, 1]), (100, [8, 2])):
        sizes.clear()
        features(model, max_batch_size)
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
