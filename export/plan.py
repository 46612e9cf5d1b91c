"""What a build will do, worked out before anything expensive: family, spec, identity, engines."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import turbovit
from turbovit.engines.bundle import MANIFEST, Engine, Manifest, Profile, precision_label, read_manifest
from turbovit.engines.commands import build_command
from turbovit.engines.encoder import RUNNERS
from turbovit.engines.errors import BuildError, BundleError, RuntimeUnavailableError
from turbovit.engines.families import FamilyRow, family_from_architecture, load
from turbovit.engines.runner import PRECISION_DTYPES
from turbovit.engines.store import bundles_folder
from turbovit.export.checkpoint import Checkpoint, open_checkpoint
from turbovit.export.memory import require_gpu_memory
from turbovit.export.precision import choice_from_ranges, fp32_layers
from turbovit.export.profiles import profile_from_text
from turbovit.export.targets import COMPILED, architectures, gpu_memory_here, library_version
from turbovit.export.tower import Tower, described_tower, source_from_checkpoint

PRECISIONS = {name: str(dtype).removeprefix("torch.") for name, dtype in PRECISION_DTYPES.items()}  # ONNX's names
# Forms of attention by runtime and precision, best first: the first that builds and certifies is taken. `matmul` says
# that its softmax is in float32, and in half precision TensorRT-RTX makes one kernel of it, as of the node. What that
# one computes its softmax in is up to the compiler, which has no kernel for it in float32. TensorRT is untried.
_SAID_IN_FLOAT32 = {"fp32": ("matmul",), "fp16": ("matmul", "attention"), "bf16": ("matmul", "attention")}
ATTENTION_FORMS: dict[str, dict[str, tuple[str, ...]]] = {
    "onnxruntime": dict.fromkeys(PRECISIONS, ("multihead",)),
    "tensorrt": _SAID_IN_FLOAT32,
    "tensorrt_rtx": _SAID_IN_FLOAT32,
}
REFERENCE = "reference.safetensors"
# Where it is half precision, the range check has the last word.
_AUTO_PRECISION = {"onnxruntime": "fp32", "tensorrt": "fp16", "tensorrt_rtx": "fp16"}
_NO_BFLOAT16 = "7.5"  # compute capability of the GPUs without it
_PACKAGES = {"onnxruntime": ("onnxruntime", "onnxruntime-gpu")}
_TOOLS = ("turbovit", "torch", "transformers", "onnx", "onnxscript")


@dataclass(frozen=True)
class CompileOptions:
    """What a user may say about engines that are compiled.

    Attributes:
        capabilities: compute capabilities to compile for (``"8.9"``); empty for this machine's GPU.
        profiles: as `turbovit.export.profiles.profile_from_text` reads them; empty for the family's own.
        gpu_memory: bytes that the GPU has; None where it is this machine's, or not known.
    """

    capabilities: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    gpu_memory: int | None = None


@dataclass(frozen=True)
class EnginePlan:
    """One engine to make.

    Attributes:
        version: of the runtime that is installed.
        forms: of attention, best first.
        precision: where the range check chooses it, one that needs as much memory.
        architectures: compute capabilities to compile for, and `profiles` the shapes; empty where nothing is compiled.
        fp32_layers: the tower's layers that stay in float32, by path.
        asked: the precision asked for, maybe ``auto``.
        reason: why it has its precision; empty where `Plan.settled` was not there yet.
    """

    runtime: str
    version: str
    precision: str
    forms: tuple[str, ...]
    architectures: tuple[str, ...] = ()
    profiles: tuple[Profile, ...] = ()
    fp32_layers: tuple[str, ...] = ()
    asked: str = ""
    reason: str = ""

    @property
    def label(self) -> str:
        """What its graphs and weights are named by."""
        return precision_label(self.precision, self.fp32_layers)

    @property
    def compiled(self) -> bool:
        """Whether there is more to do than to write a graph."""
        return self.runtime in COMPILED

    def is_met_by(self, engine: Engine | None) -> bool:
        """Whether an engine that is there will do. One that was compiled is tied to version, GPUs and shapes."""
        if engine is None or engine.fp32_layers != self.fp32_layers:
            return False
        if not self.compiled:
            return True
        wanted = self.version, self.architectures, self.profiles
        return wanted == (engine.version, engine.architectures, engine.profiles)


@dataclass(frozen=True)
class Plan:
    """Everything a build needs to know.

    Attributes:
        manifest: as it will be, but for engines and files.
        wanted: the engines asked for.
    """

    family: FamilyRow
    tower: type[Tower]
    spec: Any
    checkpoint: Checkpoint
    manifest: Manifest
    wanted: tuple[EnginePlan, ...]

    def described(self) -> Tower:
        """The tower without weights: it knows its inputs, outputs and sizes."""
        with torch.device("meta"):
            return self.tower(self.spec)

    def settled(self, ranges: Mapping[str, float]) -> tuple[EnginePlan, ...]:
        """The engines asked for, each in the precision that the range check allows or chooses.

        Args:
            ranges: of the float32 reference tower.

        Raises:
            BuildError: float16 cannot hold the tower, or the GPUs have no bfloat16; says why.
        """
        return tuple(self._settled(engine, ranges) for engine in self.wanted)

    def _settled(self, engine: EnginePlan, ranges: Mapping[str, float]) -> EnginePlan:
        if engine.precision == "fp32":
            return engine
        bfloat16 = _NO_BFLOAT16 not in engine.architectures
        choice = choice_from_ranges(ranges, self.described(), engine.asked, engine.fp32_layers, bfloat16=bfloat16)
        return replace(engine, precision=choice.precision, reason=choice.reason)


def plan_build(
    model: str | Path,
    precision: str,
    runtimes: Sequence[str],
    limits: Mapping[str, int],
    options: CompileOptions | None = None,
    raised: Sequence[str] = (),
) -> Plan:
    """Open the checkpoint and settle what to build; reads the weights only to hash them.

    Args:
        model: a Hugging Face folder or hub id.
        precision: ``auto``, ``fp32``, ``fp16`` or ``bf16``.
        runtimes: which runtimes to build for.
        limits: what the bundle shall accept where not the family's default, such as ``{"images": 8}``.
        options: for runtimes that compile.
        raised: layers that stay in float32, by path or glob.

    Raises:
        CheckpointError, UnsupportedModelError: the checkpoint cannot be used; says why.
        BuildError, RuntimeUnavailableError: a runtime, precision, limit or option is unknown or not to be had here,
            or an engine would not fit the GPU.
    """
    options = options or CompileOptions()
    engines = _engines(precision, runtimes, options)
    family, tower, checkpoint = _open(model)
    described = described_tower(tower, checkpoint)
    bounds = _limits(described, limits)
    profiles = _profiles(described, bounds, options.profiles)
    manifest = Manifest(
        family=family.name,
        architecture=str(checkpoint.architecture),
        source=source_from_checkpoint(tower, described.spec, checkpoint),
        limits=bounds,
        inputs=described.inputs(),
        outputs=described.outputs("float32"),
        facts=described.facts(checkpoint.config),
        reference=REFERENCE,
        engines=(),
        tools=_tools(engines),
    )
    wanted = tuple(replace(engine, profiles=profiles) if engine.compiled else engine for engine in engines)
    wanted = _with_fp32_layers(wanted, fp32_layers(described, raised))
    memory = options.gpu_memory
    if memory is None and any(engine.runtime == "tensorrt" for engine in wanted):
        memory = gpu_memory_here()
    if memory is not None:
        for engine in wanted:
            require_gpu_memory(described, engine.profiles, engine.precision, engine.fp32_layers, memory)
    return Plan(family, tower, described.spec, checkpoint, manifest, wanted)


def find_bundle(model: str | Path, folder: Path | None = None) -> Path | None:
    """The newest bundle in `folder` (the store where it is None) that fits a checkpoint, or None.

    Raises:
        CheckpointError, UnsupportedModelError: the checkpoint cannot be used; says why.
    """
    return next(iter(find_bundles(model, folder)), None)


def find_bundles(model: str | Path, folder: Path | None = None) -> list[Path]:
    """As `find_bundle`, all that fit, newest first."""
    wanted = _fingerprint_of(model)
    found = []
    for path in (folder or bundles_folder()).glob(f"[!.]*/{MANIFEST}"):  # a folder with a dot is a build under way
        with contextlib.suppress(BundleError, OSError):  # a damaged neighbour is no reason to find nothing
            if _fingerprint(read_manifest(path.parent)) == wanted:
                found.append((path.stat().st_mtime_ns, path.parent))
    return [path for _, path in sorted(found, reverse=True)]


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
    described = described_tower(tower, checkpoint)
    source = source_from_checkpoint(tower, described.spec, checkpoint)
    return family.name, source.tensors_sha256, source.config, described.facts(checkpoint.config)


def runtime_version(runtime: str) -> str:
    """The installed version of a runtime.

    Raises:
        RuntimeUnavailableError: it is not installed, or cannot build here; says why.
    """
    if runtime in COMPILED:
        return library_version(runtime)
    for package in _PACKAGES[runtime]:
        with contextlib.suppress(PackageNotFoundError):
            return version(package)
    raise RuntimeUnavailableError(f"{runtime} imports, but none of the packages {_PACKAGES[runtime]} is installed")


def _open(model: str | Path) -> tuple[FamilyRow, type[Tower], Checkpoint]:
    # The config alone says which tensors are wanted; a hub id's shards are fetched after that.
    checkpoint = open_checkpoint(model)
    family = family_from_architecture(checkpoint.architecture)
    tower: type[Tower] = load(family.tower)
    return family, tower, checkpoint.with_weights(tower.is_checkpoint_vision)


def _engines(precision: str, runtimes: Sequence[str], options: CompileOptions) -> tuple[EnginePlan, ...]:
    """The engines asked for, without their profiles."""
    names = dict.fromkeys(runtime.strip().replace("-", "_") for runtime in runtimes)
    unknown = [name for name in names if name not in ATTENTION_FORMS]
    if unknown:
        raise BuildError(f"unknown runtime {unknown[0]!r}; available: {', '.join(ATTENTION_FORMS)}")
    if precision not in ("auto", *PRECISIONS):
        raise BuildError(f"unknown precision {precision!r}; available: auto, {', '.join(PRECISIONS)}")
    if options.capabilities and "tensorrt_rtx" not in names:
        raise BuildError(
            "--compute-capability is for --runtime tensorrt-rtx alone: no other compiles for GPUs elsewhere"
        )
    if (options.profiles or options.gpu_memory) and not any(name in COMPILED for name in names):
        raise BuildError(f"profiles and GPU memory are for runtimes that compile: {', '.join(COMPILED)}")
    return tuple(_engine(name, precision, options.capabilities) for name in names)


def _engine(runtime: str, precision: str, capabilities: tuple[str, ...]) -> EnginePlan:
    chosen = _AUTO_PRECISION[runtime] if precision == "auto" else precision
    forms = ATTENTION_FORMS[runtime][chosen]
    if runtime in COMPILED:
        targets = architectures(runtime, capabilities)
        return EnginePlan(runtime, runtime_version(runtime), chosen, forms, targets, asked=precision)
    reason = load(RUNNERS[runtime]).unavailable(torch.device("cpu"))
    if reason:
        raise RuntimeUnavailableError(f"cannot build for {runtime}: {reason}")
    return EnginePlan(runtime, runtime_version(runtime), chosen, forms, asked=precision)


def _with_fp32_layers(engines: tuple[EnginePlan, ...], layers: tuple[str, ...]) -> tuple[EnginePlan, ...]:
    half = [engine for engine in engines if engine.precision != "fp32"]
    if layers and not half:
        raise BuildError("--fp32-layers is for half precision, and all that is asked for is in fp32: give --precision")
    return tuple(replace(engine, fp32_layers=layers) if engine in half else engine for engine in engines)


def _profiles(described: Tower, limits: Mapping[str, int], texts: Sequence[str]) -> tuple[Profile, ...]:
    batch = str(described.inputs()[0].shape[0])
    given = dict.fromkeys(texts)  # the same twice is one
    return tuple(profile_from_text(text, limits, batch) for text in given) or described.default_profiles(limits)


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


def _tools(engines: Sequence[EnginePlan]) -> dict[str, str]:
    found = {name: _version(name) for name in _TOOLS} | {engine.runtime: engine.version for engine in engines}
    if any(engine.compiled for engine in engines):
        found["polygraphy"] = version("polygraphy")
    return {"python": platform.python_version(), **found}


def _version(name: str) -> str:
    """Of an installed package; of the code itself where that runs from a source tree."""
    return turbovit.__version__ if name == "turbovit" else version(name)
