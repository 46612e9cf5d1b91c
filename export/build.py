"""The one-time build: checkpoint in, certified bundle out, in one atomic step."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from turbovit.engines.errors import BuildError, CertificationError, TurbovitError
from turbovit.engines.store import bundles_folder, file_sha256
from turbovit.export.atomic import folder_in_one_step, remove_leftovers
from turbovit.export.certify import certified, with_engine, write_reference
from turbovit.export.islands import islands_from_file
from turbovit.export.memory import gpu_memory_lines, require_build_memory, weight_bytes
from turbovit.export.plan import PRECISIONS, REFERENCE, CompileOptions, EnginePlan, Plan, plan_build
from turbovit.export.precision import in_precision, recorded_ranges
from turbovit.export.proof import proof_pixels, prove
from turbovit.export.stand_ins import with_stand_ins
from turbovit.export.to_onnx import derive_graph, onnx_from_tower, save_base_graph
from turbovit.export.to_tensorrt import CompilerRefusedError, engine_from_onnx
from turbovit.export.tower import Tower, load_tower, require_same_config

Report = Callable[[str], None]

_SAMPLE_SEED = 0
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
# What `_files` finds; the last is a manifest that was never put in place.
_CONTENTS = (
    "model.*.onnx",
    "weights.*.bin",
    "*.engine",
    REFERENCE,
    EXTRA_TENSORS,
    f"{PROCESSOR_FOLDER}/*",
    f".{MANIFEST}.*",
)
# What the system says where it has no locks: older versions of filelock raise NotImplementedError instead.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
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
    options: CompileOptions | None = None,
    fp32_layers: Sequence[str] = (),
    report: Report = lambda step: None,
) -> Built:
    """Build a bundle of a checkpoint's vision encoder, or add engines to the one that is there.

    Args:
        model: a Hugging Face folder or hub id.
        output: the bundle's folder; by default one in the store, named by family and identity.
        precision: ``auto``, ``fp32``, ``fp16`` or ``bf16``.
        runtimes: which runtimes to build for. Where one fails the build fails, and leaves what was there. None at all
            makes a bundle without engines: with the reference outputs and all that a preprocessor needs.
        limits: what the bundle shall accept in one engine run, such as ``{"images": 8}``.
        options: for the runtimes that compile: for which GPUs and which shapes.
        fp32_layers: layers of the tower that stay in float32 in half precision, by path (``blocks.3.mlp``) or glob.
        report: called with a line at the start of each step.

    Raises:
        CheckpointError, UnsupportedModelError: the checkpoint cannot be used; says why.
        BuildError: the export failed, the disk is full, or `output` holds something else.
        BundleError: the bundle that is there is damaged.
        CertificationError: an engine's outputs are off, or the finished bundle does not encode an image.
    """
    report("checking the checkpoint")
    plan = plan_build(model, precision, runtimes, limits or {}, options, fp32_layers)
    name = f"{plan.family.name}-{plan.manifest.identity[:16]}"
    folder = Path(output).resolve() if output is not None else bundles_folder() / name
    try:
        lock = _acquired_lock(folder)
    except (OSError, NotImplementedError) as error:
        bundle = _up_to_date(plan, folder)  # needs nothing written
        if bundle is None:
            raise _unlockable(folder, error) from error
        return Built(bundle, ())
    try:
        remove_leftovers(folder)
        if (folder / MANIFEST).exists():
            return _extend(plan, folder, report)
        with folder_in_one_step(folder) as temporary:
            bundle = _new_bundle(plan, temporary, report)
        return Built(Bundle(folder, bundle.manifest), bundle.manifest.engines)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        raise BuildError(f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    finally:
        lock.release()


def _new_bundle(plan: Plan, folder: Path, report: Report) -> Bundle:
    """The reference outputs first, whose magnitudes decide about precisions; then the engines."""
    _copy_processor_files(plan.checkpoint.folder, folder / PROCESSOR_FOLDER)
    require_same_config(plan.tower, plan.checkpoint, folder / PROCESSOR_FOLDER, plan.manifest.source)
    proof_pixels(Bundle(folder, plan.manifest))  # before anything expensive
    tower = _loaded(plan, folder, report)
    within = [s for s in tower.samples(_SAMPLE_SEED) if s.within(plan.manifest.inputs, plan.manifest.limits)]
    if not within:
        raise BuildError(f"no shape that could be certified is within the limits {plan.manifest.limits}")
    _save_extra_tensors(tower, folder / EXTRA_TENSORS)
    with recorded_ranges(tower) as ranges:
        write_reference(tower, within, folder / REFERENCE, report)
    manifest = replace(plan.manifest, ranges=ranges)
    return _add_engines(plan, Bundle(folder, manifest), plan.settled(ranges), report, tower)


def _extend(plan: Plan, folder: Path, report: Report) -> Built:
    """Add what is missing beside the old engines; the manifest is replaced last, in one step."""
    bundle, missing = _bundle_there(plan, folder)
    manifest = bundle.manifest
    if not missing:
        return Built(bundle, ())
    _remove_unnamed(folder, manifest)  # what a killed extension left
    try:
        extended = _add_engines(plan, bundle, missing, report)
    except BaseException:
        _remove_unnamed(folder, read_manifest(folder))  # the new one, if that is in place
        raise
    _remove_unnamed(folder, extended.manifest)  # engines that were replaced
    return Built(extended, tuple(engine for engine in extended.manifest.engines if engine not in manifest.engines))


def _bundle_there(plan: Plan, folder: Path) -> tuple[Bundle, list[EnginePlan]]:
    """The bundle in `folder`, and the engines asked for that it lacks."""
    manifest = read_manifest(folder)
    if manifest.identity != plan.manifest.identity:
        raise BuildError(
            f"{folder} holds another bundle ({manifest.family} from {manifest.source.name}, other weights or limits): "
            f"delete it or choose another folder"
        )
    wanted = plan.settled(manifest.ranges)
    missing = [new for new in wanted if not new.is_met_by(manifest.engine(new.runtime, new.precision))]
    return open_bundle(folder), missing


def _up_to_date(plan: Plan, folder: Path) -> Bundle | None:
    """The bundle in `folder`, if it lacks nothing."""
    if not (folder / MANIFEST).exists():
        return None
    bundle, missing = _bundle_there(plan, folder)
    return None if missing else bundle


def _acquired_lock(folder: Path) -> FileLock:
    """One build at a time works on a bundle; for the caller to release."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    lock.acquire()
    return lock


def _add_engines(
    plan: Plan, bundle: Bundle, wanted: Sequence[EnginePlan], report: Report, tower: Tower | None = None
) -> Bundle:
    """Make the engines in the bundle's folder, certify them and write the manifest that names them.

    Args:
        tower: in float32, where it is loaded already; of no use afterwards.
    """
    folder = bundle.path
    for new in {new.label: new for new in wanted}.values():
        if new.reason:
            report(f"{new.precision}: {new.reason}")
        if not (folder / _graph_file(new.label, "attention")).exists():
            _export(tower or _loaded(plan, folder, report), folder, new, report)
            tower = None
    tools = plan.manifest.tools | bundle.manifest.tools | {new.runtime: new.version for new in wanted}
    manifest = replace(bundle.manifest, tools=tools)
    for new in wanted:
        target = Bundle(folder, manifest)
        finish = partial(_certified, target, report=report)
        manifest = with_engine(manifest, _engine(plan, target, new, finish, report))
    report("hashing the files")
    names = [name for name in _files(folder) if not _is_replaced(name, bundle.manifest, manifest)]
    entries = {name: FileEntry((folder / name).stat().st_size, file_sha256(folder / name)) for name in names}
    whole = Bundle(folder, replace(manifest, files=entries))
    prove(whole, [engine for engine in manifest.engines if engine not in bundle.manifest.engines], report)
    plan.checkpoint.require_unmoved()
    write_manifest(folder, whole.manifest)
    return whole


def compile_only(
    model: str | Path,
    folder: Path,
    precision: str,
    runtimes: Sequence[str],
    options: CompileOptions,
    report: Report = lambda step: None,
) -> tuple[Engine, ...]:
    """Export and compile into `folder` as `build` does, but run nothing: for measuring compilers.

    There are no reference outputs, no certificates and no manifest: what it leaves is no bundle.

    Raises:
        as `build`.
    """
    plan = plan_build(model, precision, runtimes, {}, options)
    bundle = Bundle(folder, plan.manifest)
    for new in {new.label: new for new in plan.wanted}.values():
        _export(load_tower(plan.tower, plan.spec, plan.checkpoint), folder, new, report)
    return tuple(_engine(plan, bundle, new, lambda engine: engine, report) for new in plan.wanted)


def _unlockable(folder: Path, error: OSError | NotImplementedError) -> BuildError:
    number = getattr(error, "errno", None)
    reason = getattr(error, "strerror", None) or str(error)
    if isinstance(error, OSError) and number not in _NO_LOCKS:
        return BuildError(f"{folder} cannot be written: {reason}")
    return BuildError(
        f"{folder.parent} lies on a file system without file locking ({reason}), without which two builds could write "
        f"there at once: choose another place with -o, or set TURBOVIT_HOME to one"
    )


def _loaded(plan: Plan, folder: Path, report: Report) -> Tower:
    report("loading the vision weights")
    tower = load_tower(plan.tower, plan.spec, plan.checkpoint)
    _require_space(folder, sum(tensor.numel() * tensor.element_size() for tensor in tower.state_dict().values()))
    return tower


def _export(tower: Tower, folder: Path, new: EnginePlan, report: Report) -> None:
    """Write the base graph in the precision of `new`; the tower is of no use afterwards."""
    report(f"exporting to ONNX in {new.precision}")
    sample, outputs = tower.samples(_SAMPLE_SEED)[0], tower.outputs(PRECISIONS[new.precision])
    graph = onnx_from_tower(in_precision(tower, new.precision, new.fp32_layers), sample, outputs)
    save_base_graph(graph, folder / _graph_file(new.label, "attention"), f"weights.{new.label}.bin")
    tower.release()  # before a runtime loads its own copy


def _engine(plan: Plan, bundle: Bundle, new: EnginePlan, finish: Callable[[Engine], Engine], report: Report) -> Engine:
    """The engine in the first form of attention that builds and that `finish` (its certification) does not refuse."""
    for line in gpu_memory_lines(plan.described(), new.profiles, new.precision, new.fp32_layers):
        report(line)
    failures: list[TurbovitError] = []
    for form in new.forms:
        if failures:
            report(f"{failures[-1]}; trying attention in the form {form!r}")
        try:
            return finish(_made(plan, bundle, new, form, report))
        except (CompilerRefusedError, CertificationError) as error:
            failures.append(error)
    raise type(failures[-1])("; ".join(map(str, failures))) from failures[-1]


def _certified(bundle: Bundle, engine: Engine, report: Report) -> Engine:
    """By its own run here, or else by what can stand in for it."""
    graph = _graph_file(engine.label, engine.attention)
    return with_stand_ins(bundle, certified(bundle, engine, report), graph, report)


def _made(plan: Plan, bundle: Bundle, new: EnginePlan, form: str, report: Report) -> Engine:
    """The graph in a form of attention, compiled where the runtime wants that."""
    folder, file = bundle.path, _graph_file(new.label, form)
    if not (folder / file).exists():
        report(f"writing {file}")
        derive_graph(folder / _graph_file(new.label, "attention"), folder / file, form)
    report(f"{file}: {islands_from_file(folder / file)}")
    if new.compiled:
        file = _compiled(plan, bundle, new, form, report)
    return Engine(
        runtime=new.runtime,
        version=new.version,
        precision=new.precision,
        attention=form,
        file=file,
        architectures=new.architectures,
        profiles=new.profiles,
        fp32_layers=new.fp32_layers,
        reason=new.reason,
    )


def _compiled(plan: Plan, bundle: Bundle, new: EnginePlan, form: str, report: Report) -> str:
    """Compile the graph; the name of the engine's file."""
    folder = bundle.path
    weights = weight_bytes(plan.described(), new.precision, new.fp32_layers)
    require_build_memory(weights)
    _require_space(folder, weights)
    # The old engine stays until the manifest names the new one.
    names = (f"{new.runtime}.{new.precision}{number}.engine" for number in ("", ".2"))
    file = next(name for name in names if name not in bundle.manifest.files)
    report(f"compiling {new.runtime} {new.precision} for compute capability {', '.join(new.architectures)}")
    engine_from_onnx(
        new.runtime,
        new.version,
        folder / _graph_file(new.label, form),
        folder / file,
        plan.manifest.inputs,
        new.profiles,
        new.architectures,
        lambda step: report(f"{new.runtime} {new.precision}: {step}"),
    )
    return file


def _graph_file(label: str, form: str) -> str:
    return f"model.{label}.{form}.onnx"


def _require_space(folder: Path, weights: int) -> None:
    needed = weights + _SPARE_BYTES
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


def _is_replaced(name: str, old: Manifest, new: Manifest) -> bool:
    """Whether a file served engines of the old manifest alone."""
    if name.startswith(("model.", "weights.")):
        return name.split(".")[1] not in {engine.label for engine in new.engines}
    return name in {engine.file for engine in old.engines} - {engine.file for engine in new.engines}


def _files(folder: Path) -> list[str]:
    """Every file that a build makes but the manifest, relative; a stranger's file is not among them."""
    return sorted(path.relative_to(folder).as_posix() for pattern in _CONTENTS for path in folder.glob(pattern))


def _remove_unnamed(folder: Path, manifest: Manifest) -> None:
    for name in set(_files(folder)) - set(manifest.files):
        (folder / name).unlink()
