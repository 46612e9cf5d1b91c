"""How far an engine's logits are from a reference's, and whether it chose well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# bfloat16 inside against float32 throughout: models of two layers give 0.007 to 0.012.
BOUND = 1.5e-2
ROW_BOUND = 5e-2
LAG_BOUND = 0.05


@dataclass(frozen=True)
class Agreement:
    """Of an answer's logits with a reference's for the same tokens.

    Attributes:
        overall: relative L2 of all rows.
        worst_row: relative L2 of the worst.
        lag: the furthest that a chosen token lies below its row's best, in that row's standard deviations.
    """

    overall: float
    worst_row: float
    lag: float

    @property
    def holds(self) -> bool:
        """Whether all three are within their bounds; what is not finite is not."""
        return self.overall <= BOUND and self.worst_row <= ROW_BOUND and self.lag <= LAG_BOUND


def agreement(chosen: Sequence[int], logits: Tensor, reference: Tensor) -> Agreement:
    """Compare logits of prompt and answer without its last token, both [tokens, vocabulary].

    Args:
        chosen: the answer's tokens.
        reference: the reference's logits where it is given the same tokens.

    Raises:
        ValueError: the logits are of another number of tokens.
    """
    if logits.shape != reference.shape:
        raise ValueError(f"the answer has logits of {list(logits.shape)}, the reference of {list(reference.shape)}")
    difference = logits - reference
    rows = difference.norm(dim=1) / reference.norm(dim=1)
    choices = reference[-len(chosen) :]
    taken = choices.gather(1, torch.tensor(chosen)[:, None])[:, 0]
    lags = (choices.amax(dim=1) - taken) / choices.std(dim=1)
    return Agreement(float(difference.norm() / reference.norm()), float(rows.max()), float(lags.max()))
