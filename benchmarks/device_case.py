"""One tower on one device: certificates, threads, ownership of buffers, equal outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from turbovit.benchmarks.findings import NotRunError
from turbovit.engines.bundle import Bundle, Certificate
from turbovit.engines.encoder import Encoder
from turbovit.engines.errors import CertificationError
from turbovit.engines.runner import Runner, Tensors
from turbovit.export.certify import Pair, describe, output_error, within_bound

THREADS = 8
_SIZES = ((200, 136), (140, 220))  # width, height of the images that the threads encode
ROUNDS = 3  # of runs whose results are looked at: a captured graph comes in at the third at the latest
_SEPARATION = 10  # features of another image must be this many times farther than what is taken for rounding


@dataclass(frozen=True)
class Case:
    """A sample checkpoint and the bundle of it.

    Attributes:
        size: ``tiny``, ``small`` or ``full``.
    """

    family: str
    size: str
    checkpoint: Path
    bundle_folder: Path

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.family} {self.size}"


def figures(certificate: Certificate) -> str:
    """A certificate in few words.

    Raises:
        CertificationError: it is not passed.
    """
    if not certificate.passed:
        raise CertificationError(describe(certificate))
    worst = max(certificate.outputs, key=lambda error: error.relative_l2)
    cosine = min(error.worst_cosine for error in certificate.outputs)
    return f"relative L2 {worst.relative_l2:.2g}, worst cosine {cosine:.6f} on {certificate.ran_on}"


def close_to_reference(precision: str, outputs: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Make sure that what is timed computes the same.

    Raises:
        CertificationError: an output is beyond the precision's bound.
    """
    for name, reference in expected.items():
        error = output_error(name, outputs[name].reshape(reference.shape), reference)
        if not within_bound(precision, error):
            raise CertificationError(f"{name} is off: {error}")


def check_threads(bundle: Bundle, runner: Runner, threads: int = THREADS, rounds: int = ROUNDS) -> str:
    """Threads encode an image each on one encoder, every other one on a CUDA stream of its own.

    Args:
        rounds: how often every image is encoded.

    Raises:
        NotRunError: the images' features are too much alike to be told apart.
        CertificationError: a thread got what is not its image's.
    """
    encoder = Encoder(bundle, runner)
    images = [_picture(seed) for seed in range(threads)]
    alone = [encoder.encode([image])[0].features.float() for image in images]
    apart = min(_distance(alone[i], alone[j]) for i in range(threads) for j in range(i))
    rounding = max(_distance(encoder.encode([images[0]])[0].features.float(), alone[0]), 1e-6)
    if apart < _SEPARATION * rounding:
        raise NotRunError(f"the images' features differ by {apart:.1e} alone, rounding is {rounding:.1e}")

    def encode(number: int) -> float:
        with _stream_of(number, runner.device):
            features = encoder.encode([images[number]])[0].features.float()
            return _distance(features, alone[number])

    with ThreadPoolExecutor(threads) as pool:
        worst = max(pool.map(encode, list(range(threads)) * rounds))
    if worst > apart / _SEPARATION:
        raise CertificationError(f"a thread's features are {worst:.1e} off, another image's {apart:.1e}")
    return f"{threads * rounds} runs at most {worst:.1e} off; other images are {apart:.1e} away"


def check_ownership(runner: Runner, pairs: Sequence[Pair], rounds: int = ROUNDS) -> str:
    """Features stay as they are while others are computed, inputs may be changed at once, outputs are the caller's.

    Looked at on the smallest of the samples.

    Raises:
        CertificationError: one of these does not hold.
    """
    sample, expected = min(pairs, key=lambda pair: sum(tensor.numel() for tensor in pair[0].inputs.values()))
    inputs = on_device(sample.inputs, runner.device)
    name = next(iter(expected))
    first = runner.run(inputs)[name]
    kept = first.clone()
    others = {key: 255 - tensor if tensor.dtype == torch.uint8 else tensor for key, tensor in inputs.items()}
    for _ in range(rounds):
        runner.run(others)
    _require(torch.equal(first, kept), "features changed while others were computed")
    rounding = _distance(runner.run(inputs)[name], kept)
    for _ in range(rounds):
        passing = {key: tensor.clone() for key, tensor in inputs.items()}
        got = runner.run(passing)[name]
        for tensor in passing.values():
            tensor.zero_()
        passing.clear()  # and their memory goes to the next
        off = _distance(got, kept)
        _require(off <= max(10 * rounding, 1e-6), f"features are {off:.1e} off when inputs change after the call")
        got.zero_()
    again = runner.run(inputs)[name]
    _require(_distance(again, kept) <= max(10 * rounding, 1e-6), "zeroing an output changed later ones")
    _require(again.data_ptr() != first.data_ptr(), "two results share memory")
    return "earlier features, inputs and outputs are the caller's"


def on_device(inputs: Tensors, device: torch.device) -> dict[str, Tensor]:
    """The tensors there."""
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def _picture(seed: int) -> Image.Image:
    """Coarse noise of a colour of its own, so that towers with random weights can tell it from others."""
    width, height = _SIZES[seed % len(_SIZES)]
    generator = np.random.default_rng(seed)
    noise = generator.integers(0, 256, (6, 8, 3), np.uint8) // 2 + generator.integers(0, 128, 3, np.uint8)
    return Image.fromarray(noise.astype(np.uint8)).resize((width, height), Image.Resampling.NEAREST)


def _distance(a: Tensor, b: Tensor) -> float:
    """Relative L2; infinite where the shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    return float((a.double() - b.double()).norm() / b.double().norm())


def _stream_of(number: int, device: torch.device) -> Any:
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" and number % 2 else nullcontext()


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise CertificationError(otherwise)
