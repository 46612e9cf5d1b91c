"""How much memory a model needs, from the headers of its files, and how much is here."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from turbovit.engines.bundle import Bundle, Engine

_HEADER_LIMIT = 100 << 20  # as safetensors itself


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a checkpoint's tensors, as they are stored."""

    language: int
    vision: int


@dataclass(frozen=True)
class GpuMemory:
    """One GPU's memory, in bytes."""

    name: str
    free: int
    total: int


def weight_bytes(folder: Path, is_vision: Callable[[str], bool]) -> WeightBytes | None:
    """From the headers of the safetensors files; of files that are not here, from the total that their index states.

    Args:
        is_vision: which tensors belong to the vision half; their files are here.

    Returns:
        None where neither says it, or a file is damaged.
    """
    from turbovit.engines.errors import CheckpointError
    from turbovit.export.checkpoint import open_checkpoint
    from turbovit.export.weights import INDEX, read_json

    try:
        names = open_checkpoint(folder).weight_map
        files = {file for file in names.values() if (folder / file).is_file()}
        sizes = {name: size for file in files for name, size in _tensor_bytes(folder / file).items()}
        complete = sizes.keys() >= names.keys()
        total = sum(sizes.values()) if complete else int(read_json(folder / INDEX)["metadata"]["total_size"])
        vision = sum(sizes[name] for name in names if is_vision(name))
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, struct.error):
        return None
    return WeightBytes(total - vision, vision)


def engine_bytes(bundle: Bundle, engine: Engine) -> int:
    """Bytes of the files that an engine loads: what it takes of memory at least, before it runs."""
    files = bundle.manifest.files
    weights = files.get(f"weights.{engine.label}.bin") if engine.file.endswith(".onnx") else None
    return files[engine.file].size + (weights.size if weights else 0)


def host_memory() -> tuple[int, int]:
    """(available, total) bytes of this machine's memory; what caches hold is available."""
    page = os.sysconf("SC_PAGE_SIZE")
    free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text(encoding="utf-8").splitlines() if meminfo.is_file() else []
    available = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return next(available, free), total


def gpus() -> list[GpuMemory]:
    """The GPUs that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [
        GpuMemory(torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index))
        for index in range(torch.cuda.device_count())
    ]


def capabilities(devices: Sequence[int] | None = None) -> set[tuple[int, int]]:
    """The compute capabilities of the GPUs that torch sees, or of some of them."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = range(count) if devices is None else devices
    return {torch.cuda.get_device_capability(index) for index in chosen if index < count}


def _tensor_bytes(path: Path) -> dict[str, int]:
    """Tensor name to bytes, from a safetensors file's header: its length (u64, little endian), then JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _HEADER_LIMIT:
            raise ValueError(f"{path} has a header of {length} bytes")
        header = json.loads(file.read(length))
    offsets = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: end - begin for name, (begin, end) in offsets.items()}


def text_from_bytes(size: int) -> str:
    """Such as ``7.8 GiB``, or ``12 MiB`` where it is little."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{-(-size // 2**20)} MiB"
