"""DeepSeek-VL2's vision side: SigLIP so400m at 384 px, 2x2 patches put side by side, an MLP projector.

Reference: the original's ``deepseek_vl2/models/siglip_vit.py`` (timm's VisionTransformer) and
``modeling_deepseek_vl_v2.py`` (github.com/deepseek-ai/DeepSeek-VL2); SigLIP arXiv:2303.15343, DeepSeek-VL2
arXiv:2412.10302.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbovit.engines.bundle import Profile, TensorSpec
from turbovit.engines.deepseek_vl2 import DEFAULT_MEAN, PROCESSOR_FILE
from turbovit.engines.errors import CheckpointError
from turbovit.export.config import Section, settings
from turbovit.export.layers import Block, LayerNorm, Linear, PixelScaleThenNorm, patches_from_pixels
from turbovit.export.tower import LimitOption, Sample, Tower
from turbovit.export.weights import read_json

_VISION, _PROJECTOR, _POOL = "vision.", "projector.layers.", "vision.attn_pool."
_EXTRA = ("image_newline", "view_seperator")  # spelt as in the checkpoints
_PARTS = (_VISION, "projector.", *_EXTRA)
_EPS = 1e-6

# What the original's code takes where config.json is silent, which the released ones are about heads and image size.
_VISION_DEFAULTS = {
    "image_size": 384,
    "patch_size": 16,
    "width": 1024,
    "layers": 24,
    "heads": 16,
    "mlp_ratio": 4,
    "class_token": False,
    "global_pool": "map",
    "ignore_head": True,
}
_PROJECTOR_DEFAULTS = {
    "projector_type": "downsample_mlp_gelu",
    "input_dim": 1152,
    "n_embed": 2048,
    "depth": 2,
    "mlp_ratio": 1,
    "downsample_ratio": 2,
    "token_pooling": False,
}
_MODEL_DEFAULTS = {"tile_tag": "2D", "global_view_pos": "head"}
_PROCESSOR_DEFAULTS: dict[str, Any] = {"normalize": True, "image_token": "<image>", "sft_format": "deepseek"}
_PROCESSOR_DEFAULTS |= {"image_mean": DEFAULT_MEAN, "image_std": 0.5}
_POSITIONS = ("head", "tail")


@dataclass(frozen=True)
class DeepseekVL2Spec:
    """Sizes of the tower. `mean` and `std` are the processor's, for pixels of 0 to 1.

    Attributes:
        projector: width in and out of each of the projector's layers.
        global_first: whether an image's global view stands before its tiles.
    """

    hidden: int
    layers: int
    heads: int
    inner: int
    image: int
    patch: int
    merge: int
    projector: tuple[int, ...]
    mean: float
    std: float
    global_first: bool

    @property
    def grid(self) -> int:
        """Patches along a side; what is left of the image at the right and the bottom is not looked at."""
        return self.image // self.patch

    @property
    def side(self) -> int:
        """Tokens along a side: of patches, zeros behind them where they do not divide."""
        return -(-self.grid // self.merge)

    @property
    def out(self) -> int:
        """Width of a token."""
        return self.projector[-1]


class DeepseekVL2Tower(Tower):
    """pixels uint8 [tiles, 3, image, image] -> features [tiles, tokens, out]."""

    limit_options: ClassVar[Mapping[str, LimitOption]] = {"images": LimitOption("tiles", 1)}
    spellings: ClassVar[Mapping[str, str]] = {f"{model}{part}": part for part in _PARTS for model in ("", "model.")}

    def __init__(self, spec: DeepseekVL2Spec):
        super().__init__()
        self.spec = spec
        self.normalise = PixelScaleThenNorm(spec.mean, spec.std)
        self.embedding = Linear(3 * spec.patch**2, spec.hidden)
        self.position = nn.Parameter(torch.empty(spec.grid**2, spec.hidden))
        self.blocks = nn.ModuleList(
            Block(spec.hidden, spec.heads, spec.inner, _EPS, "tanh") for _ in range(spec.layers)
        )
        self.norm = LayerNorm(spec.hidden, eps=_EPS)
        widths = zip(spec.projector, spec.projector[1:], strict=False)
        self.projector = nn.ModuleList(Linear(before, after) for before, after in widths)
        self.image_newline = nn.Parameter(torch.empty(spec.out))
        self.view_seperator = nn.Parameter(torch.empty(spec.out))

    def forward(self, pixels: Tensor) -> Tensor:
        spec = self.spec
        seen = self.normalise(pixels)[:, :, : spec.grid * spec.patch, : spec.grid * spec.patch]
        x = patches_from_pixels(seen, spec.patch)  # [tiles, patches, 3 * patch * patch]
        x = self.embedding(x) + self.position
        for block in self.blocks:
            x = block(x)
        x = self.norm(x).unflatten(1, (spec.grid, spec.grid))
        missing = spec.side * spec.merge - spec.grid
        x = F.pad(x, (0, 0, 0, missing, 0, missing))  # zeros at the right and the bottom
        x = x.unflatten(2, (spec.side, spec.merge)).unflatten(1, (spec.side, spec.merge))
        x = x.transpose(2, 3).flatten(3).flatten(1, 2)  # [tiles, tokens, (y, x, hidden) of a token's patches]
        first, *others = self.projector
        x = first(x)
        for layer in others:
            x = layer(F.gelu(x))
        return x.to(self.dtype)

    def default_profiles(self, limits: Mapping[str, int]) -> tuple[Profile, ...]:
        """An image of one tile and its global view; one of two tiles, or of four; the most."""
        limit = limits["tiles"]
        ranges = [sizes for sizes in ((1, 2, 2), (1, 3, 5)) if sizes[2] < limit] + [(1, limit, limit)]
        return tuple(Profile({"tiles": sizes}) for sizes in ranges)

    @classmethod
    def image_processor(cls, folder: Path) -> dict[str, Any]:
        return read_json(folder / PROCESSOR_FILE)

    @classmethod
    def spec_from_config(cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> DeepseekVL2Spec:
        full = Section(config, defaults=_MODEL_DEFAULTS)
        vision = full.section("vision_config", _VISION_DEFAULTS)
        projector = full.section("projector_config", _PROJECTOR_DEFAULTS, required=False)
        # What the original's code has an option for and no released checkpoint uses.
        full.require({"tile_tag": "2D"})
        vision.require({"class_token": False, "global_pool": "map", "ignore_head": True})
        projector.require({"projector_type": "downsample_mlp_gelu", "token_pooling": False})
        position = full.value("global_view_pos", " or ".join(_POSITIONS))
        if position not in _POSITIONS:
            raise full.refused("global_view_pos", position, " or ".join(_POSITIONS))
        hidden, merge = vision.integer("width"), projector.integer("downsample_ratio")
        out = projector.integer("n_embed")
        inner = out * projector.integer("mlp_ratio")
        processor = settings(preprocessor, _PROCESSOR_DEFAULTS, PROCESSOR_FILE)
        spec = DeepseekVL2Spec(
            hidden=hidden,
            layers=vision.integer("layers"),
            heads=vision.integer("heads"),
            inner=int(hidden * vision.number("mlp_ratio")),
            image=vision.integer("image_size"),
            patch=vision.integer("patch_size"),
            merge=merge,
            projector=(
                projector.integer("input_dim") * merge**2,
                *[inner] * (max(projector.integer("depth"), 2) - 1),
                out,
            ),
            mean=processor.one_for_all("image_mean", positive=False),
            std=processor.one_for_all("image_std"),
            global_first=position == _POSITIONS[0],
        )
        _check(spec, processor)
        return spec

    @classmethod
    def is_vision(cls, name: str) -> bool:
        return name.startswith(_PARTS)

    @classmethod
    def tensor_shapes(cls, spec: DeepseekVL2Spec) -> dict[str, tuple[int, ...]]:
        hidden, inner = spec.hidden, spec.inner
        shapes: dict[str, tuple[int, ...]] = {f"{_VISION}pos_embed": (1, spec.grid**2, hidden)}
        shapes |= dict.fromkeys(_EXTRA, (spec.out,))
        biased: dict[str, tuple[int, ...]] = {
            f"{_VISION}patch_embed.proj": (hidden, 3, spec.patch, spec.patch),
            f"{_VISION}norm": (hidden,),
        }
        for layer in range(spec.layers):
            prefix = f"{_VISION}blocks.{layer}."
            biased |= {f"{prefix}attn.qkv": (3 * hidden, hidden), f"{prefix}attn.proj": (hidden, hidden)}
            biased |= {f"{prefix}mlp.fc1": (inner, hidden), f"{prefix}mlp.fc2": (hidden, inner)}
            biased |= {f"{prefix}norm1": (hidden,), f"{prefix}norm2": (hidden,)}
        for layer, (before, after) in enumerate(zip(spec.projector, spec.projector[1:], strict=False)):
            biased[f"{_PROJECTOR}{2 * layer}"] = (after, before)
        unused, more = _unused_shapes(spec)
        for name, shape in (biased | more).items():
            shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        return shapes | unused

    @classmethod
    def state_from_tensors(cls, spec: DeepseekVL2Spec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Renames, and reorders: the patch convolution's kernel becomes the rows of a matrix in (channel, y, x) order,
        positions lose their batch axis, and the projector's first layer takes a token's patches as (y, x, hidden),
        where the original takes (hidden, y, x): so whole patches are moved, not single values. The attention pool,
        which the original makes and never runs, is left out."""
        state = {name: tensors[name] for name in _EXTRA}
        state["position"] = tensors[f"{_VISION}pos_embed"][0]
        state["embedding.weight"] = tensors[f"{_VISION}patch_embed.proj.weight"].flatten(1)
        state["embedding.bias"] = tensors[f"{_VISION}patch_embed.proj.bias"]
        renamed = {"norm1": "norm1", "norm2": "norm2", "attention.qkv": "attn.qkv", "attention.out": "attn.proj"}
        renamed |= {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
        for kind in ("weight", "bias"):
            state[f"norm.{kind}"] = tensors[f"{_VISION}norm.{kind}"]
            for layer in range(len(spec.projector) - 1):
                state[f"projector.{layer}.{kind}"] = tensors[f"{_PROJECTOR}{2 * layer}.{kind}"]
            for layer in range(spec.layers):
                for name, source in renamed.items():
                    state[f"blocks.{layer}.{name}.{kind}"] = tensors[f"{_VISION}blocks.{layer}.{source}.{kind}"]
        by_value = state["projector.0.weight"].unflatten(1, (spec.hidden, spec.merge**2))
        state["projector.0.weight"] = by_value.transpose(1, 2).flatten(1)
        return state

    def facts(self, config: Mapping[str, Any]) -> dict[str, Any]:
        # The image token's id is the tokenizer's alone.
        return {
            "tile": self.spec.image,
            "tokens_per_side": self.spec.side,
            "hidden": self.spec.out,
            "global_view_pos": _POSITIONS[0] if self.spec.global_first else _POSITIONS[1],
        }

    def extra_tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in _EXTRA}

    def inputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("pixels", "uint8", ("tiles", 3, self.spec.image, self.spec.image)),)

    def outputs(self, dtype: str) -> tuple[TensorSpec, ...]:
        return (TensorSpec("features", dtype, ("tiles", self.spec.side**2, self.spec.out)),)

    def default_limits(self) -> dict[str, int]:
        return {"tiles": 10}  # an image of nine tiles and its global view

    def samples(self, seed: int) -> list[Sample]:
        """Three views in one batch (noise, stripes, an image on its grey canvas), then the last two, then the last."""
        generator = torch.Generator().manual_seed(seed)
        size = self.spec.image
        noise = torch.randint(0, 256, (3, size, size), generator=generator)
        y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        stripes = (((x + 2 * y) // 17 % 2) * 255).expand(3, -1, -1)
        inside = (x >= size // 5) & (x < size - size // 5)
        padded = torch.where(inside, torch.stack([x * 2, y, x + y]) % 256, 127)
        views = torch.stack([noise, stripes, padded]).to(torch.uint8)
        return [
            Sample("3 tiles", {"pixels": views}),
            Sample("2 tiles", {"pixels": views[1:]}),
            Sample("1 tile", {"pixels": views[2:]}),
        ]


def _check(spec: DeepseekVL2Spec, processor: Section) -> None:
    if spec.inner < 1 or spec.hidden % spec.heads or spec.grid < 1 or spec.projector[0] != spec.hidden * spec.merge**2:
        raise CheckpointError(f"config.json makes no sense: sizes, heads and projector do not fit in {spec}")
    for name, ours in (("patch_size", spec.patch), ("downsample_ratio", spec.merge)):
        if processor.integer(name) != ours:
            raise CheckpointError(f"{PROCESSOR_FILE}'s {name} is {processor.integer(name)}, the vision tower's {ours}")
    processor.require({name: _PROCESSOR_DEFAULTS[name] for name in ("normalize", "image_token", "sft_format")})
    _check_resolutions(processor, spec.image)


def _check_resolutions(processor: Section, image: int) -> None:
    """The first is a tile, and all are whole tiles."""
    expected = "a list of [width, height]"
    candidates = processor.value("candidate_resolutions", expected)
    whole = isinstance(candidates, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(side, int) and side > 0 for side in pair)
        for pair in candidates
    )
    if not whole or not candidates:
        raise processor.refused("candidate_resolutions", candidates, expected)
    if candidates[0] != [image, image] or any(side % image for pair in candidates for side in pair):
        raise CheckpointError(
            f"{PROCESSOR_FILE}'s candidate_resolutions are {candidates}: the first must be [{image}, {image}], the "
            f"vision tower's, and the others made of such tiles"
        )


def _unused_shapes(spec: DeepseekVL2Spec) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """The attention pool, which the original makes and never runs: plain tensors, and layers with a bias."""
    hidden, inner = spec.hidden, spec.inner
    layers: dict[str, tuple[int, ...]] = {
        "q": (hidden, hidden),
        "kv": (2 * hidden, hidden),
        "proj": (hidden, hidden),
        "norm": (hidden,),
        "mlp.fc1": (inner, hidden),
        "mlp.fc2": (hidden, inner),
    }
    return {f"{_POOL}latent": (1, 1, hidden)}, {f"{_POOL}{name}": shape for name, shape in layers.items()}
