"""How vision tensors may be called, and which may be there for nothing: as transformers has it, and no more."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_changes import rewrite, same_tower, tower_class, vision_names
from safetensors.torch import load_file
from tower_checks import tower_of

from turbovit.engines.errors import CheckpointError
from turbovit.engines.families import FAMILIES, FamilyRow
from turbovit.export.gemma3 import Gemma3Tower
from turbovit.export.plan import plan_build
from turbovit.export.weights import SINGLE

# DeepSeek-VL2 is none of transformers'; its original saves the names without a prefix, other tools with one.
BY_TRANSFORMERS = [row for row in FAMILIES if row.name != "deepseek_vl2"]
# With what is left out of the names.
SPELT = [*((row, "") for row in BY_TRANSFORMERS), *((row, "vision_model.") for row in FAMILIES if row.name == "gemma3")]
PREFIXES = ["", "model.", "model.model.", "model.model.model."]


def digest(folder: Path) -> str:
    return plan_build(folder, "auto", ["onnxruntime"], {}).manifest.source.tensors_sha256


def renamed(folder: Path, prefix: str, left_out: str = "") -> None:
    """Put another prefix before the names of the vision tensors, and leave a part of them out."""
    vision = vision_names(folder)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        bare = {name: name.removeprefix("model.") for name in vision}
        assert not any(name.startswith("model.") for name in bare.values())
        new = {name: prefix + (bare[name].replace(left_out, "") if left_out else bare[name]) for name in vision}
        return {new.get(name, name): tensor for name, tensor in tensors.items()}

    rewrite(folder, change)


def transformers_finds_all(folder: Path, architecture: str) -> bool:
    """Whether transformers loads a checkpoint without making anything up."""
    import transformers

    _, info = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True)
    return not info["missing_keys"]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("row", "left_out"), SPELT, ids=lambda part: getattr(part, "name", part))
def test_a_prefix_is_taken_where_transformers_takes_it(
    row: FamilyRow, left_out: str, prefix: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    sample = request.getfixturevalue(f"tiny_{row.name}")
    folder = shutil.copytree(sample, tmp_path / "renamed")
    renamed(folder, prefix, left_out)
    if transformers_finds_all(folder, row.architectures[0]):
        assert digest(folder) == digest(sample)
        assert same_tower(tower_of(folder), tower_of(sample))
    else:
        with pytest.raises(CheckpointError, match=r"the vision tensors of .* do not fit its config.json: \d+ missing"):
            digest(folder)


@pytest.mark.parametrize("prefix", PREFIXES[:2])
def test_deepseek_vl2_takes_its_names_with_and_without_a_prefix(
    prefix: str, tiny_deepseek_vl2: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_deepseek_vl2, tmp_path / "renamed")
    renamed(folder, prefix)
    assert digest(folder) == digest(tiny_deepseek_vl2)


def test_tensors_that_nothing_reads_change_nothing(any_checkpoint: Path) -> None:
    tower = tower_class(any_checkpoint)
    expected, before = tower_of(any_checkpoint), digest(any_checkpoint)
    unused = {name: torch.full((2,), float("nan")) for name in tower.unused}
    rewrite(any_checkpoint, lambda tensors: tensors | unused)
    assert digest(any_checkpoint) == before
    assert same_tower(tower_of(any_checkpoint), expected)


@pytest.mark.parametrize("row", BY_TRANSFORMERS, ids=lambda row: row.name)
def test_every_family_of_transformers_knows_what_is_unused(row: FamilyRow, request: pytest.FixtureRequest) -> None:
    expected = {"gemma3": 12, "llama4": 1, "qwen3_vl": 1, "qwen3_vl_moe": 1}
    assert len(tower_class(request.getfixturevalue(f"tiny_{row.name}")).unused) == expected[row.name]


def test_gemma3s_unused_head_is_what_transformers_makes(tiny_gemma3: Path, tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    folder = shutil.copytree(tiny_gemma3, tmp_path / "head")
    before = digest(tiny_gemma3)
    config = Gemma3Config.from_pretrained(tiny_gemma3)
    config.vision_config.vision_use_head = True
    Gemma3ForConditionalGeneration.from_pretrained(tiny_gemma3, config=config).save_pretrained(folder)
    saved = load_file(folder / SINGLE)
    head = {Gemma3Tower.canonical_name(name) for name in saved if ".head." in name}
    assert len(head) == 11
    assert Gemma3Tower.unused - head == {"vision_tower.vision_model.embeddings.position_ids"}
    assert digest(folder) == before


def test_the_unused_buffers_are_what_transformers_computes(
    tiny_gemma3: Path, tiny_llama4: Path, tiny_qwen3_vl: Path
) -> None:
    import transformers

    for folder, model in (
        (tiny_gemma3, "Gemma3ForConditionalGeneration"),
        (tiny_llama4, "Llama4ForConditionalGeneration"),
        (tiny_qwen3_vl, "Qwen3VLForConditionalGeneration"),
    ):
        tower = tower_class(folder)
        with torch.device("meta"):
            made = getattr(transformers, model)(transformers.AutoConfig.from_pretrained(folder))
        buffers = {tower.canonical_name(name) for name, _ in made.named_buffers()}
        assert {name for name in tower.unused if ".head." not in name} <= buffers


def test_an_unknown_name_stays_refused(any_checkpoint: Path) -> None:
    prefix = vision_names(any_checkpoint)[-1].rpartition(".")[0]
    rewrite(any_checkpoint, lambda tensors: tensors | {f"{prefix}.extra": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"1 unknown \(.*\.extra\)"):
        digest(any_checkpoint)
