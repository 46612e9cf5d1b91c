"""What is measured: a family's checkpoint, its bundle, and images."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from turbovit.engines.bundle import Bundle, open_bundle
from turbovit.engines.encoder import Encoder, open_encoder
from turbovit.engines.errors import InputError
from turbovit.engines.families import FamilyRow, distinct_families, family_from_name, load
from turbovit.engines.preprocessor import Pixels
from turbovit.export.build import build
from turbovit.export.checkpoint import open_checkpoint
from turbovit.export.samples import write_sample
from turbovit.export.tower import Tower, described_tower

Size = tuple[int, int]  # width, height


@dataclass(frozen=True)
class Subject:
    """One family's synthetic checkpoint and the bundle built from it."""

    row: FamilyRow
    checkpoint: Path
    bundle: Bundle

    @property
    def name(self) -> str:
        return self.row.name

    def described(self) -> Tower:
        """The tower on the meta device: shapes without weights."""
        tower: type[Tower] = load(self.row.tower)
        return described_tower(tower, open_checkpoint(self.checkpoint, tower.is_checkpoint_vision))

    def encoder(self, runtime: str = "onnxruntime") -> Encoder:
        return open_encoder(self.bundle, runtime, "auto")


@dataclass(frozen=True)
class Case:
    """Engine inputs of some images.

    Attributes:
        tokens: that the language model gets.
        patches: that attend to something, all images together.
    """

    label: str
    inputs: dict[str, torch.Tensor]
    images: int
    tokens: int
    patches: int


def families(names: Sequence[str] | None) -> list[FamilyRow]:
    """The rows named; without names all whose towers differ."""
    return [family_from_name(name) for name in names] if names else distinct_families()


def subject(
    row: FamilyRow, size: str, layers: int | None, folder: Path, report: Callable[[str], None] = lambda step: None
) -> Subject:
    """Write a checkpoint (once) and build its bundle (anew: the engine measured is the one that is built today)."""
    checkpoint, bundle = sample_and_place(row, size, layers, folder, report)
    build(checkpoint, bundle, report=lambda step: report(f"{row.name}: {step}"))
    return Subject(row, checkpoint, open_bundle(bundle))


def sample_and_place(
    row: FamilyRow, size: str, layers: int | None, folder: Path, report: Callable[[str], None]
) -> tuple[Path, Path]:
    """A checkpoint, written where it is not there yet, and the place of its bundle, where nothing is left."""
    home = folder / f"{row.name}-{size}-{layers or 'all'}"
    checkpoint, bundle = home / "checkpoint", home / "bundle"
    if not (checkpoint / "config.json").exists():
        report(f"{row.name}: writing a checkpoint")
        write_sample(row.name, checkpoint, size, 0, layers)
    shutil.rmtree(bundle, ignore_errors=True)
    return checkpoint, bundle


def noise_image(size: Size, seed: int = 0) -> Image.Image:
    """An RGB image of smooth noise: what a photograph costs to decode, and no two pixels rows alike."""
    width, height = size
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (max(2, height // 16), max(2, width // 16), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    grain = generator.integers(-12, 13, (height, width, 3), dtype=np.int16)
    return Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))


def encoded_image(image: Image.Image, kind: str) -> bytes:
    """The image as a file, ``JPEG`` (quality 90) or ``PNG``."""
    buffer = BytesIO()
    image.save(buffer, kind, **({"quality": 90} if kind == "JPEG" else {}))
    return buffer.getvalue()


def case_of_images(encoder: Encoder, size: Size, images: int = 1) -> Case:
    """Different images of one size, in one engine run.

    Raises:
        InputError: the bundle's limits do not allow so many in one run.
    """
    preprocessor = encoder.preprocessor
    pixels = [preprocessor.pixels_from_image(noise_image(size, seed)) for seed in range(images)]
    rows = torch.cat([one.rows for one in pixels])
    _check_limit(encoder, pixels, rows, size)
    inputs = preprocessor.inputs_from_rows(rows, pixels[0].group)
    tokens = sum(sum(one.runs) for one in pixels)
    label = f"{size[0]}x{size[1]}" if images == 1 else f"{images} x {size[0]}x{size[1]}"
    return Case(label, inputs, images, tokens, len(rows) * _patches_of_row(encoder, rows))


def _check_limit(encoder: Encoder, pixels: Sequence[Pixels], rows: torch.Tensor, size: Size) -> None:
    symbol = str(encoder.manifest.inputs[0].shape[0])
    most = encoder.preprocessor.max_rows(pixels[0].group) or len(rows)
    limit = min(encoder.manifest.limits[symbol], most)
    if len(rows) > limit:
        raise InputError(f"{len(pixels)} images {size[0]}x{size[1]} are {len(rows)} {symbol}, one run takes {limit}")


def _patches_of_row(encoder: Encoder, rows: torch.Tensor) -> int:
    spec = encoder.manifest.inputs[0]
    if isinstance(spec.shape[1], str):  # the row is a list of patches
        return rows.shape[1]
    patch = int(encoder.manifest.source.config["patch"])
    return (rows.shape[-1] // patch) * (rows.shape[-2] // patch)
