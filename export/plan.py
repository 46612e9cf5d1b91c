"""What a build will do, worked out before anything expensive: family, spec, identity, engines."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from turbovit.engines.bundle import MANIFEST, Manifest, read_manifest
from turbovit.engines.commands import build_command
from turbovit.engines.encoder import RUNNERS
from turbovit.engines.errors import BuildError, BundleError, RuntimeUnavailableError
from turbovit.engines.families import FamilyRow, family_from_architecture, load
from turbovit.engines.store import bundles_folder
from turbovit.export.checkpoint import Checkpoint, open_checkpoint
from turbovit.export.tower import Tower, source_from_checkpoint

ATTENTION_FORMS = {"onnxruntime": "multihead"}
PRECISIONS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
REFERENCE = "reference.safetensors"
_AUTO_PRECISION = {"onnxruntime": "fp32"}
_PACKAGES = {"onnxruntime": ("onnxruntime", "onnxruntime-gpu")}
_TOOLS = ("turbovit", "torch", "transformers", "onnx", "onnxscript")


@dataclass(frozen=True)
class Plan:
    """Everything a build needs to know.

    Attributes:
        manifest: as it will be, but for engines and files.
        wanted: the engines asked for, as (runtime, precision).
    """

    family: FamilyRow
    tower: type[Tower]
    spec: Any
    checkpoint: Checkpoint
    manifest: Manifest
    wanted: tuple[tuple[str, str], ...]


def plan_build(model: str | Path, precision: str, runtimes: Sequence[str], limits: Mapping[str, int]) -> Plan:
    """Open the checkpoint and settle what to build; reads the weights only to hash them.

    Args:
        model: a Hugging Face folder or hub id.
        precision: ``auto``, ``fp32``, ``fp16`` or ``bf16``.
        runtimes: which runtimes to build for.
        limits: what the bundle shall accept where not the family's default, such as ``{"images": 8}``.

    Raises:
        CheckpointError, UnsupportedModelError: the checkpoint cannot be used; says why.
        BuildError, RuntimeUnavailableError: a runtime, precision or limit is unknown or not to be had here.
    """
    wanted = tuple(dict.fromkeys((runtime, _precision(runtime, precision)) for runtime in runtimes))
    if not wanted:
        raise BuildError(f"no runtime to build for; available: {', '.join(ATTENTION_FORMS)}")
    family, tower, checkpoint = _open(model)
    described = _described(tower, checkpoint)
    manifest = Manifest(
        family=family.name,
        architecture=str(checkpoint.architecture),
        source=source_from_checkpoint(tower, described.spec, checkpoint),
        limits=_limits(described, limits),
        inputs=described.inputs(),
        outputs=described.outputs("float32"),
        facts=described.facts(checkpoint.config),
        reference=REFERENCE,
        engines=(),
        tools=_tools(runtimes),
    )
    return Plan(family, tower, described.spec, checkpoint, manifest, wanted)


def find_bundle(model: str | Path) -> Path | None:
    """The newest bundle in the store that fits a checkpoint, or None.

    Raises:
        CheckpointError, UnsupportedModelError: the checkpoint cannot be used; says why.
    """
    wanted = _fingerprint_of(model)
    found = []
    for path in bundles_folder().glob(f"[!.]*/{MANIFEST}"):  # a folder with a dot is a build under way
        with contextlib.suppress(BundleError, OSError):  # a damaged neighbour is no reason to find nothing
            if _fingerprint(read_manifest(path.parent)) == wanted:
                found.append((path.stat().st_mtime_ns, path.parent))
    return max(found)[1] if found else None


def bundle_from_name(name: str) -> Path:
    """The folder of a bundle: `name` itself, or the newest in the store that fits the checkpoint `name`.

    Raises:
        BundleError: there is none; gives the command that builds it.
        CheckpointError, UnsupportedModelError: `name` is no bundle, and no checkpoint that can be used either.
    """
    if (Path(name) / MANIFEST).exists():
        return Path(name)
    found = find_bundle(name)
    if found is None:
        raise no_bundle(name)
    return found


def no_bundle(model: str | Path, otherwise: str = "") -> BundleError:
    """The error where a model has no bundle; `otherwise` is what else can be done."""
    return BundleError(f"there is no engine bundle for {model}: build it with: {build_command(model)}{otherwise}")


def require_fit(model: str | Path, bundle: str | Path) -> None:
    """Make sure that a bundle was built from a checkpoint's weights and config.

    Raises:
        BundleError: it was built from others, or cannot be read.
        CheckpointError, UnsupportedModelError: the checkpoint cannot be used; says why.
    """
    manifest = read_manifest(Path(bundle))
    if _fingerprint(manifest) != _fingerprint_of(model):
        raise BundleError(
            f"{bundle} was built from {manifest.source.name}, and the vision weights or config of {model} are others: "
            f"build one of them: {build_command(model)}"
        )


def _fingerprint(manifest: Manifest) -> tuple[Any, ...]:
    source = manifest.source
    return manifest.family, source.tensors_sha256, source.config, manifest.facts


def _fingerprint_of(model: str | Path) -> tuple[Any, ...]:
    family, tower, checkpoint = _open(model)
    described = _described(tower, checkpoint)
    source = source_from_checkpoint(tower, described.spec, checkpoint)
    return family.name, source.tensors_sha256, source.config, described.facts(checkpoint.config)


def runtime_version(runtime: str) -> str:
    """The installed version of a runtime's package."""
    for package in _PACKAGES[runtime]:
        with contextlib.suppress(PackageNotFoundError):
            return version(package)
    raise RuntimeUnavailableError(f"{runtime} imports, but none of the packages {_PACKAGES[runtime]} is installed")


def _open(model: str | Path) -> tuple[FamilyRow, type[Tower], Checkpoint]:
    # The config alone says which tensors are wanted; a hub id's shards are fetched after that.
    family = family_from_architecture(open_checkpoint(model).architecture)
    tower: type[Tower] = load(family.tower)
    return family, tower, open_checkpoint(model, tower.is_checkpoint_vision)


def _described(tower: type[Tower], checkpoint: Checkpoint) -> Tower:
    """The tower without weights: it knows its inputs, outputs and facts."""
    with torch.device("meta"):
        return tower(tower.spec_from_config(checkpoint.config, tower.image_processor(checkpoint.folder)))


def _precision(runtime: str, precision: str) -> str:
    if runtime not in ATTENTION_FORMS:
        raise BuildError(f"unknown runtime {runtime!r}; available: {', '.join(ATTENTION_FORMS)}")
    reason = load(RUNNERS[runtime]).unavailable(torch.device("cpu"))
    if reason:
        raise RuntimeUnavailableError(f"cannot build for {runtime}: {reason}")
    chosen = _AUTO_PRECISION[runtime] if precision == "auto" else precision
    if chosen not in PRECISIONS:
        raise BuildError(f"unknown precision {precision!r}; available: auto, {', '.join(PRECISIONS)}")
    return chosen


def _limits(described: Tower, given: Mapping[str, int]) -> dict[str, int]:
    limits = described.default_limits()
    options = described.limit_options
    for name, value in given.items():
        if name not in options:
            raise BuildError(f"this family has no limit {name!r}; it has {', '.join(options)}")
        option = options[name]
        if value < option.divisor:
            raise BuildError(f"the limit of {name} is {value}, expected at least {option.divisor}")
        limits[option.symbol] = value // option.divisor
    return limits


def _tools(runtimes: Sequence[str]) -> dict[str, str]:
    found = {name: version(name) for name in _TOOLS} | {runtime: runtime_version(runtime) for runtime in runtimes}
    return {"python": platform.python_version(), **found}
