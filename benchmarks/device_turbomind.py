"""The device check's part about TurboMind: DeepSeek-VL2's answers on the machine's GPU, beside transformers'."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from turbovit.benchmarks.findings import Findings, NotRunError
from turbovit.benchmarks.turbomind_answers import LANGUAGES
from turbovit.engines.errors import CertificationError, RuntimeUnavailableError

_SECONDS = 40  # that must be left to begin one


def check_turbomind(findings: Findings, device: torch.device, seconds: float) -> None:
    """One row for each of its language halves; each runs in a process of its own, as TurboMind's checks end theirs.

    Args:
        seconds: that are left; those that do not fit are not run.
    """
    for language in LANGUAGES:
        with findings.check("deepseek_vl2 tiny", f"TurboMind {language}", "answers") as details:
            _require_turbomind(device)
            if seconds < _SECONDS:
                raise NotRunError(f"{max(seconds, 0):.0f} s of the time are left, {_SECONDS} s may be needed")
            details.append(_answers(language, device, seconds))
        seconds -= findings.checks[-1].seconds


def _require_turbomind(device: torch.device) -> None:
    if device.type != "cuda":
        raise NotRunError("TurboMind runs on CUDA devices")
    if find_spec("lmdeploy") is None:
        raise RuntimeUnavailableError("LMDeploy is not here: pip install 'turbovit[lmdeploy]'")
    from turbovit.lmdeploy_ext import adapter

    problem = adapter.turbomind_problem()
    if problem:
        raise RuntimeUnavailableError(f"LMDeploy's TurboMind cannot be loaded here: {problem}")


def _answers(language: str, device: torch.device, seconds: float) -> str:
    with tempfile.TemporaryDirectory(prefix="turbovit-turbomind-") as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "turbovit.benchmarks.turbomind_answers"]
        command += ["--language", language, "--json", str(results)]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        chosen = visible[device.index or 0] if visible[0] else str(device.index or 0)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": chosen}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, encoding="utf-8", errors="replace", timeout=seconds
            )
        except subprocess.TimeoutExpired:
            raise CertificationError(f"no end after {seconds:.0f} s") from None
        if not results.is_file():
            said = "; ".join(done.stderr.strip().splitlines()[-3:])
            raise CertificationError(f"its process ended with {done.returncode}: {said}")
        cases = json.loads(results.read_text(encoding="utf-8"))[language]
    worst = max(case["agreement"]["overall"] for case in cases)
    failed = [f"{case['name']}: {case['agreement']} {case['problem']}".strip() for case in cases if not case["passed"]]
    if failed:
        raise CertificationError(f"{len(failed)} of {len(cases)} conversations are not the reference's: {failed[0]}")
    return f"{len(cases)} conversations, relative L2 of the logits at most {worst:.1e}"
