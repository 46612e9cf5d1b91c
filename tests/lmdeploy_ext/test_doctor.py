"""What the doctor says of a model: both halves, both backends, engines, memory, and what closes the gaps."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from turbovit.engines import trt_runner
from turbovit.engines.bundle import Bundle
from turbovit.engines.families import FAMILIES, family_from_name, load
from turbovit.engines.ort_runner import OnnxRuntimeRunner
from turbovit.engines.trt_runner import TensorRTRunner
from turbovit.export.checkpoint import INDEX, SINGLE
from turbovit.lmdeploy_ext import memory, model_doctor, pytorch_capability
from turbovit.lmdeploy_ext.bundle_choice import BUNDLE_VARIABLE
from turbovit.lmdeploy_ext.diagnosis import Diagnosis
from turbovit.lmdeploy_ext.doctor import diagnose
from turbovit.lmdeploy_ext.memory import GpuMemory, WeightBytes, engine_bytes, text_from_bytes, weight_bytes
from turbovit.lmdeploy_ext.turbomind_models.models import LANGUAGE_HALVES

GIB = 2**30
VISION, TURBOMIND, PYTORCH = "vision half", "TurboMind language half", "PyTorch language half"
GEMMA3 = "Gemma3ForConditionalGeneration"
GPU_MEMORY = "the GPU's, for both halves"

Report = dict[tuple[str, str], Diagnosis]


def report(model: object) -> Report:
    lines = diagnose(str(model))
    found = {(line.section, line.what): line for line in lines}
    assert len(found) == len(lines)  # no line is said twice
    return found


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets this machine have GPUs with so many free GiB."""

    def have(*free: float) -> None:
        there = [GpuMemory("a GPU", int(size * GIB), 80 * GIB) for size in free]
        monkeypatch.setattr(model_doctor, "gpus", lambda: there)

    return have


@pytest.fixture(autouse=True)
def _empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOVIT_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("family", [row.name for row in FAMILIES])
def test_both_backends_are_looked_at_for_every_family(family: str, request: pytest.FixtureRequest, gpus: Any) -> None:
    gpus()
    architecture = family_from_name(family).architectures[0]
    found = report(request.getfixturevalue(f"tiny_{family}"))
    assert found[VISION, "vision weights"].state == "have"
    own = "have" if architecture in LANGUAGE_HALVES else "missing"
    assert found[TURBOMIND, f"a language model for {architecture}"].state == own
    assert found[TURBOMIND, f"{architecture} end to end"].state == "missing"
    assert found[PYTORCH, f"a language model for {architecture}"].state == "have"
    assert found[PYTORCH, pytorch_capability.HOOK].state == "have"
    assert found[PYTORCH, "CUDA device"].state == "missing"
    assert found[PYTORCH, f"{architecture} end to end"].detail == "it needs a CUDA device and a bundle besides"


def test_what_the_pytorch_engine_lacks_of_llama4_is_said(tiny_llama4: Path) -> None:
    found = report(tiny_llama4)
    chunks = "attention in chunks, for prompts longer than one chunk (8192)"
    assert found[PYTORCH, chunks].state == "missing"
    assert found[PYTORCH, "layers without rope between"].state == "have"


def test_without_a_bundle_the_command_is_given(tiny_gemma3: Path) -> None:
    line = report(tiny_gemma3)[VISION, "bundle in the store"]
    assert (line.state, line.command) == ("missing", f"turbovit build {tiny_gemma3}")


def test_the_engines_of_a_bundle_are_looked_at(
    tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(40)
    monkeypatch.setenv(BUNDLE_VARIABLE, str(tiny_gemma3_bundle.path))
    found = report(tiny_gemma3)
    assert found[VISION, "bundle in the store"].detail == str(tiny_gemma3_bundle.path)
    engine = found[VISION, "engine onnxruntime fp32"]
    assert engine.state == "have"
    assert engine.detail.startswith("passed; runs on ")
    end = found[PYTORCH, f"{GEMMA3} end to end"]
    assert end.state == "have"
    assert "never run on a GPU" in end.detail
    assert found["memory", GPU_MEMORY].command == f"turbovit serve {tiny_gemma3}"


def test_bundles_in_the_store_are_found_and_damaged_ones_named(
    tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, tmp_path: Path
) -> None:
    for name in ("good", "bad"):
        shutil.copytree(tiny_gemma3_bundle.path, tmp_path / "home" / "bundles" / name)
    (tmp_path / "home" / "bundles" / "bad" / "weights.fp32.bin").unlink()
    found = report(tiny_gemma3)
    assert found[VISION, "bundle in the store"].detail.endswith("good")
    assert "weights.fp32.bin" in found[VISION, "bundle bad"].detail


def test_a_bundle_of_another_model_is_said(
    tiny_gemma3: Path, tiny_llama4_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BUNDLE_VARIABLE, str(tiny_llama4_bundle.path))
    line = report(tiny_gemma3)[VISION, "vision weights"]
    assert line.state == "missing"
    assert "was built from" in line.detail


def test_a_compiled_engine_is_compared_with_the_library_and_the_gpu(
    tiny_gemma3_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorRTRunner, "unavailable", lambda device: None if device.type == "cuda" else "no reason")
    monkeypatch.setattr(trt_runner, "library_from_name", lambda module: SimpleNamespace(__version__="10.16.0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    built = replace(tiny_gemma3_bundle.manifest.engines[0], runtime="tensorrt", version="10.14.1")
    expected = {
        ("10.14.1", "9.0"): ("have", "runs on cuda here"),
        ("11.4.0", "9.0"): ("missing", "compiled by tensorrt 11.4.0, here is another major version: 10.16.0"),
        ("10.14.1", "8.9"): ("missing", "compiled for compute capability 8.9, this GPU has 9.0"),
    }
    for (version, capability), (state, words) in expected.items():
        got, detail = model_doctor._engine_here(replace(built, version=version, architectures=(capability,)))
        assert got == state
        assert words in detail


@pytest.mark.parametrize(
    ("change", "cuda", "state", "words"),
    [
        (
            {"architectures": ("8.9", "12.0")},
            True,
            "missing",
            "not on cuda: was compiled for compute capability 8.9, 12.0, this GPU has 9.0",
        ),
        ({"architectures": ("8.9", "9.0")}, True, "have", "runs on cuda here"),
        ({}, True, "have", "runs on cuda here"),
        ({}, False, "missing", "not on cuda: no reason; not on cpu: no reason"),
        ({"runtime": "abacus"}, True, "missing", "this turbovit has no abacus"),
    ],
)
def test_an_engine_is_compared_with_the_machine(
    change: dict[str, Any],
    cuda: bool,
    state: str,
    words: str,
    tiny_gemma3_bundle: Bundle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unavailable(device: torch.device) -> str | None:
        return None if cuda and device.type == "cuda" else "no reason"

    monkeypatch.setattr(OnnxRuntimeRunner, "unavailable", unavailable)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    engine = replace(tiny_gemma3_bundle.manifest.engines[0], **change)
    got, detail = model_doctor._engine_here(engine)
    assert got == state
    assert words in detail


def test_an_engine_that_failed_is_not_here(tiny_gemma3_bundle: Bundle) -> None:
    engine = tiny_gemma3_bundle.manifest.engines[0]
    assert engine.certificate is not None
    failed = replace(engine, certificate=replace(engine.certificate, passed=False))
    assert model_doctor._engine_here(failed)[0] == "missing"


def test_without_lmdeploy_nothing_is_known_of_the_language_half(
    tiny_gemma3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "lmdeploy" else find(name))
    for module in ("capability", "pytorch_capability"):
        name = "_turbomind_folder" if module == "capability" else "_lmdeploy_folder"
        monkeypatch.setattr(f"turbovit.lmdeploy_ext.{module}.{name}", lambda: None)
    found = report(tiny_gemma3)
    states = {
        line.state for (section, what), line in found.items() if section in (TURBOMIND, PYTORCH) if "CUDA" not in what
    }
    assert states == {"unknown"}
    assert found["lmdeploy", "the parts that turbovit plugs into"].command == "pip install 'turbovit[lmdeploy]'"


def tensor_bytes(checkpoint: Path, vision: bool) -> int:
    is_vision = load(family_from_name("gemma3").tower).is_checkpoint_vision
    tensors = load_file(checkpoint / SINGLE)
    return sum(one.numel() * one.element_size() for name, one in tensors.items() if is_vision(name) is vision)


def test_weights_are_measured_by_their_headers(tiny_gemma3: Path) -> None:
    measured = weight_bytes(tiny_gemma3, load(family_from_name("gemma3").tower).is_checkpoint_vision)
    assert measured == WeightBytes(tensor_bytes(tiny_gemma3, False), tensor_bytes(tiny_gemma3, True))
    assert measured.language > 0
    assert measured.vision > 0


def sharded(checkpoint: Path, target: Path) -> Path:
    """A copy with the vision tensors in one file and the others in another, and the index of both."""
    shutil.copytree(checkpoint, target)
    tensors = load_file(target / SINGLE)
    (target / SINGLE).unlink()
    is_vision = load(family_from_name("gemma3").tower).is_checkpoint_vision
    files = {name: "vision.safetensors" if is_vision(name) else "language.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, target / file)
    total = sum(one.numel() * one.element_size() for one in tensors.values())
    (target / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}))
    return target


def test_of_files_that_are_not_here_the_index_says_the_size(tiny_gemma3: Path, tmp_path: Path) -> None:
    folder = sharded(tiny_gemma3, tmp_path / "model")
    is_vision = load(family_from_name("gemma3").tower).is_checkpoint_vision
    expected = weight_bytes(tiny_gemma3, is_vision)
    assert weight_bytes(folder, is_vision) == expected
    (folder / "language.safetensors").unlink()
    assert weight_bytes(folder, is_vision) == expected
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({"weight_map": index["weight_map"]}))
    assert weight_bytes(folder, is_vision) is None


def test_a_damaged_file_has_no_size_and_stops_no_report(tiny_gemma3: Path, tmp_path: Path) -> None:
    folder = sharded(tiny_gemma3, tmp_path / "model")
    (folder / "language.safetensors").write_bytes(b"\xff" * 20)
    assert weight_bytes(folder, load(family_from_name("gemma3").tower).is_checkpoint_vision) is None
    assert report(folder)["memory", GPU_MEMORY].state == "unknown"


@pytest.mark.parametrize(
    ("free", "state", "spread"),
    [
        ((), "missing", None),
        ((10,), "have", 1),
        ((9,), "missing", None),
        ((6, 6), "have", 2),
        ((6, 4), "missing", None),
        ((4, 4, 4), "missing", None),
        ((4, 4, 4, 4), "have", 4),
    ],
)
def test_memory_is_compared_with_the_gpus(
    free: tuple[float, ...], state: str, spread: int | None, tiny_gemma3_bundle: Bundle, gpus: Any, monkeypatch: Any
) -> None:
    """8 GiB of a language half over the GPUs, and half a GiB of an engine on each; a tenth stays free."""
    gpus(*free)
    monkeypatch.setattr(model_doctor, "engine_bytes", lambda *_: GIB // 2)
    *_, line = model_doctor._memory("a/model", WeightBytes(8 * GIB, GIB), [tiny_gemma3_bundle])
    assert line.state == state
    assert "needs 8.5 GiB (language half 8.0 GiB as stored, vision engine 512 MiB)" in line.detail
    assert ("there is no GPU here" in line.detail) == (not free)
    commands = {None: "", 1: "turbovit serve a/model"}
    assert line.command == commands.get(spread, f"turbovit serve a/model --tp {spread}")


def test_an_engine_needs_its_graph_and_its_weights(tiny_gemma3_bundle: Bundle) -> None:
    (engine,) = tiny_gemma3_bundle.manifest.engines
    files = [tiny_gemma3_bundle.file(name) for name in (engine.file, "weights.fp32.bin")]
    assert engine_bytes(tiny_gemma3_bundle, engine) == sum(file.stat().st_size for file in files)


def test_sizes_are_readable() -> None:
    assert [text_from_bytes(size) for size in (0, 1, 2**20, GIB, 3 * GIB // 2)] == [
        *("0 MiB", "1 MiB", "1 MiB", "1.0 GiB", "1.5 GiB")
    ]
    available, total = memory.host_memory()
    assert 0 < available <= total


def test_an_engine_with_layers_in_float32_has_weights_of_its_own(tiny_gemma3: Path, tmp_path: Path) -> None:
    from turbovit.export.build import build

    bundle = build(tiny_gemma3, tmp_path / "bundle", precision="fp16", fp32_layers=["blocks.0.mlp"]).bundle
    (engine,) = bundle.manifest.engines
    (weights,) = bundle.path.glob("weights.*.bin")
    assert engine_bytes(bundle, engine) == bundle.file(engine.file).stat().st_size + weights.stat().st_size
