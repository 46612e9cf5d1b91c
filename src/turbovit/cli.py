"""The `turbovit` command. Each subcommand imports what it needs when it runs."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from turbovit.bench_cli import bench_app
from turbovit.engines.errors import RuntimeUnavailableError, TurbovitError, UsageError

app = typer.Typer(
    help="Compiled vision encoders for LMDeploy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench_app, name="bench")
out = Console(emoji=False)
err = Console(stderr=True, emoji=False)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts, and nothing else.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 a check failed, 2 bad usage or input."""
    debug = "--debug" in sys.argv
    if isinstance(sys.stdout, TextIOWrapper):
        # A path may hold bytes that are no characters of the locale, and a config characters that it does not have.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except TurbovitError as error:
        if debug:
            raise
        err.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(error.exit_code)


@app.callback()
def _settings(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and the libraries' own warnings.")] = False,
) -> None:
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="%(message)s", stream=sys.stderr)
    if debug:
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")
    logging.getLogger("turbovit").setLevel(logging.INFO)


@app.command()
def sample(
    family: Annotated[str, typer.Argument(help="gemma3, llama4, qwen3_vl, qwen3_vl_moe or deepseek_vl2.")],
    directory: Annotated[Path, typer.Argument(help="Where to write it; must not exist or be empty.")],
    size: Annotated[str, typer.Option(help="tiny, small or full.")] = "tiny",
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
    layers: Annotated[int | None, typer.Option(help="Of the vision tower; by default as many as the size has.")] = None,
    language: Annotated[
        str | None,
        typer.Option(help="deepseek_vl2: mha, mla or base, a tiny language half that TurboMind takes, in bfloat16."),
    ] = None,
) -> None:
    """Write a synthetic checkpoint: real geometry, random weights, its own tokenizer."""
    from turbovit.export.samples import write_sample

    with err.status(f"writing a {size} {family} checkpoint"):
        write_sample(family, directory, size, seed, layers, language)
    out.print(f"{family} ({size}) written to {escape(str(directory))}", soft_wrap=True)


@app.command()
def build(
    model: Annotated[str, typer.Argument(help="A checkpoint folder or a hub id.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The bundle's folder; by default one in the store.")
    ] = None,
    precision: Annotated[str, typer.Option(help="auto, fp32, fp16 or bf16.")] = "auto",
    fp32_layers: Annotated[
        str | None,
        typer.Option(metavar="LAYER,...", help="Layers that stay in float32, such as blocks.3.mlp or blocks.2?."),
    ] = None,
    runtime: Annotated[
        str,
        typer.Option(help="Runtimes to build for, separated by commas: onnxruntime, tensorrt-rtx, tensorrt."),
    ] = "onnxruntime",
    compute_capability: Annotated[
        str | None,
        typer.Option(
            metavar="8.6,8.9,...",
            help="GPUs that tensorrt-rtx compiles for; none need be here; by default the one here.",
        ),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SYMBOL=MIN:OPT:MAX,...",
            help="Input shapes to compile for; give it several times for several; by default the family's own.",
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(metavar="GIB", help="Refuse engines that need more memory on their GPU.")
    ] = None,
    max_images: Annotated[int | None, typer.Option(help="Most images (with their crops) in one engine run.")] = None,
    max_pixels: Annotated[int | None, typer.Option(help="Most pixels an image may have.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Trace the vision tower of MODEL, build engines of it and certify them."""
    from turbovit.export.build import build as build_bundle
    from turbovit.export.plan import CompileOptions

    options = CompileOptions(
        capabilities=tuple(part.strip() for part in compute_capability.split(",")) if compute_capability else (),
        profiles=tuple(profile or ()),
        gpu_memory=int(gpu_memory * 2**30) if gpu_memory is not None else None,
    )
    limits = {name: value for name, value in (("images", max_images), ("pixels", max_pixels)) if value is not None}
    with _progress(as_json) as report:
        built = build_bundle(
            model,
            output,
            precision=precision,
            runtimes=runtime.split(","),
            limits=limits,
            options=options,
            fp32_layers=[part.strip() for part in fp32_layers.split(",")] if fp32_layers else (),
            report=report,
        )
    if as_json:
        new = [engine.file for engine in built.new]
        print(json.dumps({"bundle": str(built.bundle.path), "new": new, "manifest": _manifest_data(built.bundle)}))
        return
    verb = "built" if built.new else "up to date, nothing to do:"
    out.print(f"{verb} {escape(str(built.bundle.path))}", soft_wrap=True)
    _print_engines(built.bundle.manifest.engines)


@app.command()
def verify(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    runtime: Annotated[str | None, typer.Option(help="Only this runtime's engines.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Hash every file of BUNDLE, run its engines here, compare them with its reference outputs, and encode an image.

    Exits with 1 where an engine fails or none can run here.
    """
    from turbovit.engines.bundle import open_bundle
    from turbovit.export.certify import verify_engines
    from turbovit.export.proof import prove

    with _progress(as_json) as report:
        report("hashing every file")
        opened = open_bundle(bundle, use_hash_cache=False)
        engines = verify_engines(opened, _runtime_name(runtime), report)
        try:
            prove(opened, engines, report)
        except RuntimeUnavailableError as error:  # as the verdicts say
            err.print(f"no image was encoded: {escape(str(error))}", soft_wrap=True)
    if as_json:
        print(json.dumps([_plain(engine) | {"verdict": engine.verdict} for engine in engines]))
    else:
        _print_engines(engines)
    verdicts = {engine.verdict for engine in engines}
    if "failed" in verdicts or "passed" not in verdicts:
        raise typer.Exit(1)


@app.command()
def inspect(bundle: Annotated[Path, typer.Argument(help="A bundle's folder.")], as_json: JsonOption = False) -> None:
    """Show what BUNDLE holds, once all its files are known to be there and unchanged."""
    from turbovit.engines.bundle import open_bundle

    opened = open_bundle(bundle)
    if as_json:
        print(json.dumps(_manifest_data(opened)))
        return
    manifest = opened.manifest
    size = sum(entry.size for entry in manifest.files.values())
    rows = {
        "bundle": f"{opened.path} ({size / 1e6:.1f} MB, {len(manifest.files)} files)",
        "model": f"{manifest.family}, {manifest.architecture}",
        "built from": manifest.source.name,
        "vision weights": f"sha256 {manifest.source.tensors_sha256}",
        "limits": ", ".join(f"{value} {symbol} in one run" for symbol, value in manifest.limits.items()),
        "inputs": ", ".join(f"{spec.name} {spec.dtype} {list(spec.shape)}" for spec in manifest.inputs),
        "outputs": ", ".join(f"{spec.name} {list(spec.shape)}" for spec in manifest.outputs),
        "made with": ", ".join(f"{name} {version}" for name, version in manifest.tools.items()),
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/]", escape(value))
    out.print(table)
    _print_engines(manifest.engines)


@app.command()
def encode(
    source: Annotated[
        str, typer.Argument(metavar="BUNDLE_OR_MODEL", help="A bundle, or a model that has one in the store.")
    ],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the features to this .npz file.")] = None,
    runtime: Annotated[str, typer.Option(help="auto, tensorrt, tensorrt-rtx, onnxruntime or torch.")] = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Encode images, and say what came out."""
    from turbovit.engines.encoder import open_encoder
    from turbovit.export.plan import bundle_from_name

    with err.status("loading the engine"):
        encoder = open_encoder(bundle_from_name(source), _runtime_name(runtime) or "auto", device)
    rows = []
    features = {}
    for number, image in enumerate(images):
        started = time.perf_counter()
        result = encoder.encode_pixels([encoder.preprocessor.pixels_from_image(image)])[0]
        tokens, hidden = result.features.shape
        milliseconds = 1e3 * (time.perf_counter() - started)
        rows.append({"image": str(image), "tokens": tokens, "hidden": hidden, "milliseconds": round(milliseconds, 1)})
        features[f"image_{number}"] = result.features.float().cpu().numpy()
    if output is not None:
        _write_npz(output, features)
    if as_json:
        print(json.dumps({"ran_on": encoder.runner.description, "images": rows}))
        return
    out.print(f"encoded with {escape(encoder.runner.description)}", soft_wrap=True)
    for row in rows:
        size = f"{row['tokens']} tokens x {row['hidden']}"
        out.print(f"  {escape(str(row['image']))}: {size}, {row['milliseconds']} ms", soft_wrap=True)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A checkpoint folder or hub id; comes first.")],
    backend: Annotated[
        str | None,
        typer.Option(help="turbomind or pytorch; by default turbomind where it can run MODEL, else pytorch."),
    ] = None,
    engines: Annotated[
        Path | None, typer.Option(help="A bundle, or a folder of bundles to look in; by default the store.")
    ] = None,
    auto_build: Annotated[
        bool, typer.Option("--auto-build", help="Build the bundle first where there is none.")
    ] = False,
    no_compiled_vision: Annotated[
        bool, typer.Option("--no-compiled-vision", help="Leave the vision half to LMDeploy (backend pytorch).")
    ] = False,
    allowed_local_media_path: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Requests may name files in DIR as images and videos; by default none."),
    ] = None,
) -> None:
    """Serve MODEL with LMDeploy's own server, its vision tower compiled.

    Every other option is one of `lmdeploy serve api_server`, and goes there as it is written.
    """
    from turbovit.lmdeploy_ext.serve import serve as run_server

    if model.startswith("-"):
        raise UsageError(f"MODEL comes before the options of LMDeploy's server, got {model!r} first")
    run_server(
        model,
        context.args,
        backend=backend,
        engines=engines,
        auto_build=auto_build,
        compiled_vision=not no_compiled_vision,
        local_media=allowed_local_media_path,
        report=lambda line: err.print(escape(line), soft_wrap=True),
    )


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(help="A checkpoint folder or hub id.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what this machine and this LMDeploy can do (with MODEL), before anyone builds."""
    from turbovit.lmdeploy_ext.doctor import diagnose

    findings = diagnose(model)
    if as_json:
        print(json.dumps([_plain(finding) for finding in findings]))
        return
    colours = {"have": "green", "missing": "red", "unknown": "yellow"}
    table = Table()
    for column in ("", "what", "state", "detail"):
        table.add_column(column, overflow="fold")  # nothing is cut off, however narrow the terminal
    for finding in findings:
        state = f"[{colours[finding.state]}]{finding.state}[/]"
        table.add_row(finding.section, escape(finding.what), state, escape(finding.detail))
    out.print(table)
    for command in dict.fromkeys(finding.command for finding in findings if finding.command):
        out.print(f"  $ {escape(command)}", soft_wrap=True)


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A spinner with the present step on a terminal, a line a step elsewhere, nothing where `quiet`."""
    started = time.perf_counter()
    if quiet:
        yield lambda step: None
    elif err.is_terminal:
        with err.status("starting") as status:
            yield lambda step: _next_step(status, step, started)
    else:
        yield lambda step: err.print(f"{time.perf_counter() - started:6.1f} s  {escape(step)}", soft_wrap=True)


def _next_step(status: Any, step: str, started: float) -> None:
    err.print(f"[dim]{time.perf_counter() - started:6.1f} s  {escape(step)}[/]", soft_wrap=True)
    status.update(escape(step))


def _print_engines(engines: Sequence[Any]) -> None:
    from turbovit.engines.profiles import described

    colours = {"passed": "green", "failed": "red", "not run": "yellow"}
    for engine in engines:
        verdict = f"[{colours[engine.verdict]}]{engine.verdict}[/]"
        out.print(f"{engine.runtime} {engine.precision} ({engine.attention} attention): {verdict}", soft_wrap=True)
        if engine.architectures:
            compiled = f"for compute capability {', '.join(engine.architectures)}; {described(engine.profiles)}"
            out.print(f"  {escape(compiled)}", soft_wrap=True)
        if engine.reason:
            out.print(f"  {engine.precision}: {escape(engine.reason)}", soft_wrap=True)
        if engine.fp32_layers:
            out.print(f"  in float32: {escape(', '.join(engine.fp32_layers))}", soft_wrap=True)
        if engine.certificate is None:
            out.print(f"  {escape(engine.not_run or '')}", soft_wrap=True)
        else:
            _print_certificate(engine.certificate)
        for stand_in in engine.stand_ins:
            verdict = f"[{colours[stand_in.verdict]}]{stand_in.verdict}[/]"
            out.print(f"  not this engine, but its precision elsewhere: {verdict}", soft_wrap=True)
            _print_certificate(stand_in)


def _print_certificate(certificate: Any) -> None:
    for error in certificate.outputs:
        out.print(f"  {error.output}: {escape(str(error))}", soft_wrap=True)
    out.print(f"  bound: {escape(certificate.bound)}", soft_wrap=True)
    out.print(f"  ran on {escape(certificate.ran_on)}: {escape(', '.join(certificate.shapes))}", soft_wrap=True)


def _runtime_name(option: str | None) -> str | None:
    """As manifests write it."""
    return option.replace("-", "_") if option else None


def _plain(item: Any) -> dict[str, Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(type(item)).dump_python(item, mode="json")


def _manifest_data(bundle: Any) -> dict[str, Any]:
    return _plain(bundle.manifest)


def _write_npz(path: Path, arrays: dict[str, Any]) -> None:
    import numpy as np

    from turbovit.engines.errors import BuildError

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            np.savez(file, **arrays)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise BuildError(f"{path} cannot be written: {error.strerror or error}") from None
