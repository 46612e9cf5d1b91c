"""LMDeploy's request path and the reference over the tiny sample, each loaded once a run."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from turbovit.engines.preprocessor import Encoded, Pixels

if TYPE_CHECKING:
    from turbovit.benchmarks.lmdeploy_side import LMDeploySide
    from turbovit.benchmarks.reference_gemma3 import Gemma3Reference
    from turbovit.engines.bundle import Bundle

pytest.importorskip("lmdeploy", reason="LMDeploy is not installed")


@pytest.fixture(scope="session")
def side(tiny_gemma3: Path, tiny_gemma3_bundle: Bundle) -> LMDeploySide:
    from turbovit.benchmarks.lmdeploy_side import LMDeploySide

    return LMDeploySide(tiny_gemma3, tiny_gemma3_bundle.path)


@pytest.fixture(scope="session")
def reference(tiny_gemma3: Path) -> Gemma3Reference:
    from turbovit.benchmarks.reference_gemma3 import Gemma3Reference

    return Gemma3Reference(tiny_gemma3)


@pytest.fixture(scope="session")
def released_gemma3(data: Path) -> Path:
    """Config, tokenizer, processor and chat template as Google released them; there are no weights."""
    folder = data / "realdata" / "gemma3" / "gemma-3-27b-it"
    if not folder.is_dir():
        pytest.skip(f"no released files: {folder} does not exist")
    return folder


@pytest.fixture(scope="session")
def released_side(released_gemma3: Path, tiny_gemma3_bundle: Bundle) -> LMDeploySide:
    """LMDeploy over the released files; a bundle with their token ids stands in for one of the missing weights."""
    from turbovit.benchmarks.lmdeploy_side import LMDeploySide
    from turbovit.engines.encoder import open_encoder
    from turbovit.lmdeploy_ext.base import CompiledVisionModel

    config = json.loads((released_gemma3 / "config.json").read_text())
    ids = {"boi_token_id": "boi_token_index", "eoi_token_id": "eoi_token_index", "image_token_id": "image_token_index"}
    facts = {**tiny_gemma3_bundle.manifest.facts, **{fact: config[entry] for fact, entry in ids.items()}}
    manifest = replace(tiny_gemma3_bundle.manifest, facts=facts)
    encoder = open_encoder(replace(tiny_gemma3_bundle, manifest=manifest), device="cpu")
    encoder.encode_pixels = sampled_features

    def build_model(self: CompiledVisionModel, trust_remote_code: bool = False) -> None:
        self.encoder = encoder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledVisionModel, "build_model", build_model)
        patch.setattr("lmdeploy.vl.engine.is_bf16_supported", lambda device: True)  # else it asks the driver
        return LMDeploySide(released_gemma3, tiny_gemma3_bundle.path)


@pytest.fixture(scope="session")
def released_reference(released_gemma3: Path) -> Gemma3Reference:
    """The processor alone: it can say which ids are right, not which logits."""
    from transformers import AutoProcessor

    from turbovit.benchmarks.reference_gemma3 import Gemma3Reference

    reference = Gemma3Reference.__new__(Gemma3Reference)
    reference.processor = AutoProcessor.from_pretrained(released_gemma3)
    return reference


@pytest.fixture(scope="session")
def quick_side(side: LMDeploySide) -> LMDeploySide:
    """`side` without the engine, for tests of everything around it."""
    quick = copy.copy(side)
    quick.encoder, quick.processor = copy.copy(side.encoder), copy.copy(side.processor)
    quick.encoder.model = copy.copy(side.encoder.model)
    quick.encoder.model.encoder = copy.copy(side.encoder.model.encoder)
    quick.encoder.model.encoder.encode_pixels = sampled_features
    quick.processor.vl_encoder = quick.encoder
    return quick


def sampled_features(items: Sequence[Pixels], max_batch: int | None = None) -> list[Encoded]:
    """As `Encoder.encode_pixels`, with 64 pixels from all over the image in place of every token's features."""
    return [
        Encoded(torch.cat([row.flatten()[::37633].float().expand(256, -1) for row in item.rows]), item.runs)
        for item in items
    ]


@pytest.fixture(autouse=True)
def _no_noise(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A refusal is the caller's: the event loop must not report it as well."""
    caplog.set_level(logging.WARNING, "asyncio")
    yield
    assert [record for record in caplog.get_records("call") if record.name == "asyncio"] == []
