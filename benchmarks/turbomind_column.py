"""The demo's last column: what TurboMind answers for a family, where this checkout can run it without a GPU.

The released binary runs over stand-ins for CUDA that lie beside the tests; they are no part of the package, so they are
run as a script.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbovit.benchmarks.turbomind_answers import LANGUAGES

CASE = "images in two turns"
_SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "turbomind_cpu" / "run.py"
_TARGET = "turbovit.benchmarks.turbomind_answers:command"
_CANNOT = 3  # what the script ends with where it can run nothing
_SECONDS = 600


@dataclass(frozen=True)
class TurboMindColumn:
    """What the demo says of TurboMind.

    Attributes:
        lines: of the table's cell.
        failed: whether it ran and its answers are not the reference's.
    """

    lines: tuple[str, ...]
    failed: bool = False


def turbomind_column(family: str, directory: Path, languages: Sequence[str] = LANGUAGES) -> TurboMindColumn:
    """Run TurboMind for a family, in `directory`.

    Args:
        languages: which of DeepSeek-VL2's language halves.
    """
    if family != "deepseek_vl2":
        return TurboMindColumn(("no language half",))
    reason = _reason()
    if reason:
        return TurboMindColumn((f"not run: {reason}",))
    directory.mkdir(parents=True, exist_ok=True)
    results = directory / "results.json"
    results.unlink(missing_ok=True)
    arguments = [*("--language", ",".join(languages)), *("--cases", CASE), *("--json", str(results))]
    command = [sys.executable, str(_SCRIPT), str(directory / "stand_ins"), _TARGET, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return TurboMindColumn((f"no answer after {_SECONDS} s",), failed=True)
    if done.returncode == _CANNOT:
        return TurboMindColumn((f"not run: {done.stdout.strip()}",))
    if not results.is_file():
        last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        return TurboMindColumn((f"failed: {last}",), failed=True)
    cases = [
        (language, case)
        for language, found in json.loads(results.read_text(encoding="utf-8")).items()
        for case in found
    ]
    lines = [line for language, case in cases for line in _lines(language, case)]
    return TurboMindColumn(tuple(lines), failed=done.returncode != 0)


def _reason() -> str | None:
    if not _SCRIPT.is_file():
        return "its kernels for CPUs come with a checkout"
    return None if shutil.which("g++") else "no g++ to compile its kernels for CPUs"


def _lines(language: str, case: dict[str, Any]) -> list[str]:
    """The tokens, and the reference's beneath where they are others."""
    own, reference = (" ".join(map(str, case[name])) for name in ("tokens", "expected"))
    if case["passed"] and own == reference:
        return [f"{language}: {own}, as the reference"]
    off = f"logits {case['agreement']['overall']:.1%} off"
    verdict = f"{off}, within bounds" if case["passed"] else f"{off}, NOT within bounds {case['problem']}".strip()
    return [f"{language}: {own}", f"reference: {reference}", verdict]
