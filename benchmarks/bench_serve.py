"""`turbovit bench serve`: requests through LMDeploy's own processor, by several clients at once and for a long time.

The language engine is not part of it: a request ends when TurboMind would get it.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.benchmarks.machine import resident_bytes
from turbovit.benchmarks.report import Equality, Report, Target
from turbovit.benchmarks.subjects import Size, Subject, families, noise_image, subject
from turbovit.benchmarks.timing import Spread
from turbovit.engines.encoder import Encoder
from turbovit.engines.errors import CertificationError

GROWTH_BYTES = 32e6  # what allocators may keep back over thousands of images; a leak of one image's pixels is far more
_LEAST_SIDE = 192  # of the images of a long run, in pixels
_SETTLED = 0.2  # of the images: until then buffers and caches fill


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        image: width and height.
        clients: how many ask at once; each a case.
        requests: of every case.
        long_run: how many different images go through one encoder, for its memory; 0 leaves that out.
    """

    families: Sequence[str]
    size: str
    layers: int | None
    image: Size
    clients: Sequence[int]
    requests: int
    long_run: int
    folder: Path


def bench_serve(options: Options, report: Callable[[str], None] = lambda step: None) -> Report:
    """Measure latency and throughput of requests, and memory over a long run.

    Raises:
        CertificationError: a request among others differs from the same request alone; nothing was timed.
    """
    found = Report.of("serve", options)
    for row in families(options.families):
        one = subject(row, options.size, options.layers, options.folder, report)
        side = LMDeploySide(one.checkpoint, one.bundle.path)
        require_equal_requests(one.name, side, options.image, found)
        for clients in options.clients:
            report(f"{row.name}: {clients} clients")
            _measure(one, side, clients, options, found)
        if options.long_run:
            tiny = subject(row, "tiny", None, options.folder, report)
            report(f"{row.name}: {options.long_run} different images through one tiny encoder")
            with closing(tiny.encoder()) as encoder:
                add_memory(row.name, resident_over_images(encoder, options.long_run), found)
    return found


def require_equal_requests(family: str, side: LMDeploySide, size: Size, found: Report) -> None:
    """Compare requests that were made at once with the same made one after the other.

    Raises:
        CertificationError: they differ.
    """
    chats = [_chat(size, seed) for seed in range(3)]
    alone = [side.request(chat) for chat in chats]
    together = asyncio.run(_gathered(side, chats))
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        if one["input_ids"] != other["input_ids"] or not torch.equal(
            torch.cat(list(one["input_embeddings"])), torch.cat(list(other["input_embeddings"]))
        ):
            raise CertificationError(f"{family}: request {number} of 3 at once differs from the same request alone")
    found.equal.append(Equality(family, "3 clients", "request", 0.0, 0.0))


def _measure(one: Subject, side: LMDeploySide, clients: int, options: Options, found: Report) -> None:
    chats = [_chat(options.image, seed) for seed in range(clients)]
    seconds: list[float] = []

    async def client(chat: list[dict[str, Any]], count: int) -> None:
        for _ in range(count):
            started = time.perf_counter()
            await side.processor.get_prompt_input(chat, True)
            seconds.append(time.perf_counter() - started)

    async def all_clients() -> None:
        await asyncio.gather(*(client(chat, max(1, options.requests // clients)) for chat in chats))

    started = time.perf_counter()
    asyncio.run(all_clients())
    rate = len(seconds) / (time.perf_counter() - started)
    case = f"{clients} clients, {options.image[0]}x{options.image[1]}"
    found.add(one.name, case, "s", {"request": Spread(tuple(seconds))}, clients=clients, requests_a_second=rate)
    found.notes.append(f"{one.name}, {case}: {rate:.2f} requests a second")


def resident_over_images(encoder: Encoder, images: int) -> list[int]:
    """Encode different images of many sizes, one after the other; the resident bytes after each hundredth of them."""
    step = max(1, images // 100)
    resident = []
    for number in range(images):
        size = (_LEAST_SIDE + 8 * (number % 13), _LEAST_SIDE + 8 * (number % 7))
        encoder.encode([noise_image(size, seed=number)])
        if (number + 1) % step == 0:
            gc.collect()
            resident.append(resident_bytes())
    return resident


def growth(resident: Sequence[int]) -> float:
    """Bytes gained from when buffers had filled to the end, both as medians of a few samples."""
    settled = list(resident[int(_SETTLED * len(resident)) :])
    few = max(1, len(settled) // 8)
    return Spread(tuple(settled[-few:])).median - Spread(tuple(settled[:few])).median


def add_memory(family: str, resident: Sequence[int], found: Report) -> None:
    """Add the resident memory over a long run, and its target."""
    found.add(family, "long run", "B", {"resident memory": Spread(tuple(map(float, resident)))})
    found.targets.append(Target(f"{family}: bytes gained over a long run", growth(resident), GROWTH_BYTES))


async def _gathered(side: LMDeploySide, chats: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*(side.processor.get_prompt_input(chat, True) for chat in chats)))


def _chat(size: Size, seed: int) -> list[dict[str, Any]]:
    image = {"type": "image_data", "image_data": {"data": noise_image(size, seed)}}
    return [{"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}]
