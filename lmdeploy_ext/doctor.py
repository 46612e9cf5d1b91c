"""What this machine, its packages and its LMDeploy can do with a model, before anyone builds."""

from __future__ import annotations

import importlib.util
import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from turbovit.engines.commands import build_command
from turbovit.engines.errors import TurbovitError
from turbovit.lmdeploy_ext.capability import State, language_findings

_PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "lmdeploy", "tensorrt")
_OPTIONAL = ("onnxruntime", "onnxruntime-gpu", "lmdeploy", "tensorrt")


@dataclass(frozen=True)
class Diagnosis:
    """One line of the doctor's report."""

    section: str
    what: str
    state: State
    detail: str


def diagnose(model: str | None = None) -> list[Diagnosis]:
    """Look at this machine, and at `model` where one is given.

    Args:
        model: a checkpoint folder or hub id.

    Raises:
        CheckpointError: there is no such checkpoint.
        UnsupportedModelError: no family serves its architecture.
    """
    return [*_machine(), *_packages(), *_runtimes(), *_lmdeploy(), *(_model(model) if model else [])]


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
    for name in _PACKAGES:
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
        detail = "not installed: pip install 'turbovit[lmdeploy]'; bundles can be built and run without it"
        return [Diagnosis("lmdeploy", "the parts that turbovit plugs into", "missing", detail)]
    from turbovit.lmdeploy_ext import adapter

    problems = adapter.check()
    state: State = "missing" if problems else "have"
    return [Diagnosis("lmdeploy", "the parts that turbovit plugs into", state, "; ".join(problems))]


def _model(model: str) -> list[Diagnosis]:
    from turbovit.engines.families import family_from_architecture
    from turbovit.export.checkpoint import open_checkpoint
    from turbovit.export.plan import find_bundle

    architecture = str(open_checkpoint(model).architecture)
    family = family_from_architecture(architecture)
    found = [Diagnosis("model", architecture, "have", f"family {family.name}")]
    try:
        bundle = find_bundle(model)
    except TurbovitError as error:
        found.append(Diagnosis("vision half", "vision weights", "missing", str(error)))
    else:
        detail = str(bundle) if bundle else f"build it: {build_command(model)}"
        found.append(Diagnosis("vision half", "bundle in the store", "have" if bundle else "missing", detail))
    findings = language_findings(architecture)
    found += [Diagnosis("TurboMind language half", finding.what, finding.state, "") for finding in findings]
    missing = [finding.what for finding in findings if finding.state == "missing"]
    if missing:
        detail = (
            f"the installed TurboMind cannot run this model, it lacks {'; '.join(missing)}: "
            f"its requests are built and checked, its answers are not to be had"
        )
        found.append(Diagnosis("TurboMind language half", f"{architecture} end to end", "missing", detail))
    return found
