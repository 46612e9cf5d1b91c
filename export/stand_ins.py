"""Certificates of an engine's precision where the engine itself cannot run.

An engine for a GPU is built where there is none. What its precision does to the tower can be seen all the same: ONNX
Runtime runs the very graph that was compiled, where it has kernels for it, and the reference tower runs in that dtype.
Neither says that the compiled engine is right, and the manifest keeps them apart from its certificate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from turbovit.engines.bundle import Bundle, Certificate, Engine
from turbovit.engines.encoder import RUNNERS, TORCH_ENGINE
from turbovit.engines.errors import BundleError, CertificationError, CheckpointError, RuntimeUnavailableError
from turbovit.engines.families import load
from turbovit.engines.runner import Runner
from turbovit.export.certify import Pair, certificate_from_pairs, describe, read_reference

# Pixel values times bytes of weights. A larger tower takes minutes in half precision, for which few CPUs have kernels.
_MOST_WORK = 1e15
_CPU = torch.device("cpu")


def with_stand_ins(bundle: Bundle, engine: Engine, graph: str, progress: Callable[[str], None]) -> Engine:
    """The engine, with stand-ins where it has no certificate.

    A large tower runs its smallest samples alone, on the first that can: the certificate names the shapes.

    Args:
        engine: as `certify.certified` gives it.
        graph: the file in the bundle that the engine was compiled from.
        progress: called with a line before each sample.

    Raises:
        CertificationError: a stand-in missed the bound of the engine's precision.
    """
    if engine.certificate is not None:
        return engine
    pairs = read_reference(bundle)
    affordable = _affordable(pairs, bundle, engine)
    certificates: list[Certificate] = []
    for candidate in _candidates(engine, graph):
        if certificates and len(affordable) < len(pairs):
            break
        certificates += _certificates(bundle, candidate, affordable, progress)
    return replace(engine, stand_ins=tuple(certificates))


def _candidates(engine: Engine, graph: str) -> Iterator[Engine]:
    """What may compute in the engine's precision here; float32 in torch would be the reference itself."""
    if engine.runtime != "onnxruntime":
        yield replace(engine, runtime="onnxruntime", file=graph, architectures=(), profiles=())
    if engine.precision != "fp32":
        yield replace(TORCH_ENGINE, precision=engine.precision, fp32_layers=engine.fp32_layers)


def _certificates(
    bundle: Bundle, candidate: Engine, pairs: Sequence[Pair], progress: Callable[[str], None]
) -> list[Certificate]:
    """One, or none where the candidate cannot run here: no kernel, not installed, or the checkpoint is gone."""
    runner_class: type[Runner] = load(RUNNERS[candidate.runtime])
    try:
        runner = runner_class.open(bundle, candidate, _CPU)
    except (RuntimeUnavailableError, BundleError, CheckpointError):
        return []
    with runner:
        certificate = certificate_from_pairs(runner, pairs, progress)
    if not certificate.passed:
        raise CertificationError(f"{candidate.precision} misses its bound: {describe(certificate)}")
    return [certificate]


def _affordable(pairs: Sequence[Pair], bundle: Bundle, engine: Engine) -> list[Pair]:
    """The smallest samples, at least one."""
    weights = bundle.file(f"weights.{engine.label}.bin").stat().st_size
    first = bundle.manifest.inputs[0].name
    taken: list[Pair] = []
    work = 0
    for pair in sorted(pairs, key=lambda pair: pair[0].inputs[first].numel()):
        work += pair[0].inputs[first].numel() * weights
        if taken and work > _MOST_WORK:
            break
        taken.append(pair)
    return taken
