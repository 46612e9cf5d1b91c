"""How far TurboMind's logits are from a reference's, and whether it chose well."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from turbomind_cpu.rig import Answer

# bfloat16 inside against float32 throughout: calibrated models of two layers give 0.007 to 0.012.
BOUND = 1.5e-2
ROW_BOUND = 5e-2
LAG_BOUND = 0.05


@dataclass(frozen=True)
class Agreement:
    """Of an answer's logits with a reference's for the same tokens."""

    overall: float  # relative L2 of all rows
    worst_row: float  # relative L2 of the worst
    lag: float  # the furthest that a chosen token lies below its row's best, in that row's standard deviations

    @property
    def holds(self) -> bool:
        return self.overall <= BOUND and self.worst_row <= ROW_BOUND and self.lag <= LAG_BOUND


def agreement(answer: Answer, reference: torch.Tensor) -> Agreement:
    """Compare with the reference's logits of prompt and answer without its last token, [tokens, vocabulary].

    Raises:
        ValueError: the answer has no logits, or those of another number of tokens.
    """
    if answer.logits is None or answer.logits.shape != reference.shape:
        got = None if answer.logits is None else tuple(answer.logits.shape)
        raise ValueError(f"the answer has logits of shape {got}, the reference of {tuple(reference.shape)}")
    difference = answer.logits - reference
    rows = difference.norm(dim=1) / reference.norm(dim=1)
    choices = reference[-len(answer.tokens) :]
    chosen = choices.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    lags = (choices.max(dim=1).values - chosen) / choices.std(dim=1)
    return Agreement((difference.norm() / reference.norm()).item(), rows.max().item(), lags.max().item())


def assert_agrees(answer: Answer, reference: torch.Tensor) -> None:
    """The answer's logits and choices are the reference's, as far as bfloat16 goes."""
    found = agreement(answer, reference)
    assert found.holds, found
