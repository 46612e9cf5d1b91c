"""Compare an engine with the float32 reference tower, and write the certificate.

The reference tower's inputs and outputs lie in the bundle, so that any machine can certify an engine without the
checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor

from turbovit.engines.bundle import Bundle, Certificate, Engine, Manifest, OutputError
from turbovit.engines.encoder import RUNNERS
from turbovit.engines.errors import BuildError, BundleError, CertificationError, RuntimeUnavailableError
from turbovit.engines.families import load
from turbovit.engines.runner import Runner
from turbovit.export.tower import Sample, Tower

Pair = tuple[Sample, dict[str, Tensor]]  # a sample, and the reference tower's outputs for it

# Certificate bounds by precision. In half precision the worst token's direction decides; a cosine says nothing about
# length, so that a row may also be off by no more than such a turn of all its tokens would make it.
_WORST_COSINE = {"fp16": 0.999, "bf16": 0.99}
_RELATIVE_L2 = {"fp32": 1e-5} | {precision: sqrt(2 * (1 - cosine)) for precision, cosine in _WORST_COSINE.items()}


def reference_outputs(tower: Tower, sample: Sample, memory: dict[bytes, dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tower's outputs for `sample`, computed row by row so that no row can depend on its batch mates.

    Args:
        tower: the reference, in float32.
        memory: rows computed before, by their content; extended.

    Returns:
        One tensor an output, batch first.
    """
    specs = tower.inputs()
    batch = specs[0].shape[0]
    rows = []
    for index in range(len(sample.inputs[specs[0].name])):
        inputs = {
            spec.name: sample.inputs[spec.name][index : index + 1]
            if spec.shape[0] == batch
            else sample.inputs[spec.name]
            for spec in specs
        }
        key = _content(inputs)
        if key not in memory:
            memory[key] = tower.run(inputs)
        rows.append(memory[key])
    return {name: torch.cat([row[name] for row in rows]) for name in tower.output_names}


def write_reference(tower: Tower, samples: list[Sample], path: Path, progress: Callable[[str], None]) -> None:
    """Run the reference tower on `samples` and store inputs and outputs in `path` (safetensors)."""
    from safetensors.torch import save_file

    memory: dict[bytes, dict[str, Tensor]] = {}
    tensors: dict[str, Tensor] = {}
    for number, sample in enumerate(samples):
        progress(f"reference tower: {sample.label}")
        outputs = reference_outputs(tower, sample, memory)
        for kind, values in (("input", sample.inputs), ("output", outputs)):
            tensors |= {f"{number}.{kind}.{name}": value.clone() for name, value in values.items()}
    # One entry: safetensors writes several in another order each time.
    save_file(tensors, path, metadata={"labels": json.dumps([sample.label for sample in samples])})
    path.chmod(0o644)  # safetensors writes 0600, and bundles are shared


def read_reference(bundle: Bundle) -> list[Pair]:
    """The samples of a bundle and the reference tower's outputs for them."""
    from safetensors import safe_open

    pairs: list[Pair] = []
    with safe_open(bundle.file(bundle.manifest.reference), framework="pt") as file:
        for number, label in enumerate(json.loads(file.metadata()["labels"])):
            parts: dict[str, dict[str, Tensor]] = {"input": {}, "output": {}}
            for key in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                owner, kind, name = key.split(".", 2)
                if int(owner) == number:
                    parts[kind][name] = file.get_tensor(key)
            pairs.append((Sample(label, parts["input"]), parts["output"]))
    return pairs


def certificate_from_runner(bundle: Bundle, runner: Runner, progress: Callable[[str], None]) -> Certificate:
    """Run every sample of the bundle and compare.

    Args:
        progress: called with a line before each sample.
    """
    return certificate_from_pairs(runner, read_reference(bundle), progress)


def certificate_from_pairs(runner: Runner, pairs: Iterable[Pair], progress: Callable[[str], None]) -> Certificate:
    """As `certificate_from_runner`, for some of the bundle's samples."""
    worst: dict[str, OutputError] = {}
    shapes = []
    for sample, expected in pairs:
        progress(f"{runner.description}: {sample.label}")
        outputs = runner.run(sample.inputs)
        shapes.append(sample.label)
        for name, reference in expected.items():
            error = output_error(name, outputs[name], reference)
            worst[name] = _worse(worst[name], error) if name in worst else error
    precision = runner.engine.precision
    return Certificate(
        ran_on=runner.description,
        shapes=tuple(shapes),
        outputs=tuple(worst.values()),
        bound=bound_text(precision),
        passed=all(within_bound(precision, error) for error in worst.values()),
    )


def output_error(name: str, got: Tensor, reference: Tensor) -> OutputError:
    """Compare one output.

    Args:
        got: [batch, ..., hidden], any float dtype.
        reference: the same shape, float32.
    """
    actual, expected = got.double().cpu(), reference.double()
    difference = (actual - expected).flatten(1)
    relative = difference.norm(dim=1) / expected.flatten(1).norm(dim=1)
    cosine = torch.nn.functional.cosine_similarity(actual, expected, dim=-1)
    return OutputError(
        output=name,
        relative_l2=_number(relative.max()),
        worst_cosine=_number(cosine.min(), nan=-1.0),
        max_abs=_number(difference.abs().max()),
        finite=bool(actual.isfinite().all()),
    )


def within_bound(precision: str, error: OutputError) -> bool:
    """Whether an output is close enough for the precision."""
    close = error.relative_l2 <= _RELATIVE_L2[precision]
    return error.finite and close and error.worst_cosine >= _WORST_COSINE.get(precision, -1.0)


def bound_text(precision: str) -> str:
    """The bound in words."""
    rows = f"relative L2 of every row <= {_RELATIVE_L2[precision]:.2g}, all finite"
    if precision in _WORST_COSINE:
        return f"{precision}: cosine of every token >= {_WORST_COSINE[precision]:g}, {rows}"
    return f"{precision}: {rows}"


def certified(bundle: Bundle, engine: Engine, progress: Callable[[str], None]) -> Engine:
    """The engine with a certificate of this machine, or with the reason why it cannot run here.

    Raises:
        CertificationError: it ran and missed its bound.
        BuildError: a float32 engine that runs on any device does not load.
    """
    tried = _tried(bundle, engine, progress)
    if tried.certificate is None and engine.precision == "fp32" and not engine.architectures:
        # Every runtime has float32: a graph that does not load is wrong.
        raise BuildError(f"the engine does not load: {tried.not_run}")
    if tried.certificate is not None and not tried.certificate.passed:
        raise CertificationError(f"{engine.file} missed its bound: {describe(tried.certificate)}")
    return tried


def verify_engines(bundle: Bundle, runtime: str | None, progress: Callable[[str], None]) -> list[Engine]:
    """The bundle's engines (of one runtime) with certificates of this machine; where one fails it says so.

    Raises:
        BundleError: the bundle has no engine for `runtime`.
    """
    engines = [engine for engine in bundle.manifest.engines if runtime in (None, engine.runtime)]
    if runtime is not None and not engines:
        built = ", ".join(sorted({engine.runtime for engine in bundle.manifest.engines})) or "none"
        raise BundleError(f"{bundle.path} has no engine for {runtime!r}; it has {built}")
    return [_tried(bundle, engine, progress) for engine in engines]


def _tried(bundle: Bundle, engine: Engine, progress: Callable[[str], None]) -> Engine:
    """The engine with a certificate of this machine, passed or failed, or with the reason why it cannot run here."""
    try:
        runner = open_runner(bundle, engine)
    except (RuntimeUnavailableError, BundleError) as error:
        return replace(engine, certificate=None, not_run=str(error))
    with runner:
        return replace(engine, certificate=certificate_from_runner(bundle, runner, progress), not_run=None)


def open_runner(bundle: Bundle, engine: Engine) -> Runner:
    """A runner of an engine, on a GPU where its runtime has one here.

    Raises:
        RuntimeUnavailableError, BundleError, CheckpointError: as `Runner.open`.
    """
    runner_class: type[Runner] = load(RUNNERS[engine.runtime])
    device = torch.device("cuda" if runner_class.unavailable(torch.device("cuda")) is None else "cpu")
    return runner_class.open(bundle, engine, device)


def describe(certificate: Certificate) -> str:
    """The figures of a certificate in one line."""
    figures = "; ".join(f"{error.output}: {error}" for error in certificate.outputs)
    return f"{figures} (bound: {certificate.bound}; ran on {certificate.ran_on})"


def with_engine(manifest: Manifest, engine: Engine) -> Manifest:
    """The manifest with `engine` in place of the one of its runtime and precision, or added."""
    others = [e for e in manifest.engines if (e.runtime, e.precision) != (engine.runtime, engine.precision)]
    ordered = sorted([*others, engine], key=lambda e: (e.runtime, e.precision))
    return replace(manifest, engines=tuple(ordered))


def _worse(a: OutputError, b: OutputError) -> OutputError:
    return OutputError(
        output=a.output,
        relative_l2=max(a.relative_l2, b.relative_l2),
        worst_cosine=min(a.worst_cosine, b.worst_cosine),
        max_abs=max(a.max_abs, b.max_abs),
        finite=a.finite and b.finite,
    )


def _number(value: Tensor, nan: float = torch.finfo(torch.float64).max) -> float:
    """A float that JSON can hold: NaN becomes `nan`, the worst there is, and infinity the largest float."""
    return float(torch.nan_to_num(value, nan=nan))


def _content(inputs: Mapping[str, Tensor]) -> bytes:
    digest = hashlib.sha256()
    for name, tensor in sorted(inputs.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()
