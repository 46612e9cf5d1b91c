"""Compiles one graph with TensorRT or TensorRT-RTX, in a process of its own.

polygraphy takes one of the two for good when it is imported, and a compiler that crashes must not take its caller
along. Reads a `CompileJob` as JSON from stdin. Prints JSON lines to stdout: ``{"step": ...}`` as it goes on, then
``{"done": true}`` or ``{"error": ..., "refused": ...}``: whether it was the compiler that does not take the graph. What
the library prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEAK = "done, peak memory "  # of this process
_SECONDS_BETWEEN_STEPS = 5.0
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


@dataclass(frozen=True)
class CompileJob:
    """What to compile.

    Attributes:
        runtime: ``tensorrt`` or ``tensorrt_rtx``.
        graph: the ONNX file, and `engine` the file to write.
        profiles: (smallest, optimal, largest) shape of every input, in order of preference.
        architectures: compute capabilities to compile for; ``tensorrt`` takes the GPU that is here.
        timing_cache: a file to read timings from and to write them to; None for a runtime that has none.
        parent: the process that waits. The child ends when it does.
    """

    runtime: str
    graph: str
    engine: str
    profiles: list[dict[str, list[list[int]]]]
    architectures: list[str]
    timing_cache: str | None
    parent: int


def main() -> None:
    """Run the job on stdin."""
    job = CompileJob(**json.load(sys.stdin))
    end_with(job.parent)
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # the library prints to both

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")

    try:
        _compile(job, lambda step: answer(step=step))
    except Exception as error:  # whatever polygraphy or the library raises; its log is on stderr
        answer(error=f"{type(error).__name__}: {error}", refused=type(error).__name__ == "PolygraphyException")
        sys.exit(1)
    answer(done=True)


def _compile(job: CompileJob, report: Callable[[str], None]) -> None:
    if job.runtime == "tensorrt_rtx":
        os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1"
    os.environ.pop("POLYGRAPHY_AUTOINSTALL_DEPS", None)  # nothing is installed behind anyone's back
    from polygraphy.backend.trt import PostprocessConfig, Profile, engine_bytes_from_network, network_from_onnx_path
    from polygraphy.logger import G_LOGGER
    from polygraphy.mod.trt_importer import lazy_import_trt

    G_LOGGER.module_severity = {"": G_LOGGER.WARNING}
    G_LOGGER.colors = False
    library = lazy_import_trt()
    report("parsing the graph")
    # Where a version has no such flag, its networks are nothing else.
    typed = hasattr(library.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")
    graph = Path(job.graph)
    os.chdir(graph.parent)  # the library takes a path as UTF-8, which not every locale's are
    network = network_from_onnx_path(graph.name, strongly_typed=typed)
    profiles = []
    for shapes in job.profiles:
        profile = Profile()
        for name, (low, best, high) in shapes.items():
            profile.add(name, tuple(low), tuple(best), tuple(high))
        profiles.append(profile)
    config = _config(job, profiles, _monitor(library, report))
    # On by default: float32 would be computed with 10 bits of mantissa. polygraphy clears it for TensorRT alone.
    config = PostprocessConfig(config, lambda _, __, made: made.clear_flag(library.BuilderFlag.TF32))
    with engine_bytes_from_network(network, config, save_timing_cache=job.timing_cache) as engine:
        report("writing the engine")
        Path(job.engine).write_bytes(memoryview(engine))
    report(f"{PEAK}{peak_bytes() / 2**30:.2f} GiB")


def _config(job: CompileJob, profiles: list[Any], monitor: Any) -> Any:
    common = {"profiles": profiles, "progress_monitor": monitor, "load_timing_cache": job.timing_cache}
    if job.runtime == "tensorrt_rtx":
        from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

        pairs = [tuple(map(int, capability.split("."))) for capability in job.architectures]
        return CreateConfigRTX(compute_capabilities=pairs, **common)
    from polygraphy.backend.trt import CreateConfig

    return CreateConfig(**common)


def _monitor(library: Any, report: Callable[[str], None]) -> Any:
    """The library's progress interface: its main phases, and every few seconds where it stands."""

    class Monitor(library.IProgressMonitor):
        def __init__(self) -> None:
            library.IProgressMonitor.__init__(self)  # pybind11 wants it by name
            self.depths: dict[str, int] = {}
            self.steps: dict[str, int] = {}
            self.reported = time.monotonic()

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.depths[phase_name] = self.depths.get(parent_phase or "", 0) + 1
            self.steps[phase_name] = num_steps
            if self.depths[phase_name] == 2:
                self._say(phase_name[0].lower() + phase_name[1:])

        def step_complete(self, phase_name: str, step: int) -> bool:
            if time.monotonic() - self.reported > _SECONDS_BETWEEN_STEPS:
                self._say(f"{phase_name[0].lower()}{phase_name[1:]}, {step + 1} of {self.steps.get(phase_name, 0)}")
            return True

        def phase_finish(self, phase_name: str) -> None:
            pass

        def _say(self, text: str) -> None:
            self.reported = time.monotonic()
            report(text)

    return Monitor()


def peak_bytes() -> int:
    """The largest resident memory of this process so far; unlike getrusage's it does not count who started it."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def end_with(parent: int) -> None:
    """Die with the process that waits, even if that one is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main()
