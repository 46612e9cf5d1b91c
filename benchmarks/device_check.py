"""`python -m turbovit.benchmarks.device_check`: does it work on this GPU, and how fast, in under five minutes.

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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from turbovit.benchmarks.contenders import Call, contenders, open_engine, torch_runner
from turbovit.benchmarks.device_case import (
    THREADS,
    Case,
    check_ownership,
    check_threads,
    close_to_reference,
    figures,
    on_device,
    reference_bundle,
    with_engine,
)
from turbovit.benchmarks.device_turbomind import check_turbomind
from turbovit.benchmarks.findings import Findings, NotRunError, TimingRow
from turbovit.benchmarks.machine import machine_facts, machine_line
from turbovit.benchmarks.timing import alternating, stopwatch
from turbovit.engines.bundle import Bundle
from turbovit.engines.encoder import RUNNERS
from turbovit.engines.errors import RuntimeUnavailableError, TurbovitError
from turbovit.engines.families import FAMILIES, load
from turbovit.engines.runner import Runner
from turbovit.export.certify import certificate_from_runner, read_reference
from turbovit.export.samples import write_sample
from turbovit.export.targets import COMPILED, architectures

_FULL_FAMILY = "gemma3"
# Precisions that are built for a runtime, by kind of device and size.
_ENGINES: Mapping[tuple[str, str], Mapping[str, Sequence[str]]] = {
    ("cpu", "tiny"): {"onnxruntime": ("fp32",)},
    ("cuda", "tiny"): {"tensorrt": ("fp16",), "tensorrt_rtx": ("fp16",), "onnxruntime": ("fp16", "fp32")},
    ("cuda", "full"): {"tensorrt": ("fp16", "bf16"), "tensorrt_rtx": ("fp16", "bf16"), "onnxruntime": ("fp16",)},
}
# Precisions that the torch tower is certified in and timed in.
_CERTIFIED = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "bf16", "fp16")}
_TIMED = {"cpu": ("fp32",), "cuda": ("bf16", "fp16", "fp32")}
_SLOW = 60  # seconds that must be left to begin something slow
_FOR_FULL = 150  # seconds that must be left to begin the full size


@dataclass(frozen=True)
class Options:
    """What to check, and within which time.

    Attributes:
        quick: tiny towers alone, few rounds, nothing that compiles for long.
        deadline: on `time.perf_counter`'s clock; nothing new is begun after it.
    """

    device: torch.device
    quick: bool
    deadline: float
    families: Sequence[str] = field(default_factory=lambda: tuple(row.name for row in FAMILIES))

    def require_time(self, seconds: float = 0) -> None:
        """Raise a `NotRunError` where less than `seconds` are left."""
        left = self.deadline - time.perf_counter()
        if left < seconds:
            raise NotRunError(f"{max(left, 0):.0f} s of the time are left: give more with --seconds")

    @property
    def rounds(self) -> int:
        """Of each timing."""
        return 3 if self.quick else 20


def check_device(options: Options, folder: Path, findings: Findings) -> None:
    """All checks; `folder` takes what they write."""
    runtimes = []
    for runtime in RUNNERS:
        if runtime == "torch":  # the reference tower is always there
            continue
        with findings.check("", runtime, "there"):
            _require_buildable(runtime, options.device)
            runtimes.append(runtime)
    for family in options.families:
        check_case(options, _case(folder, family, "tiny"), runtimes, findings)
    if options.quick:
        return
    case = _case(folder, _FULL_FAMILY, "full")
    with findings.check(case.name, "all", "begun"):
        if options.device.type == "cpu":
            raise NotRunError("full size is for GPUs")
        options.require_time(_FOR_FULL)
        check_case(options, case, runtimes, findings)


def check_case(options: Options, case: Case, runtimes: Sequence[str], findings: Findings) -> None:
    """Everything about one sample."""
    bundle: Bundle | None = None
    with findings.check(case.name, "sample", "written"):
        options.require_time()
        write_sample(case.family, case.checkpoint, case.size)
        bundle = reference_bundle(case, lambda step: None)
    if bundle is None:
        return
    for precision in _CERTIFIED[options.device.type]:
        _check_torch(options, case, bundle, precision, findings)
    for runtime in runtimes:
        for precision in _ENGINES[options.device.type, case.size].get(runtime, ()):
            bundle = _check_engine(options, case, bundle, runtime, precision, findings)
    _time(options, case, bundle, findings)


def _check_torch(options: Options, case: Case, bundle: Bundle, precision: str, findings: Findings) -> None:
    subject = f"torch {precision}"
    runner: Runner | None = None
    with findings.check(case.name, subject, "certificate") as details:
        options.require_time()
        runner = torch_runner(bundle, options.device, precision)
        details.append(figures(certificate_from_runner(bundle, runner, lambda step: None)))
    if runner is not None:
        _check_runner(bundle, runner, case, subject, findings)


def _check_engine(
    options: Options, case: Case, bundle: Bundle, runtime: str, precision: str, findings: Findings
) -> Bundle:
    """The bundle with one more engine; as it was where that cannot be built or does not run."""
    subject = f"{runtime} {precision}"
    runner: Runner | None = None
    with findings.check(case.name, subject, "build, certificate") as details:
        options.require_time(_SLOW if runtime in COMPILED and case.size == "full" else 0)
        extended, engine = with_engine(case, runtime, precision, lambda step: None)
        if engine.certificate is None:
            raise NotRunError(engine.not_run)
        details.append(figures(engine.certificate))
        runner = open_engine(extended, engine, options.device)
    if runner is None:
        return bundle
    _check_runner(extended, runner, case, subject, findings)
    return extended


def _check_runner(bundle: Bundle, runner: Runner, case: Case, subject: str, findings: Findings) -> None:
    with runner:
        with findings.check(case.name, subject, f"{THREADS} threads") as details:
            details.append(check_threads(bundle, runner))
        with findings.check(case.name, subject, "ownership") as details:
            details.append(check_ownership(runner, read_reference(bundle)))


def _time(options: Options, case: Case, bundle: Bundle, findings: Findings) -> None:
    """Open all contenders, make sure that each computes the same, and time them side by side."""
    pairs = read_reference(bundle)[:1] if case.size == "tiny" else read_reference(bundle)
    opened: dict[str, Call] = {}
    for contender in contenders(bundle, options.device, _TIMED[options.device.type]):
        subject = f"{contender.name} {contender.precision}"
        with findings.check(case.name, subject, "equal output"):
            if contender.slow and (options.quick or case.size == "tiny"):
                raise NotRunError("for the full size alone: it takes long to compile")
            options.require_time(_SLOW if contender.slow else 0)
            call = contender.open()
            for sample, expected in pairs:
                close_to_reference(contender.precision, call(on_device(sample.inputs, options.device)), expected)
            opened[subject] = call
    for sample, _ in pairs:
        with findings.check(case.name, "all", f"timing of {sample.label}"):
            options.require_time()
            inputs = on_device(sample.inputs, options.device)
            calls = {subject: _bound(call, inputs) for subject, call in opened.items()}
            seconds = 1.0 if options.quick else 10.0
            watch = stopwatch(options.device)
            spreads = alternating(calls, options.rounds, warm_up=2, settle=0, most_seconds=seconds, seconds_of=watch)
            for subject, timing in spreads.items():
                findings.timings.append(TimingRow(case.name, sample.label, subject, timing))


def _bound(call: Call, inputs: dict[str, torch.Tensor]) -> Callable[[], object]:
    return lambda: call(inputs)


def _require_buildable(runtime: str, device: torch.device) -> None:
    reason = load(RUNNERS[runtime]).unavailable(device)
    if reason:
        raise RuntimeUnavailableError(reason)
    if runtime in COMPILED:
        try:
            architectures(runtime, ())
        except TurbovitError as error:
            raise RuntimeUnavailableError(str(error)) from None


def _case(folder: Path, family: str, size: str) -> Case:
    return Case(family, size, folder / f"{family}-{size}", folder / f"{family}-{size}-bundle")


@contextmanager
def _own_store(folder: Path) -> Iterator[None]:
    """The caller's store stays as it is, nothing is fetched, and libraries keep their remarks to themselves."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    before = dict(os.environ)
    os.environ |= {"TURBOVIT_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m turbovit.benchmarks.device_check", description=__doc__)
    parser.add_argument("--device", type=_device, default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--quick", action="store_true", help="tiny towers alone, few rounds")
    parser.add_argument("--seconds", type=float, default=270, help="begin nothing new after this time (default: 270)")
    parser.add_argument("--families", default=",".join(row.name for row in FAMILIES), help="separated by commas")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    given = parser.parse_args(arguments)
    if given.json is not None and not given.json.parent.is_dir():
        parser.error(f"the folder of {given.json} does not exist")
    return given


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and print the table. 0: nothing failed; 1: something did."""
    given = _arguments(arguments)
    deadline = time.perf_counter() + given.seconds
    options = Options(given.device, given.quick, deadline, tuple(given.families.split(",")))
    if options.device.type == "cuda":
        torch.cuda.set_device(options.device)  # the libraries' own allocations go to the current one
    console = Console(width=None if sys.stdout.isatty() else 160)
    facts = machine_facts()
    console.print(machine_line(facts), soft_wrap=True)
    findings = Findings(progress=lambda line: console.print(f"[dim]{line}[/]", soft_wrap=True))
    with tempfile.TemporaryDirectory(prefix="turbovit-device-check-") as folder, _own_store(Path(folder)):
        started = time.perf_counter()
        check_device(options, Path(folder), findings)
        check_turbomind(findings, options.device, deadline - time.perf_counter())
        seconds = time.perf_counter() - started
    console.print(findings.table(f"turbovit on {options.device}, {seconds:.0f} s"))
    if given.json is not None:
        result = {"device": str(options.device), "seconds": seconds, "machine": facts, **findings.plain()}
        temporary = given.json.with_name(f".{given.json.name}.{os.getpid()}")
        temporary.write_text(json.dumps(result, indent=2) + "\n")
        os.replace(temporary, given.json)
    return 1 if findings.failed else 0


if __name__ == "__main__":
    sys.exit(main())
