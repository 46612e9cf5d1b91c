"""Where the rig cannot know the right answer it gives none: it fails, and names what it was asked for."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from turbomind_cpu import build
from turbomind_cpu.rig import Job, Request, Rig


@pytest.mark.slow
@pytest.mark.parametrize(
    ("generation", "engine", "named"),
    [
        ({"repetition_penalty": 1.2}, {}, "RepetitionPenaltyKernel"),
        ({"top_k": 5}, {}, "no CPU version of sampling"),
        ({}, {"dtype": "float16"}, "__half"),
    ],
    ids=["unknown kernel", "sampling", "float16"],
)
def test_what_has_no_cpu_version_fails_by_name(
    generation: dict[str, Any], engine: dict[str, Any], named: str, cpu_rig: Rig, checkpoint: Callable[[str], Path]
) -> None:
    job = Job(checkpoint("qwen3"), [[Request([2, 3, 4], generation=generation)]], engine)
    with pytest.raises(RuntimeError, match=rf"(?s)ended with 70, expected 0.*turbomind_cpu: .*{named}"):
        cpu_rig.generate([job])


@pytest.fixture
def unsettled() -> Iterator[None]:
    build.skip_reason.cache_clear()
    yield
    build.skip_reason.cache_clear()


@pytest.mark.usefixtures("unsettled")
class TestSkips:
    def test_a_missing_compiler_is_a_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda _: None)
        assert build.skip_reason() == "no g++ to compile the stand-ins for CUDA"

    def test_another_binary_is_a_reason(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        other = tmp_path / "_turbomind.so"
        other.write_bytes(b"another build")
        monkeypatch.setattr(build, "engine_binaries", lambda: [other])
        monkeypatch.setattr(shutil, "which", lambda name: name)
        assert "written for TurboMind 0.18.0" in str(build.skip_reason())

    def test_no_lmdeploy_is_a_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build, "engine_binaries", list)
        monkeypatch.setattr(shutil, "which", lambda name: name)
        assert build.skip_reason() == "LMDeploy with its TurboMind extension is not installed"

    @pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
    def test_a_skip_fails_in_continuous_integration(
        self, ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CI", ci)
        with pytest.raises(outcome, match="no g"):
            build.skip("no g++")
