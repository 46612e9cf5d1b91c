"""LMDeploy's request path and the reference over the tiny sample, each loaded once a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

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
    """LMDeploy over the released files: the tiny engine encodes, with the released token ids among its facts."""
    from turbovit.benchmarks.lmdeploy_side import LMDeploySide
    from turbovit.engines.encoder import open_encoder
    from turbovit.lmdeploy_ext.base import CompiledVisionModel

    config = json.loads((released_gemma3 / "config.json").read_text())
    ids = {"boi_token_id": "boi_token_index", "eoi_token_id": "eoi_token_index", "image_token_id": "image_token_index"}
    facts = {**tiny_gemma3_bundle.manifest.facts, **{fact: config[entry] for fact, entry in ids.items()}}
    manifest = replace(tiny_gemma3_bundle.manifest, facts=facts)
    encoder = open_encoder(replace(tiny_gemma3_bundle, manifest=manifest), device="cpu")

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


@pytest.fixture(autouse=True)
def _no_noise(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A refusal is the caller's: the event loop must not report it as well."""
    caplog.set_level(logging.WARNING, "asyncio")
    yield
    assert [record for record in caplog.records if record.name == "asyncio"] == []
