"""Llama 4's vision side: a ViT over 336 px tiles with 2D rope and its class token last, pixel shuffle, two projections.

Reference: `Llama4VisionModel` and `Llama4MultiModalProjector` of `transformers.models.llama4.modeling_llama4` (5.24).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbovit.engines.bundle import Profile, TensorSpec
from turbovit.engines.errors import CheckpointError
from turbovit.export.config import Section, check_kind, check_side, check_steps, rope_theta, settings
from turbovit.export.layers import Block, LayerNorm, Linear, PixelTable, Rope, patches_from_pixels
from turbovit.export.tower import LimitOption, Sample, Tower

_VISION = "vision_model."
_PROJECTOR = "multi_modal_projector.linear_1.weight"
_PARTS = (_VISION, "multi_modal_projector.")
_GELU = "gelu"
_THETA = 1e4  # of the rope where the config is silent
_EPS = 1e-5  # torch's default, which the reference takes whatever the config's norm_eps
_SHUFFLE = 2  # patches along a side of a token: the config's pixel_shuffle_ratio is 1 / 2


@dataclass(frozen=True)
class Llama4Spec:
    """Sizes of the tower. `mean`, `std` and `scale` are the processor's."""

    hidden: int
    layers: int
    heads: int
    inner: int
    image: int
    patch: int
    theta: float
    adapter_in: int
    adapter_out: int
    out: int
    mean: float
    std: float
    scale: float

    @property
    def grid(self) -> int:
        """Patches along a side of a tile."""
        return self.image // self.patch

    @property
    def tokens(self) -> int:
        """Of a tile."""
        return (self.grid // _SHUFFLE) ** 2

    @property
    def head_size(self) -> int:
        """Channels of an attention head."""
        return self.hidden // self.heads


class Llama4Tower(Tower):
    """pixels uint8 [tiles, 3, image, image] -> features [tiles, tokens, out]."""

    limit_options: ClassVar[Mapping[str, LimitOption]] = {"images": LimitOption("tiles", 1)}
    spellings: ClassVar[Mapping[str, str]] = {f"{model}{part}": part for part in _PARTS for model in ("", "model.")}
    unused: ClassVar[frozenset[str]] = frozenset([f"{_VISION}rotary_embedding.freqs_ci"])  # computed, and once saved

    def __init__(self, spec: Llama4Spec):
        super().__init__()
        self.spec = spec
        self.embedding = Linear(3 * spec.patch**2, spec.hidden, bias=False)
        self.class_token = nn.Parameter(torch.empty(spec.hidden))
        self.position = nn.Parameter(torch.empty(spec.grid**2 + 1, spec.hidden))
        self.norm_before = LayerNorm(spec.hidden, eps=_EPS)
        self.blocks = nn.ModuleList(
            Block(spec.hidden, spec.heads, spec.inner, _EPS, "none") for _ in range(spec.layers)
        )
        self.norm_after = LayerNorm(spec.hidden, eps=_EPS)
        self.adapter_in = Linear(spec.hidden * _SHUFFLE**2, spec.adapter_in, bias=False)
        self.adapter_out = Linear(spec.adapter_in, spec.adapter_out, bias=False)
        self.projector = Linear(spec.adapter_out, spec.out, bias=False)
        with torch.device("cpu"):  # numbers of the architecture, no checkpoint tensors
            self.rope = _rope(spec)
            # Not while tracing: the exporter computes bfloat16 in float32.
            self.normalise = PixelTable(_pixel_values(spec))

    def forward(self, pixels: Tensor) -> Tensor:
        spec = self.spec
        x = patches_from_pixels(self.normalise(pixels), spec.patch)  # [tiles, patches, 3 * patch * patch]
        x = self.embedding(x)
        class_token = self.class_token.to(x.dtype).expand(x.shape[0], 1, -1)
        x = torch.cat([x, class_token], dim=1) + self.position
        x = self.norm_before(x)
        rope = (self.rope[0].to(x.device), self.rope[1].to(x.device))
        for block in self.blocks:
            x = block(x, rope)
        side = spec.grid // _SHUFFLE
        x = self.norm_after(x)[:, :-1].unflatten(1, (side, _SHUFFLE, side, _SHUFFLE))
        x = x.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(1, 2)  # [tiles, tokens, (y, x, hidden) of a token's patches]
        return self.projector(F.gelu(self.adapter_out(F.gelu(self.adapter_in(x))))).to(self.dtype)

    @classmethod
    def spec_from_config(cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Llama4Spec:
        from transformers import Llama4TextConfig, Llama4VisionConfig

        full = Section(config)
        vision = full.section("vision_config", vars(Llama4VisionConfig()))
        vision.require({"hidden_act": _GELU, "num_channels": 3, "pixel_shuffle_ratio": 1 / _SHUFFLE})
        processor = settings(preprocessor, {"image_mean": 0.5, "image_std": 0.5, "rescale_factor": 1 / 255})
        spec = Llama4Spec(
            hidden=vision.integer("hidden_size"),
            layers=vision.integer("num_hidden_layers"),
            heads=vision.integer("num_attention_heads"),
            inner=vision.integer("intermediate_size"),
            image=vision.integer("image_size"),
            patch=vision.integer("patch_size"),
            theta=rope_theta(vision, _THETA),
            adapter_in=vision.integer("projector_input_dim"),
            adapter_out=vision.integer("projector_output_dim"),
            out=full.section("text_config", vars(Llama4TextConfig())).integer("hidden_size"),
            mean=processor.one_for_all("image_mean", positive=False),
            std=processor.one_for_all("image_std"),
            scale=processor.number("rescale_factor"),
        )
        _check(spec, processor)
        return spec

    @classmethod
    def is_vision(cls, name: str) -> bool:
        return name.startswith(_PARTS)

    @classmethod
    def tensor_shapes(cls, spec: Llama4Spec) -> dict[str, tuple[int, ...]]:
        hidden, inner = spec.hidden, spec.inner
        shapes: dict[str, tuple[int, ...]] = {
            f"{_VISION}class_embedding": (hidden,),
            f"{_VISION}positional_embedding_vlm": (spec.grid**2 + 1, hidden),
            f"{_VISION}patch_embedding.linear.weight": (hidden, 3 * spec.patch**2),
            f"{_VISION}vision_adapter.mlp.fc1.weight": (spec.adapter_in, hidden * _SHUFFLE**2),
            f"{_VISION}vision_adapter.mlp.fc2.weight": (spec.adapter_out, spec.adapter_out),
            _PROJECTOR: (spec.out, spec.adapter_out),
        }
        biased: dict[str, tuple[int, ...]] = {"layernorm_pre": (hidden,), "layernorm_post": (hidden,)}
        for layer in range(spec.layers):
            prefix = f"model.layers.{layer}."
            biased |= {f"{prefix}self_attn.{part}_proj": (hidden, hidden) for part in ("q", "k", "v", "o")}
            biased |= {f"{prefix}mlp.fc1": (inner, hidden), f"{prefix}mlp.fc2": (hidden, inner)}
            biased |= {f"{prefix}{norm}": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        for name, shape in biased.items():
            shapes |= {f"{_VISION}{name}.weight": shape, f"{_VISION}{name}.bias": shape[:1]}
        return shapes

    @classmethod
    def state_from_tensors(cls, spec: Llama4Spec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Renames, and transforms two values: q, k and v are stacked into one projection, and the channels of every
        head of q and k are reordered from rope pairs (2i, 2i + 1) to (i, i + half). The same order on both leaves
        their products as they are."""
        state = {
            "embedding.weight": tensors[f"{_VISION}patch_embedding.linear.weight"],
            "class_token": tensors[f"{_VISION}class_embedding"],
            "position": tensors[f"{_VISION}positional_embedding_vlm"],
            "adapter_in.weight": tensors[f"{_VISION}vision_adapter.mlp.fc1.weight"],
            "adapter_out.weight": tensors[f"{_VISION}vision_adapter.mlp.fc2.weight"],
            "projector.weight": tensors[_PROJECTOR],
        }
        renamed = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm", "attention.out": "self_attn.o_proj"}
        renamed |= {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
        for kind in ("weight", "bias"):
            state[f"norm_before.{kind}"] = tensors[f"{_VISION}layernorm_pre.{kind}"]
            state[f"norm_after.{kind}"] = tensors[f"{_VISION}layernorm_post.{kind}"]
            for layer in range(spec.layers):
                theirs, ours = f"{_VISION}model.layers.{layer}.", f"blocks.{layer}."
                for name, source in renamed.items():
                    state[f"{ours}{name}.{kind}"] = tensors[f"{theirs}{source}.{kind}"]
                query, key, value = (tensors[f"{theirs}self_attn.{part}_proj.{kind}"] for part in ("q", "k", "v"))
                qkv = [_halves(query, spec), _halves(key, spec), value]
                state[f"{ours}attention.qkv.{kind}"] = torch.cat(qkv)
        return state

    def facts(self, config: Mapping[str, Any]) -> dict[str, Any]:
        from transformers import Llama4Config

        full = Section(config, defaults=vars(Llama4Config()))
        # The config's image_token_index is the patch's; what stands for a whole image is the tokenizer's alone.
        return {
            "tokens_per_tile": self.spec.tokens,
            "hidden": self.spec.out,
            "patch_token_id": full.renamed_integer("image_token_index", "image_token_id"),
        }

    def inputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("pixels", "uint8", ("tiles", 3, self.spec.image, self.spec.image)),)

    def outputs(self, dtype: str) -> tuple[TensorSpec, ...]:
        return (TensorSpec("features", dtype, ("tiles", self.spec.tokens, self.spec.out)),)

    def default_limits(self) -> dict[str, int]:
        return {"tiles": 17}  # an image of 16 tiles and its global view

    def default_profiles(self, limits: Mapping[str, int]) -> tuple[Profile, ...]:
        """One tile; an image of four tiles and its global view; the most."""
        limit = limits["tiles"]
        ranges = [sizes for sizes in ((1, 1, 1), (1, 5, 9)) if sizes[2] < limit] + [(1, limit, limit)]
        return tuple(Profile({"tiles": sizes}) for sizes in ranges)

    def tokens(self, sizes: Mapping[str, int]) -> int:
        return self.spec.grid**2 + 1

    def samples(self, seed: int) -> list[Sample]:
        """Three tiles in one batch (noise, a checkerboard, a ramp), then the last two, then the last alone."""
        generator = torch.Generator().manual_seed(seed)
        size = self.spec.image
        noise = torch.randint(0, 256, (3, size, size), generator=generator)
        y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        board = (((x // 20 + y // 13) % 2) * 255).expand(3, -1, -1)
        ramp = torch.stack([x, y, x + y]) % 256
        tiles = torch.stack([noise, board, ramp]).to(torch.uint8)
        return [
            Sample("3 tiles", {"pixels": tiles}),
            Sample("2 tiles", {"pixels": tiles[1:]}),
            Sample("1 tile", {"pixels": tiles[2:]}),
        ]


def _rope(spec: Llama4Spec) -> Rope:
    """cos and sin [patches + 1, 1, head size], float32; columns turn the first half of the pairs, rows the second.

    Counted from 1; the class token, last, is not turned.
    """
    half = spec.head_size // 2
    frequencies = 1.0 / (spec.theta ** (torch.arange(0, half, 2).float() / half))
    index = torch.arange(spec.grid**2)
    columns, rows = ((axis + 1)[:, None] * frequencies for axis in (index % spec.grid, index // spec.grid))
    angles = torch.cat([columns, rows], dim=-1)
    angles = torch.cat([angles, torch.zeros(1, half)])
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def _halves(tensor: Tensor, spec: Llama4Spec) -> Tensor:
    """Rows of every head from (2i, 2i + 1) to (i, i + half)."""
    return tensor.unflatten(0, (spec.heads, spec.head_size // 2, 2)).transpose(1, 2).flatten(0, 2)


def _pixel_values(spec: Llama4Spec) -> list[float]:
    """What the reference's processor makes of the 256 values of a pixel: it computes in bfloat16."""
    values = torch.arange(256).to(torch.bfloat16) * spec.scale
    mean, std = (torch.tensor(value, dtype=torch.bfloat16) for value in (spec.mean, spec.std))
    return ((values - mean) / std).float().tolist()


def _check(spec: Llama4Spec, processor: Section) -> None:
    if spec.image % (spec.patch * _SHUFFLE) or spec.hidden % (4 * spec.heads) or spec.adapter_in != spec.adapter_out:
        raise CheckpointError(f"config.json makes no sense: sizes, heads and adapter do not fit in {spec}")
    check_kind(processor, "Llama4ImageProcessor")
    check_side(processor, spec.image)
    check_steps(processor)
