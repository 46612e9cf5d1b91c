"""Runs things in a child process whose TurboMind is the released one, over stand-ins for CUDA or over a real driver.

The rig is where a child runs and what torch is told there; `generate.py` is one thing to run in it, any
`module:function` is another.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from turbomind_cpu.build import build

from turbovit.benchmarks.turbomind_side import Answer, Request

CHILD = Path(__file__).with_name("child.py")
TESTS = CHILD.parents[1]
STAND_INS = "TURBOMIND_CPU_STAND_INS"  # set in a child that runs over stand-ins
TRACE = "TURBOMIND_CPU_TRACE"
TIMEOUT_S = 600


@dataclass(frozen=True)
class Rig:
    """Where children run: over `libraries`, loaded before all others, or over the machine's own CUDA without any."""

    libraries: tuple[Path, ...] = ()

    @classmethod
    def on_cpu(cls, folder: Path) -> Rig:
        """A rig over stand-ins, which are compiled into an existing folder."""
        return cls(tuple(build(folder)))

    def environment(self) -> dict[str, str]:
        """A child's environment variables.

        The stand-ins are preloaded by path: torch loads its own CUDA before anything on a search path is found.
        """
        paths = [str(TESTS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        common = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "TM_LOG_LEVEL": "WARNING"}
        if not self.libraries:
            return {**os.environ, **common}
        return {
            **os.environ,
            **common,
            "LD_PRELOAD": ":".join(map(str, self.libraries)),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TM_GEMM_IMPORT": "/dev/null",  # no warm-up of the products: it only measures kernels
            STAND_INS: "1",
        }

    def run(
        self,
        target: str,
        *arguments: str,
        prepare: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Call `target`, a `module:function`, with strings in a child, after the functions named by `prepare`.

        Over stand-ins the GPU is one of compute capability 8.0; `TURBOMIND_CPU_SM` in `environment` names another (90).

        Raises:
            subprocess.TimeoutExpired: the child took longer than `timeout` seconds.
        """
        options = [option for name in prepare for option in ("--prepare", name)]
        return subprocess.run(
            [sys.executable, str(CHILD), *options, target, *arguments],
            env={**self.environment(), **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def generate(
        self, jobs: Sequence[Job], prepare: Sequence[str] = (), trace: Path | None = None
    ) -> list[list[list[Answer]]]:
        """Answers by job, round and request; all jobs run in one child.

        Args:
            jobs: run in turn, an engine each.
            prepare: `module:function` names, called before LMDeploy is asked for anything.
            trace: a file that gets the mangled name of each kernel launched, one a line.

        Raises:
            RuntimeError: the child failed; with its stderr.
        """
        with tempfile.TemporaryDirectory() as folder:
            sent, received = Path(folder, "jobs.pt"), Path(folder, "answers.pt")
            torch.save(list(jobs), sent)
            environment = {TRACE: str(trace)} if trace else {}
            target = "turbomind_cpu.generate:main"
            child = self.run(target, str(sent), str(received), prepare=prepare, environment=environment)
            if child.returncode != 0:
                raise RuntimeError(f"the child ended with {child.returncode}, expected 0; its stderr:\n{child.stderr}")
            return torch.load(received, weights_only=False)


@dataclass(frozen=True)
class Job:
    """An engine over a checkpoint, and rounds of requests; those of a round run at once, as one batch."""

    model: Path
    rounds: list[list[Request]]
    engine: dict[str, Any] = field(default_factory=dict)  # of TurbomindEngineConfig
    within: str | None = None  # a context manager's `module:function`: LMDeploy as it is while the engine is made
