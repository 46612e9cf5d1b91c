"""`turbovit bench glue`: where the time of a request goes, from an image's bytes to TurboMind's request.

Stages: decode, preprocess, engine, and glue - what `forward` and `to_turbomind` take beyond the engine's runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.benchmarks.report import Equality, Report, Target
from turbovit.benchmarks.subjects import Size, Subject, encoded_image, families, noise_image, subject
from turbovit.benchmarks.timing import Spread
from turbovit.engines.errors import CertificationError
from turbovit.engines.images import rgb_from_bytes
from turbovit.engines.runner import Runner

STAGES = ("decode", "preprocess", "engine", "glue")
GLUE_SECONDS = 2e-3
GLUE_SHARE = 0.03  # of the engine's time, on top
_QUESTION = "What is this?"


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        sizes: width and height of the images.
        images: how many a request has.
    """

    families: Sequence[str]
    size: str
    layers: int | None
    sizes: Sequence[Size]
    images: int
    rounds: int
    folder: Path


def bench_glue(options: Options, report: Callable[[str], None] = lambda step: None) -> Report:
    """Measure the stages of one request, for every family.

    Raises:
        CertificationError: the request's features are not those of the engine run by itself; nothing was timed.
    """
    found = Report.of("glue", options)
    for row in families(options.families):
        one = subject(row, options.size, options.layers, options.folder, report)
        side = LMDeploySide(one.checkpoint, one.bundle.path)
        for size in options.sizes:
            report(f"{row.name}: {options.images} x {size[0]}x{size[1]}")
            _measure(one, side, size, options, found)
    return found


def _measure(one: Subject, side: LMDeploySide, size: Size, options: Options, found: Report) -> None:
    files = [encoded_image(noise_image(size, seed), "JPEG") for seed in range(options.images)]
    label = f"{options.images} x {size[0]}x{size[1]}"
    require_equal_features(one.name, label, side, files, found)
    stages: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for number in range(options.rounds + 1):
        for stage, seconds in stage_seconds(side, files).items():
            if number:  # the first warms up
                stages[stage].append(seconds)
    for stage, samples in stages.items():
        found.add(one.name, label, "s", {stage: Spread(tuple(samples))}, stage=stage)
    over = [glue - GLUE_SHARE * engine for glue, engine in zip(stages["glue"], stages["engine"], strict=True)]
    what = f"{one.name}, {label}: seconds of forward and to_turbomind beyond the engine and {GLUE_SHARE:.0%} of it"
    found.targets.append(Target(what, Spread(tuple(over)).median, GLUE_SECONDS))


def stage_seconds(side: LMDeploySide, files: Sequence[bytes]) -> dict[str, float]:
    """Seconds of each stage of one request."""
    model = side.encoder.model
    started = time.perf_counter()
    messages = messages_of([rgb_from_bytes(data, model.encoder.preprocessor.alpha) for data in files])
    decoded = time.perf_counter()
    messages = model.preprocess(messages)
    prepared = time.perf_counter()
    with timed_runs(model.encoder.runner) as runs:
        request_of(side, model.forward(messages))
        finished = time.perf_counter()
    engine = sum(runs)
    seconds = (decoded - started, prepared - decoded, engine, finished - prepared - engine)
    return dict(zip(STAGES, seconds, strict=True))


def require_equal_features(family: str, case: str, side: LMDeploySide, files: Sequence[bytes], found: Report) -> None:
    """Compare a request's embeddings, bit for bit, with the encoder's features of the same images.

    Raises:
        CertificationError: they differ.
    """
    model = side.encoder.model
    images = [rgb_from_bytes(data, model.encoder.preprocessor.alpha) for data in files]
    pixels = [model.encoder.preprocessor.pixels_from_image(image) for image in images]
    expected = torch.cat([one.features for one in model.encoder.encode_pixels(pixels, 1)])
    request = request_of(side, model.forward(model.preprocess(messages_of(images))))
    got = torch.cat(list(request["input_embeddings"]))
    if not torch.equal(got, expected):
        raise CertificationError(f"{family}, {case}: the request's embeddings are not the engine's features")
    found.equal.append(Equality(family, case, "request", 0.0, 0.0))


def messages_of(images: Sequence[Any]) -> list[dict[str, Any]]:
    """One user's turn with the images and a question, in LMDeploy's form behind its parser."""
    parts = [{"type": "image", "data": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": _QUESTION}]}]


def request_of(side: LMDeploySide, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """TurboMind's request from what `forward` returned."""
    return side.encoder.model.to_turbomind(messages, side.chat_template, side.tokenizer)


@contextmanager
def timed_runs(runner: Runner) -> Iterator[list[float]]:
    """Within, the seconds of every call of the runner's `run` are collected."""
    seconds: list[float] = []
    original = runner.run

    def run(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        started = time.perf_counter()
        try:
            return original(inputs)
        finally:
            seconds.append(time.perf_counter() - started)

    runner.run = run  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        del runner.run  # the class's again
