"""Gemma 3's vision side: SigLIP so400m at 896 px, 4x4 average pooling, RMSNorm and a linear projection.

Reference: `transformers.models.siglip.modeling_siglip` and `Gemma3MultiModalProjector` of
`transformers.models.gemma3.modeling_gemma3` (5.24); SigLIP arXiv:2303.15343, Gemma 3 arXiv:2503.19786.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from turbovit.engines.bundle import TensorSpec
from turbovit.engines.errors import CheckpointError
from turbovit.export.config import Section, check_kind, check_side, check_steps, settings
from turbovit.export.layers import Block, LayerNorm, Linear, PixelNorm, RMSNorm, patches_from_pixels
from turbovit.export.tower import LimitOption, Sample, Tower

_TOWER = "vision_tower."
_VISION = f"{_TOWER}vision_model."
_PROJECTOR = "multi_modal_projector."
_GELU = "gelu_pytorch_tanh"
# What transformers 5 takes: it left out ``vision_model.`` for a while, and writes a leading ``model.``.
_SPELLINGS = {
    **{f"{model}{_VISION}": _VISION for model in ("", "model.")},
    **{f"{model}{_TOWER}": _VISION for model in ("", "model.", "model.model.")},
    **{f"{model}{_PROJECTOR}": _PROJECTOR for model in ("", "model.", "model.model.")},
}
# SigLIP's attention pooling, which Gemma 3 never runs and transformers makes unless `vision_use_head` is false, and an
# old buffer.
_HEAD_LAYERS = ("attention.in_proj_", "attention.out_proj.", "layernorm.", "mlp.fc1.", "mlp.fc2.")
_HEAD = ("probe", *(f"{layer}{kind}" for layer in _HEAD_LAYERS for kind in ("weight", "bias")))
_UNUSED = frozenset([f"{_VISION}embeddings.position_ids", *(f"{_VISION}head.{name}" for name in _HEAD)])


@dataclass(frozen=True)
class Gemma3Spec:
    """Sizes of the tower. `mean`, `std` and `scale` are the processor's: pixel * scale, minus mean, over std."""

    hidden: int
    layers: int
    heads: int
    inner: int
    eps: float
    image: int
    patch: int
    tokens: int
    out: int
    mean: float
    std: float
    scale: float

    @property
    def grid(self) -> int:
        """Patches along a side."""
        return self.image // self.patch

    @property
    def pooled(self) -> int:
        """Tokens along a side."""
        return isqrt(self.tokens)

    @property
    def pool(self) -> int:
        """Patches along a side that are averaged into one token."""
        return self.grid // self.pooled


class Gemma3Tower(Tower):
    """pixels uint8 [images, 3, image, image] -> features [images, tokens, out]."""

    limit_options: ClassVar[Mapping[str, LimitOption]] = {"images": LimitOption("images", 1)}
    spellings: ClassVar[Mapping[str, str]] = _SPELLINGS
    unused: ClassVar[frozenset[str]] = _UNUSED

    def __init__(self, spec: Gemma3Spec):
        super().__init__()
        self.spec = spec
        self.normalise = PixelNorm(spec.mean, spec.std, spec.scale)
        self.embedding = Linear(3 * spec.patch**2, spec.hidden)
        self.position = nn.Parameter(torch.empty(spec.grid**2, spec.hidden))
        self.blocks = nn.ModuleList(
            Block(spec.hidden, spec.heads, spec.inner, spec.eps, "tanh") for _ in range(spec.layers)
        )
        self.norm = LayerNorm(spec.hidden, eps=spec.eps)
        self.projector_norm = RMSNorm(spec.hidden, spec.eps)
        self.projector = Linear(spec.hidden, spec.out, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        spec = self.spec
        x = patches_from_pixels(self.normalise(pixels), spec.patch)  # [images, patches, 3 * patch * patch]
        x = self.embedding(x) + self.position
        for block in self.blocks:
            x = block(x)
        # The mean between two norms belongs to their float32.
        x = self.norm(x.float()).unflatten(1, (spec.pooled, spec.pool, spec.pooled, spec.pool))
        x = x.mean((2, 4)).flatten(1, 2)  # [images, tokens, hidden]
        return self.projector(self.projector_norm(x)).to(self.dtype)

    @classmethod
    def spec_from_config(cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Gemma3Spec:
        from transformers import Gemma3TextConfig, SiglipVisionConfig

        full = Section(config, defaults=_defaults())
        vision = full.section("vision_config", vars(SiglipVisionConfig()))
        vision.require({"hidden_act": _GELU, "num_channels": 3})
        processor = settings(preprocessor, {"image_mean": 0.5, "image_std": 0.5, "rescale_factor": 1 / 255})
        spec = Gemma3Spec(
            hidden=vision.integer("hidden_size"),
            layers=vision.integer("num_hidden_layers"),
            heads=vision.integer("num_attention_heads"),
            inner=vision.integer("intermediate_size"),
            eps=vision.number("layer_norm_eps"),
            image=vision.integer("image_size"),
            patch=vision.integer("patch_size"),
            tokens=full.integer("mm_tokens_per_image"),
            out=full.section("text_config", vars(Gemma3TextConfig())).integer("hidden_size"),
            mean=processor.one_for_all("image_mean", positive=False),
            std=processor.one_for_all("image_std"),
            scale=processor.number("rescale_factor"),
        )
        _check(spec, processor)
        return spec

    @classmethod
    def is_vision(cls, name: str) -> bool:
        return name.startswith((_VISION, _PROJECTOR))

    @classmethod
    def tensor_shapes(cls, spec: Gemma3Spec) -> dict[str, tuple[int, ...]]:
        hidden, inner = spec.hidden, spec.inner
        shapes: dict[str, tuple[int, ...]] = {
            f"{_VISION}embeddings.patch_embedding.weight": (hidden, 3, spec.patch, spec.patch),
            f"{_VISION}embeddings.patch_embedding.bias": (hidden,),
            f"{_VISION}embeddings.position_embedding.weight": (spec.grid**2, hidden),
        }
        linears = {f"self_attn.{part}_proj": (hidden, hidden) for part in ("q", "k", "v", "out")}
        linears |= {"mlp.fc1": (inner, hidden), "mlp.fc2": (hidden, inner)}
        for layer in range(spec.layers):
            prefix = f"{_VISION}encoder.layers.{layer}."
            for name, shape in linears.items():
                shapes |= {f"{prefix}{name}.weight": shape, f"{prefix}{name}.bias": shape[:1]}
            for name in ("layer_norm1", "layer_norm2"):
                shapes |= {f"{prefix}{name}.weight": (hidden,), f"{prefix}{name}.bias": (hidden,)}
        return shapes | {
            f"{_VISION}post_layernorm.weight": (hidden,),
            f"{_VISION}post_layernorm.bias": (hidden,),
            f"{_PROJECTOR}mm_input_projection_weight": (hidden, spec.out),
            f"{_PROJECTOR}mm_soft_emb_norm.weight": (hidden,),
        }

    @classmethod
    def state_from_tensors(cls, spec: Gemma3Spec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Renames, and transforms four values: the patch convolution's kernel becomes the rows of a matrix in
        (channel, y, x) order; q, k and v are stacked into one projection; the projector's RMSNorm, stored as w
        for a factor of 1 + w, becomes that factor (in the dtype given, as the reference adds in float32); the
        projection, stored as [in, out], becomes the weight of a linear layer."""
        state = {
            "embedding.weight": tensors[f"{_VISION}embeddings.patch_embedding.weight"].flatten(1),
            "embedding.bias": tensors[f"{_VISION}embeddings.patch_embedding.bias"],
            "position": tensors[f"{_VISION}embeddings.position_embedding.weight"],
            "projector_norm.weight": 1.0 + tensors[f"{_PROJECTOR}mm_soft_emb_norm.weight"],
            "projector.weight": tensors[f"{_PROJECTOR}mm_input_projection_weight"].T,
        }
        renamed = {"norm1": "layer_norm1", "norm2": "layer_norm2", "attention.out": "self_attn.out_proj"}
        renamed |= {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
        for kind in ("weight", "bias"):
            state[f"norm.{kind}"] = tensors[f"{_VISION}post_layernorm.{kind}"]
            for layer in range(spec.layers):
                theirs, ours = f"{_VISION}encoder.layers.{layer}.", f"blocks.{layer}."
                for name, source in renamed.items():
                    state[f"{ours}{name}.{kind}"] = tensors[f"{theirs}{source}.{kind}"]
                qkv = [tensors[f"{theirs}self_attn.{part}_proj.{kind}"] for part in ("q", "k", "v")]
                state[f"{ours}attention.qkv.{kind}"] = torch.cat(qkv)
        return state

    def facts(self, config: Mapping[str, Any]) -> dict[str, Any]:
        full = Section(config, defaults=_defaults())
        return {
            "tokens_per_crop": self.spec.tokens,
            "hidden": self.spec.out,
            "boi_token_id": full.renamed_integer("boi_token_index", "boi_token_id"),
            "eoi_token_id": full.renamed_integer("eoi_token_index", "eoi_token_id"),
            "image_token_id": full.renamed_integer("image_token_index", "image_token_id"),
        }

    def inputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("pixels", "uint8", ("images", 3, self.spec.image, self.spec.image)),)

    def outputs(self, dtype: str) -> tuple[TensorSpec, ...]:
        return (TensorSpec("features", dtype, ("images", self.spec.tokens, self.spec.out)),)

    def default_limits(self) -> dict[str, int]:
        return {"images": 8}

    def samples(self, seed: int) -> list[Sample]:
        """Two images in one batch - noise, and smooth shapes with black and white areas - then the second alone."""
        generator = torch.Generator().manual_seed(seed)
        size = self.spec.image
        noise = torch.randint(0, 256, (3, size, size), generator=generator)
        y, x = torch.meshgrid(torch.linspace(0, 6, size), torch.linspace(0, 9, size), indexing="ij")
        waves = torch.stack([(x * y).sin(), (x + y).cos(), (x - 2 * y).sin()])
        smooth = (waves * 200 + 128).clamp(0, 255)  # a third of it saturates
        pair = torch.stack([noise.float(), smooth]).to(torch.uint8)
        return [Sample("2 images", {"pixels": pair}), Sample("1 image", {"pixels": pair[1:]})]


def _defaults() -> dict[str, Any]:
    """What the reference takes where config.json is silent about more than one half."""
    from transformers import Gemma3Config

    return vars(Gemma3Config())


def _check(spec: Gemma3Spec, processor: Section) -> None:
    if spec.image % spec.patch or spec.pooled**2 != spec.tokens or spec.grid % spec.pooled or spec.hidden % spec.heads:
        raise CheckpointError(
            f"config.json makes no sense: image, patch, tokens, hidden and heads do not divide in {spec}"
        )
    check_kind(processor, "Gemma3ImageProcessor")
    check_side(processor, spec.image)
    check_steps(processor)
