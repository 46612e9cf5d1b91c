"""A bundle proves that it can be used: opened as a user opens it, it encodes an image, and a video where it takes them.

A certificate says that an engine computes what the reference tower does. It says nothing about the processor files, the
tensors between the features and the limits, which every request goes through too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from turbovit.engines.bundle import Bundle, Engine
from turbovit.engines.encoder import PROCESSOR_FOLDER, TORCH_ENGINE, Encoder, preprocessor_of
from turbovit.engines.errors import (
    BuildError,
    CertificationError,
    CheckpointError,
    InputError,
    RuntimeUnavailableError,
    TurbovitError,
)
from turbovit.engines.preprocessor import Encoded, Pixels, Video
from turbovit.engines.runner import Runner
from turbovit.export.certify import open_runner

_SIDE = 64  # of the picture; square, and so the smallest that a family makes of any


def prove(bundle: Bundle, engines: Sequence[Engine], report: Callable[[str], None]) -> None:
    """Encode with every engine that passed here; where none could run, with the reference tower.

    Args:
        engines: of the bundle, with their certificates. Where one failed, that is all there is to know.

    Raises:
        CheckpointError: the processor files cannot be used.
        RuntimeUnavailableError: no engine runs here, and the reference tower's checkpoint is gone.
        BuildError: the bundle's limits leave no room for an image.
        CertificationError: what came out is not finite, or not of the size that a prompt has room for.
    """
    items = proof_pixels(bundle)
    passed = [engine for engine in engines if engine.verdict == "passed"]
    failed = any(engine.verdict == "failed" for engine in engines)
    for engine in passed or ([] if failed else [TORCH_ENGINE]):
        with _opened(bundle, engine) as runner:
            report(f"encoding an image with {runner.description}")
            for pixels, encoded in zip(items, Encoder(bundle, runner).encode_pixels(items), strict=True):
                _check(pixels, encoded, bundle.manifest.facts["hidden"], runner.description)


def _opened(bundle: Bundle, engine: Engine) -> Runner:
    try:
        return open_runner(bundle, engine)
    except CheckpointError as error:
        raise RuntimeUnavailableError(f"no engine of it runs here, and the reference tower neither: {error}") from error


def proof_pixels(bundle: Bundle) -> list[Pixels]:
    """What the bundle's preprocessor makes of a picture, and of a video where it takes them.

    Raises:
        CheckpointError: it cannot, for its processor files.
        BuildError: it cannot, for the bundle's limits.
    """
    try:
        preprocessor = preprocessor_of(bundle)
        items = [preprocessor.pixels_from_image(_picture())]
        if preprocessor.takes_videos:
            items.append(preprocessor.pixels_from_video(_video()))
    except InputError as error:
        raise BuildError(f"the bundle would refuse even a picture of {_SIDE}x{_SIDE}: {error}") from error
    except TurbovitError:
        raise
    except Exception as error:  # whatever transformers' processors raise about settings that they cannot use
        files = ", ".join(sorted(path.name for path in (bundle.path / PROCESSOR_FOLDER).iterdir())) or "there are none"
        reason = " ".join(f"{type(error).__name__}: {error}".split()).replace(f"{bundle.path}/", "")
        raise CheckpointError(
            f"the processor files of {bundle.manifest.source.name} ({files}) are not those of a "
            f"{bundle.manifest.architecture} that can be used: {reason}; download them again"
        ) from error
    return items


def _picture() -> Image.Image:
    ramp = np.arange(_SIDE, dtype=np.uint8)
    y, x = np.meshgrid(ramp, ramp, indexing="ij")
    return Image.fromarray(np.stack([3 * x, 2 * y, x + y], axis=2))


def _video() -> Video:
    frame = np.asarray(_picture())
    return Video(np.stack([frame, frame[::-1], frame, frame[::-1]]), fps=2.0, frame_indices=(0, 1, 2, 3))


def _check(pixels: Pixels, encoded: Encoded, hidden: int, ran_on: str) -> None:
    expected = (sum(pixels.runs), hidden)
    for features in (encoded.features, *encoded.deepstack):
        if tuple(features.shape) != expected:
            raise CertificationError(f"{ran_on} gave features of shape {tuple(features.shape)}, expected {expected}")
        if not features.isfinite().all():
            raise CertificationError(f"{ran_on} gave features that are not finite")
