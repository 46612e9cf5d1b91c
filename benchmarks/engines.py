"""`make engines`: every family at full size, compiled ahead of time by TensorRT-RTX on this machine, without a GPU.

For each family a synthetic checkpoint is written, exported and compiled, in a process of its own, so that its peak
memory is its own. Nothing is run: there is no reference and no certificate.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from turbovit.engines.families import distinct_families, family_from_name

CAPABILITIES = ("8.6", "8.9", "12.0")
_MODULE = "turbovit.benchmarks.engines"  # not __name__: it may be run as __main__
_RUNTIME = "tensorrt_rtx"
_GIB = 2**30


@dataclass(frozen=True)
class Row:
    """What compiling one family took.

    Attributes:
        seconds: by step: ``export`` (with loading the weights) and ``compile``.
        peak_gib: largest resident memory by process: ``export`` and ``compile``.
        profiles: the shapes it was compiled for, in words.
    """

    family: str
    precision: str
    attention: str
    engine: Path
    engine_bytes: int
    architectures: tuple[str, ...]
    profiles: str
    seconds: dict[str, float]
    peak_gib: dict[str, float]


def compiled_family(
    family: str,
    directory: Path,
    size: str = "full",
    precision: str = "fp16",
    capabilities: Sequence[str] = CAPABILITIES,
) -> Row:
    """Sample, export and compile one family in `directory`, in a process of its own."""
    arguments = [family, str(directory), size, precision, ",".join(capabilities)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    done = subprocess.run(
        [sys.executable, "-m", _MODULE, "--one", *arguments],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env=environment,
    )
    if done.returncode:
        raise RuntimeError(f"compiling {family} ended with status {done.returncode}")
    fields = json.loads(done.stdout.splitlines()[-1])
    return Row(**fields | {"engine": Path(fields["engine"]), "architectures": tuple(fields["architectures"])})


def _compile_here(family: str, directory: Path, size: str, precision: str, capabilities: Sequence[str]) -> Row:
    from turbovit.engines.profiles import described
    from turbovit.export.build import compile_only
    from turbovit.export.compile_child import PEAK, peak_bytes
    from turbovit.export.plan import CompileOptions
    from turbovit.export.samples import write_sample

    checkpoint, folder = directory / family / "checkpoint", directory / family / "compiled"
    shutil.rmtree(directory / family, ignore_errors=True)
    write_sample(family, checkpoint, size, 0)
    folder.mkdir()
    started = time.perf_counter()
    compiling: list[float] = []
    peaks: list[float] = []

    def report(step: str) -> None:
        print(f"{family} {time.perf_counter() - started:6.1f} s  {step}", file=sys.stderr)
        if step.startswith("compiling") and not compiling:
            compiling.append(time.perf_counter())
        if PEAK in step:
            peaks.append(float(step.partition(PEAK)[2].split()[0]))

    options = CompileOptions(capabilities=tuple(capabilities))
    (engine,) = compile_only(checkpoint, folder, precision, [_RUNTIME], options, report)
    ended = time.perf_counter()
    return Row(
        family=family,
        precision=engine.precision,
        attention=engine.attention,
        engine=folder / engine.file,
        engine_bytes=(folder / engine.file).stat().st_size,
        architectures=engine.architectures,
        profiles=described(engine.profiles),
        seconds={"export": compiling[0] - started, "compile": ended - compiling[0]},
        peak_gib={"export": peak_bytes() / _GIB, "compile": max(peaks)},
    )


def table_from_rows(rows: Sequence[Row]) -> Table:
    """Times and memory, and what they were for."""
    table = Table(title="full-size towers, compiled ahead of time by TensorRT-RTX")
    for column in ("family", "engine", "compute capability", "export", "compile", "peak memory: export, compile"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(
            row.family,
            f"{row.precision}, {row.attention}, {row.engine_bytes / _GIB:.2f} GiB",
            ", ".join(row.architectures),
            f"{row.seconds['export']:.0f} s",
            f"{row.seconds['compile']:.0f} s",
            f"{row.peak_gib['export']:.1f} GiB, {row.peak_gib['compile']:.1f} GiB",
        )
    return table


def main() -> None:
    """Compile every family in the folder given (default: engines); the checkpoints and engines stay there."""
    if sys.argv[1:2] == ["--one"]:
        family, folder, size, precision, capabilities = sys.argv[2:]
        row = _compile_here(family_from_name(family).name, Path(folder), size, precision, capabilities.split(","))
        print(json.dumps(asdict(row) | {"engine": str(row.engine)}))
        return
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "compiled")
    console = Console(width=None if sys.stdout.isatty() else 140)
    rows = [compiled_family(family.name, directory) for family in distinct_families()]
    console.print(table_from_rows(rows))
    console.print("Nothing was run: a GPU has to be there for that. On one, turbovit verify certifies an engine.")


if __name__ == "__main__":
    main()
