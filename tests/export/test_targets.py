"""The GPUs that an engine is compiled for, and what has to be installed for that."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from turbovit.engines.errors import BuildError, RuntimeUnavailableError
from turbovit.export import targets
from turbovit.export.targets import architectures, library_version


@pytest.fixture
def rtx() -> None:
    pytest.importorskip("tensorrt_rtx")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU as torch would see it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_capabilities_are_sorted_as_numbers_and_each_is_there_once(rtx: None, no_gpu: None) -> None:
    assert architectures("tensorrt_rtx", ["12.0", "8.9", "7.5", "8.9"]) == ("7.5", "8.9", "12.0")


def test_the_gpu_that_is_here_is_the_default(rtx: None, gpu: None) -> None:
    assert architectures("tensorrt_rtx", []) == ("8.9",)
    assert architectures("tensorrt_rtx", ["12.0"]) == ("12.0",)
    assert architectures("tensorrt", []) == ("8.9",)


@pytest.mark.parametrize("capability", ["9.0", "1.0", "10.0"])
def test_a_capability_that_the_library_does_not_know_lists_those_it_does(
    rtx: None, no_gpu: None, capability: str
) -> None:
    with pytest.raises(BuildError) as caught:
        architectures("tensorrt_rtx", ["8.9", capability])
    text = str(caught.value)
    assert f"does not compile for compute capability {capability}; it does for 7.5, 8.0, 8.6, 8.9, 12.0" in text
    assert text.endswith("On the GPU itself build with --runtime tensorrt")


@pytest.mark.parametrize("capability", ["8", "sm89", "8.9.1", "", "8,9", "current", "89"])
def test_a_malformed_capability_is_refused(rtx: None, no_gpu: None, capability: str) -> None:
    with pytest.raises(BuildError, match=f"the compute capability is '{capability}', expected something like 8.9"):
        architectures("tensorrt_rtx", [capability])


def test_without_a_gpu_tensorrt_rtx_asks_which(rtx: None, no_gpu: None) -> None:
    with pytest.raises(RuntimeUnavailableError, match=r"--compute-capability with one or more of 7\.5, 8\.0"):
        architectures("tensorrt_rtx", [])


def test_without_a_gpu_tensorrt_is_refused_before_anything_else(no_gpu: None) -> None:
    with pytest.raises(RuntimeUnavailableError) as caught:
        architectures("tensorrt", [])
    assert "tensorrt compiles for the GPU that it runs on, and torch sees none here" in str(caught.value)
    assert "--runtime tensorrt-rtx --compute-capability" in str(caught.value)


@pytest.mark.parametrize("runtime", ["tensorrt", "tensorrt_rtx"])
@pytest.mark.parametrize("missing", ["library", "polygraphy"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, runtime: str, missing: str
) -> None:
    absent = runtime if missing == "library" else missing
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == absent else SimpleNamespace(name=name)
    )
    extra = {"tensorrt": "gpu", "tensorrt_rtx": "rtx"}[runtime]
    message = rf"cannot build for {runtime}: {absent} is not installed: pip install 'turbovit\[{extra}\]'"
    with pytest.raises(RuntimeUnavailableError, match=message):
        library_version(runtime)


def test_a_library_that_does_not_import_is_told_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise OSError("libcudart.so.13: cannot open\n shared object file")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(targets.importlib, "import_module", fail)
    with pytest.raises(RuntimeUnavailableError, match=r"does not import: libcudart\.so\.13: cannot open shared object"):
        library_version("tensorrt_rtx")


def test_the_version_is_the_librarys_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="11.4.0", __spec__=SimpleNamespace()))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    assert library_version("tensorrt") == "11.4.0"
