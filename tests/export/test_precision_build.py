"""Precisions through whole builds: a checkpoint that float16 cannot hold, layers in float32, and stand-ins."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from turbovit.engines.bundle import Bundle, Engine, read_manifest
from turbovit.engines.errors import BuildError, CertificationError
from turbovit.export import stand_ins
from turbovit.export.build import build
from turbovit.export.certify import verify_engines
from turbovit.export.plan import plan_build
from turbovit.export.stand_ins import with_stand_ins

DOWN = "vision_tower.vision_model.encoder.layers.1.mlp.fc2."


@pytest.fixture(scope="session")
def large_gemma3(tiny_gemma3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sample whose second layer adds more to the residual stream than float16 holds. Never changed."""
    folder = tmp_path_factory.mktemp("checkpoints") / "large"
    shutil.copytree(tiny_gemma3, folder)
    tensors = load_file(folder / "model.safetensors")
    for kind in ("weight", "bias"):
        tensors[DOWN + kind] *= 3e4
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def raised(large_gemma3: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Its bundle in float16, with that layer in float32. Never changed."""
    folder = tmp_path_factory.mktemp("bundles") / "raised"
    return build(large_gemma3, folder, precision="fp16", fp32_layers=["blocks.1.mlp"]).bundle


def test_float16_is_refused_with_layer_and_number_and_leaves_nothing(large_gemma3: Path, tmp_path: Path) -> None:
    message = r"float16 cannot hold the tower: blocks.1.mlp.down output reaches 1.007e\+05.*--fp32-layers"
    with pytest.raises(BuildError, match=message):
        build(large_gemma3, tmp_path / "bundle", precision="fp16")
    assert not list(tmp_path.glob("*bundle*/"))


def test_the_layer_in_float32_makes_float16_possible(raised: Bundle) -> None:
    (engine,) = raised.manifest.engines
    assert (engine.precision, engine.fp32_layers, engine.verdict) == ("fp16", ("blocks.1.mlp",), "passed")
    assert engine.reason.startswith("asked for; float16 holds every layer")
    assert raised.manifest.ranges["blocks.1.mlp.down output"] > 65504


def test_the_same_list_is_a_no_op_and_another_one_replaces_the_engine(
    raised: Bundle, large_gemma3: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(raised.path, folder)
    assert build(large_gemma3, folder, precision="fp16", fp32_layers=["blocks.1.ml?"]).new == ()
    built = build(large_gemma3, folder, precision="fp16", fp32_layers=["blocks.1"])
    (engine,) = built.bundle.manifest.engines
    assert built.new == (engine,)
    assert engine.fp32_layers == ("blocks.1",)
    graphs = {path.name for pattern in ("*.onnx", "*.bin") for path in folder.glob(pattern)}
    assert len(graphs) == 3  # two graphs and their weights: those of the old list are gone
    assert graphs <= set(built.bundle.manifest.files)
    assert not graphs & set(raised.manifest.files)


@pytest.mark.parametrize(("sample", "precision"), [("tiny_gemma3", "fp16"), ("large_gemma3", "bf16")])
def test_auto_follows_the_range_check(request: pytest.FixtureRequest, sample: str, precision: str) -> None:
    model = request.getfixturevalue(sample)
    plan = plan_build(model, "fp16", ["onnxruntime"], {})
    plan = replace(plan, wanted=tuple(replace(engine, asked="auto") for engine in plan.wanted))
    ranges = {"large_gemma3": "raised", "tiny_gemma3": "tiny_gemma3_bundle"}[sample]
    (engine,) = plan.settled(request.getfixturevalue(ranges).manifest.ranges)
    assert engine.precision == precision
    assert ("cannot hold" in engine.reason) == (precision == "bf16")


def test_layers_in_float32_need_half_precision(tiny_gemma3: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="all that is asked for is in fp32: give --precision"):
        build(tiny_gemma3, tmp_path / "bundle", fp32_layers=["blocks.1"])
    with pytest.raises(BuildError, match="no layer is called 'nope'"):
        build(tiny_gemma3, tmp_path / "bundle", precision="bf16", fp32_layers=["nope"])


def test_bfloat16_that_cannot_run_here_has_a_stand_in_of_torch(every_precision: Bundle) -> None:
    engine = every_precision.manifest.engine("onnxruntime", "bf16")
    assert engine is not None
    assert (engine.verdict, engine.certificate) == ("not run", None)
    (stand_in,) = engine.stand_ins
    assert stand_in.ran_on == f"torch {torch.__version__} bf16 on cpu"
    assert stand_in.passed
    assert stand_in.bound.startswith("bf16: cosine of every token >= 0.99")
    assert stand_in.shapes == ("1 image", "2 images")
    assert read_manifest(every_precision.path).engine("onnxruntime", "bf16") == engine


def compiled(precision: str = "fp16") -> Engine:
    """As of a runtime that is not here."""
    return Engine("tensorrt", "10", precision, "multihead", "x.engine", ("8.9",), not_run="no GPU")


def stood_in(bundle: Bundle, engine: Engine) -> Engine:
    return with_stand_ins(bundle, engine, f"model.{engine.precision}.multihead.onnx", lambda step: None)


def test_a_compiled_engine_is_stood_in_for_by_its_graph_and_by_torch(every_precision: Bundle) -> None:
    engine = stood_in(every_precision, compiled())
    assert [certificate.ran_on.split()[0] for certificate in engine.stand_ins] == ["onnxruntime", "torch"]
    assert engine.verdict == "not run"  # whatever they say
    assert stood_in(every_precision, compiled("fp32")).stand_ins[0].ran_on.startswith("onnxruntime")


def test_a_large_tower_runs_its_smallest_shape_on_one(every_precision: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins, "_MOST_WORK", 1)
    (certificate,) = stood_in(every_precision, compiled()).stand_ins
    assert certificate.shapes == ("1 image",)


def test_a_stand_in_that_misses_its_bound_is_an_error(every_precision: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    from turbovit.export import certify

    monkeypatch.setitem(certify._WORST_COSINE, "fp16", 1.0)
    with pytest.raises(CertificationError, match="fp16 misses its bound: features: relative L2"):
        stood_in(every_precision, compiled())


def test_an_engine_that_ran_needs_no_stand_in(every_precision: Bundle) -> None:
    engine = every_precision.manifest.engine("onnxruntime", "fp16")
    assert engine is not None
    assert engine.stand_ins == ()
    assert stood_in(every_precision, engine) is engine


def test_without_the_checkpoint_torch_stands_in_for_nothing(every_precision: Bundle) -> None:
    source = replace(every_precision.manifest.source, name="/gone")
    moved = Bundle(every_precision.path, replace(every_precision.manifest, source=source))
    assert [certificate.ran_on.split()[0] for certificate in stood_in(moved, compiled()).stand_ins] == ["onnxruntime"]


def test_verify_keeps_the_stand_ins_apart(every_precision: Bundle) -> None:
    (engine,) = [e for e in verify_engines(every_precision, "onnxruntime", lambda step: None) if e.precision == "bf16"]
    assert engine.verdict == "not run"
    assert len(engine.stand_ins) == 1


def test_inspect_says_that_a_stand_in_is_not_the_engine(
    every_precision: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    from turbovit import cli

    cli.inspect(every_precision.path, as_json=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert "onnxruntime bf16 (multihead attention): not run" in shown
    assert "not this engine, but its precision elsewhere: passed" in shown
    cli.inspect(every_precision.path, as_json=True)
    engines = json.loads(capsys.readouterr().out)["engines"]
    assert [len(engine["stand_ins"]) for engine in engines] == [1, 0, 0]
