"""The one-time build: whole or not there, never mistaken for another, and never done twice."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import pytest
from filelock import FileLock
from safetensors import SafetensorError

import turbovit
from turbovit.engines.bundle import MANIFEST, Bundle, open_bundle, read_manifest, text_from_manifest
from turbovit.engines.errors import BuildError, BundleError, CertificationError, TurbovitError
from turbovit.engines.families import distinct_families
from turbovit.engines.store import file_sha256
from turbovit.export import build as module
from turbovit.export import plan
from turbovit.export.build import build
from turbovit.export.plan import find_bundle

CHILD = Path(__file__).with_name("build_child.py")
# Lines of `report`, by their start, in the order of the steps.
STEPS = ["loading the vision weights", "reference tower", "exporting", "writing model", "onnxruntime", "hashing"]
EXTENSION_STEPS = [step for step in STEPS if step != "reference tower"]
PROJECTOR = "multi_modal_projector.mm_input_projection_weight"
NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

Exported = list[str]
Changed = Callable[..., Path]


def files(folder: Path) -> dict[str, tuple[int, str]]:
    """Modification time and hash of every file."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, file_sha256(path)) for path in found}


def assert_whole(bundle: Bundle) -> None:
    """It opens, every byte of it, and nothing lies about in or beside it."""
    assert open_bundle(bundle.path, use_hash_cache=False).manifest == bundle.manifest
    assert files(bundle.path).keys() == {MANIFEST, *bundle.manifest.files}
    assert bundle.path.name in beside(bundle.path)
    assert not [name for name in beside(bundle.path) if name.startswith(f".{bundle.path.name}")]


def beside(folder: Path) -> set[str]:
    """What is in the folder that holds `folder`, but for locks."""
    return {path.name for path in folder.parent.iterdir() if path.suffix != ".lock"}


def test_a_build_gives_a_certified_bundle_in_the_store(tiny_gemma3: Path, store: Path, quick_export: Exported) -> None:
    steps: list[str] = []
    built = build(tiny_gemma3, report=steps.append)
    manifest = built.bundle.manifest
    assert built.bundle.path == store / f"gemma3-{manifest.identity[:16]}"
    assert built.new == manifest.engines
    assert [(engine.precision, engine.verdict) for engine in built.new] == [("fp32", "passed")]
    assert manifest.source.name == str(tiny_gemma3)
    assert manifest.limits == {"images": 8}
    assert "processor/preprocessor_config.json" in manifest.files
    assert_whole(built.bundle)
    positions = [next(at for at, line in enumerate(steps) if line.startswith(step)) for step in STEPS]
    assert positions == sorted(positions)


def test_a_second_build_is_a_no_op_that_says_so(tiny_gemma3: Path, copied: Bundle, quick_export: Exported) -> None:
    before = files(copied.path)
    steps: list[str] = []
    built = build(tiny_gemma3, copied.path, report=steps.append)
    assert built.new == ()
    assert built.bundle == copied
    assert files(copied.path) == before
    assert steps == ["checking the checkpoint"]
    assert quick_export == []


def test_two_builds_give_the_same_bundle(tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, tmp_path: Path) -> None:
    again = build(tiny_gemma3, tmp_path / "again").bundle
    assert again.manifest.files == tiny_gemma3_bundle.manifest.files
    assert again.manifest == tiny_gemma3_bundle.manifest
    assert text_from_manifest(again.manifest) == tiny_gemma3_bundle.file(MANIFEST).read_text()


@pytest.mark.parametrize("family", [row.name for row in distinct_families()])
def test_a_bundle_without_engines_lacks_nothing_else(
    family: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model, whole = (request.getfixturevalue(f"tiny_{family}{kind}") for kind in ("", "_bundle"))
    built = build(model, tmp_path / "bundle", runtimes=())
    assert built.new == built.bundle.manifest.engines == ()
    assert_whole(built.bundle)
    engines = {name for name in whole.manifest.files if name.startswith(("model.", "weights."))}
    assert engines
    assert built.bundle.manifest.files == {n: entry for n, entry in whole.manifest.files.items() if n not in engines}
    assert built.bundle.manifest.ranges == whole.manifest.ranges
    if family == "gemma3":
        assert build(model, tmp_path / "bundle").bundle.manifest == whole.manifest


def test_a_build_from_a_source_tree_needs_no_package_of_ours(
    tiny_gemma3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        if name == "turbovit":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(plan, "version", absent)
    built = build(tiny_gemma3, tmp_path / "bundle", runtimes=())
    assert built.bundle.manifest.tools["turbovit"] == turbovit.__version__


def test_precisions_stand_beside_each_other(tiny_gemma3_bundle: Bundle, every_precision: Bundle) -> None:
    assert_whole(every_precision)
    before, after = tiny_gemma3_bundle.manifest, every_precision.manifest
    assert [engine.precision for engine in after.engines] == ["bf16", "fp16", "fp32"]
    assert after.engine("onnxruntime", "fp32") == before.engines[0]
    assert before.files.items() <= after.files.items()
    assert after.identity == before.identity


def test_half_precision_is_certified_where_it_runs(every_precision: Bundle) -> None:
    engine = every_precision.manifest.engine("onnxruntime", "fp16")
    assert engine is not None
    assert engine.verdict == "passed"
    assert engine.certificate is not None
    assert all(error.worst_cosine >= 0.999 for error in engine.certificate.outputs)


def test_what_does_not_run_here_is_not_run_and_never_passed(every_precision: Bundle) -> None:
    engine = every_precision.manifest.engine("onnxruntime", "bf16")
    assert engine is not None
    assert (engine.verdict, engine.certificate) == ("not run", None)
    assert "cannot load model.bf16.multihead.onnx" in str(engine.not_run)
    assert "node" in str(engine.not_run)  # onnxruntime's own words, which differ from version to version
    assert str(every_precision.path.parent) not in str(engine.not_run)  # no place that a build only passes through


def test_adding_a_precision_leaves_all_other_files_alone(
    tiny_gemma3: Path, copied: Bundle, quick_export: Exported
) -> None:
    (copied.path / "notes.txt").write_text("not the bundle's")
    before = files(copied.path)
    built = build(tiny_gemma3, copied.path, precision="fp16")
    assert [engine.precision for engine in built.new] == ["fp16"]
    after = files(copied.path)
    del before[MANIFEST]
    assert {name: after[name] for name in before} == before
    assert "notes.txt" not in built.bundle.manifest.files


def test_a_limit_below_the_samples_certifies_what_is_within_it(tiny_gemma3: Path, quick_export: Exported) -> None:
    bundle = build(tiny_gemma3, limits={"images": 1}).bundle
    (engine,) = bundle.manifest.engines
    assert bundle.manifest.limits == {"images": 1}
    assert engine.certificate is not None
    assert engine.certificate.shapes == ("1 image",)
    assert engine.verdict == "passed"
    assert_whole(bundle)


def test_other_weights_at_the_same_path_are_another_bundle(
    tiny_gemma3: Path, changed_model: Changed, quick_export: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = changed_model()
    old = build(model).bundle
    shutil.rmtree(model)
    changed_model(tensor=PROJECTOR)
    assert find_bundle(model) is None
    monkeypatch.undo()
    monkeypatch.setenv("TURBOVIT_HOME", str(old.path.parents[1]))
    new = build(model).bundle
    assert new.path != old.path
    assert find_bundle(model) == new.path
    assert find_bundle(tiny_gemma3) == old.path
    assert_whole(old)
    assert_whole(new)
    with pytest.raises(BuildError, match=r"holds another bundle \(gemma3 from .*, other weights or limits\): delete"):
        build(model, old.path)


def test_other_limits_are_another_bundle(tiny_gemma3: Path, copied: Bundle, quick_export: Exported) -> None:
    with pytest.raises(BuildError, match="holds another bundle"):
        build(tiny_gemma3, copied.path, limits={"images": 2})
    assert_whole(copied)


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "model.fp32.attention.onnx"])
def test_a_folder_with_other_files_is_refused(tiny_gemma3: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / name).write_text("mine")
    with pytest.raises(BuildError, match="bundle exists and is not empty: delete it or choose another folder"):
        build(tiny_gemma3, tmp_path / "bundle")
    assert (tmp_path / "bundle" / name).read_text() == "mine"
    assert "bundle" in beside(tmp_path / "bundle")


def test_a_file_or_a_place_below_one_is_refused(tiny_gemma3: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file/bundle"):
        with pytest.raises(BuildError, match="file"):
            build(tiny_gemma3, output)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["new/folder/bundle", "bundle[1]", "b*"])
def test_any_name_will_do_for_the_output(tiny_gemma3: Path, tmp_path: Path, quick_export: Exported, name: str) -> None:
    folder = tmp_path / name
    leftover, other = (folder.parent / f".{own}.part-01234567" for own in (folder.name, "bxx"))
    for path in (leftover, other):
        path.mkdir(parents=True)
    assert_whole(build(tiny_gemma3, folder).bundle)
    assert not leftover.exists()
    assert other.exists()


def test_an_empty_folder_becomes_the_bundle(
    tiny_gemma3: Path, tmp_path: Path, quick_export: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bundle").mkdir()
    monkeypatch.chdir(tmp_path / "bundle")
    built = build(tiny_gemma3, ".")
    assert built.bundle.path == tmp_path / "bundle"
    assert_whole(built.bundle)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runtimes": ["tensorflow"]}, "unknown runtime 'tensorflow'; available: onnxruntime"),
        ({"runtimes": [], "precision": "int8"}, "unknown precision 'int8'"),
        ({"precision": "int8"}, "unknown precision 'int8'; available: auto, fp32, fp16, bf16"),
        ({"limits": {"tiles": 4}}, "no limit 'tiles'; it has images"),
        ({"limits": {"images": 0}}, "limit of images is 0, expected at least 1"),
    ],
)
def test_an_unknown_option_is_an_error_that_lists_the_known(
    tiny_gemma3: Path, store: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        build(tiny_gemma3, **options)
    assert not store.exists()


def test_engines_that_miss_their_bound_leave_nothing(
    changed_model: Changed, store: Path, quick_export: Exported
) -> None:
    model = changed_model(tensor=PROJECTOR)  # the graphs exported before hold the old weights
    with pytest.raises(CertificationError, match=r"model\.fp32\.multihead\.onnx missed its bound"):
        build(model)
    assert beside(store / "any") == set()
    assert find_bundle(model) is None


LOCK_ERRORS = {
    "read-only": OSError(errno.EROFS, os.strerror(errno.EROFS)),
    "another user's": PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
    "no locks": OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)),
    "no such call": OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)),
    "older filelock": NotImplementedError("FileSystem does not appear to support flock"),
}


@pytest.fixture(params=LOCK_ERRORS)
def no_lock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store whose bundles' locks cannot be had; what kind of store it is."""
    acquire = FileLock.acquire

    def fail(self: FileLock, *arguments: Any, **options: Any) -> Any:
        if "index" in Path(self.lock_file).name:  # tested with the store
            return acquire(self, *arguments, **options)
        raise LOCK_ERRORS[request.param]

    monkeypatch.setattr(FileLock, "acquire", fail)
    return str(request.param)


def test_nothing_to_do_needs_no_lock(tiny_gemma3: Path, copied: Bundle, no_lock: str) -> None:
    before = files(copied.path)
    built = build(tiny_gemma3, copied.path)
    assert (built.bundle, built.new) == (copied, ())
    assert files(copied.path) == before


@pytest.mark.parametrize("there", [True, False])
def test_a_store_that_cannot_be_locked_is_said_and_left_alone(
    there: bool, tiny_gemma3: Path, copied: Bundle, tmp_path: Path, quick_export: Exported, no_lock: str
) -> None:
    folder = copied.path if there else tmp_path / "new"
    before = files(copied.path)
    with pytest.raises(BuildError) as caught:
        build(tiny_gemma3, folder, precision="fp16")
    if no_lock in ("read-only", "another user's"):
        assert_one_line(caught.value, f"{folder} cannot be written: ", LOCK_ERRORS[no_lock].strerror)
    else:
        assert_one_line(caught.value, "without file locking (", "choose another place with -o, or set TURBOVIT_HOME")
    assert files(copied.path) == before
    assert not (tmp_path / "new").exists()
    assert quick_export == []


def interrupt(steps: list[str], error: BaseException) -> Callable[[str], None]:
    """A report that raises at the first of `steps`."""

    def report(line: str) -> None:
        if line.startswith(tuple(steps)):
            raise error

    return report


@pytest.mark.parametrize("step", STEPS)
def test_ctrl_c_leaves_nothing(tiny_gemma3: Path, store: Path, quick_export: Exported, step: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(tiny_gemma3, report=interrupt([step], KeyboardInterrupt()))
    assert beside(store / "any") == set()


@pytest.mark.parametrize("step", EXTENSION_STEPS)
def test_ctrl_c_while_adding_leaves_the_old_bundle(
    tiny_gemma3: Path, copied: Bundle, quick_export: Exported, step: str
) -> None:
    before = files(copied.path)
    with pytest.raises(KeyboardInterrupt):
        build(tiny_gemma3, copied.path, precision="fp16", report=interrupt([step], KeyboardInterrupt()))
    assert files(copied.path) == before


def test_ctrl_c_just_after_the_new_manifest_keeps_its_files(
    tiny_gemma3: Path, copied: Bundle, quick_export: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = module.write_manifest

    def write_and_stop(*arguments: Any) -> None:
        write(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_manifest", write_and_stop)
    with pytest.raises(KeyboardInterrupt):
        build(tiny_gemma3, copied.path, precision="fp16")
    assert_whole(Bundle(copied.path, read_manifest(copied.path)))


@pytest.fixture(scope="module")
def ended(
    tiny_gemma3: Path,
    tiny_gemma3_bundle: Bundle,
    every_precision: Bundle,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[tuple[Path, int]]]:
    """Builds in processes of their own: output, and exit status - 10 + new engines, or minus the deadly signal."""
    folder = tmp_path_factory.mktemp("processes")
    jobs: dict[str, list[dict[str, str]]] = {
        "killed": [{"output": f"killed-{number}/bundle", "die_at": step} for number, step in enumerate(STEPS)],
        "killed adding": [
            {"output": f"adding-{number}/bundle", "die_at": step, "precision": "fp16"}
            for number, step in enumerate(EXTENSION_STEPS)
        ],
        "at once": [{"output": "at-once/bundle"}] * 2,
    }
    for job in jobs["killed adding"]:
        shutil.copytree(tiny_gemma3_bundle.path, folder / job["output"])
    common = {"model": str(tiny_gemma3), "graphs": str(every_precision.path)}
    arguments = [common | job | {"output": str(folder / job["output"])} for group in jobs.values() for job in group]
    command = [sys.executable, str(CHILD), json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    statuses = iter(json.loads(done.stdout.splitlines()[-1]))
    return {name: [(folder / job["output"], next(statuses)) for job in group] for name, group in jobs.items()}


Ended = dict[str, list[tuple[Path, int]]]


def test_a_killed_build_leaves_nothing_that_opens(tiny_gemma3: Path, ended: Ended, quick_export: Exported) -> None:
    for output, status in ended["killed"]:
        assert status == -signal.SIGKILL
        (leftover,) = beside(output)
        for folder in (output, output.parent / leftover):
            with pytest.raises(BundleError, match="is not a turbovit bundle"):
                open_bundle(folder)
    for output, _ in (ended["killed"][0], ended["killed"][-1]):
        assert_whole(build(tiny_gemma3, output).bundle)
        assert beside(output) == {"bundle"}


def test_a_kill_while_adding_leaves_the_old_bundle(
    tiny_gemma3: Path, ended: Ended, tiny_gemma3_bundle: Bundle, every_precision: Bundle, quick_export: Exported
) -> None:
    for output, status in ended["killed adding"]:
        assert status == -signal.SIGKILL
        assert open_bundle(output, use_hash_cache=False).manifest == tiny_gemma3_bundle.manifest
    added = build(tiny_gemma3, ended["killed adding"][-1][0], precision="fp16").bundle
    assert added.manifest.engine("onnxruntime", "fp16") == every_precision.manifest.engine("onnxruntime", "fp16")
    assert_whole(added)


def test_two_builders_at_once_give_one_bundle(ended: Ended) -> None:
    (output, first), (_, second) = ended["at once"]
    assert {first, second} == {10, 11}  # one built it, the other found it
    assert_whole(Bundle(output, read_manifest(output)))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_files_cut_short_by_a_kill_are_made_anew(
    tiny_gemma3: Path, copied: Bundle, every_precision: Bundle, quick_export: Exported, precision: str
) -> None:
    for name in ("model.fp16.attention.onnx", "model.fp16.multihead.onnx", "weights.fp16.bin"):
        (copied.path / name).write_bytes(every_precision.file(name).read_bytes()[:1000])
    (copied.path / f".{MANIFEST}.12345").write_text("{")
    added = build(tiny_gemma3, copied.path, precision=precision).bundle
    assert added.manifest.engine("onnxruntime", precision) == every_precision.manifest.engine("onnxruntime", precision)
    assert_whole(added)


def assert_one_line(error: TurbovitError, *parts: str) -> None:
    assert "\n" not in str(error)
    assert all(part in str(error) for part in parts)


def test_too_little_space_is_told_before_anything_is_written(
    tiny_gemma3: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 1 << 40, 3 << 20))
    with pytest.raises(BuildError) as caught:
        build(tiny_gemma3)
    assert_one_line(caught.value, "has 3 MiB free, the bundle needs up to 65 MiB", str(store))
    assert beside(store / "any") == set()


def fail(error: Exception) -> Callable[..., NoReturn]:
    def failing(*_: Any, **__: Any) -> NoReturn:
        raise error

    return failing


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("_copy_processor_files", NO_SPACE),
        ("write_reference", SafetensorError("I/O error: No space left on device (os error 28)")),
        ("save_base_graph", NO_SPACE),
        ("derive_graph", NO_SPACE),
        ("write_manifest", NO_SPACE),
    ],
)
def test_a_disk_that_fills_up_is_one_clear_line(
    tiny_gemma3: Path,
    store: Path,
    quick_export: Exported,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    error: Exception,
) -> None:
    monkeypatch.setattr(module, step, fail(error))
    with pytest.raises(BuildError) as caught:
        build(tiny_gemma3)
    assert_one_line(caught.value, "cannot be written: ", "No space left on device", str(store))
    assert beside(store / "any") == set()


@pytest.mark.parametrize("step", ["save_base_graph", "derive_graph", "write_manifest"])
def test_a_disk_that_fills_up_while_adding_leaves_the_old_bundle(
    tiny_gemma3: Path, copied: Bundle, quick_export: Exported, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = files(copied.path)
    monkeypatch.setattr(module, step, fail(NO_SPACE))
    with pytest.raises(BuildError, match="cannot be written: No space left on device"):
        build(tiny_gemma3, copied.path, precision="fp16")
    assert files(copied.path) == before
    assert_whole(copied)


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many bytes whose free space the build does not see."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("this machine lets no small file system be mounted")
        monkeypatch.setattr(module, "_require_space", lambda *_: None)
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True)


# The tiny bundle: 7.4 MB of reference outputs, 1.5 MB of weights, graphs of 80 and 60 kB.
@pytest.mark.parametrize("size", [1 << 12, 1 << 20, 7_500_000, 9_000_000])
def test_a_really_full_disk_is_one_clear_line(
    tiny_gemma3: Path, small_disk: Callable[[int], Path], quick_export: Exported, size: int
) -> None:
    folder = small_disk(size) / "bundle"
    with pytest.raises(BuildError) as caught:
        build(tiny_gemma3, folder)
    assert_one_line(caught.value, "cannot be written: ", "No space left on device")
    assert beside(folder) == set()


def test_a_really_full_disk_while_adding_leaves_the_old_bundle(
    tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, small_disk: Callable[[int], Path], quick_export: Exported
) -> None:
    used = sum(path.stat().st_size for path in tiny_gemma3_bundle.path.rglob("*") if path.is_file())
    folder = small_disk(used + 500_000) / "bundle"
    shutil.copytree(tiny_gemma3_bundle.path, folder)
    before = files(folder)
    with pytest.raises(BuildError, match=r"cannot be written: .*No space left on device"):
        build(tiny_gemma3, folder, precision="fp16")
    assert files(folder) == before
    assert_whole(Bundle(folder, tiny_gemma3_bundle.manifest))
