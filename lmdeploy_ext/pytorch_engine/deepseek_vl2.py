"""DeepSeek-VL2 in LMDeploy's PyTorch engine.

LMDeploy's own model takes a batch for one image a sequence, and fails where a sequence has none. So what it does with
images between the input processor and the language half is done here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from turbovit.engines.preprocessor import Pixels, joined
from turbovit.lmdeploy_ext.pytorch_engine.tower import CompiledTowerModel


class DeepseekVL2CompiledTower(CompiledTowerModel):
    """LMDeploy's DeepSeek-VL2 with a compiled vision tower and projector.

    Newlines and separator are the bundle's, which puts them between the features.
    """

    tower: ClassVar[str] = "deepseek_vl2:DeepseekVLV2ForCausalLM._init_vision_module"
    left_out: ClassVar[tuple[str, ...]] = ("deepseek_vl2:MlpProjector",)
    vision_prefixes: ClassVar[tuple[str, ...]] = ("vision.", "projector.", "image_newline", "view_seperator")

    vision: Any  # set by LMDeploy's class

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.image_newline = self.view_seperator = None

    def prepare_inputs_for_generation(
        self, past_key_values: Sequence[Any], inputs_embeds: Tensor | None = None, context: Any = None
    ) -> dict[str, Any]:
        """As LMDeploy's own; ``pixel_values`` are one tensor of views [views, 3, height, width] an image."""
        batch = context.input_multimodals or ()
        images = [image for sequence in batch for image in sequence.get("image", ())]
        token = images[0].meta["image_token_id"] if images else None
        return {
            "input_ids": context.input_ids,
            "position_ids": context.position_ids,
            "past_key_values": past_key_values,
            "attn_metadata": context.attn_metadata,
            "pixel_values": [image.data for image in images] or None,
            "images_spatial_crop": [image.meta["images_spatial_crop"] for image in images] or None,
            "image_mask": context.input_ids == token if images else None,
            "inputs_embeds": inputs_embeds,
        }

    def prepare_inputs_embeds(
        self,
        input_ids: Tensor,
        images: Sequence[Tensor],
        images_seq_mask: Tensor,
        images_spatial_crop: Sequence[tuple[int, int]],
        **_: Any,
    ) -> Tensor:
        """Embeddings [1, tokens, hidden] of a batch, with the images' features at the placeholders.

        Args:
            images: uint8 views [views, 3, height, width] of each, the whole image first.
            images_seq_mask: bool [1, tokens], where the placeholders are.
            images_spatial_crop: columns and rows of tiles of each.
        """
        items = [
            Pixels(rows=views, group=None, runs=(), grid=(1, rows, columns))
            for views, (columns, rows) in zip(images, images_spatial_crop, strict=True)
        ]
        features = joined([one.features for one in self.vision.encoder.encode_pixels(items)])
        embeddings = self.get_input_embeddings()(input_ids)  # type: ignore[attr-defined]
        return embeddings.masked_scatter(images_seq_mask[..., None], features.to(embeddings.dtype))
