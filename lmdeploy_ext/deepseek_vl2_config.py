"""DeepSeek-VL2's config as a transformers class: transformers has none, and LMDeploy then falls back to a plain one.

Defaults are those of the original's code (``configuration_deepseek.py`` and ``modeling_deepseek_vl_v2.py``,
github.com/deepseek-ai/DeepSeek-VL2): the released configs leave heads, layer counts and MLA's sizes to them. Classes
of a module, so that a config can be pickled for another process.
"""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, DeepseekV2Config, PreTrainedConfig


def register() -> None:
    """Make `transformers.AutoConfig` load DeepSeek-VL2's config.json. A second call does nothing."""
    AutoConfig.register(DeepseekVLV2Config.model_type, DeepseekVLV2Config, exist_ok=True)


@strict  # else the base class's types are the ones that are checked
class DeepseekVL2LanguageConfig(DeepseekV2Config):
    """transformers' class with the original's defaults, and with what MHA and sigmoid routing need."""

    num_hidden_layers: int = 30
    kv_lora_rank: int | None = 512  # null with MHA
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    bos_token_id: int | None = 100000
    eos_token_id: int | list[int] | None = 100001
    use_mla: bool = True
    moe_layer_freq: int = 1
    scoring_func: str = "softmax"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if not self.use_mla:  # the base class takes the rope's part of an MLA head for all of it
            self.head_dim = self.hidden_size // self.num_attention_heads

    def get(self, name: str, default: Any = None) -> Any:
        """As a dict's: LMDeploy's match rule takes this config for one."""
        return getattr(self, name, default)


class DeepseekVL2VisionConfig(PreTrainedConfig):
    """The vision tower's sizes."""

    model_type = "vision"
    model_name: str = "siglip_large_patch16_384"
    image_size: int = 384
    patch_size: int = 16
    width: int = 1024
    layers: int = 24
    heads: int = 16
    mlp_ratio: float = 4
    global_pool: str = "map"
    ignore_head: bool = True
    class_token: bool = False
    num_classes: int = 0


class DeepseekVL2ProjectorConfig(PreTrainedConfig):
    """The projector's sizes."""

    model_type = "mlp_projector"
    projector_type: str = "downsample_mlp_gelu"
    input_dim: int = 1152
    n_embed: int = 2048
    depth: int = 2
    mlp_ratio: int = 1
    downsample_ratio: int = 2
    token_pooling: bool = False


class DeepseekVLV2Config(PreTrainedConfig):
    """The whole model's; `language_config`, `vision_config` and `projector_config` are objects."""

    model_type = "deepseek_vl_v2"
    sub_configs: ClassVar[dict[str, type]] = {
        "vision_config": DeepseekVL2VisionConfig,
        "projector_config": DeepseekVL2ProjectorConfig,
        "language_config": DeepseekVL2LanguageConfig,
    }
    tile_tag: str = "2D"
    global_view_pos: str = "head"
    candidate_resolutions: Any = ((384, 384),)
    vision_config: Any = None
    projector_config: Any = None
    language_config: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name, part in self.sub_configs.items():
            given = getattr(self, name)
            if not isinstance(given, part):
                setattr(self, name, part(**(given or {})))
        super().__post_init__(**kwargs)
