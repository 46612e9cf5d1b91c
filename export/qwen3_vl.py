"""Qwen3-VL's vision side, dense and MoE alike: native resolution, 2D rope, merged tokens and deepstack levels.

Reference: `Qwen3VLVisionModel` of `transformers.models.qwen3_vl.modeling_qwen3_vl` (5.24); Qwen3-VL arXiv:2511.21631.

An engine run takes images or frames of one grid: each attends within itself alone, so that equal grids form the batch
and no mask is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbovit.engines.bundle import Profile, TensorSpec
from turbovit.engines.errors import CheckpointError, UnsupportedModelError
from turbovit.engines.qwen3_vl import PATCHES_A_RUN, grid_inputs
from turbovit.export.config import Section, check_edges, check_kind, check_steps, rope_theta, settings
from turbovit.export.layers import Block, LayerNorm, Linear, PixelNorm
from turbovit.export.profiles import buckets
from turbovit.export.tower import LimitOption, Sample, Tower

_VISION = "model.visual."
_GELU = "gelu_pytorch_tanh"
_EPS = 1e-6  # a constant in the reference too
_THETA = 1e4  # of the 2D rope
VIDEO_PROCESSOR_FILE = "video_preprocessor_config.json"
_VIDEO_SETTINGS = f"{VIDEO_PROCESSOR_FILE} (or the video_processor in processor_config.json)"
_SIZES = {"patch_size": "patch", "temporal_patch_size": "temporal", "merge_size": "merge"}  # the processor's: ours


@dataclass(frozen=True)
class Qwen3VLSpec:
    """Sizes of the tower. `levels` are the layers whose outputs become deepstack levels."""

    hidden: int
    layers: int
    heads: int
    inner: int
    patch: int
    temporal: int
    merge: int
    positions: int
    out: int
    levels: tuple[int, ...]
    mean: float
    std: float
    scale: float

    @property
    def patch_values(self) -> int:
        """uint8 values of a patch: (channel, frame, y, x)."""
        return 3 * self.temporal * self.patch**2

    @property
    def merged(self) -> int:
        """Width of a token before the projection: the patches of a merge block side by side."""
        return self.hidden * self.merge**2

    @property
    def side(self) -> int:
        """Learned positions along a side."""
        return isqrt(self.positions)


class Merger(nn.Module):
    """[frames, patches, hidden] -> [frames, patches / merge**2, out]; the norm stands before the merge or after it."""

    def __init__(self, spec: Qwen3VLSpec, norm_after: bool):
        super().__init__()
        self.block = spec.merge**2
        self.norm_after = norm_after
        self.norm = LayerNorm(spec.merged if norm_after else spec.hidden, eps=_EPS)
        self.up = Linear(spec.merged, spec.merged)
        self.down = Linear(spec.merged, spec.out)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_after:
            x = self.norm(x.unflatten(1, (-1, self.block)).flatten(2))
        else:
            x = self.norm(x).unflatten(1, (-1, self.block)).flatten(2)
        return self.down(F.gelu(self.up(x)))


class Qwen3VLTower(Tower):
    """pixels uint8 [frames, patches, values] -> features and deepstack levels, each [frames, patches / 4, out].

    Patches are in merge-block order. `interp_index` and `interp_weight` [4, patches] resample the learned positions
    to the grid; `patch_position` [patches, 2] is each patch's row and column.
    """

    limit_options: ClassVar[Mapping[str, LimitOption]] = {
        "images": LimitOption("frames", 1),
        "pixels": LimitOption("merged", 32 * 32),
    }
    spellings: ClassVar[Mapping[str, str]] = {f"{model}visual.": _VISION for model in ("", "model.", "model.model.")}
    unused: ClassVar[frozenset[str]] = frozenset([f"{_VISION}rotary_pos_emb.inv_freq"])  # computed, and once saved

    def __init__(self, spec: Qwen3VLSpec):
        super().__init__()
        self.spec = spec
        self.normalise = PixelNorm(spec.mean, spec.std, spec.scale)
        self.embedding = Linear(spec.patch_values, spec.hidden)
        self.position = nn.Embedding(spec.positions, spec.hidden)
        self.blocks = nn.ModuleList(
            Block(spec.hidden, spec.heads, spec.inner, _EPS, "tanh") for _ in range(spec.layers)
        )
        self.merger = Merger(spec, norm_after=False)
        self.level_mergers = nn.ModuleList(Merger(spec, norm_after=True) for _ in spec.levels)
        with torch.device("cpu"):  # as numbers: a buffer would be no checkpoint tensor
            quarter = spec.hidden // spec.heads // 4
            self.frequencies = (1.0 / (_THETA ** (torch.arange(quarter, dtype=torch.float32) / quarter))).tolist()

    def forward(
        self, pixels: Tensor, interp_index: Tensor, interp_weight: Tensor, patch_position: Tensor
    ) -> tuple[Tensor, ...]:
        spec = self.spec
        x = self.embedding(self.normalise(pixels))
        # Corner by corner: all four at once would take four times the memory of the patches.
        position = self.position(interp_index[0]).float() * interp_weight[0][:, None]
        for corner in range(1, 4):
            position = position + self.position(interp_index[corner]).float() * interp_weight[corner][:, None]
        x = x + position.to(x.dtype)
        rope = self._rope(patch_position)
        levels = []
        for layer, block in enumerate(self.blocks):
            x = block(x, rope)
            if layer in spec.levels:
                levels.append(self.level_mergers[spec.levels.index(layer)](x))
        return tuple(output.to(self.dtype) for output in (self.merger(x), *levels))

    def _rope(self, patch_position: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [patches, 1, head size], float32: pairs in the first half turn with the row, then the column."""
        frequencies = torch.tensor(self.frequencies, device=patch_position.device)
        angles = (patch_position.float()[:, :, None] * frequencies).flatten(1)  # [patches, 2 * quarter]
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        return angles.cos(), angles.sin()

    @classmethod
    def is_vision(cls, name: str) -> bool:
        return name.startswith(_VISION)

    @classmethod
    def video_processor(cls, folder: Path) -> dict[str, Any]:
        found = super().video_processor(folder)
        if found is None:
            raise CheckpointError(
                f"{folder} has no {VIDEO_PROCESSOR_FILE} (and no video_processor in processor_config.json), without "
                f"which videos would get the sizes of images: download the processor files of the model too"
            )
        from transformers import Qwen3VLVideoProcessor

        names = ("size", *_SIZES)
        defaults = {name: getattr(Qwen3VLVideoProcessor, name) for name in names}
        video = settings(found, defaults, _VIDEO_SETTINGS)
        kind = video.given.get("video_processor_type")
        if kind not in (None, Qwen3VLVideoProcessor.__name__):
            raise video.refused("video_processor_type", kind, f'"{Qwen3VLVideoProcessor.__name__}"')
        for name in _SIZES:  # where they are not the images', there are no videos
            video.integer(name)
        check_edges(video)
        return found

    @classmethod
    def spec_from_config(cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Qwen3VLSpec:
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

        vision = Section(config).section("vision_config", vars(Qwen3VLVisionConfig()))
        vision.require({"hidden_act": _GELU, "in_channels": 3})
        theta = rope_theta(vision, _THETA)
        if theta != _THETA:
            raise UnsupportedModelError(f"config.json: the vision half's rope_theta is {theta}, supported: {_THETA}")
        processor = settings(preprocessor, _processor_defaults())
        layers = vision.integer("depth")
        spec = Qwen3VLSpec(
            hidden=vision.integer("hidden_size"),
            layers=layers,
            heads=vision.integer("num_heads"),
            inner=vision.integer("intermediate_size"),
            patch=vision.integer("patch_size"),
            temporal=vision.integer("temporal_patch_size"),
            merge=vision.integer("spatial_merge_size"),
            positions=vision.integer("num_position_embeddings"),
            out=vision.integer("out_hidden_size"),
            levels=vision.indexes("deepstack_visual_indexes", layers),
            mean=processor.one_for_all("image_mean", positive=False),
            std=processor.one_for_all("image_std"),
            scale=processor.number("rescale_factor"),
        )
        _check(spec, processor)
        return spec

    @classmethod
    def tensor_shapes(cls, spec: Qwen3VLSpec) -> dict[str, tuple[int, ...]]:
        hidden, inner, merged = spec.hidden, spec.inner, spec.merged
        shapes: dict[str, tuple[int, ...]] = {
            f"{_VISION}patch_embed.proj.weight": (hidden, 3, spec.temporal, spec.patch, spec.patch),
            f"{_VISION}patch_embed.proj.bias": (hidden,),
            f"{_VISION}pos_embed.weight": (spec.positions, hidden),
        }
        linears = {"attn.qkv": (3 * hidden, hidden), "attn.proj": (hidden, hidden)}
        linears |= {"mlp.linear_fc1": (inner, hidden), "mlp.linear_fc2": (hidden, inner)}
        blocks = {f"blocks.{layer}.{name}": shape for layer in range(spec.layers) for name, shape in linears.items()}
        norms = {f"blocks.{layer}.norm{number}": hidden for layer in range(spec.layers) for number in (1, 2)}
        mergers = {"merger": hidden} | {f"deepstack_merger_list.{level}": merged for level in range(len(spec.levels))}
        for name, width in mergers.items():
            norms[f"{name}.norm"] = width
            blocks |= {f"{name}.linear_fc1": (merged, merged), f"{name}.linear_fc2": (spec.out, merged)}
        for name, shape in blocks.items():
            shapes |= {f"{_VISION}{name}.weight": shape, f"{_VISION}{name}.bias": shape[:1]}
        for name, width in norms.items():
            shapes |= {f"{_VISION}{name}.weight": (width,), f"{_VISION}{name}.bias": (width,)}
        return shapes

    @classmethod
    def state_from_tensors(cls, spec: Qwen3VLSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Renames, and transforms one value: the 3D patch convolution's kernel becomes the rows of a matrix in
        (channel, frame, y, x) order, which is the order of a patch's pixels."""
        renamed = {
            "patch_embed.proj": "embedding",
            "pos_embed": "position",
            "deepstack_merger_list": "level_mergers",
            "attn.qkv": "attention.qkv",
            "attn.proj": "attention.out",
            "linear_fc1": "up",
            "linear_fc2": "down",
        }
        state = {}
        for name, tensor in tensors.items():
            ours = name.removeprefix(_VISION)
            for theirs, new in renamed.items():
                ours = ours.replace(theirs, new)
            state[ours] = tensor.flatten(1) if ours == "embedding.weight" else tensor
        return state

    def facts(self, config: Mapping[str, Any]) -> dict[str, Any]:
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig

        full = Section(config, defaults=vars(Qwen3VLConfig()))
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        return {name: full.integer(name, least=0) for name in names} | {
            "hidden": self.spec.out,
            "merge": self.spec.merge,
            "positions_side": self.spec.side,
            "temporal_patch": self.spec.temporal,
            "deepstack_levels": len(self.spec.levels),
        }

    def inputs(self) -> tuple[TensorSpec, ...]:
        patches = f"{self.spec.merge**2}*merged"
        return (
            TensorSpec("pixels", "uint8", ("frames", patches, self.spec.patch_values)),
            TensorSpec("interp_index", "int32", (4, patches)),
            TensorSpec("interp_weight", "float32", (4, patches)),
            TensorSpec("patch_position", "int32", (patches, 2)),
        )

    def outputs(self, dtype: str) -> tuple[TensorSpec, ...]:
        names = ["features", *(f"deepstack_{level}" for level in range(len(self.spec.levels)))]
        return tuple(TensorSpec(name, dtype, ("frames", "merged", self.spec.out)) for name in names)

    def default_limits(self) -> dict[str, int]:
        return {"frames": 8, "merged": 16384}  # a grid of 16,777,216 pixels, the processor's own limit

    def default_profiles(self, limits: Mapping[str, int]) -> tuple[Profile, ...]:
        """By patches of a frame: up to 1,024 (512x512 pixels), 4,096, 16,384 (a 1080p image has 8,160), and the limit.

        The optimum is one frame, and half of the range's patches. A range holds as many frames as the preprocessor
        puts into one run.
        """
        ranges = buckets(limits["merged"], [patches // self.spec.merge**2 for patches in (1024, 4096, 16384)])
        most = [PATCHES_A_RUN // (low * self.spec.merge**2) for low, _, _ in ranges]
        frames = [(1, 1, max(1, min(count, limits["frames"]))) for count in most]
        return tuple(Profile({"frames": f, "merged": merged}) for f, merged in zip(frames, ranges, strict=True))

    def tokens(self, sizes: Mapping[str, int]) -> int:
        return self.spec.merge**2 * sizes["merged"]

    def samples(self, seed: int) -> list[Sample]:
        """Noise on grids that are wide, tall, square and single, alone and in batches."""
        generator = torch.Generator().manual_seed(seed)
        samples = []
        for frames, height, width in ((2, 12, 20), (3, 8, 6), (1, 26, 18), (1, 2, 2), (2, 16, 16)):
            shape = (frames, height * width, self.spec.patch_values)
            pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            grid = grid_inputs(height, width, self.spec.merge, self.spec.side)
            samples.append(Sample(f"{frames} x {height}x{width} patches", {"pixels": pixels, **grid}))
        return samples


def _processor_defaults() -> dict[str, Any]:
    """The settings that the image processor's class takes where they are left out."""
    from transformers import Qwen2VLImageProcessor

    names = (*_SIZES, "image_mean", "image_std", "rescale_factor", "size")
    return {name: getattr(Qwen2VLImageProcessor, name) for name in names}


def _check(spec: Qwen3VLSpec, processor: Section) -> None:
    if spec.side**2 != spec.positions or spec.hidden % (4 * spec.heads):
        raise CheckpointError(f"config.json makes no sense: sizes, positions and heads do not fit in {spec}")
    check_kind(processor, "Qwen2VLImageProcessor")
    for name, size in _SIZES.items():
        if processor.integer(name) != getattr(spec, size):
            raise CheckpointError(
                f"the processor's {name} is {processor.integer(name)}, the vision tower's {getattr(spec, size)}"
            )
    check_edges(processor)
    check_steps(processor)
