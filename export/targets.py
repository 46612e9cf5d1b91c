"""The GPUs that an engine is compiled for."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Sequence

from turbovit.engines.errors import BuildError, RuntimeUnavailableError

# Runtimes that compile the graph, by the name of their module, and the extra that brings it.
COMPILED = {"tensorrt": "gpu", "tensorrt_rtx": "rtx"}
_AHEAD_OF_TIME = "tensorrt_rtx"


def library_version(runtime: str) -> str:
    """The installed version of a runtime that compiles.

    Raises:
        RuntimeUnavailableError: the library, or polygraphy, is missing or does not import; says which and why.
    """
    for module in ("polygraphy", runtime):
        if importlib.util.find_spec(module) is None:
            extra = COMPILED[runtime]
            raise RuntimeUnavailableError(
                f"cannot build for {runtime}: {module} is not installed: pip install 'turbovit[{extra}]'"
            )
    try:
        version: str = importlib.import_module(runtime).__version__
    except Exception as error:  # whatever loading its shared libraries raises
        reason = " ".join(str(error).split())
        raise RuntimeUnavailableError(f"cannot build for {runtime}: it does not import: {reason}") from error
    return version


def architectures(runtime: str, wanted: Sequence[str]) -> tuple[str, ...]:
    """The compute capabilities to compile for, in order.

    Args:
        runtime: ``tensorrt`` compiles for the GPU that it runs on alone; ``tensorrt_rtx`` for any that it knows.
        wanted: as a user gives them (``"8.9"``); empty for the GPU of this machine.

    Raises:
        BuildError: one is malformed, or not one that the runtime compiles for.
        RuntimeUnavailableError: this machine has no GPU, and the runtime needs one, or `wanted` is empty.
    """
    here = _capability_here()
    if runtime != _AHEAD_OF_TIME:
        if here is None:
            raise RuntimeUnavailableError(
                f"{runtime} compiles for the GPU that it runs on, and torch sees none here: build on the machine that "
                f"shall run it, or for GPUs elsewhere with --runtime tensorrt-rtx --compute-capability 8.9,12.0"
            )
        return (here,)
    known = _known_to_rtx()
    if not wanted and here is None:
        raise RuntimeUnavailableError(
            f"{runtime} has to know the GPUs to compile for, as torch sees none here: --compute-capability with one "
            f"or more of {', '.join(known)}"
        )
    asked = list(wanted) or [str(here)]
    for capability in asked:
        if not re.fullmatch(r"\d+\.\d", capability):
            raise BuildError(f"the compute capability is {capability!r}, expected something like 8.9")
        if capability not in known:
            raise BuildError(
                f"{runtime} {library_version(runtime)} does not compile for compute capability {capability}; it "
                f"does for {', '.join(known)}. On the GPU itself build with --runtime tensorrt"
            )
    return tuple(sorted(set(asked), key=_order))


def gpu_memory_here() -> int | None:
    """Bytes of this machine's GPU; None where torch sees none."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def _capability_here() -> str | None:
    import torch

    from turbovit.engines.runner import capability_of

    return capability_of(torch.device("cuda")) if torch.cuda.is_available() else None


def _known_to_rtx() -> list[str]:
    """The library's own list: its enumeration has ``SM89`` and the like."""
    library_version(_AHEAD_OF_TIME)
    names = importlib.import_module(_AHEAD_OF_TIME).ComputeCapability.__members__
    found = (re.fullmatch(r"SM(\d+)(\d)", name) for name in names)
    return sorted((f"{match[1]}.{match[2]}" for match in found if match), key=_order)


def _order(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))
