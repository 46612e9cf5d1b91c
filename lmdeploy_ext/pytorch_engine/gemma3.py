"""Gemma 3 in LMDeploy's PyTorch engine.

Where a sequence has images, LMDeploy's decoder computes attention a second time, under masks that let the tokens of an
image see each other. As it stands in 0.18 (`lmdeploy.pytorch.models.gemma.GemmaAttention.naive_attn_with_masks`) that
passes the scale as dropout, fails where a batch has several sequences, and lets images see the ones after them. So
masks and attention are made here. Reference: `transformers.models.gemma3.modeling_gemma3` (5.24).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from turbovit.lmdeploy_ext.pytorch_engine import adapter
from turbovit.lmdeploy_ext.pytorch_engine.tower import CompiledTowerModel


class Gemma3CompiledTower(CompiledTowerModel):
    """LMDeploy's Gemma 3 with a compiled vision tower and projector."""

    tower: ClassVar[str] = "gemma3_vl:SiglipVisionModel"
    left_out: ClassVar[tuple[str, ...]] = ("gemma3_vl:Gemma3MultiModalProjector",)
    vision_prefixes: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.")

    config: Any  # set by LMDeploy's class
    language_model: Any
    sliding_window: int

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for attention in adapter.gemma_attentions(self.language_model):
            attention.naive_attn_with_masks = functools.partial(masked_attention, attention)

    def prepare_attn_masks(
        self, input_ids: Tensor, positions: Tensor, mask_dtype: torch.dtype, **kwargs: Any
    ) -> dict[str, Any]:
        """`kwargs` and the masks for the decoder's layers: everything before, or only the sliding window of it.

        Args:
            input_ids, positions: [tokens of all sequences].
        """
        every = image_masks(input_ids == self.config.image_token_index, positions)
        local = [None if mask is None else _windowed(mask, self.sliding_window) for mask in every]
        return {**kwargs, "has_images": True, "global_attn_masks": every, "local_attn_masks": local}


def image_masks(is_image: Tensor, positions: Tensor) -> list[Tensor | None]:
    """For each sequence a mask [tokens, tokens], True where a row's token sees a column's.

    A token sees those before it, and those of its own image. None for a sequence without images: LMDeploy's own
    attention is right for it. None as well for what continues an earlier chunk, whose keys are in the cache alone.

    Args:
        is_image, positions: [tokens of all sequences].
    """
    begins = positions != pad(positions, (1, -1), value=-2) + 1
    on_host = torch.stack([begins.long(), is_image.long(), positions]).cpu()  # one copy, for all decisions
    starts = on_host[0].nonzero().flatten().tolist()
    masks: list[Tensor | None] = []
    for start, stop in zip(starts, [*starts[1:], len(positions)], strict=True):
        needed = bool(on_host[1, start:stop].any()) and int(on_host[2, start]) == 0
        masks.append(_image_mask(is_image[start:stop]) if needed else None)
    return masks


def masked_attention(
    attention: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, attn_masks: Sequence[Tensor | None], seq_lens: Tensor
) -> Tensor:
    """Attention under `image_masks`, in place of what LMDeploy computed where there is a mask.

    Args:
        attention: LMDeploy's layer.
        q, k, v: [tokens of all sequences, heads * head size], or with heads as a dimension of their own.
        out: [1, tokens of all sequences, query heads * head size], what LMDeploy computed; changed in place.
        seq_lens: [sequences], the tokens of each.
    """
    lengths = seq_lens.tolist()
    parts = [tensor.view(len(tensor), -1, attention.head_dim).transpose(0, 1).split(lengths, 1) for tensor in (q, k, v)]
    for mask, own, *inputs in zip(attn_masks, out[0].split(lengths), *parts, strict=True):
        if mask is not None:
            query, key, value = (tensor[None] for tensor in inputs)  # [1, heads, tokens, head size]
            result = scaled_dot_product_attention(query, key, value, mask, scale=attention.scaling, enable_gqa=True)
            own.copy_(result[0].transpose(0, 1).flatten(1))
    return out


def _image_mask(is_image: Tensor) -> Tensor:
    follows = pad(is_image, (1, -1))
    image = torch.where(is_image, (is_image & ~follows).cumsum(0), 0)  # 1 for the first image, 0 for text
    same = (image[:, None] == image[None]) & is_image
    return same | torch.ones_like(same).tril()


def _windowed(mask: Tensor, size: int) -> Tensor:
    """The mask without what is `size` tokens or more before a token."""
    return mask & torch.ones_like(mask).triu(1 - size)
