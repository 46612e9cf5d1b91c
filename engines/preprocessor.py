"""Images to uint8 pixels, and engine outputs back to one result per image: what each family defines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch

from turbovit.engines.errors import InputError
from turbovit.engines.images import Alpha, ImageLike
from turbovit.engines.options import LABELS, Option

Grid = tuple[int, int, int]  # temporal steps, rows and columns of patches


@dataclass(frozen=True)
class Video:
    """A video whose frames are sampled already.

    Attributes:
        frames: uint8 [frames, height, width, 3].
        fps: of the file they were taken from; None where it is not known.
        frame_indices: their numbers in that file.
    """

    frames: np.ndarray
    fps: float | None
    frame_indices: tuple[int, ...]


def check_video(video: Video) -> None:
    """Make sure that a video's frames and numbers are what they have to be.

    Raises:
        InputError: says what was got, and what was expected.
    """
    frames, indices, fps = video.frames, video.frame_indices, video.fps
    if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        found = f"{frames.dtype} {list(frames.shape)}" if isinstance(frames, np.ndarray) else type(frames).__name__
        raise InputError(f"its frames are {found}, expected a uint8 array [frames, height, width, 3]")
    if frames.size == 0:
        raise InputError(f"its frames are an array of shape {list(frames.shape)}, expected some pixels")
    if len(indices) != len(frames):
        raise InputError(f"it has {len(frames)} frames and {len(indices)} frame numbers")
    if fps is not None and not (isfinite(fps) and fps >= 0):
        raise InputError(f"it has {fps} frames a second, expected a positive number, or None where it is not known")


@dataclass(frozen=True)
class Pixels:
    """One image or video as an engine takes it.

    Attributes:
        rows: uint8, batch rows first: whole images, crops, tiles or frames.
        group: rows of equal groups may share one engine run.
        runs: feature tokens of each run of placeholders that the image has in the prompt, in order; they add
            up to the image's tokens.
        grid: of patches, for families whose prompts depend on it.
        timestamps: seconds of each temporal step; empty for an image.
    """

    rows: torch.Tensor
    group: Hashable
    runs: tuple[int, ...]
    grid: Grid | None = None
    timestamps: tuple[float, ...] = ()


@dataclass(frozen=True)
class Encoded:
    """What the language model gets for one image.

    Attributes:
        features: [tokens, hidden], in prompt order.
        runs: as in `Pixels`: how the tokens are spread over the prompt.
        deepstack: [tokens, hidden] of each level, for families that have levels.
        grid, timestamps: as in `Pixels`.
    """

    features: torch.Tensor
    runs: tuple[int, ...]
    deepstack: tuple[torch.Tensor, ...] = ()
    grid: Grid | None = None
    timestamps: tuple[float, ...] = ()

    @property
    def embeddings(self) -> list[torch.Tensor]:
        """The features cut into the runs, each [run's tokens, hidden]."""
        return list(self.features.split(list(self.runs)))


Item = Pixels | Encoded  # an image or video, before or after the engine: its place in a prompt is the same


class Preprocessor(ABC):
    """What a family does before and after the engine.

    Attributes:
        alpha: what happens to transparent pixels.
        options: the family's table of options: all that requests and `Encoder.encode` can ask for, at every level.
        facts: of the bundle's manifest, which prompts are made with.
        limits: of one engine run, by symbol; the bundle's.
        tensors: that the family puts between the engine's features; the bundle's.
    """

    alpha: ClassVar[Alpha] = "white"
    options: ClassVar[tuple[Option, ...]] = LABELS
    facts: Mapping[str, Any] = MappingProxyType({})
    limits: Mapping[str, int] = MappingProxyType({})
    tensors: Mapping[str, torch.Tensor] = MappingProxyType({})

    @abstractmethod
    def __init__(self, processor_folder: Path, facts: Mapping[str, Any]):
        """Load from a bundle's processor files and the facts of its manifest."""

    @abstractmethod
    def pixels_from_image(self, image: ImageLike, **options: Any) -> Pixels:
        """Resize, crop or tile one image; families say which options they have.

        Raises:
            InputError: the image cannot be used; says why.
        """

    @property
    def takes_videos(self) -> bool:
        """Whether the model has videos, and its processors fit the tower."""
        return False

    def pixels_from_video(self, video: Video, **options: Any) -> Pixels:
        """Resize and cut one video.

        Raises:
            InputError: the family takes no videos, or this one cannot be used; says why.
        """
        raise InputError("this model takes images, no videos")

    @abstractmethod
    def inputs_from_rows(self, rows: torch.Tensor, group: Hashable) -> dict[str, torch.Tensor]:
        """All engine inputs for rows of one group."""

    def max_rows(self, group: Hashable) -> int | None:
        """The most rows of a group that one engine run should have; None where the bundle's limit will do."""
        return None

    @abstractmethod
    def encoded_from_rows(self, outputs: Mapping[str, torch.Tensor], pixels: Pixels) -> Encoded:
        """One image's result from its rows of the engine's outputs."""


def concatenated_outputs(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Outputs of consecutive runs joined along the batch axis."""
    return {name: joined([part[name] for part in parts]) for name in parts[0]}


def joined_levels(items: Sequence[Encoded]) -> list[torch.Tensor]:
    """[tokens of all items, hidden] of each deepstack level."""
    return [joined(rows) for rows in zip(*(one.deepstack for one in items), strict=True)]


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors joined along their first axis; a single one as it is, not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
