"""The device check on a CPU: the same code as on a GPU, on tiny towers; and what it makes of failures."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.overrides import TorchFunctionMode

from turbovit.benchmarks import contenders, device_case, device_check
from turbovit.benchmarks.contenders import torch_runner
from turbovit.benchmarks.device_case import check_ownership, check_threads, close_to_reference
from turbovit.benchmarks.findings import Findings, NotRunError
from turbovit.engines.bundle import Bundle
from turbovit.engines.encoder import TORCH_ENGINE
from turbovit.engines.errors import CertificationError, RuntimeUnavailableError
from turbovit.engines.families import FAMILIES
from turbovit.engines.runner import Runner
from turbovit.export.certify import read_reference
from turbovit.export.torch_runner import TorchRunner

CPU = torch.device("cpu")


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "result.json"
    code = device_check.main(["--device", "cpu", "--quick", "--json", str(file), *arguments])
    return code, json.loads(file.read_text())


def found(result: Mapping[str, Any], check: str) -> dict[str, str]:
    return {row["subject"]: row["state"] for row in result["checks"] if row["check"] == check}


@pytest.mark.slow
def test_every_check_of_a_cpu_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)
    code, result = run(tmp_path, "--families", "llama4,qwen3_vl")
    assert code == 0
    assert dict(os.environ) == before
    assert found(result, "certificate") == {"torch fp32": "passed", "torch bf16": "passed"}
    assert found(result, "build, certificate") == {"onnxruntime fp32": "passed"}
    for check in ("8 threads", "ownership"):
        assert found(result, check) == {"torch fp32": "passed", "torch bf16": "passed", "onnxruntime fp32": "passed"}
    equal = found(result, "equal output")
    assert equal.pop("torch.compile fp32") == "not run"
    assert equal == dict.fromkeys(("transformers fp32", "torch eager fp32", "onnxruntime fp32"), "passed")
    there = found(result, "there")
    assert there == {"onnxruntime": "passed", "tensorrt": "not run", "tensorrt_rtx": "not run"}
    assert {row["case"] for row in result["timings"]} == {"llama4 tiny", "qwen3_vl tiny"}
    for row in result["timings"]:
        assert len(row["samples_ms"]) >= 3
        low, high = row["quartiles_ms"]
        assert 0 < low <= row["median_ms"] <= high
    assert torch.__version__.startswith(result["machine"]["versions"]["torch"])
    printed = capsys.readouterr().out
    assert "relative L2" in printed
    assert "it runs on CUDA devices, and torch sees none" in " ".join(printed.split())


def test_all_families_are_checked_and_a_lack_of_time_is_said(tmp_path: Path) -> None:
    code, result = run(tmp_path, "--seconds", "0")
    assert code == 0
    assert not result["timings"]
    rows = {row["case"]: row for row in result["checks"] if row["check"] == "written"}
    assert list(rows) == [f"{family.name} tiny" for family in FAMILIES]
    assert all(row["state"] == "not run" and "give more with --seconds" in row["detail"] for row in rows.values())


def test_a_failure_is_a_row_and_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(device_check, "write_sample", fails)
    code, result = run(tmp_path, "--families", "gemma3,llama4")
    assert code == 1
    failed = [(row["case"], row["detail"]) for row in result["checks"] if row["state"] == "failed"]
    assert failed == [(f"{name} tiny", "OSError: no space left on device") for name in ("gemma3", "llama4")]


def test_a_machine_without_onnxruntime_certifies_the_torch_tower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from turbovit.engines.ort_runner import OnnxRuntimeRunner

    monkeypatch.setattr(OnnxRuntimeRunner, "unavailable", classmethod(lambda cls, device: "it is not installed"))
    code, result = run(tmp_path, "--families", "qwen3_vl")
    assert code == 0
    assert found(result, "there")["onnxruntime"] == "not run"
    assert found(result, "certificate") == {"torch fp32": "passed", "torch bf16": "passed"}
    assert {row["subject"] for row in result["timings"]} == {"transformers fp32", "torch eager fp32"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--device", "cuda:9"], "torch sees"),
        (["--device", "mps"], "torch sees"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--json", "/no/such/folder/result.json"], "does not exist"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        device_check.main(arguments)
    assert raised.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "devices", "expected"),
    [("auto", 0, "cpu"), ("auto", 2, "cuda:0"), ("cuda", 1, "cuda:0"), ("cuda:1", 2, "cuda:1"), ("cpu", 2, "cpu")],
)
def test_the_device_is_one_with_a_number(
    name: str, devices: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    assert device_check._device(name) == torch.device(expected)


# The checks find what they are there for


class Spoilt(TorchRunner):
    """The torch runner with something wrong in what it gives out."""

    spoil: Callable[[Spoilt, dict[str, Tensor]], dict[str, Tensor]]

    def _infer(self, inputs: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
        return type(self).spoil(self, super()._infer(inputs, shapes))


def one_buffer(runner: Spoilt, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every result in the same memory."""
    kept = runner.__dict__.setdefault("kept", {})
    for name, tensor in outputs.items():
        key = (name, tensor.shape)
        kept[key] = kept.get(key, tensor).copy_(tensor)
    return {name: kept[name, tensor.shape] for name, tensor in outputs.items()}


def the_last_image(runner: Spoilt, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What another thread computed, where there is one at it."""
    runner.__dict__["last"] = outputs
    time.sleep(0.02)
    same = all(runner.__dict__["last"][name].shape == tensor.shape for name, tensor in outputs.items())
    return runner.__dict__["last"] if same else outputs


def opened(bundle: Bundle, spoil: Any) -> Runner:
    kind = type("SpoiltRunner", (Spoilt,), {"spoil": spoil})
    return kind.open(bundle, TORCH_ENGINE, CPU)


def test_shared_memory_of_results_is_found(tiny_qwen3_vl_bundle: Bundle) -> None:
    pairs = read_reference(tiny_qwen3_vl_bundle)
    assert "the caller's" in check_ownership(opened(tiny_qwen3_vl_bundle, lambda _, outputs: outputs), pairs)
    with pytest.raises(CertificationError, match="features changed while others were computed"):
        check_ownership(opened(tiny_qwen3_vl_bundle, one_buffer), pairs)


def test_another_threads_features_are_found(tiny_qwen3_vl_bundle: Bundle) -> None:
    assert "24 runs" in check_threads(tiny_qwen3_vl_bundle, opened(tiny_qwen3_vl_bundle, lambda _, outputs: outputs))
    with pytest.raises(CertificationError, match="a thread's features are"):
        check_threads(tiny_qwen3_vl_bundle, opened(tiny_qwen3_vl_bundle, the_last_image))


def test_images_that_look_alike_are_no_proof(tiny_qwen3_vl_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_case, "_picture", lambda seed: device_case.Image.new("RGB", (100, 100), "red"))
    with pytest.raises(NotRunError, match=r"differ by 0\.0e\+00 alone"):
        check_threads(tiny_qwen3_vl_bundle, torch_runner(tiny_qwen3_vl_bundle, CPU, "fp32"))


def test_other_outputs_are_not_timed() -> None:
    expected = {"features": torch.randn(1, 4, 8)}
    close_to_reference("fp32", {"features": expected["features"][0]}, expected)  # as some give it
    with pytest.raises(CertificationError, match="features is off"):
        close_to_reference("fp32", {"features": expected["features"] * 1.001}, expected)


def test_what_a_check_raises_decides_its_state() -> None:
    lines: list[str] = []
    findings = Findings(lines.append)
    raised = [None, NotRunError("no"), RuntimeUnavailableError("away"), NotImplementedError("none"), KeyError("x")]
    for error in raised:
        with findings.check("case", "subject", "check") as details:
            details.append("figures")
            if error is not None:
                raise error
    assert [row.state for row in findings.checks] == ["passed", "not run", "not run", "not run", "failed"]
    assert findings.checks[-1].detail == "figures; KeyError: 'x'"
    assert findings.failed
    assert len(lines) == 5
    console = Console(file=io.StringIO(), width=140)
    console.print(findings.table("title"))
    assert "KeyError" in console.file.getvalue()  # type: ignore[attr-defined]


# Our tower as a CUDA graph


class HostCopies(TorchFunctionMode):
    """Counts what would be copied from the host: tensors made of numbers, and host tensors that go elsewhere."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [argument for argument in args if isinstance(argument, Tensor) and argument.dim()]
        leaves = any(tensor.device == CPU for tensor in given) and isinstance(result, Tensor) and result.device != CPU
        self.count += func is torch.tensor or leaves
        return result


@pytest.mark.parametrize("family", ["gemma3", "llama4", "qwen3_vl"])
def test_a_tower_copies_nothing_from_the_host_under_capture(family: str, request: pytest.FixtureRequest) -> None:
    """The device is one without data here, which is no host either; a capture comes after a first run."""
    bundle = request.getfixturevalue(f"tiny_{family}_bundle")
    tower = torch_runner(bundle, CPU, "fp32").tower.to("meta")
    inputs = {name: tensor.to("meta") for name, tensor in read_reference(bundle)[-1][0].inputs.items()}
    with HostCopies() as plain:
        tower.run(inputs)
    with HostCopies() as kept, contenders._ConstantsOnce():
        tower.run(inputs)
        first, kept.count = kept.count, 0
        tower.run(inputs)
    assert kept.count == 0
    assert first == plain.count
    assert bool(first) == (family != "gemma3")


def test_graphs_are_kept_by_shape_and_their_buffers_stay_inside(
    tiny_qwen3_vl_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[Any] = []

    @contextmanager
    def graph(graph: Any) -> Any:
        captured.append(graph)
        yield

    class Graph:
        def replay(self) -> None:
            pass

    class Stream:
        def wait_stream(self, other: Stream) -> None:
            pass

    for name, value in {"CUDAGraph": Graph, "graph": graph, "Stream": Stream, "current_stream": Stream}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    runner = torch_runner(tiny_qwen3_vl_bundle, CPU, "fp32")
    call = contenders._graph(lambda precision: runner, "fp32")
    pairs = read_reference(tiny_qwen3_vl_bundle)
    results = [call(sample.inputs) for sample, _ in pairs for _ in range(2)]
    assert len(captured) == len(pairs)
    assert len({result["features"].data_ptr() for result in results}) == len(results)
    close_to_reference("fp32", results[0], pairs[0][1])
