"""Builds in processes of their own, for tests that kill builds or run two at once.

Usage: build_child.py JOBS, a JSON list of `Job` fields. Imports once, then forks a process for each job: all at
once if they have the same output, else one after the other. Prints one JSON list: what became of each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import onnx_ir as ir
import onnxruntime  # noqa: F401  (not in every process again)
from transformers import Gemma3Config  # noqa: F401

from turbovit.export import build as module


@dataclass(frozen=True)
class Job:
    """One build.

    Attributes:
        graphs: folder with a base graph of each precision, taken instead of exporting anew.
        die_at: the step, by the start of its line, at which the process kills itself.
    """

    model: str
    output: str
    graphs: str
    precision: str = "fp32"
    die_at: str | None = None

    def run(self) -> None:
        def report(step: str) -> None:
            if self.die_at is not None and step.startswith(self.die_at):
                os.kill(os.getpid(), signal.SIGKILL)

        graph = Path(self.graphs) / f"model.{self.precision}.attention.onnx"
        module.onnx_from_tower = lambda *_: ir.load(graph)
        built = module.build(self.model, self.output, precision=self.precision, report=report)
        os._exit(10 + len(built.new))


def start(job: Job) -> int:
    """Fork; the process ends with status 10 + the number of new engines, or 1."""
    process = os.fork()
    if process == 0:
        try:
            job.run()
        finally:
            os._exit(1)
    return process


def main() -> None:
    jobs = [Job(**fields) for fields in json.loads(sys.argv[1])]
    ends: list[int] = []
    for _, together in groupby(jobs, key=lambda job: job.output):
        processes = [start(job) for job in together]
        ends += [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
