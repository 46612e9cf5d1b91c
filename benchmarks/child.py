"""One step in a process of its own, so that its peak memory is its own: ``python -m turbovit.benchmarks.child``.

Takes a JSON object as its argument, and prints one as its last line: seconds and peak bytes, or an error.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from turbovit.engines.errors import BuildError, TurbovitError
from turbovit.export.compile_child import peak_bytes
from turbovit.export.to_tensorrt import LAST_LINES, ending


def in_child(step: str, **arguments: Any) -> dict[str, float]:
    """Run a step of this module in a new process; its ``seconds`` and ``peak`` bytes.

    Raises:
        BuildError: it failed; with its own error, or how it ended and what it said last.
    """
    command = [sys.executable, "-m", "turbovit.benchmarks.child", json.dumps({"step": step, **arguments}, default=str)]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if result.returncode:
        said = "; ".join(result.stderr.strip().splitlines()[-LAST_LINES:])
        raise BuildError(f"{step} {ending(result.returncode)} in a process of its own: {said}")
    answer = json.loads(result.stdout.splitlines()[-1])
    if "error" in answer:
        raise BuildError(f"{step} failed in a process of its own: {answer['error']}")
    return answer


def _build(arguments: Mapping[str, Any]) -> float:
    from turbovit.export.build import build
    from turbovit.export.plan import CompileOptions

    options = CompileOptions(capabilities=tuple(arguments["capabilities"]))
    started = time.perf_counter()
    build(arguments["checkpoint"], arguments["bundle"], runtimes=arguments["runtimes"], options=options)
    return time.perf_counter() - started


def _load(arguments: Mapping[str, Any]) -> float:
    from turbovit.engines.encoder import open_encoder

    started = time.perf_counter()
    open_encoder(arguments["bundle"], arguments["runtime"], "auto")
    return time.perf_counter() - started


def _run(arguments: Mapping[str, Any]) -> float:
    from turbovit.benchmarks.subjects import noise_image
    from turbovit.engines.encoder import open_encoder

    encoder = open_encoder(arguments["bundle"], arguments["runtime"], "auto")
    width, height = arguments["size"]
    image = noise_image((width, height))
    started = time.perf_counter()
    encoder.encode([image])
    return time.perf_counter() - started


STEPS: dict[str, Callable[[Mapping[str, Any]], float]] = {"build": _build, "load": _load, "run": _run}


def main() -> None:
    """Run the step that the command line names."""
    arguments = json.loads(sys.argv[1])
    try:
        seconds = STEPS[arguments["step"]](arguments)
    except TurbovitError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return
    compilers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024  # they run in processes of their own
    peak = max(peak_bytes(), compilers)
    print(json.dumps({"seconds": seconds, "peak": peak}))


if __name__ == "__main__":
    main()
