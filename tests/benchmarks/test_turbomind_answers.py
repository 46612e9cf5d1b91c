"""What is compared of TurboMind's answers, and what the check of a device makes of it, without TurboMind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from turbovit.benchmarks import turbomind_answers
from turbovit.benchmarks.agreement import BOUND, LAG_BOUND, ROW_BOUND, Agreement, agreement
from turbovit.benchmarks.device_turbomind import check_turbomind
from turbovit.benchmarks.findings import Findings
from turbovit.benchmarks.turbomind_answers import Case
from turbovit.lmdeploy_ext import adapter

LOGITS = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
BEST = LOGITS[-3:].argmax(dim=1).tolist()
CUDA = torch.device("cuda", 1)


def test_equal_logits_agree_and_each_bound_is_held() -> None:
    assert agreement(BEST, LOGITS, LOGITS) == Agreement(0.0, 0.0, 0.0)
    assert not agreement(BEST, LOGITS * (1 + 1.1 * BOUND), LOGITS).holds
    one_row = LOGITS.clone()
    one_row[4] *= 1 + 1.1 * ROW_BOUND
    found = agreement(BEST, one_row, LOGITS)
    assert found.overall < BOUND
    assert found.worst_row == pytest.approx(1.1 * ROW_BOUND, rel=1e-3)
    assert not found.holds
    second = LOGITS[-3:].topk(2).indices[:, 1].tolist()
    assert agreement(second, LOGITS, LOGITS).lag > LAG_BOUND
    assert not agreement(second, LOGITS, LOGITS).holds
    assert not agreement(BEST, LOGITS / 0, LOGITS).holds


def test_logits_of_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits of \[39, 64\], the reference of \[40, 64\]"):
        agreement(BEST, LOGITS[1:], LOGITS)


def case(error: float, problem: str = "") -> Case:
    return Case("text", 10, [1, 2], [1, 2], Agreement(error, error, 0.0), problem)


@pytest.mark.parametrize(("found", "code"), [(case(0.01), 0), (case(0.02), 1), (case(0.01, "cancelled late"), 1)])
def test_the_command_fails_where_a_case_does(
    found: Case, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(turbomind_answers, "check", lambda languages, folder, names: {"mla": [found]})
    file = tmp_path / "results.json"
    assert turbomind_answers.main(["--language", "mla", "--json", str(file)]) == code
    (written,) = json.loads(file.read_text())["mla"]
    assert written["passed"] is found.passed is (code == 0)
    assert written["agreement"]["overall"] == found.agreement.overall
    said = capsys.readouterr().out
    assert said.startswith(f"mla, text: {'FAILED' if code else 'passed'}")
    assert found.problem in said


def checked(device: torch.device, seconds: float = 300) -> list[Any]:
    findings = Findings(lambda line: None)
    check_turbomind(findings, device, seconds)
    return findings.checks


def test_without_a_gpu_time_or_turbomind_it_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {(row.state, row.detail) for row in checked(torch.device("cpu"))} == {
        ("not run", "TurboMind runs on CUDA devices")
    }
    monkeypatch.setattr(adapter, "turbomind_problem", lambda: "libcuda.so.1 is missing")
    assert "cannot be loaded here: libcuda.so.1 is missing" in checked(CUDA)[0].detail
    monkeypatch.setattr(adapter, "turbomind_problem", lambda: None)
    assert {row.state for row in checked(CUDA, 1)} == {"not run"}


def test_each_language_half_is_run_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(command: list[str], env: dict[str, str], **_: Any) -> Any:
        language = command[command.index("--language") + 1]
        asked.append((command[:3], env["CUDA_VISIBLE_DEVICES"]))
        if language == "base":
            return SimpleNamespace(returncode=-6, stderr="a\nb\nCheck failed: success")
        error = 0.01 if language == "mha" else 0.3
        found = {"name": "text", "agreement": {"overall": error}, "problem": "", "passed": language == "mha"}
        Path(command[command.index("--json") + 1]).write_text(json.dumps({language: [found]}))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(adapter, "turbomind_problem", lambda: None)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    mha, mla, base = checked(CUDA)
    assert (mha.state, mha.detail) == ("passed", "1 conversations, relative L2 of the logits at most 1.0e-02")
    assert mla.state == base.state == "failed"
    assert "1 of 1 conversations are not the reference's: text" in mla.detail
    assert "its process ended with -6: a; b; Check failed: success" in base.detail
    module = [sys.executable, "-m", "turbovit.benchmarks.turbomind_answers"]
    assert asked == [(module, "6")] * len(turbomind_answers.LANGUAGES)
