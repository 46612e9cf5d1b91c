"""What the device check does about each sample checkpoint, and in which time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from turbovit.benchmarks.contenders import Call, contenders, open_engine, torch_runner
from turbovit.benchmarks.device_case import (
    ROUNDS,
    THREADS,
    Case,
    check_ownership,
    check_threads,
    close_to_reference,
    figures,
    on_device,
)
from turbovit.benchmarks.findings import Findings, NotRunError, TimingRow
from turbovit.benchmarks.timing import alternating, stopwatch
from turbovit.engines.bundle import Bundle
from turbovit.engines.encoder import RUNNERS
from turbovit.engines.errors import RuntimeUnavailableError, TurbovitError
from turbovit.engines.families import load
from turbovit.engines.runner import PRECISION_DTYPES, Runner
from turbovit.export.build import build
from turbovit.export.certify import certificate_from_runner, read_reference
from turbovit.export.samples import write_sample
from turbovit.export.targets import COMPILED, architectures

_FULL_FAMILY = "gemma3"
_PRECISIONS = tuple(PRECISION_DTYPES)
# Precisions that are built for a runtime, by kind of device and size.
_ENGINES: Mapping[tuple[str, str], Mapping[str, Sequence[str]]] = {
    ("cpu", "tiny"): {"onnxruntime": ("fp32", "fp16")},
    ("cuda", "tiny"): {"tensorrt": ("fp16",), "tensorrt_rtx": ("fp16",), "onnxruntime": ("fp16", "fp32")},
    ("cuda", "full"): {"tensorrt": ("fp16", "bf16"), "tensorrt_rtx": ("fp16", "bf16"), "onnxruntime": ("fp16",)},
}
# Seconds that must be left to begin what takes long. TensorRT times kernels on the GPU as it compiles, and has never
# done so for these towers; exporting and compiling for TensorRT-RTX took 30 s at full size on two cores.
_FOR_BUILD = {
    "tiny": {"tensorrt": 60, "tensorrt_rtx": 30, "onnxruntime": 15},
    "full": {"tensorrt": 200, "tensorrt_rtx": 75, "onnxruntime": 60},
}
_FOR_COMPILE = 90  # torch.compile, at full size
_FOR_FULL = 120  # the full size's weights, reference outputs and torch towers
_FOR_TINY = 10


@dataclass(frozen=True)
class Options:
    """What to check, and within which time.

    Attributes:
        quick: tiny towers alone, few rounds, nothing that compiles for long.
        deadline: on `time.monotonic`'s clock, which all processes share.
    """

    device: torch.device
    quick: bool
    deadline: float

    def require_time(self, seconds: float) -> None:
        """Raise a `NotRunError` where less than `seconds` are left."""
        left = max(self.deadline - time.monotonic(), 0)
        if left < seconds:
            raise NotRunError(f"left out for lack of time: {left:.0f} s are left, {seconds:.0f} s may be needed")

    @property
    def glance(self) -> bool:
        """Whether every check is made once, as times and graphs are not what a quick look at a CPU is about."""
        return self.quick and self.device.type == "cpu"

    @property
    def rounds(self) -> int:
        """Of each timing."""
        return 1 if self.glance else 3 if self.quick else 20


def cases(options: Options, families: Sequence[str], folder: Path) -> list[Case]:
    """The samples to check; `folder` takes what is written."""
    tiny = [_case(folder, family, "tiny") for family in families]
    return tiny if options.quick else [*tiny, _case(folder, _FULL_FAMILY, "full")]


def buildable(device: torch.device, findings: Findings) -> list[str]:
    """The runtimes that engines can be built for and run with on `device`."""
    runtimes = []
    for runtime in RUNNERS:
        if runtime == "torch":  # the reference tower is always there
            continue
        with findings.check("", runtime, "there"):
            _require_buildable(runtime, device)
            runtimes.append(runtime)
    return runtimes


def check_case(options: Options, case: Case, runtimes: Sequence[str], findings: Findings) -> None:
    """Everything about one sample."""
    bundle: Bundle | None = None
    with findings.check(case.name, "sample", "written"):
        if case.size == "full" and options.device.type == "cpu":
            raise NotRunError("full size is for GPUs")
        options.require_time(_FOR_FULL if case.size == "full" else _FOR_TINY)
        write_sample(case.family, case.checkpoint, case.size)
        bundle = build(case.checkpoint, case.bundle_folder, runtimes=()).bundle
    if bundle is None:
        return
    for precision in _PRECISIONS:
        _check_torch(options, case, bundle, precision, findings)
    for runtime in runtimes:
        for precision in _ENGINES[options.device.type, case.size].get(runtime, ()):
            bundle = _check_engine(options, case, bundle, runtime, precision, findings)
    _time(options, case, bundle, findings)


def _check_torch(options: Options, case: Case, bundle: Bundle, precision: str, findings: Findings) -> None:
    subject = f"torch {precision}"
    runner: Runner | None = None
    with findings.check(case.name, subject, "certificate") as details:
        options.require_time(_FOR_TINY)
        runner = torch_runner(bundle, options.device, precision)
        details.append(figures(certificate_from_runner(bundle, runner, lambda step: None)))
    if runner is not None:
        _check_runner(options, bundle, runner, case, subject, findings)


def _check_engine(
    options: Options, case: Case, bundle: Bundle, runtime: str, precision: str, findings: Findings
) -> Bundle:
    """The bundle with one more engine; as it was where that cannot be built or does not run."""
    subject = f"{runtime} {precision}"
    extended, runner = bundle, None
    with findings.check(case.name, subject, "build, certificate") as details:
        options.require_time(_FOR_BUILD[case.size][runtime])
        built = build(case.checkpoint, case.bundle_folder, precision=precision, runtimes=(runtime,))
        (engine,) = built.new
        if engine.certificate is None:
            raise NotRunError(engine.not_run)
        details.append(figures(engine.certificate))
        runner = open_engine(built.bundle, engine, options.device)
        extended = built.bundle
    if runner is not None:
        _check_runner(options, extended, runner, case, subject, findings)
    return extended


def _check_runner(
    options: Options, bundle: Bundle, runner: Runner, case: Case, subject: str, findings: Findings
) -> None:
    threads, rounds = (2, 1) if options.glance else (THREADS, ROUNDS)
    with runner:
        with findings.check(case.name, subject, "threads") as details:
            options.require_time(_FOR_TINY)
            details.append(check_threads(bundle, runner, threads, rounds))
        with findings.check(case.name, subject, "ownership") as details:
            options.require_time(_FOR_TINY)
            details.append(check_ownership(runner, read_reference(bundle), rounds))


def _time(options: Options, case: Case, bundle: Bundle, findings: Findings) -> None:
    """Open all contenders, make sure that each computes the same, and time them side by side."""
    pairs = read_reference(bundle)
    if case.size == "tiny":
        pairs = pairs[-1:] if options.quick else pairs[:1]
    opened: dict[str, Call] = {}
    for contender in contenders(bundle, options.device, _PRECISIONS):
        subject = f"{contender.name} {contender.precision}"
        with findings.check(case.name, subject, "equal output"):
            if contender.slow and (options.quick or case.size == "tiny"):
                raise NotRunError("for the full size alone: it takes long to compile")
            options.require_time(_FOR_COMPILE if contender.slow else _FOR_TINY)
            call = contender.open()
            for sample, expected in pairs:
                close_to_reference(contender.precision, call(on_device(sample.inputs, options.device)), expected)
            opened[subject] = call
    for sample, _ in pairs:
        with findings.check(case.name, "all", f"timing of {sample.label}"):
            options.require_time(_FOR_TINY)
            inputs = on_device(sample.inputs, options.device)
            calls = {subject: _bound(call, inputs) for subject, call in opened.items()}
            spreads = alternating(
                calls,
                options.rounds,
                warm_up=min(2, options.rounds - 1),
                settle=0,
                most_seconds=1.0 if options.quick else 10.0,
                seconds_of=stopwatch(options.device),
            )
            for subject, timing in spreads.items():
                findings.take(TimingRow(case.name, sample.label, subject, timing))


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
