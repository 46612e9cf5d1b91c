"""The options of `turbovit build` for runtimes that compile, through the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from turbovit.engines.bundle import Bundle

pytest.importorskip("tensorrt_rtx")

RTX = ("--runtime", "tensorrt-rtx", "--precision", "fp16")


def turbovit(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "turbovit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_compiles_ahead_of_time_and_shows_for_what(
    tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, tmp_path: Path
) -> None:
    shutil.copytree(tiny_gemma3_bundle.path, tmp_path / "bundle")
    options = (*RTX, "--compute-capability", "8.9, 12.0", "--profile", "images=1:1:1", "--profile", "images=1:2:4")
    built = turbovit("build", tiny_gemma3, "-o", tmp_path / "bundle", *options)
    assert built.returncode == 0, built.stderr
    assert "tensorrt_rtx fp16: parsing the graph" in built.stderr
    assert "profile images=1:2:4: about " in built.stderr
    shown = turbovit("inspect", tmp_path / "bundle")
    assert "tensorrt_rtx fp16 (matmul attention): not run" in shown.stdout
    assert "for compute capability 8.9, 12.0; " in shown.stdout
    (engine,) = [
        engine
        for engine in json.loads(turbovit("inspect", tmp_path / "bundle", "--json").stdout)["engines"]
        if engine["runtime"] == "tensorrt_rtx"
    ]
    assert engine["architectures"] == ["8.9", "12.0"]
    assert [profile["ranges"] for profile in engine["profiles"]] == [{"images": [1, 1, 1]}, {"images": [1, 2, 4]}]
    again = turbovit("build", tiny_gemma3, "-o", tmp_path / "bundle", *options)
    assert again.returncode == 0
    assert again.stdout.startswith("up to date, nothing to do:")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*RTX, "--compute-capability", "9.0"), "does not compile for compute capability 9.0; it does for 7.5, 8.0"),
        ((*RTX, "--compute-capability", "ada"), "the compute capability is 'ada', expected something like 8.9"),
        ((*RTX, "--compute-capability", "8.9", "--profile", "images"), "expected images=MIN:OPT:MAX"),
        ((*RTX, "--compute-capability", "8.9", "--gpu-memory", "0.1"), "there are 0.1 GiB"),
    ],
)
def test_bad_options_are_one_line_and_leave_nothing(
    tiny_gemma3: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    done = turbovit("build", tiny_gemma3, "-o", tmp_path / "bundle", *options)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "bundle").exists()
