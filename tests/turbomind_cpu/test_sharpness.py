"""The bound on logits is sharp: each mistake in a language half misses it, by far."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from turbomind_cpu.agreement import BOUND, agreement
from turbomind_cpu.checkpoints import prompt
from turbomind_cpu.reference import Reference
from turbomind_cpu.rig import Answer, Job, Request, Rig

PROMPT = prompt(37, 1)
CONTROLS = {
    "no_rope_reordering": "qwen3",
    "no_shared_expert": "glm4_moe_lite",
    "wrong_softmax_scale": "glm4_moe_lite",
    "output_projection_padded_behind": "glm4_moe_lite",
    "no_correction_bias": "glm4_moe_lite",
}


@pytest.fixture(scope="module")
def answers(cpu_rig: Rig, checkpoint: Callable[[str], Path]) -> dict[str, Answer]:
    asked = [[Request(PROMPT, logits=True)]]
    jobs = [Job(checkpoint(model), asked, within=f"turbomind_cpu.controls:{name}") for name, model in CONTROLS.items()]
    return {name: rounds[0][0] for name, rounds in zip(CONTROLS, cpu_rig.generate(jobs), strict=True)}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_mistake_misses_the_bound(
    control: str, answers: dict[str, Answer], reference: Callable[[str], Reference]
) -> None:
    answer = answers[control]
    right = reference(CONTROLS[control]).logits(Request(PROMPT), answer.tokens)
    assert agreement(answer, right).overall > 2 * BOUND
