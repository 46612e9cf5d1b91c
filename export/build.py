"""The one-time build: checkpoint in, certified bundle out, in one atomic step."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError

from turbovit.engines.bundle import (
    MANIFEST,
    Bundle,
    Engine,
    FileEntry,
    Manifest,
    open_bundle,
    read_manifest,
    write_manifest,
)
from turbovit.engines.encoder import EXTRA_TENSORS, PROCESSOR_FOLDER
from turbovit.engines.errors import BuildError
from turbovit.engines.runner import DTYPES
from turbovit.engines.store import bundles_folder, file_sha256
from turbovit.export.atomic import folder_in_one_step, remove_leftovers
from turbovit.export.certify import certified, with_engine, write_reference
from turbovit.export.plan import ATTENTION_FORMS, PRECISIONS, REFERENCE, Plan, plan_build, runtime_version
from turbovit.export.to_onnx import derive_graph, onnx_from_tower, save_base_graph
from turbovit.export.tower import Tower, load_tower

Report = Callable[[str], None]

_SAMPLE_SEED = 0
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
# What `_files` finds; the last is a manifest that was never put in place.
_CONTENTS = ("model.*.onnx", "weights.*.bin", REFERENCE, EXTRA_TENSORS, f"{PROCESSOR_FOLDER}/*", f".{MANIFEST}.*")
# Room for graphs, reference outputs and processor files beside the weights.
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class Built:
    """What `build` did.

    Attributes:
        new: the engines it made; empty where the bundle had them all.
    """

    bundle: Bundle
    new: tuple[Engine, ...]


def build(
    model: str | Path,
    output: str | Path | None = None,
    *,
    precision: str = "auto",
    runtimes: Sequence[str] = ("onnxruntime",),
    limits: Mapping[str, int] | None = None,
    report: Report = lambda step: None,
) -> Built:
    """Build a bundle of a checkpoint's vision encoder, or add engines to the one that is there.

    Args:
        model: a Hugging Face folder or hub id.
        output: the bundle's folder; by default one in the store, named by family and identity.
        precision: ``auto``, ``fp32``, ``fp16`` or ``bf16``.
        runtimes: which runtimes to build for.
        limits: what the bundle shall accept in one engine run, such as ``{"images": 8}``.
        report: called with a line at the start of each step.

    Raises:
        CheckpointError, UnsupportedModelError: the checkpoint cannot be used; says why.
        BuildError: the export failed, the disk is full, or `output` holds something else.
        BundleError: the bundle that is there is damaged.
        CertificationError: an engine's outputs are off.
    """
    report("checking the checkpoint")
    plan = plan_build(model, precision, runtimes, limits or {})
    name = f"{plan.family.name}-{plan.manifest.identity[:16]}"
    folder = Path(output).resolve() if output is not None else bundles_folder() / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{folder.name}.lock"):
            remove_leftovers(folder)
            if (folder / MANIFEST).exists():
                return _extend(plan, folder, report)
            with folder_in_one_step(folder) as temporary:
                bundle = _add_engines(plan, Bundle(temporary, plan.manifest), plan.wanted, report)
            return Built(Bundle(folder, bundle.manifest), bundle.manifest.engines)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        raise BuildError(f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}") from error


def _extend(plan: Plan, folder: Path, report: Report) -> Built:
    """Add what is missing beside the old engines; the manifest is replaced last, in one step."""
    manifest = read_manifest(folder)
    if manifest.identity != plan.manifest.identity:
        raise BuildError(
            f"{folder} holds another bundle ({manifest.family} from {manifest.source.name}, other weights or limits): "
            f"delete it or choose another folder"
        )
    bundle = open_bundle(folder)
    missing = [pair for pair in plan.wanted if manifest.engine(*pair) is None]
    if not missing:
        return Built(bundle, ())
    _remove_unnamed(folder, manifest)  # what a killed extension left
    try:
        extended = _add_engines(plan, bundle, missing, report)
    except BaseException:
        _remove_unnamed(folder, read_manifest(folder))  # the new one, if that is in place
        raise
    return Built(extended, tuple(engine for engine in extended.manifest.engines if engine not in manifest.engines))


def _add_engines(plan: Plan, bundle: Bundle, wanted: Sequence[tuple[str, str]], report: Report) -> Bundle:
    """Make the engines in the bundle's folder, certify them and write the manifest that names them."""
    folder = bundle.path
    for precision in dict.fromkeys(precision for _, precision in wanted):
        if not (folder / _graph_file(precision, "attention")).exists():
            _export(plan, folder, precision, report)
    engines = [_engine(folder, runtime, precision, report) for runtime, precision in wanted]
    manifest = bundle.manifest
    for engine in engines:
        manifest = with_engine(manifest, certified(Bundle(folder, manifest), engine, report))
    report("hashing and writing the manifest")
    entries = {name: FileEntry((folder / name).stat().st_size, file_sha256(folder / name)) for name in _files(folder)}
    manifest = replace(manifest, files=entries)
    write_manifest(folder, manifest)
    return Bundle(folder, manifest)


def _export(plan: Plan, folder: Path, precision: str, report: Report) -> None:
    """Write the base graph in one precision; the first time also the reference outputs and what is of no engine."""
    report("loading the vision weights")
    tower = load_tower(plan.tower, plan.spec, plan.checkpoint)
    _require_space(folder, tower)
    samples = tower.samples(_SAMPLE_SEED)
    if not (folder / REFERENCE).exists():
        _copy_processor_files(plan.checkpoint.folder, folder / PROCESSOR_FOLDER)
        within = [sample for sample in samples if sample.within(plan.manifest.inputs, plan.manifest.limits)]
        if not within:
            raise BuildError(f"no shape that could be certified is within the limits {plan.manifest.limits}")
        _save_extra_tensors(tower, folder / EXTRA_TENSORS)
        write_reference(tower, within, folder / REFERENCE, report)
    report(f"exporting to ONNX in {precision}")
    dtype = PRECISIONS[precision]
    graph = onnx_from_tower(tower.to(DTYPES[dtype]), samples[0], tower.outputs(dtype))
    save_base_graph(graph, folder / _graph_file(precision, "attention"), f"weights.{precision}.bin")
    tower.release()  # before a runtime loads its own copy


def _engine(folder: Path, runtime: str, precision: str, report: Report) -> Engine:
    """The graph in the attention form that the runtime takes."""
    form = ATTENTION_FORMS[runtime]
    file = _graph_file(precision, form)
    if not (folder / file).exists():
        report(f"writing {file}")
        derive_graph(folder / _graph_file(precision, "attention"), folder / file, form)
    return Engine(runtime, runtime_version(runtime), precision, form, file)


def _graph_file(precision: str, form: str) -> str:
    return f"model.{precision}.{form}.onnx"


def _require_space(folder: Path, tower: Tower) -> None:
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tower.state_dict().values()) + _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise BuildError(f"{folder.parent} has {free >> 20} MiB free, the bundle needs up to {needed >> 20} MiB")


def _copy_processor_files(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for name in _PROCESSOR_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _save_extra_tensors(tower: Tower, path: Path) -> None:
    from safetensors.torch import save_file

    tensors = tower.extra_tensors()
    if tensors:
        save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, path)
        path.chmod(0o644)  # safetensors writes 0600, and bundles are shared


def _files(folder: Path) -> list[str]:
    """Every file that a build makes but the manifest, relative; a stranger's file is not among them."""
    return sorted(path.relative_to(folder).as_posix() for pattern in _CONTENTS for path in folder.glob(pattern))


def _remove_unnamed(folder: Path, manifest: Manifest) -> None:
    for name in set(_files(folder)) - set(manifest.files):
        (folder / name).unlink()
