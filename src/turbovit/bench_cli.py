"""`turbovit bench ...`: measurements side by side, on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

bench_app = typer.Typer(help="Measure, side by side, what it costs on this machine.", no_args_is_help=True)
out = Console(emoji=False)
err = Console(stderr=True, emoji=False)

FamilyOption = Annotated[str, typer.Option("--family", help="Families, separated by commas; by default all.")]
SizeOption = Annotated[str, typer.Option(help="tiny, small or full: the width of the towers.")]
LayersOption = Annotated[int, typer.Option(help="Layers of the towers, so that it takes less time; 0: all of them.")]
RoundsOption = Annotated[int, typer.Option(help="How often everything is timed, in turns.")]
ImagesOption = Annotated[str, typer.Option("--image", help="Image sizes, WIDTHxHEIGHT, separated by commas.")]
WorkOption = Annotated[Path | None, typer.Option(help="Where checkpoints and bundles go; by default the store.")]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write JSON, a markdown table and plots to this folder.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts, and nothing else.")]


@bench_app.command()
def encoder(
    family: FamilyOption = "",
    size: SizeOption = "full",
    layers: LayersOption = 2,
    image: ImagesOption = "896x896",
    batch: Annotated[str, typer.Option(help="Images of the first size in one run, separated by commas.")] = "1",
    rounds: RoundsOption = 7,
    contender: Annotated[str, typer.Option(help="Parts of names of what is compared; by default all.")] = "",
    work: WorkOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Engines beside transformers' towers: eager, compiled and exported."""
    from turbovit.benchmarks.bench_encoder import Options, bench_encoder

    options = Options(
        families=_words(family),
        size=size,
        layers=layers or None,
        sizes=_sizes(image),
        batches=[int(number) for number in _words(batch)],
        rounds=rounds,
        contenders=_words(contender),
        folder=_work_folder(work),
    )
    # Minutes a family: what there is stays if it is interrupted.
    keep = (lambda found: found.write(output)) if output else (lambda found: None)
    _finish(lambda report: bench_encoder(options, report, keep), output, as_json)


@bench_app.command()
def preprocess(
    family: FamilyOption = "",
    image: ImagesOption = "1920x1080",
    rounds: RoundsOption = 21,
    work: WorkOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decoding, and images to pixels beside the families' own processors."""
    from turbovit.benchmarks.bench_preprocess import Options, bench_preprocess

    options = Options(_words(family), _sizes(image), rounds, _work_folder(work))
    _finish(lambda report: bench_preprocess(options, report), output, as_json)


@bench_app.command()
def glue(
    family: FamilyOption = "",
    size: SizeOption = "full",
    layers: LayersOption = 2,
    image: ImagesOption = "640x480",
    images: Annotated[int, typer.Option(help="Images in a request.")] = 1,
    rounds: RoundsOption = 9,
    work: WorkOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """The stages of a request: decode, preprocess, engine, and what LMDeploy's steps add."""
    from turbovit.benchmarks.bench_glue import Options, bench_glue

    options = Options(_words(family), size, layers or None, _sizes(image), images, rounds, _work_folder(work))
    _finish(lambda report: bench_glue(options, report), output, as_json)


@bench_app.command()
def serve(
    family: FamilyOption = "",
    size: SizeOption = "full",
    layers: LayersOption = 2,
    image: Annotated[str, typer.Option(help="Image size, WIDTHxHEIGHT.")] = "640x480",
    clients: Annotated[str, typer.Option(help="How many ask at once, separated by commas.")] = "1,4",
    requests: Annotated[int, typer.Option(help="Requests of each case.")] = 8,
    long_run: Annotated[int, typer.Option(help="Different images through one tiny encoder; 0: none.")] = 2000,
    work: WorkOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Requests by several clients at once through LMDeploy's processor, and memory over a long run."""
    from turbovit.benchmarks.bench_serve import Options, bench_serve

    options = Options(
        families=_words(family),
        size=size,
        layers=layers or None,
        image=_sizes(image)[0],
        clients=[int(number) for number in _words(clients)],
        requests=requests,
        long_run=long_run,
        folder=_work_folder(work),
    )
    _finish(lambda report: bench_serve(options, report), output, as_json)


@bench_app.command()
def build(
    family: FamilyOption = "",
    size: SizeOption = "full",
    layers: LayersOption = 2,
    runtime: Annotated[str, typer.Option(help="Runtimes, separated by commas.")] = "onnxruntime",
    compute_capability: Annotated[
        str, typer.Option(help="Compute capabilities for tensorrt-rtx, separated by commas; by default this GPU's.")
    ] = "",
    image: ImagesOption = "896x896",
    rounds: RoundsOption = 3,
    work: WorkOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time and peak memory of building, loading and running."""
    from turbovit.benchmarks.bench_build import Options, bench_build

    options = Options(
        families=_words(family),
        size=size,
        layers=layers or None,
        runtimes=_words(runtime),
        capabilities=_words(compute_capability),
        sizes=_sizes(image),
        rounds=rounds,
        folder=_work_folder(work),
    )
    _finish(lambda report: bench_build(options, report), output, as_json)


def _finish(run: Callable[[Callable[[str], None]], Any], output: Path | None, as_json: bool) -> None:
    def say(step: str) -> None:
        if not as_json:
            err.print(f"[dim]{escape(step)}[/]", soft_wrap=True)

    if output is not None:
        from turbovit.benchmarks.plots import require_matplotlib

        require_matplotlib()  # not after minutes of measuring
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    report = run(say)
    if output is not None:
        from turbovit.benchmarks.plots import write_plots

        paths = [*report.write(output), *write_plots(report, output)]
        say(f"wrote {', '.join(map(str, paths))}")
    if as_json:
        print(json.dumps(report.to_json()))
        return
    out.print(report.table())
    for line in report.rate_lines():
        out.print(f"[dim]{escape(line)}[/]", soft_wrap=True)
    for skipped in report.skipped:
        reason = escape(f"{skipped.family}, {skipped.contender}: {skipped.reason}")
        out.print(f"[yellow]not run[/] {reason}", soft_wrap=True)
    for target in report.targets:
        out.print(f"[{'green' if target.met else 'red'}]{escape(str(target))}[/]", soft_wrap=True)
    for note in report.notes:
        out.print(escape(note), soft_wrap=True)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _sizes(text: str) -> list[tuple[int, int]]:
    from turbovit.engines.errors import InputError

    sizes = []
    for word in _words(text):
        width, _, height = word.partition("x")
        if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
            raise InputError(f"{word!r} is no image size: expected WIDTHxHEIGHT, such as 1920x1080")
        sizes.append((int(width), int(height)))
    if not sizes:
        raise InputError("no image size given: expected WIDTHxHEIGHT, such as 1920x1080")
    return sizes


def _work_folder(given: Path | None) -> Path:
    from turbovit.engines.store import home

    return given or home() / "bench"
