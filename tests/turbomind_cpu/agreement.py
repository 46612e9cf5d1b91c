"""How far TurboMind's logits are from a reference's, and whether it chose well."""

from __future__ import annotations

import torch
from turbomind_cpu.rig import Answer

from turbovit.benchmarks.agreement import BOUND, Agreement
from turbovit.benchmarks.agreement import agreement as of_logits

__all__ = ["BOUND", "agreement", "assert_agrees"]


def agreement(answer: Answer, reference: torch.Tensor) -> Agreement:
    """Compare with the reference's logits of prompt and answer without its last token, [tokens, vocabulary]."""
    assert answer.logits is not None
    return of_logits(answer.tokens, answer.logits, reference)


def assert_agrees(answer: Answer, reference: torch.Tensor) -> None:
    """The answer's logits and choices are the reference's, as far as bfloat16 goes."""
    found = agreement(answer, reference)
    assert found.holds, found
