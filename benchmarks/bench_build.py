"""`turbovit bench build`: time and memory of building, loading and running a bundle, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from turbovit.benchmarks.child import in_child
from turbovit.benchmarks.report import Report, Skipped, Target
from turbovit.benchmarks.subjects import Size, families, sample_and_place
from turbovit.benchmarks.timing import Spread
from turbovit.engines.errors import TurbovitError
from turbovit.engines.families import FamilyRow

BUILD_SECONDS, BUILD_BYTES = 120.0, 6e9
LOAD_SECONDS = 5.0


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        runtimes: to build for, and to load and run where that works here.
        capabilities: compute capabilities to compile for; empty for this machine's GPU.
        sizes: width and height of the images that are run.
    """

    families: Sequence[str]
    size: str
    layers: int | None
    runtimes: Sequence[str]
    capabilities: Sequence[str]
    sizes: Sequence[Size]
    rounds: int
    folder: Path


def bench_build(options: Options, report: Callable[[str], None] = lambda step: None) -> Report:
    """Build once, load and run several times.

    The build certifies every engine that can run here: that is its check of equal outputs.

    Raises:
        BuildError: a build failed.
    """
    found = Report.of("build", options)
    for row in families(options.families):
        checkpoint, bundle = sample_and_place(row, options.size, options.layers, options.folder, report)
        report(f"{row.name}: building for {', '.join(options.runtimes)}")
        figures = in_child(
            "build",
            checkpoint=checkpoint,
            bundle=bundle,
            runtimes=list(options.runtimes),
            capabilities=list(options.capabilities),
        )
        _add(found, row, "build", ", ".join(options.runtimes), [figures])
        targets = (("seconds", BUILD_SECONDS), ("peak", BUILD_BYTES))
        found.targets += [Target(f"{row.name}: build, {name}", figures[name], bound) for name, bound in targets]
        for runtime in options.runtimes:
            _measure_runtime(row, bundle, runtime, options, found, report)
    return found


def _measure_runtime(
    row: FamilyRow, bundle: Path, runtime: str, options: Options, found: Report, report: Callable[[str], None]
) -> None:
    try:
        report(f"{row.name}: loading with {runtime}")
        in_child("load", bundle=bundle, runtime=runtime)  # files come into the page cache
        loads = [in_child("load", bundle=bundle, runtime=runtime) for _ in range(options.rounds)]
        _add(found, row, "load", runtime, loads)
        seconds = Spread(tuple(one["seconds"] for one in loads)).median
        found.targets.append(Target(f"{row.name}: loading with {runtime}, warm, seconds", seconds, LOAD_SECONDS))
        for size in options.sizes:
            report(f"{row.name}: one image {size[0]}x{size[1]} with {runtime}")
            one = in_child("run", bundle=bundle, runtime=runtime, size=size)
            _add(found, row, f"load and run {size[0]}x{size[1]}", runtime, [one])
    except TurbovitError as error:
        found.skipped.append(Skipped(row.name, runtime, str(error)))


def _add(found: Report, row: FamilyRow, case: str, what: str, figures: Sequence[dict[str, float]]) -> None:
    found.add(row.name, case, "s", {what: Spread(tuple(one["seconds"] for one in figures))})
    found.add(row.name, case, "B", {f"{what}, peak memory": Spread(tuple(one["peak"] for one in figures))})
