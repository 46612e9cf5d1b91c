"""Compiles the stand-ins for CUDA, or says why they cannot serve the TurboMind that is installed."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

SOURCES = Path(__file__).with_name("stand_ins")
# Records and symbols in the sources are those of this binary.
ENGINE_VERSION = "0.18.0"
ENGINE_SHA256 = "db152012d64f0f47527dbe649e200bbad4e787676425d370afaf64c0eef284bf"


@dataclass(frozen=True)
class Library:
    """A stand-in: its soname, its sources, and whether its symbols carry the soname as their version."""

    soname: str
    sources: tuple[str, ...]
    versioned: bool = True


# torch brings its own CUDA: where that asks for the symbols of another version, it is not captured.
LIBRARIES = (
    Library("libcudart.so.12", ("runtime.cpp",)),
    Library("libcuda.so.1", ("driver.cpp",), versioned=False),
    Library(
        "libcublas.so.12",
        (
            "attention.cpp",
            "blas.cpp",
            "bookkeeping_kernels.cpp",
            "dense_kernels.cpp",
            "kernels.cpp",
            "matmul.cpp",
            "moe.cpp",
        ),
    ),
)


@functools.cache
def skip_reason() -> str | None:
    """Why the stand-ins cannot serve here, or None where they can."""
    if sys.platform != "linux":
        return f"TurboMind's extension is built for linux, this is {sys.platform}"
    if shutil.which("g++") is None:
        return "no g++ to compile the stand-ins for CUDA"
    engines = engine_binaries()
    if not engines:
        return "LMDeploy with its TurboMind extension is not installed"
    digest = hashlib.sha256(engines[0].read_bytes()).hexdigest()
    if digest != ENGINE_SHA256:
        return f"the stand-ins are written for TurboMind {ENGINE_VERSION} with sha256 {ENGINE_SHA256}, here is {digest}"
    return None


def skip(reason: str) -> NoReturn:
    """Skip the test that needs the stand-ins, or fail it where continuous integration promises that it runs."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"under CI=true this has to run: {reason}")
    pytest.skip(reason)


def engine_binaries() -> list[Path]:
    """TurboMind's extension modules, without importing LMDeploy."""
    spec = find_spec("lmdeploy")
    folders = (spec and spec.submodule_search_locations) or ()
    return [path for folder in folders for path in Path(folder).glob("turbomind/_turbomind*.so")]


def build(folder: Path) -> list[Path]:
    """Compile all stand-ins into an existing folder; one that is there already is kept.

    Raises:
        RuntimeError: the compiler's errors.
    """
    missing = [library for library in LIBRARIES if not (folder / library.soname).exists()]
    compilers = [(library, _compiler(library, folder)) for library in missing]
    for library, compiler in compilers:
        _, errors = compiler.communicate()
        if compiler.returncode != 0:
            raise RuntimeError(f"g++ could not compile {library.soname} from {', '.join(library.sources)}:\n{errors}")
    return [folder / library.soname for library in LIBRARIES]


def _compiler(library: Library, folder: Path) -> subprocess.Popen[str]:
    command = ["g++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command += [f"-Wl,-soname,{library.soname}"]
    if library.versioned:
        script = folder / f"{library.soname}.map"
        script.write_text(f"{library.soname} {{ global: *; }};\n")
        command += [f"-Wl,--version-script={script}"]
    command += [str(SOURCES / source) for source in library.sources]
    command += ["-o", str(folder / library.soname)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
