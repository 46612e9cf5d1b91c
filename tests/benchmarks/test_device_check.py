"""The device check on a CPU: the same code as on a GPU, on tiny towers; and what it makes of failures."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import device_check_child
import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

from turbovit.benchmarks import contenders, device_case, device_cases, device_check, device_process
from turbovit.benchmarks.contenders import torch_runner
from turbovit.benchmarks.device_case import Case, check_ownership, check_threads, close_to_reference
from turbovit.benchmarks.device_cases import Options, check_case
from turbovit.benchmarks.device_process import check_cases
from turbovit.benchmarks.findings import Begun, CaseEnded, Event, Finding, Findings, NotRunError
from turbovit.engines.bundle import Bundle
from turbovit.engines.encoder import TORCH_ENGINE
from turbovit.engines.errors import CertificationError, RuntimeUnavailableError
from turbovit.engines.families import FAMILIES
from turbovit.engines.runner import PRECISION_DTYPES, Runner
from turbovit.export.certify import read_reference
from turbovit.export.torch_runner import TorchRunner

CPU = torch.device("cpu")


HALVES = ("bf16", "fp16")
TORCH = {"torch fp32", "torch bf16", "torch fp16"}
ENGINES = {"onnxruntime fp32", "onnxruntime fp16"}


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """In processes of its own, as on a command line."""
    file = tmp_path / "result.json"
    code = device_check.main(["--device", "cpu", "--quick", "--json", str(file), *arguments])
    return code, json.loads(file.read_text(encoding="utf-8"))


def states(rows: Sequence[Mapping[str, Any]], case: str, check: str) -> dict[str, str]:
    return {row["subject"]: row["state"] for row in rows if (row["case"], row["check"]) == (case, check)}


def passed(subjects: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(subjects, "passed")


@pytest.mark.slow
def test_every_check_of_a_cpu_passes_for_every_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In float32 and both halves. Two minutes of CPU time, half of them Gemma 3's 4,096 patches and the exports."""
    before = dict(os.environ)
    code, result = run(tmp_path)
    assert code == 0
    assert result["finished"]
    assert dict(os.environ) == before
    rows = result["checks"]
    assert states(rows, "", "there") == {"onnxruntime": "passed", "tensorrt": "not run", "tensorrt_rtx": "not run"}
    for family in FAMILIES:
        case = f"{family.name} tiny"
        assert states(rows, case, "written") == passed(["sample"])
        assert states(rows, case, "certificate") == passed(TORCH)
        assert states(rows, case, "build, certificate") == passed(ENGINES)
        for check in ("threads", "ownership"):
            assert states(rows, case, check) == passed(TORCH | ENGINES)
        equal = states(rows, case, "equal output")
        assert equal.pop("torch.compile fp32") == "not run"
        ways = {f"{way} {precision}" for way in ("transformers", "torch eager") for precision in ("fp32", *HALVES)}
        assert equal == passed(ways | ENGINES)
        timed = [row for row in result["timings"] if row["case"] == case]
        assert {row["subject"] for row in timed} == ways | ENGINES
    for row in result["timings"]:
        low, high = row["quartiles_ms"]
        assert 0 < low <= row["median_ms"] <= high
    assert torch.__version__.startswith(result["machine"]["versions"]["torch"])
    printed = capsys.readouterr().out
    assert "relative L2" in printed
    assert "it runs on CUDA devices, and torch sees none" in " ".join(printed.split())


# Time, and what ends a process


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    code, result = run(tmp_path, "--seconds", "0")
    assert code == 0
    assert not result["timings"]
    left_out = {row["case"]: row for row in result["checks"] if row["check"] != "answers"}  # TurboMind's, for GPUs
    assert list(left_out) == [f"{family.name} tiny" for family in FAMILIES]
    assert all(row["state"] == "not run" and "time" in row["detail"] for row in left_out.values())


@pytest.mark.parametrize(
    ("left", "checks"),
    [
        (5, {"written": "5 s are left, 10 s may be needed"}),
        (12, {"certificate": "", "build, certificate": "12 s are left, 15 s may be needed"}),
    ],
)
def test_nothing_is_begun_that_may_not_end_in_time(
    left: float, checks: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_cases.time, "monotonic", lambda: 0.0)
    findings = Findings(lambda event: None)
    options = Options(CPU, quick=True, deadline=left + 0.4)
    (case,) = device_cases.cases(options, ["qwen3_vl"], tmp_path)
    check_case(options, case, ["onnxruntime"], findings)
    for check, reason in checks.items():
        found = [row for row in findings.checks if row.check == check]
        assert found
        assert all((row.state == "not run") == bool(reason) and reason in row.detail for row in found)


@pytest.mark.parametrize(
    ("size", "runtime"), [(size, name) for size in ("tiny", "full") for name in device_cases._ENGINES["cuda", "full"]]
)
def test_every_compile_has_a_time_that_it_may_need(size: str, runtime: str) -> None:
    assert 0 < device_cases._FOR_BUILD[size][runtime] < device_check._MOST_SECONDS


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Findings]:
    """Runs cases of the test's making, by name, in real processes."""

    def check(*families: str, work: Any = device_check_child.work, seconds: float = 120) -> Findings:
        monkeypatch.setattr(device_process, "_work", work)
        findings = Findings(lambda event: None)
        options = Options(CPU, quick=True, deadline=time.monotonic() + seconds)
        cases = [Case(family, "tiny", tmp_path / family, tmp_path / f"{family}-bundle") for family in families]
        check_cases(options, cases, findings)
        findings.checks = [row for row in findings.checks if row.case]
        return findings

    return check


def test_a_process_that_is_lost_costs_its_case_alone(checked: Callable[..., Findings]) -> None:
    first, crashed, fails, second = checked("first", "crashes", "fails", "second").checks
    assert (first.state, fails.state, second.state) == ("passed", "failed", "passed")
    assert fails.detail.endswith("OSError: no space left on device")
    assert (crashed.case, crashed.check, crashed.state) == ("crashes tiny", "check", "failed")
    assert crashed.detail == "its process was ended by SIGSEGV; what follows about it is left out"
    assert second.detail != first.detail  # another process
    assert second.detail == fails.detail.split(";")[0]


def test_a_process_that_ends_between_checks_is_said_too(checked: Callable[..., Findings]) -> None:
    made, lost, after = checked("ends", "after").checks
    assert (made.state, lost.state, after.state) == ("passed", "failed", "passed")
    assert (lost.case, lost.check) == ("ends tiny", "begun")
    assert "its process ended with status 3" in lost.detail


def test_a_device_that_takes_nothing_more_gets_a_new_process(checked: Callable[..., Findings]) -> None:
    rows = checked("a", "b", work=device_check_child.spoilt_work).checks
    assert [row.state for row in rows] == ["passed", "passed"]
    assert rows[0].detail != rows[1].detail


def test_what_never_ends_is_ended_in_time(checked: Callable[..., Findings]) -> None:
    began = time.monotonic()
    hung, left_out = checked("hangs", "after", seconds=15).checks
    assert time.monotonic() - began < 30
    assert (hung.case, hung.state) == ("hangs tiny", "not run")
    assert hung.detail == "the time was over before it ended; what follows about it is left out"
    assert (left_out.case, left_out.state, left_out.detail) == ("after tiny", "not run", "left out for lack of time")


def test_results_are_written_after_each_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, seen = tmp_path / "result.json", []

    def check_cases(options: Options, cases: Sequence[Case], findings: Findings) -> None:
        for case in cases:
            with findings.check(case.name, "subject", "check"):
                raise OSError("no space left on device")
            findings.take(CaseEnded(case.name))
            seen.append(json.loads(file.read_text(encoding="utf-8")))

    monkeypatch.setattr(device_check, "check_cases", check_cases)
    code, result = run(tmp_path, "--families", "gemma3,llama4")
    assert code == 1
    assert [(len(one["checks"]), one["finished"]) for one in [*seen, result]] == [(1, False), (2, False), (2, True)]
    assert {row["detail"] for row in result["checks"]} == {"OSError: no space left on device"}
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_machine_without_onnxruntime_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from turbovit.engines.ort_runner import OnnxRuntimeRunner

    monkeypatch.setattr(OnnxRuntimeRunner, "unavailable", classmethod(lambda cls, device: "it is not installed"))
    findings = Findings(lambda event: None)
    assert device_cases.buildable(CPU, findings) == []
    assert [row.state for row in findings.checks] == ["not run"] * 3
    assert not findings.failed


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--device", "cuda:9"], "torch sees"),
        (["--device", "mps"], "torch sees"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--json", "/no/such/folder/result.json"], "does not exist"),
        (["--seconds", "481"], "'481' is no number of seconds from 0 to 480"),
        (["--seconds", "soon"], "'soon' is no number of seconds"),
        (["--families", "gemma3,gemma4"], "unknown family 'gemma4'; available: gemma3"),
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
    events: list[Event] = []
    findings = Findings(events.append)
    raised = [None, NotRunError("no"), RuntimeUnavailableError("away"), NotImplementedError("none"), KeyError("x")]
    for error in raised:
        with findings.check("case", "subject", "check") as details:
            details.append("figures")
            if error is not None:
                raise error
    assert [row.state for row in findings.checks] == ["passed", "not run", "not run", "not run", "failed"]
    assert findings.checks[-1].detail == "figures; KeyError: 'x'"
    assert findings.failed
    assert [type(event) for event in events] == [Begun, Finding] * 5
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


@pytest.mark.parametrize("family", ["gemma3", "llama4", "qwen3_vl", "deepseek_vl2"])
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
    assert bool(first) == (family in ("llama4", "qwen3_vl"))  # ropes


@pytest.mark.parametrize("precision", ["fp32", *HALVES])
@pytest.mark.parametrize("family", ["gemma3", "llama4", "qwen3_vl", "deepseek_vl2"])
def test_a_tower_computes_where_its_inputs_lie(family: str, precision: str, request: pytest.FixtureRequest) -> None:
    """On CUDA tensors that have no data: one from the host among them is an error, as on a GPU."""
    bundle = request.getfixturevalue(f"tiny_{family}_bundle")
    tower = torch_runner(bundle, CPU, precision).tower
    sample, expected = read_reference(bundle)[0]
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in tower.modules():
            for name, parameter in module.named_parameters(recurse=False):
                there = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
                module.register_parameter(name, torch.nn.Parameter(there, requires_grad=False))
        inputs = {name: torch.empty(t.shape, dtype=t.dtype, device="cuda") for name, t in sample.inputs.items()}
        outputs = tower.run(inputs)
        for name, tensor in expected.items():
            found = outputs[name]
            assert (found.device.type, found.dtype, found.shape) == ("cuda", PRECISION_DTYPES[precision], tensor.shape)
        with pytest.raises(RuntimeError, match="two different devices"):
            tower.run({**inputs, tower.input_names[-1]: sample.inputs[tower.input_names[-1]]})


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
