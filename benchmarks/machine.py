"""What a measurement has to say about the machine that it was made on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    "turbovit",
    "torch",
    "transformers",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "tensorrt-rtx-cu12",
    "polygraphy",
    "lmdeploy",
)


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Hardware and versions, as JSON takes them; memory in bytes."""
    facts: dict[str, Any] = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = {
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return facts


def summary(facts: dict[str, Any]) -> str:
    """The machine in one line."""
    gpu = facts.get("gpu")
    device = f"{gpu['name']} (compute capability {gpu['compute_capability']}), CUDA {gpu['cuda']}, " if gpu else ""
    return f"{device}{facts['cpu']}, {facts['cpu_cores']} cores, torch {facts['packages'].get('torch')}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
