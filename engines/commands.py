"""The commands that errors and reports tell people to run, ready for a shell."""

from __future__ import annotations

import shlex
from pathlib import Path


def build_command(
    model: str | Path, output: str | Path | None = None, runtime: str | None = None, precision: str | None = None
) -> str:
    """The `turbovit build` that makes what is missing."""
    words = ["turbovit", "build", str(model)]
    words += ["-o", str(output)] if output is not None else []
    words += ["--runtime", runtime] if runtime is not None else []
    words += ["--precision", precision] if precision is not None else []
    return shlex.join(words)


def serve_command(model: str | Path, tensor_parallel: int = 1) -> str:
    """The `turbovit serve` that answers requests about `model`."""
    words = ["turbovit", "serve", str(model)]
    words += ["--tp", str(tensor_parallel)] if tensor_parallel > 1 else []
    return shlex.join(words)
