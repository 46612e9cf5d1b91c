"""Parts of attention that the calibrated models lack, each against transformers in a model that has it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from turbomind_cpu.agreement import assert_agrees
from turbomind_cpu.checkpoints import llama, prompt, qwen2, qwen3, write
from turbomind_cpu.reference import Reference
from turbomind_cpu.rig import Answer, Job, Request, Rig

PROMPT = prompt(200, 3)
TRAINED, EXTENDED = 64, 256  # positions: the prompt is beyond the first


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


VARIANTS: dict[str, Callable[[], Any]] = {
    "biases": qwen2,
    "linear rope": partial(qwen3, **rope("linear", factor=4.0)),
    "yarn": partial(
        qwen3,
        max_position_embeddings=EXTENDED,
        **rope("yarn", factor=EXTENDED / TRAINED, original_max_position_embeddings=TRAINED),
    ),
    "llama3 rope": partial(
        llama,
        **rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=TRAINED,
        ),
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("variants")
    return {name: write(make, folder / name.replace(" ", "-")) for name, make in VARIANTS.items()}


@pytest.fixture(scope="module")
def answers(models: dict[str, Path], rig: Rig) -> dict[str, Answer]:
    jobs = [
        Job(model, [[Request(PROMPT, logits=True)]], within="turbomind_cpu.controls:yarn_by_trained_positions")
        for model in models.values()
    ]
    return {name: rounds[0][0] for name, rounds in zip(models, rig.generate(jobs), strict=True)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_the_references(variant: str, models: dict[str, Path], answers: dict[str, Answer]) -> None:
    answer = answers[variant]
    assert_agrees(answer, Reference(models[variant]).logits(Request(PROMPT), answer.tokens))
