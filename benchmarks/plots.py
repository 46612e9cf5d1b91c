"""Plots of a report, as PNG files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from turbovit.benchmarks.machine import machine_line
from turbovit.benchmarks.report import Measurement, Report
from turbovit.engines.errors import RuntimeUnavailableError

_INCHES = (7.0, 4.2)
_DPI = 120


def require_matplotlib() -> None:
    """Make sure that plots can be drawn.

    Raises:
        RuntimeUnavailableError: says how to install matplotlib.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
    except ImportError:
        raise RuntimeUnavailableError(
            "plots need matplotlib, which is not installed: pip install 'turbovit[bench]', or leave out --output"
        ) from None


def write_plots(report: Report, folder: Path) -> list[Path]:
    """Draw what the report has: latency by patches and by batch, stages, and bars of everything else.

    Raises:
        RuntimeUnavailableError: matplotlib is not installed.
    """
    require_matplotlib()
    paths = []
    for family in dict.fromkeys(one.family for one in report.measurements):
        timed = [one for one in report.measurements if one.family == family and one.unit == "s"]
        for name, draw in _PLOTS.items():
            figure = draw(timed)
            if figure is None:
                continue
            axes = figure.axes[0]
            axes.set_title(f"{family}: {name}")
            figure.text(0.01, 0.005, machine_line(report.machine), fontsize=5)
            figure.tight_layout(rect=(0, 0.02, 1, 1))
            path = folder / f"{report.bench}-{family}-{name.replace(' ', '-')}.png"
            figure.savefig(path, dpi=_DPI)
            paths.append(path)
    _close()
    return paths


def _by_patches(timed: list[Measurement]) -> Any:
    single = [one for one in timed if one.facts.get("images") == 1]
    return _lines(single, "patches", logarithmic=True)


def _by_batch(timed: list[Measurement]) -> Any:
    return _lines([one for one in timed if "images" in one.facts], "images", logarithmic=False)


def _lines(timed: list[Measurement], fact: str, logarithmic: bool) -> Any:
    """One line a contender, over a fact that has several values."""
    if len({one.facts[fact] for one in timed}) < 2:
        return None
    figure, axes = _figure()
    for name, points in _by_contender(timed).items():
        points = sorted(points, key=lambda one: float(one.facts[fact]))
        x = [float(one.facts[fact]) for one in points]
        y = [one.spread.median for one in points]
        below = [one.spread.median - one.spread.low for one in points]
        above = [one.spread.high - one.spread.median for one in points]
        axes.errorbar(x, y, yerr=[below, above], marker="o", markersize=3, linewidth=1, capsize=2, label=name)
    if logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.set_xlabel(fact)
    axes.set_ylabel("seconds, median and quartiles")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6)
    return figure


def _bars(timed: list[Measurement]) -> Any:
    """One bar a contender of the first case."""
    cases = list(dict.fromkeys(one.case for one in timed if "stage" not in one.facts))
    if not cases:
        return None
    shown = [one for one in timed if one.case == cases[0] and "stage" not in one.facts]
    figure, axes = _figure()
    names = [one.contender for one in shown][::-1]
    medians = [one.spread.median for one in shown][::-1]
    spread = [
        [one.spread.median - one.spread.low for one in shown][::-1],
        [one.spread.high - one.spread.median for one in shown][::-1],
    ]
    axes.barh(names, medians, xerr=spread, capsize=2, color="tab:blue")
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel(f"seconds, median and quartiles ({cases[0]})")
    return figure


def _stages(timed: list[Measurement]) -> Any:
    """One stacked bar a case."""
    staged = [one for one in timed if "stage" in one.facts]
    if not staged:
        return None
    figure, axes = _figure()
    left: dict[str, float] = {}
    for stage in dict.fromkeys(str(one.facts["stage"]) for one in staged):
        of_stage = [one for one in staged if one.facts["stage"] == stage]
        cases = [one.case for one in of_stage]
        widths = [one.spread.median for one in of_stage]
        axes.barh(cases, widths, left=[left.get(case, 0.0) for case in cases], label=stage)
        for case, width in zip(cases, widths, strict=True):
            left[case] = left.get(case, 0.0) + width
    axes.set_xlabel("seconds, medians")
    axes.legend(fontsize=7)
    return figure


_PLOTS = {"side by side": _bars, "by patches": _by_patches, "by batch": _by_batch, "stages": _stages}


def _by_contender(timed: Iterable[Measurement]) -> Mapping[str, list[Measurement]]:
    groups: dict[str, list[Measurement]] = {}
    for one in timed:
        groups.setdefault(one.contender, []).append(one)
    return groups


def _figure() -> Any:
    from matplotlib import pyplot

    return pyplot.subplots(figsize=_INCHES)


def _close() -> None:
    from matplotlib import pyplot

    pyplot.close("all")
