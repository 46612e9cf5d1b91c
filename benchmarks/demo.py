"""`make demo`: every family from nothing to a proved TurboMind request, on this machine, without downloads.

A synthetic checkpoint is written, its vision engine built and certified, a conversation taken through LMDeploy's
own classes, and the request compared with transformers' processor and whole model.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from turbovit.benchmarks.turbomind_column import TurboMindColumn, turbomind_column
from turbovit.engines.families import FAMILIES, FamilyRow, load
from turbovit.lmdeploy_ext.turbomind_models import NEVER_RUN

LOGITS_BOUND = 1e-4  # float32, largest absolute difference
_SIZES = ((640, 480), (300, 900))  # width, height of the demo's images


@dataclass(frozen=True)
class Row:
    """What the demo found for one family."""

    family: str
    build_seconds: float
    certificate: str
    tokens: int
    ranges: int
    ids_equal: bool
    logits_error: float | None
    turbomind: TurboMindColumn

    @property
    def close(self) -> bool:
        """Whether the logits are the reference's."""
        return self.logits_error is not None and self.logits_error <= LOGITS_BOUND

    @property
    def proved(self) -> bool:
        """Whether ids and logits are the reference's, and what TurboMind answered, where it ran."""
        return self.ids_equal and self.close and not self.turbomind.failed


def demo(family: FamilyRow, directory: Path, console: Console) -> Row:
    """Sample, build, run through LMDeploy and compare one family in `directory`."""
    from turbovit.benchmarks.lmdeploy_side import LMDeploySide
    from turbovit.benchmarks.reference import chat_from_lmdeploy
    from turbovit.export.build import build
    from turbovit.export.samples import write_sample

    checkpoint, bundle = directory / family.name / "checkpoint", directory / family.name / "bundle"
    shutil.rmtree(directory / family.name, ignore_errors=True)
    write_sample(family.name, checkpoint, "tiny", 0)
    console.print(f"[dim]{family.name}: synthetic checkpoint in {checkpoint}[/]")
    started = time.perf_counter()
    built = build(checkpoint, bundle, report=lambda step: console.print(f"[dim]{family.name}: {step}[/]"))
    seconds = time.perf_counter() - started
    console.print(f"[dim]{family.name}: a conversation through LMDeploy, and the same through transformers[/]")
    messages = conversation()
    request = LMDeploySide(checkpoint, bundle).request(messages)
    reference = load(family.reference)(checkpoint)
    comparison = reference.compare(request, reference.inputs_from_messages(chat_from_lmdeploy(messages)))
    console.print(f"[dim]{family.name}: TurboMind[/]")
    return Row(
        family=family.name,
        build_seconds=seconds,
        certificate=", ".join(f"{engine.runtime} {engine.precision} {engine.verdict}" for engine in built.new),
        tokens=len(request["input_ids"]),
        ranges=len(request["input_embedding_ranges"]),
        ids_equal=comparison.ids_equal,
        logits_error=comparison.logits_error,
        turbomind=turbomind_column(family.name, directory / family.name / "turbomind"),
    )


def conversation() -> list[dict[str, Any]]:
    """Two turns with an image each, in LMDeploy's form; pixels from a fixed seed."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    first, second = (
        {"type": "image_data", "image_data": {"data": Image.fromarray(generator.integers(0, 256, (h, w, 3), np.uint8))}}
        for w, h in _SIZES
    )
    return [
        {"role": "user", "content": [first, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "Noise."},
        {"role": "user", "content": [{"type": "text", "text": "And this:"}, second]},
    ]


def table_from_rows(rows: list[Row]) -> Table:
    """The demo's result as a table."""
    columns = ("family", "build", "certificate", "request", "ids", "logits", "TurboMind's tokens")
    table = Table(*columns, title="turbovit demo")
    for row in rows:
        error = "-" if row.logits_error is None else f"{row.logits_error:.1e} off"
        table.add_row(
            row.family,
            f"{row.build_seconds:.1f} s",
            row.certificate,
            f"{row.tokens} tokens, {row.ranges} image ranges",
            "[green]equal[/]" if row.ids_equal else "[red]DIFFERENT[/]",
            f"[green]{error}[/]" if row.close else f"[red]{error} (bound {LOGITS_BOUND:g})[/]",
            Text("\n".join(row.turbomind.lines), "red" if row.turbomind.failed else ""),
        )
    return table


def _quiet() -> None:
    """No network, and none of the libraries' own log lines and progress bars between the demo's."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    import lmdeploy.utils
    from transformers.utils import logging as transformers_logging

    lmdeploy.utils.get_logger("lmdeploy").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def main() -> None:
    """Run the demo in the folder given (default: demo); exits with 1 where a family is not proved."""
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "demo")
    _quiet()
    console = Console(width=None if sys.stdout.isatty() else 160)
    rows = [demo(family, directory, console) for family in FAMILIES]
    console.print(table_from_rows(rows))
    console.print(
        "Compared with transformers' own processor and whole model in float32 (DeepSeek-VL2, which it lacks: the "
        "original's algorithm over transformers' parts). The stock TurboMind has no language model for these families "
        "(turbovit doctor says which parts are missing). turbovit brings DeepSeek-VL2's, which "
        f"{NEVER_RUN}. Three tiny ones, made as its three sizes are, answer a conversation with two images; of the "
        "released sizes its router has kernels for tiny and small, and none for the largest."
    )
    sys.exit(0 if all(row.proved for row in rows) else 1)


if __name__ == "__main__":
    main()
