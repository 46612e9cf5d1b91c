"""Qwen3-VL, dense and MoE, in LMDeploy's PyTorch engine."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from turbovit.engines.encoder import Encoder
from turbovit.engines.preprocessor import Pixels, joined, joined_levels
from turbovit.lmdeploy_ext.pytorch_engine.tower import CompiledTower, CompiledTowerModel


class Qwen3VLTower(CompiledTower):
    """Stands where LMDeploy's tower is, and is called as that is: positions first, then patches.

    The engine makes rope and learned positions itself. LMDeploy hands what `fast_pos_embed_interpolate` gave on to
    `forward`, so that is where the grids pass through.
    """

    def __init__(self, encoder: Encoder, dtype: torch.dtype):
        super().__init__(encoder, dtype)
        self.spatial_merge_size = int(encoder.manifest.facts["merge"])

    def rot_pos_emb(self, grid_thw: Tensor) -> Tensor:
        """Nothing, in a shape that LMDeploy's arithmetic takes."""
        return torch.empty(0, 0)

    def fast_pos_embed_interpolate(self, grid_thw: Tensor) -> Tensor:
        """The grids [items, 3] themselves, which are on the CPU."""
        return grid_thw

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, cu_seqlens: Tensor, rotary_pos_emb: Any, pos_embeds: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Features [tokens, hidden] and as many of each deepstack level, in the order of the items.

        Args:
            hidden_states: [patches of all items, values of one], whole numbers 0 to 255 in the model's dtype.
            pos_embeds: the grids, from `fast_pos_embed_interpolate`.
        """
        grids = pos_embeds.tolist()
        patches = hidden_states.to(torch.uint8).split([steps * rows * columns for steps, rows, columns in grids])
        items = [self._pixels(own, *grid) for own, grid in zip(patches, grids, strict=True)]
        encoded = self.encoder.encode_pixels(items)
        features = joined([one.features for one in encoded]).to(self.dtype)
        return features, [level.to(self.dtype) for level in joined_levels(encoded)]

    def _pixels(self, patches: Tensor, steps: int, rows: int, columns: int) -> Pixels:
        tokens = rows * columns // self.spatial_merge_size**2
        frames = patches.unflatten(0, (steps, rows * columns))
        return Pixels(frames, group=(rows, columns), runs=(tokens,) * steps, grid=(steps, rows, columns))


class Qwen3VLCompiledTower(CompiledTowerModel):
    """LMDeploy's Qwen3-VL with a compiled vision tower and its deepstack levels."""

    tower_class: ClassVar[type[CompiledTower]] = Qwen3VLTower
    tower: ClassVar[str] = "qwen3_vl:Qwen3VLVisionModel"
    vision_prefixes: ClassVar[tuple[str, ...]] = ("visual.",)
