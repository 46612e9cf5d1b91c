"""What a check of a device found: one row a check, and one a timing, for a table and for JSON.

Each comes as an event, which may have crossed from another process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from turbovit.benchmarks.timing import Spread
from turbovit.engines.errors import RuntimeUnavailableError

State = Literal["passed", "failed", "not run"]
_COLOURS = {"passed": "green", "failed": "red", "not run": "yellow"}


class NotRunError(Exception):
    """A check cannot be made here, which is no fault; says why."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        case: family and size; empty where it is about the machine.
        subject: runtime and precision.
        check: what was looked at.
    """

    case: str
    subject: str
    check: str
    state: State
    detail: str
    seconds: float


@dataclass(frozen=True)
class TimingRow:
    """The timing of one subject on one shape."""

    case: str
    shape: str
    subject: str
    timing: Spread


@dataclass(frozen=True)
class Begun:
    """A check has begun."""

    case: str
    subject: str
    check: str


@dataclass(frozen=True)
class CaseEnded:
    """There is nothing more to check about a case."""

    case: str


Event = Begun | Finding | TimingRow | CaseEnded


@dataclass
class Findings:
    """All of them, in the order they came.

    Attributes:
        told: called with each event as it comes, once it is taken in.
    """

    told: Callable[[Event], None]
    checks: list[Finding] = field(default_factory=list)
    timings: list[TimingRow] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether any check failed."""
        return any(finding.state == "failed" for finding in self.checks)

    @contextmanager
    def check(self, case: str, subject: str, check: str) -> Iterator[list[str]]:
        """Make one check: what it raises becomes its row, and what it adds to the list it gets, the detail.

        A `NotRunError`, `RuntimeUnavailableError` or `NotImplementedError` says that it cannot be made here; anything
        else, that it failed.
        """
        self.take(Begun(case, subject, check))
        details: list[str] = []
        started = time.perf_counter()
        state: State = "passed"
        try:
            yield details
        except (NotRunError, RuntimeUnavailableError, NotImplementedError) as error:
            state, details = "not run", [*details, str(error)]
        except Exception as error:  # whatever it is, the other checks go on
            kind = "" if type(error).__module__.startswith("turbovit.") else f"{type(error).__name__}: "
            state, details = "failed", [*details, f"{kind}{error}"]
        detail = " ".join("; ".join(details).split())
        self.take(Finding(case, subject, check, state, detail, time.perf_counter() - started))

    def take(self, event: Event) -> None:
        """Take one in."""
        if isinstance(event, Finding):
            self.checks.append(event)
        elif isinstance(event, TimingRow):
            self.timings.append(event)
        self.told(event)

    def plain(self) -> dict[str, Any]:
        """As JSON takes it; times in milliseconds, checks in seconds."""
        timings = [
            {"case": row.case, "shape": row.shape, "subject": row.subject, "median_ms": 1e3 * row.timing.median}
            | {"quartiles_ms": (1e3 * row.timing.low, 1e3 * row.timing.high)}
            | {"samples_ms": [1e3 * seconds for seconds in row.timing.samples]}
            for row in self.timings
        ]
        return {"checks": [asdict(finding) for finding in self.checks], "timings": timings}

    def table(self, title: str) -> Table:
        """Checks, then times; those of one shape beside the eager tower's in the same precision."""
        table = Table("case", "subject", "check", "result", "detail", title=title)
        for column in table.columns:
            column.overflow = "fold"
        for row in self.checks:
            state = f"[{_COLOURS[row.state]}]{row.state}[/]"
            table.add_row(row.case, row.subject, row.check, state, escape(_shortened(row.detail)))
        table.add_section()
        for timed in self.timings:
            low, median, high = (1e3 * value for value in (timed.timing.low, timed.timing.median, timed.timing.high))
            spread = f"{low:.2f} to {high:.2f} ms, {len(timed.timing.samples)} runs"
            table.add_row(timed.case, timed.subject, timed.shape, f"{median:.2f} ms", spread)
        return table


def _shortened(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
