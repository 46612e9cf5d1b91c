"""What the real TurboMind engine makes of a request, found out on a machine without a GPU.

LMDeploy's `_turbomind` extension links against the CUDA driver. A child process that finds a stub of
`libcuda.so.1` first can import it, and can take a request as far as the tensor map the C++ engine gets:
`AsyncEngine.safe_run`, `TurboMindInstance.async_stream_infer`, `prepare_inputs` and `_np_dict_to_tm_dict`
all run as LMDeploy has them. What C++ does with the map afterwards is tested in `turbomind_cpu`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

CHILD = Path(__file__).with_name("turbomind_child.py")
CHILD_TIMEOUT_S = 600

# The driver functions that `_turbomind` leaves undefined (`nm -D --undefined-only`, LMDeploy 0.18).
DRIVER_FUNCTIONS = (
    "cuDeviceGetAttribute",
    "cuGetErrorString",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemGetAllocationGranularity",
    "cuMemMap",
    "cuMemRelease",
    "cuMemRetainAllocationHandle",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMulticastAddDevice",
    "cuMulticastBindMem",
    "cuMulticastCreate",
    "cuMulticastGetGranularity",
    "cuMulticastUnbind",
)
CUDA_ERROR_NO_DEVICE = 100


@dataclass(frozen=True)
class Intake:
    """The tensors TurboMind holds for one request, as the C++ engine would receive them."""

    input_ids: torch.Tensor  # [tokens] int32
    input_embeddings: torch.Tensor | None  # [rows of all images, hidden], the engine's dtype
    input_embedding_ranges: torch.Tensor | None  # [ranges, 2] int32, begin and end in input_ids
    ignored: frozenset[str]  # the request's keys that the engine accepts and does not look at


def skip_reason() -> str | None:
    """Why `intake` cannot work here, or None where it can."""
    if sys.platform != "linux":
        return f"TurboMind's extension is built for linux, this is {sys.platform}"
    if shutil.which("gcc") is None:
        return "no gcc to compile the stub CUDA driver"
    if not any(folder.glob("turbomind/_turbomind*.so") for folder in _package_folders("lmdeploy")):
        return "LMDeploy with its TurboMind extension is not installed"
    return None


def intake(request: Mapping[str, Any], workspace: Path, dtype: str = "bfloat16") -> Intake:
    """`intakes` for one request."""
    return intakes([request], workspace, dtype)[0]


def intakes(requests: Sequence[Mapping[str, Any]], workspace: Path, dtype: str = "bfloat16") -> list[Intake]:
    """Take requests, as `to_turbomind` returns them, into an engine of this dtype: one child for all.

    Args:
        requests: each with `input_ids` and, for images, `input_embeddings` and `input_embedding_ranges`;
            `prompt` and `input_meta` as they come.
        workspace: an existing folder; the compiled stub stays there for the next call.
        dtype: `bfloat16` or `float16`.

    Raises:
        RuntimeError: LMDeploy refused a request, or the extension did not import; with the child's stderr.
    """
    driver = _compile_stub_driver(workspace)
    with tempfile.TemporaryDirectory(dir=workspace) as folder:
        sent, received = Path(folder, "requests.pt"), Path(folder, "intakes.pt")
        torch.save([dict(request) for request in requests], sent)
        child = subprocess.run(
            [sys.executable, str(CHILD), str(sent), str(received), dtype],
            env=_child_environment(driver.parent),
            capture_output=True,
            text=True,
            timeout=CHILD_TIMEOUT_S,
        )
        if child.returncode != 0:
            raise RuntimeError(
                f"the TurboMind child ended with {child.returncode} on {len(requests)} request(s) "
                f"of dtype {dtype}, expected 0; its stderr:\n{child.stderr}"
            )
        answers = torch.load(received)
    return [
        Intake(
            input_ids=tensors["input_ids"],
            input_embeddings=tensors.get("input_embeddings"),
            input_embedding_ranges=tensors.get("input_embedding_ranges"),
            ignored=frozenset(ignored),
        )
        for tensors, ignored in answers
    ]


def _compile_stub_driver(workspace: Path) -> Path:
    """A `libcuda.so.1` whose every function says that there is no device."""
    library = workspace / "stub-driver" / "libcuda.so.1"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        source = "\n".join(f"int {name}(void) {{ return {CUDA_ERROR_NO_DEVICE}; }}" for name in DRIVER_FUNCTIONS)
        command = [
            "gcc",
            "-shared",
            "-fPIC",
            f"-Wl,-soname,{library.name}",
            "-x",
            "c",
            "-",
            "-o",
            str(library),
        ]
        gcc = subprocess.run(command, input=source, capture_output=True, text=True)
        if gcc.returncode != 0:
            raise RuntimeError(f"gcc could not compile the stub CUDA driver:\n{gcc.stderr}")
    return library


def _child_environment(driver_folder: Path) -> dict[str, str]:
    libraries = [lib for folder in _package_folders("nvidia") for lib in sorted(folder.glob("*/lib"))]
    inherited = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    # The stub comes first: where a real driver exists, the answer must be the same as without one.
    search_path = [str(path) for path in (driver_folder, *libraries, *inherited) if str(path)]
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(search_path), "CUDA_VISIBLE_DEVICES": ""}


def _package_folders(name: str) -> list[Path]:
    """The folders of a top-level package, which is not imported."""
    spec = find_spec(name)
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
