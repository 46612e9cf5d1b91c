"""`turbovit bench preprocess`: from a file's bytes to what the engine takes, beside the family's own processor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from turbovit.benchmarks.report import Equality, Report, Skipped, Target
from turbovit.benchmarks.subjects import Size, Subject, encoded_image, families, noise_image, subject
from turbovit.benchmarks.timing import Spread, alternating, paired_ratio
from turbovit.engines.encoder import PROCESSOR_FOLDER
from turbovit.engines.errors import CertificationError
from turbovit.engines.images import rgb_from_bytes
from turbovit.engines.preprocessor import Preprocessor

PROCESSOR_SHARE = 0.5  # of the family's own processor
THEIRS = "transformers' processor"
UINT8 = "transformers' processor, uint8 out"
OURS = "turbovit"
_KINDS = ("JPEG", "PNG")


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        sizes: width and height of the images.
    """

    families: Sequence[str]
    sizes: Sequence[Size]
    rounds: int
    folder: Path


def bench_preprocess(options: Options, report: Callable[[str], None] = lambda step: None) -> Report:
    """Measure decoding once, and every family's preprocessing.

    Raises:
        CertificationError: our pixels are not those of the family's processor; nothing was timed.
    """
    found = Report.of("preprocess", options)
    for size in options.sizes:
        report(f"decoding {size[0]}x{size[1]}")
        _measure_decoding(size, options.rounds, found)
    for row in families(options.families):
        one = subject(row, "tiny", None, options.folder, report)
        for size in options.sizes:
            report(f"{row.name}: {size[0]}x{size[1]}")
            _measure(one, size, options.rounds, found)
    return found


def _measure(one: Subject, size: Size, rounds: int, found: Report) -> None:
    label = f"{size[0]}x{size[1]}"
    image = noise_image(size)
    with closing(one.encoder()) as encoder:
        preprocessor = encoder.preprocessor
    runs: dict[str, Callable[[], object]] = {}
    theirs = transformers_pixels(one)
    if theirs is None:
        found.skipped.append(Skipped(one.name, THEIRS, "transformers has no image processor of this family"))
    else:
        require_equal_pixels(one.name, label, preprocessor, theirs, image, found)
        runs[THEIRS] = lambda: theirs(image)
        runs[UINT8] = lambda: theirs(image, do_rescale=False, do_normalize=False)
    runs[OURS] = lambda: preprocessor.pixels_from_image(image)
    spreads = alternating(runs, rounds, warm_up=3)
    found.add(one.name, label, "s", spreads)
    if THEIRS in spreads:
        ratio = paired_ratio(spreads[OURS], spreads[THEIRS])
        what = f"{one.name}, {label}: preprocessing as a share of the processor's time"
        found.targets.append(Target(what, ratio, PROCESSOR_SHARE))


def transformers_pixels(one: Subject) -> Callable[..., torch.Tensor] | None:
    """The family's own image processor as a call from an image to its pixels; None where transformers has none."""
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(one.bundle.path / PROCESSOR_FOLDER)
    except (OSError, ValueError):
        return None

    def pixels(image: Image.Image, **options: Any) -> torch.Tensor:
        return processor(image, return_tensors="pt", **options)["pixel_values"]

    return pixels


def require_equal_pixels(
    family: str,
    case: str,
    preprocessor: Preprocessor,
    theirs: Callable[..., torch.Tensor],
    image: Image.Image,
    found: Report,
) -> None:
    """Compare our uint8 pixels with the processor's.

    Raises:
        CertificationError: one differs.
    """
    ours = preprocessor.pixels_from_image(image).rows
    expected = theirs(image, do_rescale=False, do_normalize=False)
    differing = int((ours != expected.reshape(ours.shape)).sum()) if ours.numel() == expected.numel() else ours.numel()
    if differing:
        raise CertificationError(
            f"{family}, {case}: {differing} of {ours.numel()} pixel values are not the processor's"
        )
    found.equal.append(Equality(family, case, OURS, 0.0, 0.0))


def _measure_decoding(size: Size, rounds: int, found: Report) -> None:
    """PIL, which the product uses, beside torchvision. Decoders of JPEG need not agree: how far they do is said."""
    from torchvision import io

    image = noise_image(size)
    for kind in _KINDS:
        data = encoded_image(image, kind)
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        case = f"{kind} {size[0]}x{size[1]}"
        runs: dict[str, Callable[[], object]] = {
            "PIL": partial(_pil_pixels, data),
            "turbovit, PIL with checks": partial(rgb_from_bytes, data),
        }
        try:
            other = io.decode_image(tensor, io.ImageReadMode.RGB)
        except RuntimeError as error:  # torchvision was built without the decoder
            found.skipped.append(Skipped("decode", f"torchvision, {kind}", str(error).splitlines()[0]))
        else:
            runs["torchvision.io"] = partial(io.decode_image, tensor, io.ImageReadMode.RGB)
            difference = np.abs(other.permute(1, 2, 0).numpy().astype(np.int16) - _pil_pixels(data))
            share = float((difference > 0).mean())
            found.notes.append(
                f"{case}: torchvision.io differs from PIL in {share:.1%} of the values, by at most {difference.max()}"
            )
        spreads: dict[str, Spread] = alternating(runs, rounds)
        found.add("decode", case, "s", spreads)


def _pil_pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(data)).convert("RGB"))
