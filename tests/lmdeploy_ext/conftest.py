"""LMDeploy's request path and the reference over the tiny sample, each loaded once a run."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from turbomind_deepseek_vl2 import Pair as DeepseekVL2Pair
from turbomind_llama4 import Pair as Llama4Pair
from turbomind_qwen3_vl import Pair

from turbovit.engines.preprocessor import Encoded, Pixels

if TYPE_CHECKING:
    from turbovit.benchmarks.lmdeploy_side import LMDeploySide
    from turbovit.benchmarks.reference_deepseek_vl2 import DeepseekVL2Reference
    from turbovit.benchmarks.reference_gemma3 import Gemma3Reference
    from turbovit.engines.bundle import Bundle

pytest.importorskip("lmdeploy", reason="LMDeploy is not installed")


@pytest.fixture
def turbomind_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the installed TurboMind's Python side that tests can change."""
    from turbovit.lmdeploy_ext import capability

    installed = capability._turbomind_folder()
    assert installed is not None
    folder = tmp_path / "turbomind"
    shutil.copytree(installed, folder, ignore=lambda _, names: [n for n in names if "." in n and not n.endswith(".py")])
    monkeypatch.setattr(capability, "_turbomind_folder", lambda: folder)
    return folder


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
    ids = {"boi_token_id": "boi_token_index", "eoi_token_id": "eoi_token_index", "image_token_id": "image_token_index"}
    return released_files_side(released_gemma3, tiny_gemma3_bundle, ids)


@pytest.fixture(scope="session")
def qwen3_vl(tiny_qwen3_vl: Path, tiny_qwen3_vl_bundle: Bundle) -> Pair:
    return Pair.of(tiny_qwen3_vl, tiny_qwen3_vl_bundle)


@pytest.fixture(scope="session")
def qwen3_vl_moe(tiny_qwen3_vl_moe: Path, tiny_qwen3_vl_moe_bundle: Bundle) -> Pair:
    return Pair.of(tiny_qwen3_vl_moe, tiny_qwen3_vl_moe_bundle)


@pytest.fixture(scope="session", params=["qwen3_vl", "qwen3_vl_moe"])
def each_qwen3_vl(request: pytest.FixtureRequest) -> Pair:
    """Dense, then MoE."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def llama4(tiny_llama4: Path, tiny_llama4_bundle: Bundle) -> Llama4Pair:
    return Llama4Pair.of(tiny_llama4, tiny_llama4_bundle)


@pytest.fixture(scope="session")
def deepseek_vl2(tiny_deepseek_vl2: Path, tiny_deepseek_vl2_bundle: Bundle) -> DeepseekVL2Pair:
    """In a folder whose name says nothing to LMDeploy, so that it has no chat template."""
    return DeepseekVL2Pair.of(tiny_deepseek_vl2, tiny_deepseek_vl2_bundle)


@pytest.fixture(scope="session")
def deepseek_vl2_mla(small_deepseek_vl2: Path, small_deepseek_vl2_bundle: Bundle) -> DeepseekVL2Pair:
    return DeepseekVL2Pair.of(small_deepseek_vl2, small_deepseek_vl2_bundle)


@pytest.fixture(scope="session")
def released_deepseek_vl2(data: Path, tiny_deepseek_vl2_bundle: Bundle) -> DeepseekVL2Pair:
    """Both sides over the released files: for ids alone, as there are no weights."""
    folder = data / "realdata" / "deepseek_vl2" / "deepseek-vl2"
    if not folder.is_dir():
        pytest.skip(f"no released files: {folder} does not exist")
    return DeepseekVL2Pair(released_files_side(folder, tiny_deepseek_vl2_bundle, {}), processor_of(folder))


def processor_of(folder: Path) -> DeepseekVL2Reference:
    """DeepSeek-VL2's reference without a model."""
    from transformers import AutoTokenizer

    from turbovit.benchmarks.reference_deepseek_vl2 import DeepseekVL2Reference

    reference = DeepseekVL2Reference.__new__(DeepseekVL2Reference)
    reference.settings = json.loads((folder / "processor_config.json").read_text())
    reference.tokenizer = AutoTokenizer.from_pretrained(folder)
    reference.image_id = reference.tokenizer.convert_tokens_to_ids("<image>")
    return reference


def released_files_side(folder: Path, bundle: Bundle, ids: Mapping[str, str]) -> LMDeploySide:
    """LMDeploy over released files, and a tiny bundle without its engine.

    Args:
        ids: facts of the bundle, and the entries of the released config that take their places.
    """
    from turbovit.benchmarks.lmdeploy_side import LMDeploySide
    from turbovit.engines.encoder import open_encoder
    from turbovit.lmdeploy_ext.base import CompiledVisionModel

    config = json.loads((folder / "config.json").read_text())
    facts = {**bundle.manifest.facts, **{fact: config[entry] for fact, entry in ids.items()}}
    encoder = open_encoder(replace(bundle, manifest=replace(bundle.manifest, facts=facts)), device="cpu")
    encoder.encode_pixels = sampled_features

    def build_model(self: CompiledVisionModel, trust_remote_code: bool = False) -> None:
        self.encoder = encoder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledVisionModel, "build_model", build_model)
        patch.setattr("lmdeploy.vl.engine.is_bf16_supported", lambda device: True)  # else it asks the driver
        return LMDeploySide(folder, bundle.path)


@pytest.fixture(scope="session")
def released_reference(released_gemma3: Path) -> Gemma3Reference:
    """The processor alone: it can say which ids are right, not which logits."""
    from transformers import AutoProcessor

    from turbovit.benchmarks.reference_gemma3 import Gemma3Reference

    reference = Gemma3Reference.__new__(Gemma3Reference)
    reference.processor = AutoProcessor.from_pretrained(released_gemma3)
    return reference


@pytest.fixture(scope="session")
def released_qwen3_vl(data: Path, tiny_qwen3_vl_bundle: Bundle) -> Pair:
    """Both sides over the released files: for ids alone, as there are no weights."""
    from transformers import AutoProcessor

    from turbovit.benchmarks.reference_qwen3_vl import Qwen3VLReference

    folder = data / "realdata" / "qwen3_vl" / "Qwen3-VL-8B-Instruct"
    if not folder.is_dir():
        pytest.skip(f"no released files: {folder} does not exist")
    reference = Qwen3VLReference.__new__(Qwen3VLReference)
    reference.processor = AutoProcessor.from_pretrained(folder)
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return Pair(released_files_side(folder, tiny_qwen3_vl_bundle, dict(zip(ids, ids, strict=True))), reference)


@pytest.fixture(scope="session")
def released_llama4(data: Path, tiny_llama4_bundle: Bundle) -> Llama4Pair:
    """Both sides over the released files: for ids alone, as there are no weights."""
    from transformers import AutoProcessor

    from turbovit.benchmarks.reference_llama4 import Llama4Reference

    folder = data / "realdata" / "llama4" / "Llama-4-Scout-17B-16E-Instruct"
    if not folder.is_dir():
        pytest.skip(f"no released files: {folder} does not exist")
    reference = Llama4Reference.__new__(Llama4Reference)
    reference.processor = AutoProcessor.from_pretrained(folder)
    side = released_files_side(folder, tiny_llama4_bundle, {"patch_token_id": "image_token_index"})
    return Llama4Pair(side, reference)


_SIDES = {
    "gemma3": "quick_side",
    "llama4": "llama4",
    "qwen3_vl": "qwen3_vl",
    "deepseek_vl2": "deepseek_vl2",
    "gemma3 released": "released_side",
    "llama4 released": "released_llama4",
    "qwen3_vl released": "released_qwen3_vl",
    "deepseek_vl2 released": "released_deepseek_vl2",
}


@pytest.fixture(scope="session", params=_SIDES)
def each_side(request: pytest.FixtureRequest) -> LMDeploySide:
    """LMDeploy over the tiny checkpoint of each family, then over the released files of each."""
    found = request.getfixturevalue(_SIDES[request.param])
    return getattr(found, "side", found)


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
    """As `Encoder.encode_pixels`, with 64 pixels from all over a row in place of its tokens' features."""
    return [
        Encoded(
            torch.cat([_sampled(row).expand(-(-sum(item.runs) // len(item.rows)), -1) for row in item.rows])[
                : sum(item.runs)
            ],
            item.runs,
            grid=item.grid,
            timestamps=item.timestamps,
        )
        for item in items
    ]


def _sampled(row: torch.Tensor) -> torch.Tensor:
    values = row.flatten()
    return values[torch.linspace(0, len(values) - 1, 64).long()].float()


@pytest.fixture(autouse=True)
def _no_noise(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A refusal is the caller's: the event loop must not report it as well."""
    caplog.set_level(logging.WARNING, "asyncio")
    yield
    assert [record for record in caplog.get_records("call") if record.name == "asyncio"] == []
