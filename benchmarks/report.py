"""What a benchmark found: raw samples and machine facts as JSON, a table for people, targets met or missed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from turbovit.benchmarks.machine import machine_facts, machine_line
from turbovit.benchmarks.timing import Spread

SCHEMA = 1
Unit = Literal["s", "B", "flop/s"]
# Units as people read them: from which value on, of one, and how it is called. The largest first.
_READABLE: dict[Unit, tuple[tuple[float, float, str], ...]] = {
    "s": ((10.0, 1.0, "s"), (-math.inf, 1e-3, "ms")),
    "B": ((1e10, 1e9, "GB"), (-math.inf, 1e6, "MB")),
}


@dataclass(frozen=True)
class Measurement:
    """One contender on one case.

    Attributes:
        case: what was run, such as ``640x480`` or ``2 images``.
        facts: what plots and tables need besides, such as patches, batch and floating-point operations.
    """

    family: str
    case: str
    contender: str
    unit: Unit
    spread: Spread
    facts: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Skipped:
    """A contender that could not run here, and why."""

    family: str
    contender: str
    reason: str


@dataclass(frozen=True)
class Equality:
    """How far a contender's outputs are from the reference's, before anything was timed."""

    family: str
    case: str
    contender: str
    difference: float
    bound: float


@dataclass(frozen=True)
class Target:
    """A figure beside what it should be.

    Attributes:
        at_most: whether `bound` is the most, or the least, that it may be.
    """

    what: str
    value: float
    bound: float
    at_most: bool = True

    @property
    def met(self) -> bool:
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        return f"{self.what}: {self.value:.3g} (target {sign} {self.bound:g}): {'met' if self.met else 'MISSED'}"


@dataclass
class Report:
    """Everything that one benchmark command found.

    Attributes:
        folder: that was worked in; its path is not published.
    """

    bench: str
    settings: Mapping[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    equal: list[Equality] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=machine_facts)
    folder: Path | None = None
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))

    @classmethod
    def of(cls, bench: str, options: Any) -> Report:
        """Of a command's options, a dataclass with the folder to work in."""
        settings = dict(vars(options))
        return cls(bench, folder=settings.pop("folder"), settings=settings)

    def add(self, family: str, case: str, unit: Unit, spreads: Mapping[str, Spread], **facts: float | str) -> None:
        """Add one measurement a contender."""
        self.measurements += [Measurement(family, case, name, unit, spread, facts) for name, spread in spreads.items()]

    def to_json(self) -> dict[str, Any]:
        """Plain data: schema, machine, and all samples with their medians and quartiles."""
        return {
            "schema": SCHEMA,
            "bench": self.bench,
            "created": self.created,
            "machine": self.machine,
            "settings": dict(self.settings),
            "measurements": [_measurement_json(one) for one in self.measurements],
            "skipped": [asdict(one) | {"reason": self._published(one.reason)} for one in self.skipped],
            "equal": [asdict(one) for one in self.equal],
            "targets": [asdict(one) | {"met": one.met} for one in self.targets],
            "notes": self.notes,
        }

    def table(self) -> Table:
        """Medians with their spread, and how they compare with the first contender of their case."""
        table = Table(title=f"turbovit bench {self.bench}", caption=machine_line(self.machine))
        for column in _COLUMNS:
            table.add_column(column, overflow="fold", justify="right" if column in _NUMBERS else "left")
        for row in self._rows():
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """The table for a README, with the machine named."""
        lines = [f"Measured with `turbovit bench {self.bench}` on {machine_line(self.machine)}.", ""]
        lines += [_markdown_row(_COLUMNS), _markdown_row([":--" if c not in _NUMBERS else "--:" for c in _COLUMNS])]
        lines += [_markdown_row(row) for row in self._rows()]
        for entries in (self.rate_lines(), [str(target) for target in self.targets], self.notes):
            lines += ["", *(f"- {entry}" for entry in entries)]
        return "\n".join(lines) + "\n"

    def rate_lines(self) -> list[str]:
        """One line a case: each library's rates of the tower's matrix products, each the best of the rounds."""
        cases: dict[str, dict[str, list[float]]] = {}
        for one in self.measurements:
            if one.unit == "flop/s":
                library = one.contender.rsplit(", ", 1)[1]
                rates = cases.setdefault(f"{one.family}, {one.case}", {}).setdefault(library, [])
                rates.append(max(one.spread.samples) / 1e9)
        return [
            f"{case}: matrix products by shape, GFLOP/s: "
            + ", ".join(f"{library} {min(rates):.0f} to {max(rates):.0f}" for library, rates in libraries.items())
            for case, libraries in cases.items()
        ]

    def write(self, folder: Path) -> list[Path]:
        """Write ``<bench>.json`` and ``<bench>.md``; gives their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        texts = {"json": json.dumps(self.to_json(), indent=1) + "\n", "md": self.markdown()}
        paths = [folder / f"{self.bench}.{suffix}" for suffix in texts]
        for path, text in zip(paths, texts.values(), strict=True):
            path.write_text(text, encoding="utf-8")
        return paths

    def _published(self, text: str) -> str:
        """`text` without the path of the folder that was worked in."""
        if self.folder is None:
            return text
        for folder in (self.folder.resolve(), self.folder.absolute()):
            text = text.replace(str(folder), "$WORK")
        return text

    def _rows(self) -> list[list[str]]:
        first: dict[tuple[str, str, str], float] = {}
        rows = []
        for one in self.measurements:
            if one.unit == "flop/s":
                continue
            spread = one.spread
            base = first.setdefault((one.family, one.case, one.unit), spread.median)
            size, unit = next(row[1:] for row in _READABLE[one.unit] if spread.median >= row[0])
            low, middle, high = (f"{value / size:.4g}" for value in (spread.low, spread.median, spread.high))
            ratio = f"{spread.median / base:.2f}" if base else ""
            rows.append([one.family, one.case, one.contender, f"{middle} {unit}", f"{low} to {high}", ratio])
        return rows


_COLUMNS = ("family", "case", "what", "median", "quartiles", "of the first")
_NUMBERS = ("median", "quartiles", "of the first")


def _measurement_json(one: Measurement) -> dict[str, Any]:
    spread = one.spread
    return {
        "family": one.family,
        "case": one.case,
        "contender": one.contender,
        "unit": one.unit,
        "median": spread.median,
        "quartiles": [spread.low, spread.high],
        "samples": list(spread.samples),
        **one.facts,
    }


def _markdown_row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"
