"""Qwen3-VL: images and videos to uint8 patches of a grid, and features back to images and temporal steps.

Reference: `transformers.models.qwen3_vl` (processors; `get_vision_interpolation_indices_and_weights` and
`get_vision_position_ids` of `transformers.vision_utils`), 5.24.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from turbovit.engines.byte_cache import ByteCache
from turbovit.engines.errors import InputError
from turbovit.engines.images import ImageLike, readable_rgb
from turbovit.engines.options import COUNT, ENCODE, LABELS, PIXELS, RATE, Option
from turbovit.engines.preprocessor import Encoded, Grid, Pixels, Preprocessor, Video, check_video
from turbovit.engines.resizing import pixels_from_rgb, resized

_UINT8: Mapping[str, Any] = {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}
# Patches of one engine run: frames that have more together go in several runs. A larger frame has a run alone.
PATCHES_A_RUN = 16384
# One tower takes both: these are its own, or happen before it.
_SHARED_SETTINGS = ("patch_size", "temporal_patch_size", "merge_size", "rescale_factor", "image_mean", "image_std")
# What a video without one is taken to have; Qwen3VLProcessor does the same.
_DEFAULT_FPS = 24.0
# Of all devices together: 400 grids of 1920x1080, or 25 of 4096x4096.
_GRIDS = ByteCache(64 << 20)
_CPU = torch.device("cpu")


class Qwen3VLPreprocessor(Preprocessor):
    """One row an image, one a temporal step of a video (two frames); rows of equal grids share engine runs."""

    options: ClassVar[tuple[Option, ...]] = (
        *LABELS,
        Option(("mm_processor_kwargs", "image", "min_pixels"), 65536, PIXELS),
        Option(("mm_processor_kwargs", "image", "max_pixels"), 1048576, PIXELS),
        Option(("mm_processor_kwargs", "video", "min_pixels"), 4096, PIXELS),
        Option(("mm_processor_kwargs", "video", "max_pixels"), 25165824, PIXELS),
        Option(("media_io_kwargs", "video", "fps"), 2, RATE),
        Option(("media_io_kwargs", "video", "num_frames"), 32, COUNT),
        Option((ENCODE, "size"), {"shortest_edge": 65536, "longest_edge": 1048576}),
    )

    def __init__(self, processor_folder: Path, facts: Mapping[str, Any]):
        from transformers import Qwen2VLImageProcessor, Qwen3VLVideoProcessor

        self._image_processor = Qwen2VLImageProcessor.from_pretrained(processor_folder)
        self._video_processor = Qwen3VLVideoProcessor.from_pretrained(processor_folder)
        self._no_videos = _difference(self._image_processor, self._video_processor)
        self._merge = int(facts["merge"])
        self._side = int(facts["positions_side"])
        self._temporal = int(facts["temporal_patch"])
        # Unset, newer transformers warn and mean False.
        self._video_options = (
            {"cap_pixels_per_frame": False} if hasattr(self._video_processor, "cap_pixels_per_frame") else {}
        )

    @property
    def takes_videos(self) -> bool:
        return self._no_videos is None

    def pixels_from_image(  # type: ignore[override]  # options are each family's own
        self, image: ImageLike, size: Mapping[str, int] | None = None
    ) -> Pixels:
        """One image at its native resolution.

        Args:
            size: ``shortest_edge`` and ``longest_edge``, in pixels of the whole image, instead of the processor's.
        """
        whole = pixels_from_rgb(readable_rgb(image, self.alpha))
        processor = self._image_processor
        edges = _size_option(processor, size or processor.size)["size"]
        factor = processor.patch_size * self._merge
        try:
            fitted = resized(processor, whole, edges, factor=factor)
        except ValueError as error:  # extreme shapes
            raise InputError(str(error)) from None
        patches, grid = self._patches(fitted)
        return self._pixels(patches, grid)

    def pixels_from_video(  # type: ignore[override]
        self, video: Video, size: Mapping[str, int] | None = None
    ) -> Pixels:
        """A video whose frames are sampled already; resized as the reference does.

        Args:
            size: as in `pixels_from_image`, for all frames together.
        """
        if self._no_videos:
            raise InputError(self._no_videos)
        check_video(video)
        if len(video.frames) < self._temporal:
            raise InputError(f"it has {len(video.frames)} frames, expected at least {self._temporal}")
        # torch takes neither read-only arrays nor reversed ones; all others are used where they are
        own = np.require(video.frames, requirements=("C_CONTIGUOUS", "WRITEABLE"))
        frames = torch.from_numpy(own).permute(0, 3, 1, 2)  # [frames, 3, height, width]
        options: dict[str, Any] = {**_UINT8, **self._video_options, "do_sample_frames": False, "do_resize": True}
        options["input_data_format"] = "channels_first"  # it would guess, with a warning where it can be either
        options |= _size_option(self._video_processor, size)
        output = _processed(self._video_processor, [frames], options)
        (grid,) = output["video_grid_thw"].tolist()
        pixels = self._pixels(output["pixel_values_videos"], (grid[0], grid[1], grid[2]))
        return Pixels(pixels.rows, pixels.group, pixels.runs, pixels.grid, self._timestamps(video))

    def inputs_from_rows(self, rows: Tensor, group: Hashable) -> dict[str, Tensor]:
        height, width = cast(tuple[int, int], group)
        return {"pixels": rows, **grid_inputs(height, width, self._merge, self._side, rows.device)}

    def max_rows(self, group: Hashable) -> int:
        height, width = cast(tuple[int, int], group)
        return max(1, PATCHES_A_RUN // (height * width))

    def encoded_from_rows(self, outputs: Mapping[str, Tensor], pixels: Pixels) -> Encoded:
        levels = tuple(outputs[f"deepstack_{level}"].flatten(0, 1) for level in range(len(outputs) - 1))
        return Encoded(outputs["features"].flatten(0, 1), pixels.runs, levels, pixels.grid, pixels.timestamps)

    def _patches(self, pixels: np.ndarray) -> tuple[Tensor, Grid]:
        """uint8 [3, height, width] as [patches, 3 * temporal * patch * patch] in merge-block order, and the grid.

        The image is every frame of its one temporal step.
        """
        patch, merge = self._image_processor.patch_size, self._merge
        height, width = pixels.shape[1] // patch, pixels.shape[2] // patch
        blocks = pixels.reshape(3, height // merge, merge, patch, width // merge, merge, patch)
        ordered = blocks.transpose(1, 4, 2, 5, 0, 3, 6)  # [rows, columns, merge, merge, 3, patch, patch]
        patches = np.empty((*ordered.shape[:5], self._temporal, patch, patch), dtype=np.uint8)
        for frame in range(self._temporal):
            patches[:, :, :, :, :, frame] = ordered
        return torch.from_numpy(patches.reshape(height * width, -1)), (1, height, width)

    def _pixels(self, patches: Tensor, grid: Grid) -> Pixels:
        steps, height, width = grid
        tokens = height * width // self._merge**2
        most = self.limits.get("merged", tokens)
        if tokens > most:
            raise InputError(
                f"its grid of {height}x{width} patches gives {tokens} tokens, this bundle was built for at most "
                f"{most}: send a smaller one, or build it with a larger --max-pixels"
            )
        rows = patches.unflatten(0, (steps, height * width))
        return Pixels(rows, group=(height, width), runs=(tokens,) * steps, grid=grid)

    def _timestamps(self, video: Video) -> tuple[float, ...]:
        """Seconds of each temporal step: half way between its first and last frame; the last frame fills up a step."""
        indices = list(video.frame_indices)
        indices += [indices[-1]] * (-len(indices) % self._temporal)
        seconds = [index / (video.fps or _DEFAULT_FPS) for index in indices]
        ends = zip(seconds[:: self._temporal], seconds[self._temporal - 1 :: self._temporal], strict=True)
        return tuple((first + last) / 2 for first, last in ends)


def grid_inputs(height: int, width: int, merge: int, side: int, device: torch.device = _CPU) -> Mapping[str, Tensor]:
    """What the tower needs to know of a grid; patches in merge-block order. Not to be changed: it is cached.

    Args:
        height, width: of the grid, in patches; multiples of `merge`.
        merge: patches along a side of a merge block.
        side: learned positions along a side; they are resampled bilinearly, corner to corner (align_corners).
        device: where the tensors shall be; they are copied there once.

    Returns:
        interp_index int32 [4, patches], interp_weight float32 [4, patches], patch_position int32 [patches, 2].
    """

    def make() -> Mapping[str, Tensor]:
        return {name: tensor.to(device) for name, tensor in _grid_inputs(height, width, merge, side).items()}

    return _GRIDS.get((height, width, merge, side, device), make)


def _grid_inputs(height: int, width: int, merge: int, side: int) -> dict[str, Tensor]:
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


def _difference(image_processor: Any, video_processor: Any) -> str | None:
    """Why videos cannot be taken: their processor's values are not those that the tower was built for."""
    for name in _SHARED_SETTINGS:
        image, video = getattr(image_processor, name), getattr(video_processor, name)
        if np.any(np.asarray(image) != np.asarray(video)):
            return f"the video processor's {name} is {video}, the image processor's {image}: this model takes no videos"
    return None


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
