"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = (
    "turbovit",
    "torch",
    "torchvision",
    "transformers",
    "pillow",
    "numpy",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "tensorrt-rtx-cu12",
    "polygraphy",
    "lmdeploy",
)


def machine_facts() -> dict[str, Any]:
    """The processor, its cores and caches, memory, GPUs, thread settings, versions, and how busy the machine is."""
    import torch

    gpus = [_gpu(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_model(),
        "cores": _usable_cores(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch_threads": torch.get_num_threads(),
        "thread_variables": {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "MKL_"))},
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "versions": _versions(),
    }


def machine_line(facts: dict[str, Any]) -> str:
    """The facts that a table names."""
    gpus = ", ".join(facts["gpus"]) or "no GPU"
    versions = facts["versions"]
    shown = ("torch", "transformers", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx-cu12")
    named = ", ".join(f"{name} {versions[name]}" for name in shown if name in versions)
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['instruction_set']}, {facts['memory_gib']} GiB, {gpus}; "
        f"Python {facts['python']}, {named}"
    )


def resident_bytes() -> int:
    """The resident set of this process now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _gpu(properties: Any) -> str:
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return f"{properties.name} (compute capability {properties.major}.{properties.minor}, {memory})"


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
