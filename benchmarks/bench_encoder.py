"""`turbovit bench encoder`: the engines beside transformers' own tower, on the same weights and the same images."""

from __future__ import annotations

import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from turbovit.benchmarks.baselines import (
    Outputs,
    Run,
    compiled_run,
    eager_run,
    exported_run,
    normalised_pixels,
    session_run,
    transformers_tower,
    with_linear_patches,
)
from turbovit.benchmarks.flops import Product, Work, product_contenders, work_of_tower
from turbovit.benchmarks.report import Equality, Measurement, Report, Skipped, Target
from turbovit.benchmarks.subjects import Case, Size, Subject, case_of_images, families, subject
from turbovit.benchmarks.timing import Spread, alternating, paired_ratio
from turbovit.engines.encoder import RUNNERS
from turbovit.engines.errors import CertificationError, InputError, RuntimeUnavailableError, TurbovitError
from turbovit.export.certify import output_error
from turbovit.export.tower import Tower

EQUAL_BOUND = 1e-5  # relative L2 of every row, as in a float32 certificate
EAGER = "transformers, eager sdpa"
LINEAR = "transformers, linear patches"
COMPILED = "transformers, torch.compile"
EXPORTED = "transformers' ONNX export"
PLAIN = "our graph, plain Attention node"
ENGINE_SHARE = 0.80  # of transformers' eager time
RATE_SHARE = 0.90  # of the machine's rate
PRODUCTS = "matrix product"


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        sizes: width and height of the images.
        batches: how many images of the first size go in one run.
        contenders: parts of the names of those wanted; all where empty.
    """

    families: Sequence[str]
    size: str
    layers: int | None
    sizes: Sequence[Size]
    batches: Sequence[int]
    rounds: int
    contenders: Sequence[str]
    folder: Path


def bench_encoder(
    options: Options,
    report: Callable[[str], None] = lambda step: None,
    keep: Callable[[Report], object] = lambda found: None,
) -> Report:
    """Measure every family's tower.

    Args:
        keep: called after each family with all that was found so far.

    Raises:
        CertificationError: a contender's outputs are not those of the first one; nothing was timed.
    """
    found = Report.of("encoder", options)
    for row in families(options.families):
        one = subject(row, options.size, options.layers, options.folder, report)
        with closing(one.encoder()) as encoder:
            cases = list(_cases(encoder, options, found, row.name))
        for case in cases:
            report(f"{row.name}: {case.label}")
            _measure(one, case, options, found)
        found.notes += growth_notes(found, row.name)
        keep(found)
    return found


def _cases(encoder: object, options: Options, found: Report, family: str) -> Iterator[Case]:
    wanted = [(size, 1) for size in options.sizes] + [(options.sizes[0], n) for n in options.batches if n != 1]
    seen = set()
    for size, images in wanted:
        try:
            case = case_of_images(encoder, size, images)  # type: ignore[arg-type]
        except InputError as error:
            found.skipped.append(Skipped(family, f"{images} x {size[0]}x{size[1]}", str(error)))
            continue
        shapes = tuple(tuple(tensor.shape) for tensor in case.inputs.values())
        if shapes not in seen:  # families of fixed geometry make the same of many sizes
            seen.add(shapes)
            yield case


def _measure(one: Subject, case: Case, options: Options, found: Report) -> None:
    tower = one.described()
    work = work_of_tower(tower, case.inputs)
    with ExitStack() as stack, warnings.catch_warnings(), _quiet_exporter():
        warnings.simplefilter("ignore")
        runs = dict(_contenders(one, tower, case, options, found, stack))
        require_equal(one.name, case.label, runs, found)
        rates = {
            f"{PRODUCTS} {product}, {library}": run
            for product in work.main_products
            for library, run in product_contenders(product).items()
        }
        spreads = alternating({**runs, **rates}, options.rounds)
    facts = {"patches": case.patches, "tokens": case.tokens, "images": case.images, "flops": work.flops}
    found.add(one.name, case.label, "s", {name: spreads[name] for name in runs}, **facts)
    rate = machine_rate(work, spreads)
    found.add(one.name, case.label, "flop/s", rate_spreads(work, spreads))
    _add_targets(one.name, case, work, spreads, rate, found)


def _contenders(
    one: Subject, tower: Tower, case: Case, options: Options, found: Report, stack: ExitStack
) -> Iterator[tuple[str, Run]]:
    names = tower.output_names
    pixels = normalised_pixels(tower, case.inputs)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

    def makers() -> Iterator[tuple[str, Callable[[], Run]]]:
        def theirs(linear: bool = False) -> tuple[torch.nn.Module, tuple[Tensor, ...]]:
            model = transformers_tower(one.name, one.checkpoint)
            if linear and not with_linear_patches(model):
                raise RuntimeUnavailableError("its patch embedding is linear as it is")
            return model, model.arguments(case.inputs, pixels)

        yield EAGER, lambda: eager_run(*theirs(), names)
        yield LINEAR, lambda: eager_run(*theirs(linear=True), names)
        yield COMPILED, lambda: compiled_run(*theirs(), names)
        yield EXPORTED, lambda: exported_run(*theirs(), names, folder)
        plain = one.bundle.path / "model.fp32.attention.onnx"
        given = tuple(case.inputs[name] for name in tower.input_names)
        yield PLAIN, lambda: session_run(plain, given, names)
        for runtime in RUNNERS:
            yield engine_name(runtime), partial(_engine_run, one, runtime, case.inputs, stack)

    for name, make in makers():
        if options.contenders and not any(part in name for part in options.contenders):
            continue
        try:
            yield name, make()
        except TurbovitError as error:
            found.skipped.append(Skipped(one.name, name, str(error)))


def engine_name(runtime: str) -> str:
    return f"turbovit, {runtime}"


def _engine_run(one: Subject, runtime: str, inputs: Mapping[str, Tensor], stack: ExitStack) -> Run:
    encoder = one.encoder(runtime)
    stack.callback(encoder.close)
    return lambda: encoder.runner.run(inputs)


def require_equal(family: str, case: str, runs: Mapping[str, Callable[[], Outputs]], found: Report) -> None:
    """Run every contender once and compare it with the first.

    Raises:
        CertificationError: an output is off by more than the bound; names contender, output and difference.
    """
    reference: Outputs | None = None
    for name, run in runs.items():
        outputs = {output: tensor.cpu().clone() for output, tensor in run().items()}
        if reference is None:
            reference = outputs
            continue
        errors = [output_error(output, outputs[output], expected) for output, expected in reference.items()]
        worst = max(errors, key=lambda error: error.relative_l2 if math.isfinite(error.relative_l2) else math.inf)
        if not (worst.relative_l2 <= EQUAL_BOUND and all(error.finite for error in errors)):
            raise CertificationError(
                f"{family}, {case}: {worst.output} of {name!r} is off from that of {next(iter(runs))!r} by a relative "
                f"L2 of {worst.relative_l2:.2g}, at most {EQUAL_BOUND:g} is allowed: what is not equal is not timed"
            )
        found.equal.append(Equality(family, case, name, worst.relative_l2, EQUAL_BOUND))


def rate_spreads(work: Work, spreads: Mapping[str, Spread]) -> dict[str, Spread]:
    """Rates of the matrix products, by shape and library, in operations a second."""
    return {
        name: Spread(tuple(product.flops / seconds for seconds in spread.samples))
        for product in work.main_products
        for name, spread in spreads.items()
        if name.startswith(f"{PRODUCTS} {product}, ")
    }


def machine_rate(work: Work, spreads: Mapping[str, Spread]) -> float:
    """Operations a second of the tower's own matrix products, each by the library that is fastest at its shape.

    The best of the rounds, as of the engine that is held against it: what disturbs a run makes neither look better.
    """

    def fastest(product: Product) -> float:
        prefix = f"{PRODUCTS} {product}, "
        return min(spread.least for name, spread in spreads.items() if name.startswith(prefix))

    products = work.main_products
    flops = sum(product.flops * count for product, count in products.items())
    return flops / sum(fastest(product) * count for product, count in products.items())


def _add_targets(
    family: str, case: Case, work: Work, spreads: Mapping[str, Spread], rate: float, found: Report
) -> None:
    where = f"{family}, {case.label}"
    for runtime in RUNNERS:
        name = engine_name(runtime)
        if name not in spreads or runtime == "torch":
            continue
        if EAGER in spreads:
            ratio = paired_ratio(spreads[name], spreads[EAGER])
            what = f"{where}: {runtime} as a share of transformers' eager time"
            found.targets.append(Target(what, ratio, ENGINE_SHARE))
        share = work.flops / spreads[name].least / rate
        if share > 1:
            reason = f"no engine is faster than the machine, and its share came out as {share:.2f}: others were busy"
            found.skipped.append(Skipped(family, f"{case.label}: share of the machine's rate", reason))
            continue
        what = f"{where}: {runtime} as a share of this machine's {rate / 1e9:.0f} GFLOP/s of matrix products"
        found.targets.append(Target(what, share, RATE_SHARE, at_most=False))


def growth_notes(found: Report, family: str) -> list[str]:
    """How times and floating-point operations grow with patches, where one image was measured at three counts or more.

    The exponents are the slopes of straight lines through the logarithms.
    """
    groups: dict[str, list[Measurement]] = {}
    for one in found.measurements:
        if one.family == family and one.unit == "s" and one.facts["images"] == 1:
            groups.setdefault(one.contender, []).append(one)
    notes = []
    for name, group in groups.items():
        patches = [float(one.facts["patches"]) for one in group]
        if len(set(patches)) < 3:
            continue
        time = exponent(patches, [one.spread.median for one in group])
        flops = exponent(patches, [float(one.facts["flops"]) for one in group])
        span = f"{min(patches):.0f} to {max(patches):.0f} patches"
        notes.append(f"{family}, {name}: {span}, time grows as patches^{time:.2f}, operations as patches^{flops:.2f}")
    return notes


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The k of the y = c * x**k that fits best, by least squares on logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


class _quiet_exporter:  # noqa: N801  (used as a function)
    """No log lines of the exporter."""

    def __enter__(self) -> None:
        self._logger = logging.getLogger("torch.onnx")
        self._level = self._logger.level
        self._logger.setLevel(logging.ERROR)

    def __exit__(self, *error: object) -> None:
        self._logger.setLevel(self._level)
