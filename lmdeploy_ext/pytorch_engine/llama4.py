"""Llama 4 in LMDeploy's PyTorch engine."""

from __future__ import annotations

from typing import ClassVar

from turbovit.lmdeploy_ext.pytorch_engine.tower import CompiledTowerModel


class Llama4CompiledTower(CompiledTowerModel):
    """LMDeploy's Llama 4 with a compiled vision tower and projector."""

    tower: ClassVar[str] = "llama4:Llama4VisionModel"
    left_out: ClassVar[tuple[str, ...]] = ("llama4:Llama4MultiModalProjector",)
    vision_prefixes: ClassVar[tuple[str, ...]] = ("vision_model.", "multi_modal_projector.")
