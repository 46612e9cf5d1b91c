"""What this machine, its packages and its LMDeploy can do with a model, before anyone builds."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version

from turbovit.engines.errors import TurbovitError
from turbovit.lmdeploy_ext.capability import State
from turbovit.lmdeploy_ext.diagnosis import Diagnosis
from turbovit.lmdeploy_ext.model_doctor import diagnose_model

_NEEDED = ("torch", "transformers", "onnx", "onnxscript")
_OPTIONAL = ("onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx-cu12", "polygraphy", "lmdeploy")


def diagnose(model: str | None = None) -> list[Diagnosis]:
    """Look at this machine, and at `model` where one is given.

    Args:
        model: a checkpoint folder or hub id.

    Raises:
        CheckpointError: there is no such checkpoint.
        UnsupportedModelError: no family serves its architecture.
    """
    sections: dict[str, Callable[[], Iterable[Diagnosis]]] = {
        "machine": _machine,
        "package": _packages,
        "runtime": _runtimes,
        "lmdeploy": _lmdeploy,
    }
    if model is not None:
        sections["model"] = lambda: diagnose_model(model)
    return [finding for name, section in sections.items() for finding in _whatever_happens(name, section)]


def _whatever_happens(name: str, section: Callable[[], Iterable[Diagnosis]]) -> Iterator[Diagnosis]:
    """A section as far as it goes: what breaks a library here is what the report is for."""
    try:
        yield from section()
    except TurbovitError:
        raise
    except Exception as error:  # any library's own
        detail = f"{type(error).__name__}: {' '.join(str(error).split())}"
        yield Diagnosis(name, "the rest of this part", "unknown", detail)


def _machine() -> list[Diagnosis]:
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    here = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB"
    found = [Diagnosis("machine", f"Python {platform.python_version()}", "have", here)]
    if not torch.cuda.is_available():
        return [*found, Diagnosis("machine", "CUDA device", "missing", "torch sees none; engines run on the CPU")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        detail = f"compute capability {properties.major}.{properties.minor}, {properties.total_memory / 2**30:.0f} GiB"
        found.append(Diagnosis("machine", properties.name, "have", detail))
    return found


def _packages() -> list[Diagnosis]:
    found = []
    for name in (*_NEEDED, *_OPTIONAL):
        try:
            found.append(Diagnosis("package", name, "have", version(name)))
        except PackageNotFoundError:
            detail = "optional" if name in _OPTIONAL else "needed: pip install turbovit again"
            found.append(Diagnosis("package", name, "missing", detail))
    return found


def _runtimes() -> list[Diagnosis]:
    import torch

    from turbovit.engines.encoder import RUNNERS
    from turbovit.engines.families import load

    found = []
    for name, path in RUNNERS.items():
        for device in ("cpu", "cuda"):
            reason = load(path).unavailable(torch.device(device))
            found.append(Diagnosis("runtime", f"{name} on {device}", "missing" if reason else "have", reason or ""))
    return found


def _lmdeploy() -> list[Diagnosis]:
    if importlib.util.find_spec("lmdeploy") is None:
        detail = "not installed; bundles can be built and run without it"
        command = "pip install 'turbovit[lmdeploy]'"
        return [Diagnosis("lmdeploy", "the parts that turbovit plugs into", "missing", detail, command)]
    from turbovit.lmdeploy_ext import adapter

    problems = adapter.check()
    state: State = "missing" if problems else "have"
    return [Diagnosis("lmdeploy", "the parts that turbovit plugs into", state, "; ".join(problems))]
