"""ONNX Runtime's IO binding, seen from a session that records what it is given: no GPU is needed."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from turbovit.engines.bundle import Bundle, Engine
from turbovit.engines.errors import BundleError, RuntimeUnavailableError
from turbovit.engines.ort_runner import OnnxRuntimeRunner

CUDA = torch.device("cuda", 1)
UINT8, FLOAT32, BFLOAT16 = 2, 1, 16  # onnx.TensorProto.DataType
SHAPES: dict[str, tuple[int, ...]] = {"features": (2, 256, 64)}


@dataclass
class RecordingSession:
    """The part of an InferenceSession and its binding that takes tensors by pointer, and nothing else."""

    events: list[tuple[Any, ...]] = field(default_factory=list)
    providers: tuple[str, ...] = ("CUDAExecutionProvider", "CPUExecutionProvider")

    def io_binding(self) -> RecordingSession:
        return self

    def bind_input(self, *arguments: Any) -> None:
        self.events.append(("input", *arguments))

    def bind_output(self, *arguments: Any) -> None:
        self.events.append(("output", *arguments))

    def synchronize_inputs(self) -> None:
        self.events.append(("synchronise inputs",))

    def run_with_iobinding(self, binding: RecordingSession) -> None:
        assert binding is self
        self.events.append(("run",))

    def synchronize_outputs(self) -> None:
        self.events.append(("synchronise outputs",))

    def get_providers(self) -> tuple[str, ...]:
        return self.providers

    def synchronize(self) -> None:
        """As torch's stream, which it stands for too."""
        self.events.append(("synchronise torch's stream",))


@pytest.fixture
def engine(tiny_gemma3_bundle: Bundle) -> Engine:
    found = tiny_gemma3_bundle.manifest.engine("onnxruntime", "fp32")
    assert found is not None
    return found


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> RecordingSession:
    """Its events hold what torch's stream does too; CUDA memory is the host's."""
    recording = RecordingSession()
    empty = torch.empty

    def empty_on_cuda(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device == CUDA
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty_on_cuda)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: recording)
    return recording


@pytest.mark.parametrize(
    ("precision", "dtype", "code"), [("fp32", torch.float32, FLOAT32), ("bf16", torch.bfloat16, BFLOAT16)]
)
def test_cuda_tensors_are_bound_in_place_between_synchronisations(
    precision: str, dtype: torch.dtype, code: int, session: RecordingSession, engine: Engine, tiny_gemma3_bundle: Bundle
) -> None:
    runner = OnnxRuntimeRunner(tiny_gemma3_bundle.manifest, replace(engine, precision=precision), CUDA, session)
    pixels = torch.zeros(2, 3, 896, 896, dtype=torch.uint8)
    outputs = runner._infer({"pixels": pixels}, SHAPES)
    assert outputs["features"].dtype == dtype
    assert session.events == [
        ("input", "pixels", "cuda", 1, UINT8, (2, 3, 896, 896), pixels.data_ptr()),
        ("output", "features", "cuda", 1, code, (2, 256, 64), outputs["features"].data_ptr()),
        ("synchronise torch's stream",),
        ("synchronise inputs",),
        ("run",),
        ("synchronise outputs",),
    ]


def test_cpu_tensors_are_bound_without_a_copy(engine: Engine, tiny_gemma3_bundle: Bundle) -> None:
    session = RecordingSession()
    runner = OnnxRuntimeRunner(tiny_gemma3_bundle.manifest, engine, torch.device("cpu"), session)
    pixels = torch.zeros(2, 3, 896, 896, dtype=torch.uint8)
    outputs = runner.run({"pixels": pixels})
    assert session.events[:2] == [
        ("input", "pixels", "cpu", 0, UINT8, (2, 3, 896, 896), pixels.data_ptr()),
        ("output", "features", "cpu", 0, FLOAT32, (2, 256, 64), outputs["features"].data_ptr()),
    ]


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What sessions are opened with, on a machine that seems to have CUDA."""
    import onnxruntime

    seen: dict[str, Any] = {"session": RecordingSession()}

    def open_session(path: str, options: Any, providers: list[Any]) -> RecordingSession:
        seen.update(path=path, providers=providers)
        return seen["session"]

    monkeypatch.setattr(onnxruntime, "InferenceSession", open_session)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return seen


def test_float32_on_cuda_is_not_tf32(sessions: dict[str, Any], engine: Engine, tiny_gemma3_bundle: Bundle) -> None:
    OnnxRuntimeRunner.open(tiny_gemma3_bundle, engine, CUDA)
    assert os.fsdecode(sessions["path"]) == str(tiny_gemma3_bundle.path / engine.file)
    assert sessions["providers"] == [("CUDAExecutionProvider", {"device_id": "1", "use_tf32": "0"})]


def test_a_silent_fall_back_to_the_cpu_is_an_error(
    sessions: dict[str, Any], engine: Engine, tiny_gemma3_bundle: Bundle
) -> None:
    sessions["session"].providers = ("CPUExecutionProvider",)
    with pytest.raises(RuntimeUnavailableError, match=r"fell back to CPUExecutionProvider.*did not start"):
        OnnxRuntimeRunner.open(tiny_gemma3_bundle, engine, CUDA)


def test_cuda_is_unavailable_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert OnnxRuntimeRunner.unavailable(torch.device("cuda")) == "torch sees no CUDA device"


def test_cuda_is_unavailable_in_a_build_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert "turbovit[gpu]" in str(OnnxRuntimeRunner.unavailable(torch.device("cuda")))


def test_a_graph_that_does_not_load_is_named(engine: Engine, tiny_gemma3_bundle: Bundle) -> None:
    damaged = replace(engine, file="manifest.json")
    with pytest.raises(BundleError, match=r"onnxruntime .* cannot load manifest\.json"):
        OnnxRuntimeRunner.open(tiny_gemma3_bundle, damaged, torch.device("cpu"))


def test_threads_do_not_spin_between_runs(tiny_gemma3_bundle: Bundle, engine: Engine) -> None:
    """They would keep their cores from torch and from other sessions."""
    runner = OnnxRuntimeRunner.open(tiny_gemma3_bundle, engine, torch.device("cpu"))
    options = runner._session.get_session_options()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
