"""`python -m turbovit.benchmarks.device_check`: does it work on this GPU, and how fast, in at most eight minutes.

Needs the installed package and nothing else; TensorRT, TensorRT-RTX, ONNX Runtime and LMDeploy are used where they are
there. Sample checkpoints are written, bundles built and certified on the device, threads and buffers checked, and
all ways to run a tower timed side by side. What could not be run is in the table, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from turbovit.benchmarks.device_cases import Options, cases
from turbovit.benchmarks.device_process import check_cases
from turbovit.benchmarks.device_turbomind import check_turbomind
from turbovit.benchmarks.findings import CaseEnded, Event, Finding, Findings
from turbovit.benchmarks.machine import machine_facts, machine_line
from turbovit.engines.families import FAMILIES

_NAMES = [row.name for row in FAMILIES]
_MOST_SECONDS = 480
# For this process's children: the caller's store stays as it is, and nothing is fetched.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m turbovit.benchmarks.device_check", description=__doc__)
    parser.add_argument("--device", type=_device, default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--quick", action="store_true", help="tiny towers alone, few rounds")
    parser.add_argument(
        "--seconds", type=_seconds, default=_MOST_SECONDS, help=f"for all of it; at most and by default {_MOST_SECONDS}"
    )
    parser.add_argument("--families", type=_families, default=",".join(_NAMES), help="separated by commas")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there, as far as they have come")
    given = parser.parse_args(arguments)
    if given.json is not None and not given.json.parent.is_dir():
        parser.error(f"the folder of {given.json} does not exist")
    return given


def _seconds(text: str) -> float:
    """What --seconds means here."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 to {_MOST_SECONDS}")
    return seconds


def _families(text: str) -> list[str]:
    """What --families means here."""
    names = text.split(",")
    unknown = [name for name in names if name not in _NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown family {unknown[0]!r}; available: {', '.join(_NAMES)}")
    return names


def _device(name: str) -> torch.device:
    """What --device means here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"unknown device {name!r}") from None
    if device.type not in ("cpu", "cuda") or (device.index or 0) >= max(
        torch.cuda.device_count(), device.type == "cpu"
    ):
        raise argparse.ArgumentTypeError(f"{name}: torch sees {torch.cuda.device_count()} CUDA devices here")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else torch.device("cpu")


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """The variables, for as long as the block goes on."""
    before = dict(os.environ)
    os.environ |= variables
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _line(finding: Finding) -> str:
    return f"{finding.case} {finding.subject} {finding.check}: {finding.state} ({finding.seconds:.1f} s)"


def _write(path: Path, result: Mapping[str, Any]) -> None:
    """In one step: a reader sees the results before or the results after."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and print the table. 0: nothing failed; 1: something did."""
    started = time.monotonic()
    given = _arguments(arguments)
    options = Options(given.device, given.quick, started + given.seconds)
    console = Console(width=None if sys.stdout.isatty() else 160)
    facts = machine_facts()
    console.print(machine_line(facts), soft_wrap=True)

    def save(finished: bool) -> None:
        if given.json is not None:
            seconds = time.monotonic() - started
            head = {"device": str(options.device), "seconds": seconds, "finished": finished, "machine": facts}
            _write(given.json, {**head, **findings.plain()})

    def told(event: Event) -> None:
        if isinstance(event, Finding):
            console.print(f"[dim]{_line(event)}[/]", soft_wrap=True)
        if isinstance(event, CaseEnded):
            save(finished=False)

    findings = Findings(told)
    with (
        tempfile.TemporaryDirectory(prefix="turbovit-device-check-") as folder,
        _environment(**_OFFLINE, TURBOVIT_HOME=str(Path(folder) / "home")),
    ):
        check_cases(options, cases(options, given.families, Path(folder)), findings)
        if "deepseek_vl2" in given.families:
            check_turbomind(findings, options.device, options.deadline - time.monotonic())
    save(finished=True)
    console.print(findings.table(f"turbovit on {options.device}, {time.monotonic() - started:.0f} s"))
    return 1 if findings.failed else 0


if __name__ == "__main__":
    sys.exit(main())
