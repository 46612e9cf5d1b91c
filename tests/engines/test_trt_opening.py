"""Opening a TensorRT engine: what fits, what the real library says, and that it is called as it wants to be."""

from __future__ import annotations

import inspect
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_tensorrt import ALIGNMENT, FakeEngine, FakeStream, FakeTensorRT

from turbovit.engines import trt_library, trt_runner
from turbovit.engines.bundle import Bundle, Engine, Profile
from turbovit.engines.cuda_graphs import graphs_wanted
from turbovit.engines.errors import BundleError, RuntimeUnavailableError
from turbovit.engines.trt_library import LoadedEngine
from turbovit.engines.trt_runner import TensorRTRTXRunner, TensorRTRunner

CUDA = torch.device("cuda")
ENTRY = Engine(
    runtime="tensorrt",
    version="10.14.1",
    precision="bf16",
    attention="attention",
    file="tensorrt.bf16.engine",
    architectures=("8.9", "9.0"),
    profiles=(Profile({"images": (1, 2, 8)}),),
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that seems to have an H200 as its second GPU, and TensorRT's module."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(trt_runner, "SideStream", lambda device: FakeStream())
    monkeypatch.setattr(trt_runner, "_ALIGNMENT", ALIGNMENT)
    monkeypatch.setattr(trt_runner.importlib.util, "find_spec", lambda module: object())


def bundle_with(folder: Path, bundle: Bundle, entry: Engine = ENTRY) -> Bundle:
    (folder / entry.file).write_bytes(b"engine")
    return Bundle(folder, replace(bundle.manifest, engines=(entry,)))


def install(monkeypatch: pytest.MonkeyPatch, library: FakeTensorRT) -> FakeTensorRT:
    monkeypatch.setattr(trt_runner, "library_from_name", lambda module: library)
    return library


def fake_engine(bundle: Bundle) -> FakeEngine:
    return FakeEngine(bundle.manifest, ENTRY, lambda inputs: {"features": torch.zeros(len(inputs["pixels"]), 256, 64)})


@pytest.mark.usefixtures("gpu")
def test_an_engine_of_the_bundle_opens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_gemma3_bundle: Bundle
) -> None:
    library = install(monkeypatch, FakeTensorRT(fake_engine(tiny_gemma3_bundle)))
    with TensorRTRunner.open(bundle_with(tmp_path, tiny_gemma3_bundle), ENTRY, CUDA) as runner:
        assert runner.run({"pixels": torch.zeros(1, 3, 896, 896, dtype=torch.uint8)})["features"].shape == (1, 256, 64)
    assert library.data == b"engine"


OTHER_GPU = "compute capability 8.9, 12.0, this GPU has 9.0"
OTHER_VERSION = "tensorrt 11.4.0, here is another major version: 10.16.0"
REFUSED = {
    "GPU": (
        {"architectures": ("8.9", "12.0")},
        "compute capability 8.9, 12.0, this GPU has 9.0",
        "10.14.1 and compute capability 8.9, 12.0",
    ),
    "version": (
        {"version": "11.4.0"},
        "tensorrt 11.4.0, here is another major version: 10.16.0",
        "11.4.0 and compute capability 8.9, 9.0",
    ),
    "library": ({}, "does not load: Serialization assertion", "10.14.1 and compute capability 8.9, 9.0"),
}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("change", "reason", "built_for"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_says_built_for_found_and_the_command(
    change: dict[str, Any],
    reason: str,
    built_for: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_gemma3_bundle: Bundle,
) -> None:
    library = install(monkeypatch, FakeTensorRT(None, "Serialization assertion failed", "10.16.0"))
    entry = replace(ENTRY, **change)
    bundle = bundle_with(tmp_path, tiny_gemma3_bundle, entry)
    with pytest.raises(BundleError) as raised:
        TensorRTRunner.open(bundle, entry, CUDA)
    message = str(raised.value)
    assert re.search(rf"^tensorrt\.bf16\.engine (was compiled (for|by) )?{reason}", message)
    assert f"It was built for tensorrt {built_for}; found 10.16.0 and NVIDIA H200 with 9.0." in message
    assert message.endswith(
        f"turbovit build {bundle.manifest.source.name} -o {tmp_path} --runtime tensorrt --precision bf16"
    )
    assert bool(library.data) is (not change)  # what the manifest tells is found before anything is deserialised


@pytest.mark.usefixtures("gpu")
def test_an_engine_that_the_manifest_does_not_describe_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_gemma3_bundle: Bundle
) -> None:
    install(monkeypatch, FakeTensorRT(fake_engine(tiny_gemma3_bundle)))
    entry = replace(ENTRY, profiles=())
    engine = fake_engine(tiny_gemma3_bundle)
    engine.num_optimization_profiles = 2
    install(monkeypatch, FakeTensorRT(engine))
    with pytest.raises(BundleError, match=r"2 optimisation profiles, expected 1.*Build it again: turbovit build"):
        TensorRTRunner.open(bundle_with(tmp_path, tiny_gemma3_bundle), entry, CUDA)


# Why it cannot run here


def test_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_gemma3_bundle: Bundle) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for runner_class in (TensorRTRunner, TensorRTRTXRunner):
        for device in ("cuda", "cpu"):
            assert runner_class.unavailable(torch.device(device)) == "it runs on CUDA devices, and torch sees none"
        with pytest.raises(
            RuntimeUnavailableError, match=rf"{runner_class.runtime} cannot run on cuda here: it runs on"
        ):
            runner_class.open(bundle_with(tmp_path, tiny_gemma3_bundle), ENTRY, CUDA)


@pytest.mark.usefixtures("gpu")
def test_the_device_is_not_one_it_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeTensorRT(None))
    assert TensorRTRunner.unavailable(CUDA) is None
    assert TensorRTRunner.unavailable(torch.device("cpu")) == "it runs on CUDA devices alone"
    assert TensorRTRunner.unavailable(torch.device("cuda", 2)) == "torch sees 2 CUDA devices"


@pytest.mark.usefixtures("gpu")
def test_the_library_is_missing_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: str) -> None:
        raise OSError("libnvinfer.so.10: cannot open shared object file")

    monkeypatch.setattr(trt_runner, "library_from_name", broken)
    assert TensorRTRunner.unavailable(CUDA) == (
        "tensorrt does not import: libnvinfer.so.10: cannot open shared object file"
    )
    monkeypatch.setattr(trt_runner.importlib.util, "find_spec", lambda module: None)
    assert TensorRTRunner.unavailable(CUDA) == "it is not installed: pip install 'turbovit[gpu]'"
    assert TensorRTRTXRunner.unavailable(CUDA) == "it is not installed: pip install 'turbovit[rtx]'"


@pytest.mark.parametrize("value", ["-1", "yes", "", "1.5"])
def test_a_setting_of_graphs_that_is_no_number_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert graphs_wanted() == 0
    monkeypatch.setenv("TURBOVIT_CUDA_GRAPHS", "6")
    assert graphs_wanted() == 6
    monkeypatch.setenv("TURBOVIT_CUDA_GRAPHS", value)
    with pytest.raises(RuntimeUnavailableError, match="TURBOVIT_CUDA_GRAPHS="):
        graphs_wanted()


# The real library


@pytest.fixture(scope="module")
def rtx() -> Any:
    return pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")


def test_bytes_that_are_no_engine_are_refused_in_the_librarys_own_words(rtx: Any) -> None:
    with pytest.raises(BundleError, match=r"rtx\.engine does not load: .*[Ss]erialization"):
        LoadedEngine(rtx, b"no engine at all" * 100, "rtx.engine")


PROTOCOLS = {
    "ExecutionContext": "IExecutionContext",
    "CudaEngine": "ICudaEngine",
    "ConfigurableEngine": "ICudaEngine",
    "RuntimeConfig": "IRuntimeConfig",
    "Runtime": "Runtime",
}


def declared(protocol: type) -> dict[str, list[str]]:
    """What a protocol declares: names of methods with those of their parameters, and of attributes with none."""
    members = {name: value for name, value in vars(protocol).items() if not name.startswith("_")}
    methods = {n: list(inspect.signature(v).parameters) for n, v in members.items() if inspect.isfunction(v)}
    return methods | {name: [] for name in {*members, *protocol.__annotations__} - {*methods}}


@pytest.mark.parametrize(("protocol", "real"), PROTOCOLS.items())
def test_the_real_classes_have_what_is_called_with_these_parameters(protocol: str, real: str, rtx: Any) -> None:
    """pybind11 writes the signatures of all overloads into the docstring."""
    members = declared(getattr(trt_library, protocol))
    assert members
    for name, parameters in members.items():
        documented = getattr(getattr(rtx, real), name).__doc__ or ""
        signatures = re.findall(rf"\b{name}\((self: [^\n]*)\) ->", documented)
        found = [re.findall(r"(\w+): ", re.sub(r"=[^,]*|\[[^\]]*\]", "", signature)) for signature in signatures]
        assert parameters in found if parameters else not signatures, f"{real}.{name}: {found}"


def test_the_real_module_has_the_names_that_are_used(rtx: Any) -> None:
    assert rtx.ExecutionContextAllocationStrategy.USER_MANAGED
    assert rtx.DynamicShapesKernelSpecializationStrategy.EAGER
    assert issubclass(rtx.Logger, rtx.ILogger)
    assert {"INTERNAL_ERROR", "ERROR"} <= set(rtx.ILogger.Severity.__members__)
    assert set(trt_library.DATA_TYPES) <= set(rtx.DataType.__members__)
    assert rtx.DataType.BF16.name == "BF16"
    for name in ("Runtime", "ILogger", "ExecutionContextAllocationStrategy", "__version__"):
        assert hasattr(rtx, name)
