"""An opened bundle that encodes images: preprocessor, runner and the batching between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from turbovit.engines.bundle import Bundle, Engine, open_bundle
from turbovit.engines.commands import build_command
from turbovit.engines.errors import InputError, NoEngineError, RuntimeUnavailableError, TurbovitError
from turbovit.engines.families import family_from_name, load
from turbovit.engines.images import ImageLike, checked_size
from turbovit.engines.limits import RequestPixels, check_frames
from turbovit.engines.options import ENCODE, check_options
from turbovit.engines.preprocessor import (
    Encoded,
    Pixels,
    Preprocessor,
    Video,
    check_video,
    concatenated_outputs,
    joined,
)
from turbovit.engines.runner import Runner

logger = logging.getLogger("turbovit")
T = TypeVar("T")

PROCESSOR_FOLDER = "processor"
EXTRA_TENSORS = "extra_tensors.safetensors"
RUNNERS = {
    "tensorrt": "turbovit.engines.trt_runner:TensorRTRunner",
    "tensorrt_rtx": "turbovit.engines.trt_runner:TensorRTRTXRunner",
    "onnxruntime": "turbovit.engines.ort_runner:OnnxRuntimeRunner",
    "torch": "turbovit.export.torch_runner:TorchRunner",
}
# Best first. torch runs the reference tower and so needs the checkpoint; on a CPU onnxruntime is faster.
_LADDER = (
    ("tensorrt", "cuda"),
    ("tensorrt_rtx", "cuda"),
    ("onnxruntime", "cuda"),
    ("torch", "cuda"),
    ("onnxruntime", "cpu"),
)
# Best first. Of the halves float16 is the more exact, and a build makes it only where its range is enough.
_PRECISIONS = {"cuda": ("fp16", "bf16", "fp32"), "cpu": ("fp32", "fp16", "bf16")}
TORCH_ENGINE = Engine(runtime="torch", version=torch.__version__, precision="fp32", attention="sdpa", file="")


class Encoder:
    """Encodes images with one engine. Safe to call from several threads."""

    def __init__(self, bundle: Bundle, runner: Runner):
        self.bundle = bundle
        self.manifest = bundle.manifest
        self.runner = runner
        self.preprocessor = preprocessor_of(bundle)
        batch_symbol = self.manifest.inputs[0].shape[0]
        self._limit = self.manifest.limits[str(batch_symbol)]

    def encode(self, items: Sequence[ImageLike | Video], **options: Any) -> list[Encoded]:
        """Features of every image or video, in order, each as if it were the only one.

        Args:
            items: PIL images, uint8 arrays [height, width, channels], paths of images, or `Video`s.
            options: of the family's preprocessor, such as ``cropping=False`` for DeepSeek-VL2, which cuts no image
                of a conversation that has more than two.

        Raises:
            InputError: one cannot be used, or all together have too many pixels; says which and why. Or the family has
                no such option.
        """
        options = {name: value for name, value in options.items() if value is not None}
        check_options({ENCODE: options}, self.preprocessor.options)
        request = RequestPixels()

        def prepared(item: ImageLike | Video) -> Pixels:
            if isinstance(item, Video):
                return self.preprocessor.pixels_from_video(item, **options)
            return self.preprocessor.pixels_from_image(item, **options)

        _each(items, lambda item: _count(item, request))  # all of them, before the first is decoded
        return self.encode_pixels(_each(items, prepared))

    def encode_pixels(self, items: Sequence[Pixels], max_batch: int | None = None) -> list[Encoded]:
        """As `encode`, from what the preprocessor made.

        Rows of one group share engine runs of at most `max_batch` rows (and never more than the bundle's
        limit); the results do not depend on how they were shared.
        """
        results: dict[int, Encoded] = {}
        for group in dict.fromkeys(item.group for item in items):
            members = [index for index, item in enumerate(items) if item.group == group]
            outputs = self.run_rows(joined([items[index].rows for index in members]), group, max_batch)
            start = 0
            for index in members:
                stop = start + len(items[index].rows)
                rows = {name: tensor[start:stop] for name, tensor in outputs.items()}
                results[index] = self.preprocessor.encoded_from_rows(rows, items[index])
                start = stop
        return [results[index] for index in range(len(items))]

    def run_rows(self, rows: torch.Tensor, group: Hashable, max_batch: int | None = None) -> dict[str, torch.Tensor]:
        """The engine's outputs for rows of one group, on the engine's device; limits as in `encode_pixels`."""
        limits = (self._limit, max_batch, self.preprocessor.max_rows(group))
        parts = rows.split(min(limit for limit in limits if limit))
        return concatenated_outputs(
            [self.runner.run(self.preprocessor.inputs_from_rows(part, group)) for part in parts]
        )

    def close(self) -> None:
        """Free the engine."""
        self.runner.close()


def _each(items: Sequence[ImageLike | Video], use: Callable[[ImageLike | Video], T]) -> list[T]:
    results = []
    for number, item in enumerate(items, 1):
        try:
            results.append(use(item))
        except InputError as error:
            kind = "video" if isinstance(item, Video) else "image"
            raise InputError(f"{kind} {number} of {len(items)}: {error}") from None
    return results


def _count(item: ImageLike | Video, request: RequestPixels) -> None:
    if isinstance(item, Video):
        check_video(item)
        frames, height, width, _ = item.frames.shape
        check_frames(frames)
        request.add(width, height, frames)
    else:
        request.add(*checked_size(item))


def preprocessor_of(bundle: Bundle) -> Preprocessor:
    """A bundle's preprocessor, for what needs no engine."""
    family = family_from_name(bundle.manifest.family)
    preprocessor: Preprocessor = load(family.preprocessor)(bundle.path / PROCESSOR_FOLDER, bundle.manifest.facts)
    preprocessor.facts, preprocessor.limits = bundle.manifest.facts, bundle.manifest.limits
    preprocessor.tensors = read_extra_tensors(bundle)
    return preprocessor


def open_encoder(bundle: str | Path | Bundle, runtime: str = "auto", device: str = "auto") -> Encoder:
    """Open a bundle for encoding.

    Args:
        bundle: a bundle's folder.
        runtime: ``auto``, ``tensorrt``, ``tensorrt_rtx``, ``onnxruntime`` or ``torch``. ``auto`` takes the best that
            works here and logs one line that says which, and why not the ones before it.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        BundleError: the bundle is damaged or holds no engine for this.
        RuntimeUnavailableError: the runtime or device is not here.
    """
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    runtime = runtime.replace("-", "_")  # as on the command line
    reasons: list[str] = []
    for name, target in _candidates(runtime, device):
        try:
            runner = _open_runner(opened, name, target)
        except TurbovitError as error:
            if runtime != "auto" and not isinstance(error, RuntimeUnavailableError):
                raise
            lacking = runtime == "auto" and isinstance(error, NoEngineError)
            reasons.append(f"{name} on {target}: {'no engine in the bundle' if lacking else error}")
        else:
            passed_over = f" (not {'; '.join(reasons)})" if reasons else ""
            logger.info("%s runs on %s%s", opened.path.name, runner.description, passed_over)
            return Encoder(opened, runner)
    remedy = build_command(opened.manifest.source.name, opened.path)
    raise RuntimeUnavailableError(f"{opened.path} cannot run here: {'; '.join(reasons)}. Add an engine with {remedy}")


def read_extra_tensors(bundle: Bundle) -> dict[str, torch.Tensor]:
    """A bundle's small tensors that are no part of its engines; none for most families."""
    if EXTRA_TENSORS not in bundle.manifest.files:
        return {}
    from safetensors.torch import load_file

    return load_file(bundle.file(EXTRA_TENSORS))


def _candidates(runtime: str, device: str) -> Iterable[tuple[str, torch.device]]:
    if runtime != "auto" and runtime not in RUNNERS:
        raise RuntimeUnavailableError(f"unknown runtime {runtime!r}; available: auto, {', '.join(RUNNERS)}")
    try:
        wanted = None if device == "auto" else torch.device(device)
    except RuntimeError:
        raise RuntimeUnavailableError(_unknown_device(device)) from None
    if wanted is not None and wanted.type not in _PRECISIONS:
        raise RuntimeUnavailableError(_unknown_device(device))
    if runtime == "auto":
        ladder: Iterable[tuple[str, str]] = _LADDER
    else:
        ladder = ((runtime, "cuda"), (runtime, "cpu"))
    for name, kind in ladder:
        if wanted is None or wanted.type == kind:
            yield name, wanted or torch.device(kind)


def _unknown_device(device: str) -> str:
    return f"unknown device {device!r}; expected auto, cpu, cuda or cuda:N"


def _open_runner(bundle: Bundle, runtime: str, device: torch.device) -> Runner:
    runner_class: type[Runner] = load(RUNNERS[runtime])
    reason = runner_class.unavailable(device)
    if reason:
        raise RuntimeUnavailableError(reason)
    return runner_class.open(bundle, _engine(bundle, runtime, device), device)


def _engine(bundle: Bundle, runtime: str, device: torch.device) -> Engine:
    if runtime == "torch":
        return TORCH_ENGINE
    for precision in _PRECISIONS[device.type]:
        engine = bundle.manifest.engine(runtime, precision)
        if engine is not None:
            return engine
    there = ", ".join(f"{engine.runtime} {engine.precision}" for engine in bundle.manifest.engines) or "none"
    raise NoEngineError(
        f"{bundle.path} holds no engine for {runtime} (it has: {there}): add one with "
        f"{build_command(bundle.manifest.source.name, bundle.path, runtime)}"
    )
