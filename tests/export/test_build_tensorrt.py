"""Building with the real TensorRT-RTX: what the bundle holds, when it is built again, what a failure leaves."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from turbovit.engines.bundle import MANIFEST, Bundle, Engine, Profile, open_bundle, read_manifest, text_from_manifest
from turbovit.engines.errors import BuildError, RuntimeUnavailableError
from turbovit.engines.families import distinct_families
from turbovit.engines.store import file_sha256
from turbovit.export import build as module
from turbovit.export.build import build
from turbovit.export.plan import CompileOptions
from turbovit.export.profiles import shapes_from_profile
from turbovit.export.to_tensorrt import CompilerRefusedError

tensorrt_rtx = pytest.importorskip("tensorrt_rtx")

RTX = {"runtimes": ["tensorrt-rtx"], "precision": "fp16"}
FOR_TWO = CompileOptions(capabilities=("8.9", "12.0"))
TOWERS = [row.name for row in distinct_families()]


def files(folder: Path) -> dict[str, str]:
    return {path.name: file_sha256(path) for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def built(tiny_gemma3: Path, every_precision: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The shared bundle with an engine for two architectures added. Never changed: copy it first."""
    folder = tmp_path_factory.mktemp("tensorrt") / "bundle"
    shutil.copytree(every_precision.path, folder)
    return build(tiny_gemma3, folder, options=FOR_TWO, **RTX).bundle


@pytest.fixture
def copy_of_built(built: Bundle, tmp_path: Path) -> Path:
    shutil.copytree(built.path, tmp_path / "bundle")
    return tmp_path / "bundle"


def rtx_engine(bundle: Bundle, precision: str = "fp16") -> Engine:
    engine = bundle.manifest.engine("tensorrt_rtx", precision)
    assert engine is not None
    return engine


def assert_holds(engine_file: Path, bundle: Bundle, engine: Engine) -> None:
    """The file itself is for the architectures and shapes that the manifest names."""
    content = engine_file.read_bytes()
    if engine.version.startswith("1.7."):  # where this layout of the header was seen
        known = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
        mask = sum(1 << known.index(architecture) for architecture in engine.architectures)
        assert struct.unpack("<I", content[32:36]) == (mask,)
    for profile in engine.profiles:
        for shapes in shapes_from_profile(profile, bundle.manifest.inputs).values():
            assert all(struct.pack(f"<{len(shape)}q", *shape) in content for shape in shapes)


@pytest.mark.parametrize("family", TOWERS)
def test_every_family_compiles_for_two_architectures_without_a_gpu(
    request: pytest.FixtureRequest, tmp_path: Path, family: str
) -> None:
    model, shared = (request.getfixturevalue(f"tiny_{family}{kind}") for kind in ("", "_bundle"))
    shutil.copytree(shared.path, tmp_path / "bundle")
    steps: list[str] = []
    result = build(model, tmp_path / "bundle", options=FOR_TWO, report=steps.append, **RTX)
    (engine,) = result.new
    assert (engine.runtime, engine.precision, engine.attention) == ("tensorrt_rtx", "fp16", "matmul")
    assert engine.version == tensorrt_rtx.__version__
    assert engine.architectures == ("8.9", "12.0")
    assert engine.file == "tensorrt_rtx.fp16.engine"
    assert len(engine.profiles) > 1
    assert engine.verdict == "not run"
    assert_holds(tmp_path / "bundle" / engine.file, result.bundle, engine)
    assert open_bundle(tmp_path / "bundle", use_hash_cache=False).manifest == result.bundle.manifest
    assert sum("on the GPU" in step for step in steps) == len(engine.profiles)
    assert "tensorrt_rtx fp16: parsing the graph" in steps


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_other_precisions_stand_beside_it(
    tiny_gemma3: Path, copy_of_built: Path, built: Bundle, precision: str
) -> None:
    result = build(tiny_gemma3, copy_of_built, runtimes=["tensorrt_rtx"], precision=precision, options=FOR_TWO)
    assert [(engine.precision, engine.attention) for engine in result.new] == [(precision, "matmul")]
    assert rtx_engine(result.bundle) == rtx_engine(built)
    assert_holds(copy_of_built / result.new[0].file, result.bundle, result.new[0])


def test_a_second_build_is_a_no_op_whatever_the_order_of_the_options(tiny_gemma3: Path, copy_of_built: Path) -> None:
    before = files(copy_of_built)
    steps: list[str] = []
    options = CompileOptions(capabilities=("12.0", "8.9", "8.9"))
    assert build(tiny_gemma3, copy_of_built, options=options, report=steps.append, **RTX).new == ()
    assert files(copy_of_built) == before
    assert not [step for step in steps if "compiling" in step]


def test_two_builds_are_equal_in_every_byte(
    tiny_gemma3: Path, built: Bundle, every_precision: Bundle, tmp_path: Path
) -> None:
    shutil.copytree(every_precision.path, tmp_path / "again")
    again = build(tiny_gemma3, tmp_path / "again", options=FOR_TWO, **RTX).bundle
    assert text_from_manifest(again.manifest) == built.file(MANIFEST).read_text()  # with the engine's sha256


@pytest.mark.parametrize(
    "options",
    [
        CompileOptions(capabilities=("8.6",)),
        CompileOptions(capabilities=("8.9", "12.0"), profiles=("images=1:1:2", "images=1:3:4")),
    ],
    ids=["architectures", "profiles"],
)
def test_other_options_replace_the_engine(tiny_gemma3: Path, copy_of_built: Path, options: CompileOptions) -> None:
    before = read_manifest(copy_of_built)
    for wanted in (options, FOR_TWO):
        result = build(tiny_gemma3, copy_of_built, options=wanted, **RTX)
        (engine,) = result.new
        assert engine.architectures == wanted.capabilities
        assert len([entry for entry in result.bundle.manifest.engines if entry.runtime == "tensorrt_rtx"]) == 1
        assert [path.name for path in copy_of_built.glob("*.engine")] == [engine.file]
        assert_holds(copy_of_built / engine.file, result.bundle, engine)
        assert open_bundle(copy_of_built, use_hash_cache=False).manifest == result.bundle.manifest
        if options.profiles and wanted is options:
            assert engine.profiles == (Profile({"images": (1, 1, 2)}), Profile({"images": (1, 3, 4)}))
    assert read_manifest(copy_of_built) == before  # back to where it was


def test_another_version_of_the_library_builds_anew(
    tiny_gemma3: Path, copy_of_built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt_rtx, "__version__", "1.9.0")
    (engine,) = build(tiny_gemma3, copy_of_built, options=FOR_TWO, **RTX).new
    assert engine.version == "1.9.0"
    assert read_manifest(copy_of_built).tools["tensorrt_rtx"] == "1.9.0"


@pytest.mark.parametrize("error", [CompilerRefusedError("no"), BuildError("killed"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_bundle_as_it_was(
    tiny_gemma3: Path, copy_of_built: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*arguments: Any, **_: Any) -> None:
        arguments[3].write_text("half an engine")
        raise error

    before = files(copy_of_built)
    monkeypatch.setattr(module, "engine_from_onnx", fail)
    with pytest.raises(type(error)):
        build(tiny_gemma3, copy_of_built, options=CompileOptions(capabilities=("8.6",)), **RTX)
    assert files(copy_of_built) == before


def test_one_failing_runtime_fails_the_build_as_a_whole(
    tiny_gemma3: Path, tmp_path: Path, quick_export: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CompilerRefusedError("tensorrt_rtx cannot compile it: its own words")

    monkeypatch.setattr(module, "engine_from_onnx", refuse)
    with pytest.raises(BuildError, match="its own words"):
        build(
            tiny_gemma3,
            tmp_path / "bundle",
            runtimes=["onnxruntime", "tensorrt-rtx"],
            precision="fp32",
            options=FOR_TWO,
        )
    assert not (tmp_path / "bundle").exists()


def test_a_form_that_the_compiler_refuses_is_told_and_the_next_is_tried(
    tiny_gemma3: Path, every_precision: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = module.engine_from_onnx

    def refuse_matmul(*arguments: Any, **keywords: Any) -> None:
        if "matmul" in arguments[2].name:
            raise CompilerRefusedError("tensorrt_rtx cannot compile these products")
        original(*arguments, **keywords)

    monkeypatch.setattr(module, "engine_from_onnx", refuse_matmul)
    shutil.copytree(every_precision.path, tmp_path / "bundle")
    steps: list[str] = []
    (engine,) = build(tiny_gemma3, tmp_path / "bundle", options=FOR_TWO, report=steps.append, **RTX).new
    assert engine.attention == "attention"
    assert "tensorrt_rtx cannot compile these products; trying attention in the form 'attention'" in steps
    assert any("inside attention nodes, their precision is up to the runtime" in step for step in steps)


def test_where_no_form_compiles_the_error_has_the_words_for_each(
    tiny_gemma3: Path, every_precision: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **_: Any) -> None:
        raise CompilerRefusedError(f"cannot compile {arguments[2].name}")

    monkeypatch.setattr(module, "engine_from_onnx", refuse)
    shutil.copytree(every_precision.path, tmp_path / "bundle")
    with pytest.raises(
        BuildError, match=r"cannot compile model\.fp16\.matmul\.onnx; cannot compile model\.fp16\.attention\.onnx"
    ):
        build(tiny_gemma3, tmp_path / "bundle", options=FOR_TWO, **RTX)


@pytest.mark.parametrize(
    ("options", "keywords", "message"),
    [
        (CompileOptions(capabilities=("8.9",)), {"runtimes": ["onnxruntime"]}, "--compute-capability is for"),
        (CompileOptions(profiles=("images=1:1:1",)), {"runtimes": ["onnxruntime"]}, "for runtimes that compile"),
        (CompileOptions(capabilities=("9.0",)), RTX, "does not compile for compute capability 9.0"),
        (CompileOptions(capabilities=("8.9",), profiles=("tiles=1:1:1",)), RTX, "expected images=MIN:OPT:MAX"),
        (CompileOptions(capabilities=("8.9",), profiles=("images=1:1:9",)), RTX, "the bundle's limit is 8"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_written(
    tiny_gemma3: Path, store: Path, options: CompileOptions, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        build(tiny_gemma3, options=options, **keywords)
    assert not store.exists()


def test_tensorrt_needs_a_gpu(tiny_gemma3: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        RuntimeUnavailableError, match="tensorrt compiles for the GPU that it runs on, and torch sees none"
    ):
        build(tiny_gemma3, runtimes=["tensorrt"])
    assert not store.exists()
