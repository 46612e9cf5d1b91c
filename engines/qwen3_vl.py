"""Qwen3-VL: images and videos to uint8 patches of a grid, and features back to images and temporal steps.

Reference: `transformers.models.qwen3_vl` (processors; `get_vision_interpolation_indices_and_weights` and
`get_vision_position_ids` of `transformers.vision_utils`), 5.24.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from turbovit.engines.errors import InputError
from turbovit.engines.images import ImageLike, rgb_from_image
from turbovit.engines.preprocessor import Encoded, Grid, Pixels, Preprocessor, Video

_UINT8: Mapping[str, Any] = {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}
# Patches of one engine run: what one image may have. More frames than that go in several runs.
_PATCHES_A_RUN = 16384
# What a video without one is taken to have; Qwen3VLProcessor does the same.
_DEFAULT_FPS = 24.0


class Qwen3VLPreprocessor(Preprocessor):
    """One row an image, one a temporal step of a video (two frames); rows of equal grids share engine runs."""

    def __init__(self, processor_folder: Path, facts: Mapping[str, Any]):
        from transformers import AutoImageProcessor, AutoVideoProcessor

        self._image_processor = AutoImageProcessor.from_pretrained(processor_folder)
        self._video_processor = AutoVideoProcessor.from_pretrained(processor_folder)
        self._merge = int(facts["merge"])
        self._side = int(facts["positions_side"])
        self._temporal = int(facts["temporal_patch"])
        # Unset, newer transformers warn and mean False.
        self._video_options = (
            {"cap_pixels_per_frame": False} if hasattr(self._video_processor, "cap_pixels_per_frame") else {}
        )

    def pixels_from_image(self, image: ImageLike, size: Mapping[str, int] | None = None) -> Pixels:
        """One image at its native resolution.

        Args:
            size: ``shortest_edge`` and ``longest_edge``, in pixels of the whole image, instead of the processor's.
        """
        rgb = rgb_from_image(image, self.alpha)
        options = {**_UINT8, **_size_option(self._image_processor, size)}
        output = _processed(self._image_processor, rgb, options)
        (grid,) = output["image_grid_thw"].tolist()
        return self._pixels(output["pixel_values"], (grid[0], grid[1], grid[2]))

    def pixels_from_video(self, video: Video, size: Mapping[str, int] | None = None) -> Pixels:
        """A video whose frames are sampled already; resized as the reference does.

        Args:
            size: as in `pixels_from_image`, for all frames together.
        """
        frames = torch.from_numpy(video.frames).permute(0, 3, 1, 2)  # [frames, 3, height, width]
        options: dict[str, Any] = {**_UINT8, **self._video_options, "do_sample_frames": False, "do_resize": True}
        options |= _size_option(self._video_processor, size)
        output = _processed(self._video_processor, [frames], options)
        (grid,) = output["video_grid_thw"].tolist()
        pixels = self._pixels(output["pixel_values_videos"], (grid[0], grid[1], grid[2]))
        return Pixels(pixels.rows, pixels.group, pixels.runs, pixels.grid, self._timestamps(video))

    def inputs_from_rows(self, rows: Tensor, group: Hashable) -> dict[str, Tensor]:
        height, width = cast(tuple[int, int], group)
        return {"pixels": rows, **grid_inputs(height, width, self._merge, self._side)}

    def max_rows(self, group: Hashable) -> int:
        height, width = cast(tuple[int, int], group)
        return max(1, _PATCHES_A_RUN // (height * width))

    def encoded_from_rows(self, outputs: Mapping[str, Tensor], pixels: Pixels) -> Encoded:
        levels = [tensor.flatten(0, 1) for name, tensor in sorted(outputs.items()) if name != "features"]
        deepstack = torch.stack(levels) if levels else None
        return Encoded(outputs["features"].flatten(0, 1), pixels.runs, deepstack, pixels.grid, pixels.timestamps)

    def _pixels(self, patches: Tensor, grid: Grid) -> Pixels:
        steps, height, width = grid
        tokens = height * width // self._merge**2
        rows = patches.unflatten(0, (steps, height * width))
        return Pixels(rows, group=(height, width), runs=(tokens,) * steps, grid=grid)

    def _timestamps(self, video: Video) -> tuple[float, ...]:
        """Seconds of each temporal step: half way between its first and last frame; the last frame fills up a step."""
        indices = list(video.frame_indices)
        indices += [indices[-1]] * (-len(indices) % self._temporal)
        seconds = [index / (video.fps or _DEFAULT_FPS) for index in indices]
        ends = zip(seconds[:: self._temporal], seconds[self._temporal - 1 :: self._temporal], strict=True)
        return tuple((first + last) / 2 for first, last in ends)


@lru_cache(maxsize=256)
def grid_inputs(height: int, width: int, merge: int, side: int) -> Mapping[str, Tensor]:
    """What the tower needs to know of a grid; patches in merge-block order. Not to be changed: it is cached.

    Args:
        height, width: of the grid, in patches; multiples of `merge`.
        merge: patches along a side of a merge block.
        side: learned positions along a side; they are resampled bilinearly, corner to corner (align_corners).

    Returns:
        interp_index int32 [4, patches], interp_weight float32 [4, patches], patch_position int32 [patches, 2].
    """
    blocks = (height // merge, merge, width // merge, merge)
    rows, columns = (
        axis.reshape(blocks).transpose(1, 2).flatten()
        for axis in torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    )
    (top, top_weight), (left, left_weight) = _taps(rows, height, side), _taps(columns, width, side)
    index = (top[:, None] * side + left[None]).flatten(0, 1)
    weight = (top_weight[:, None] * left_weight[None]).flatten(0, 1)
    return {
        "interp_index": index.to(torch.int32),
        "interp_weight": weight,
        "patch_position": torch.stack([rows, columns], dim=1).to(torch.int32),
    }


def _taps(position: Tensor, size: int, side: int) -> tuple[Tensor, Tensor]:
    """The two source positions [2, patches] of each target position along an axis, and their float32 weights."""
    source = position.to(torch.float32) * (side - 1) / max(size - 1, 1)
    floor = source.floor()
    taps = torch.stack([floor, floor + 1])
    weights = (1 - (source - taps).abs()).clamp(min=0)
    return taps.long().clamp(0, side - 1), weights


def _size_option(processor: Any, size: Mapping[str, int] | None) -> dict[str, Any]:
    """The processor's own size with what is given in its place."""
    if not size:
        return {}
    full = {name: processor.size[name] for name in ("shortest_edge", "longest_edge")} | dict(size)
    if full["shortest_edge"] > full["longest_edge"]:
        raise InputError(
            f"at least {full['shortest_edge']} and at most {full['longest_edge']} pixels contradict each other"
        )
    return {"size": full}


def _processed(processor: Any, items: Any, options: Mapping[str, Any]) -> Mapping[str, Tensor]:
    try:
        return processor(items, **options)
    except ValueError as error:  # the processors refuse extreme shapes so
        raise InputError(str(error)) from None
