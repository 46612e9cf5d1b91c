"""Which files are a checkpoint's weights, as the other half's loaders have it; and what is said of what is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_changes import (
    SHARDS,
    as_pointer,
    as_second_version,
    rewrite,
    shard,
    sharded,
    tower_class,
    vision_names,
    with_other_vision,
)
from safetensors.torch import load_file, save_file
from tower_checks import tower_of

from turbovit.engines.errors import CheckpointError
from turbovit.export.checkpoint import open_checkpoint
from turbovit.export.plan import bundle_from_name, find_bundle, plan_build, require_fit
from turbovit.export.weights import INDEX, SERIES, SINGLE, weight_maps

PLAIN = {"a": torch.zeros(2), "b": torch.ones(3)}


def digest(folder: Path) -> str:
    return plan_build(folder, "auto", ["onnxruntime"], {}).manifest.source.tensors_sha256


@pytest.mark.parametrize("layout", ["single", "index", "both"])
def test_the_files_are_those_of_transformers_and_the_pytorch_engine(tmp_path: Path, layout: str) -> None:
    from lmdeploy.pytorch.weight_loader.model_weight_loader import ModelWeightLoader
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    (tmp_path / "config.json").write_text("{}")
    if layout != "index":
        save_file(PLAIN, tmp_path / SINGLE, {"format": "pt"})
    if layout != "single":
        shard(tmp_path, PLAIN)
    ours = {str(tmp_path / file) for file in open_checkpoint(tmp_path).weight_map.values()}
    assert ours == set(ModelWeightLoader(str(tmp_path))._shard_paths)
    files, _ = _get_resolved_checkpoint_files(tmp_path, None, None, None, None, False)
    assert ours == set(files)


@pytest.mark.parametrize("layout", ["both", "index", "shards", "other names"])
def test_turbomind_reads_the_index_first_and_shards_without_one(tmp_path: Path, layout: str) -> None:
    from lmdeploy.turbomind.checkpoint import create_checkpoint

    if layout == "both":
        save_file({"a": torch.full((2,), 7.0)}, tmp_path / SINGLE, {"format": "pt"})
    if layout == "other names":
        save_file(PLAIN, tmp_path / "weights.safetensors", {"format": "pt"})
    else:
        shard(tmp_path, PLAIN, index=layout != "shards")
    maps = weight_maps(tmp_path)
    assert list(maps) == {"both": [SINGLE, INDEX], "index": [INDEX]}.get(layout, [SERIES])
    theirs = create_checkpoint(str(tmp_path))._data
    ours = maps[INDEX if INDEX in maps else SERIES]
    assert ours.keys() == theirs.keys()
    for name, file in ours.items():
        assert torch.equal(load_file(tmp_path / file)[name], theirs[name])


def test_two_sets_that_agree_are_one(any_checkpoint: Path) -> None:
    expected = digest(any_checkpoint)
    shard(any_checkpoint, load_file(any_checkpoint / SINGLE))
    assert digest(any_checkpoint) == expected
    (any_checkpoint / SINGLE).unlink()
    assert digest(any_checkpoint) == expected


@pytest.mark.parametrize("older", ["index", "single"])
def test_two_sets_that_differ_are_refused_by_every_entry(any_checkpoint: Path, older: str) -> None:
    old = load_file(any_checkpoint / SINGLE)
    if older == "index":
        rewrite(any_checkpoint, with_other_vision(any_checkpoint))
        shard(any_checkpoint, old)
    else:
        shard(any_checkpoint, with_other_vision(any_checkpoint)(old))
    for entry in (digest, find_bundle, lambda model: bundle_from_name(str(model))):
        with pytest.raises(CheckpointError, match="holds two sets of weights with different vision tensors") as error:
            entry(any_checkpoint)
        text = str(error.value)
        assert all(f" {name}" in text for name in (SINGLE, INDEX, *SHARDS))
        assert f"delete {SINGLE}, or the index and its shards" in text


def test_two_sets_that_differ_are_refused_for_a_bundle_that_is_named(any_checkpoint: Path, tiny_gemma3_bundle) -> None:
    shard(any_checkpoint, with_other_vision(any_checkpoint)(load_file(any_checkpoint / SINGLE)))
    with pytest.raises(CheckpointError, match="holds two sets of weights"):
        require_fit(any_checkpoint, tiny_gemma3_bundle.path)


def test_a_name_that_only_one_set_has_is_a_difference(tiny_gemma3: Path, changed_model: Callable[..., Path]) -> None:
    folder = changed_model()
    tensors = load_file(folder / SINGLE)
    name = vision_names(folder)[-1]
    shard(folder, {other: tensor for other, tensor in tensors.items() if other != name})
    with pytest.raises(CheckpointError, match="holds two sets of weights with different vision tensors"):
        digest(folder)


def leave_the_index(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(folder / SINGLE), SHARDS[0])}))


def leave_a_damaged_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def index_the_single_file(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(folder / SINGLE), SINGLE)}))


@pytest.mark.parametrize("leave", [leave_the_index, leave_a_damaged_index, index_the_single_file])
def test_an_index_whose_shards_are_gone_is_not_read(any_checkpoint: Path, leave: Callable[[Path], None]) -> None:
    expected = digest(any_checkpoint)
    leave(any_checkpoint)
    assert digest(any_checkpoint) == expected
    tower_of(any_checkpoint)


def test_shards_without_an_index_are_read_by_their_headers(any_checkpoint: Path) -> None:
    expected = digest(any_checkpoint)
    sharded(any_checkpoint, index=False)
    assert digest(any_checkpoint) == expected
    (any_checkpoint / SHARDS[0]).rename(any_checkpoint / "first.safetensors")
    (any_checkpoint / SHARDS[1]).rename(any_checkpoint / "second.safetensors")
    assert digest(any_checkpoint) == expected


def lose_a_shard(folder: Path) -> None:
    sharded(folder, index=False)
    (folder / SHARDS[0]).unlink()


def lose_an_indexed_shard(folder: Path) -> None:
    sharded(folder)
    (folder / SHARDS[0]).unlink()


def double_a_tensor(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "model-a.safetensors")
    save_file(load_file(folder / "model-a.safetensors"), folder / "model-b.safetensors", {"format": "pt"})


def cut_a_shard(folder: Path) -> None:
    sharded(folder)
    (folder / SHARDS[1]).write_bytes((folder / SHARDS[1]).read_bytes()[:-4])


def point_at_the_weights(folder: Path) -> None:
    as_pointer(folder / SINGLE)


def point_at_a_shard(folder: Path) -> None:
    sharded(folder)
    as_pointer(folder / SHARDS[1])


def point_at_the_config(folder: Path) -> None:
    as_pointer(folder / "config.json")


def point_at_the_tokenizer(folder: Path) -> None:
    as_pointer(folder / "tokenizer.json")


def keep_the_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    save_file({"lora_A.weight": torch.zeros(2)}, folder / "adapter_model.safetensors")
    (folder / SINGLE).unlink()


def keep_the_adapter_alone(folder: Path) -> None:
    keep_the_adapter(folder)
    (folder / "config.json").unlink()


def convert_to_pickles(folder: Path) -> None:
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


def keep_gguf(folder: Path) -> None:
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    (folder / SINGLE).unlink()


def keep_gguf_alone(folder: Path) -> None:
    keep_gguf(folder)
    (folder / "config.json").unlink()


SENTENCES = [
    (lose_a_shard, rf"no {INDEX}, and of its series of 2 files it lacks {SHARDS[0]}: download what is missing"),
    (lose_an_indexed_shard, rf"lacks {SHARDS[0]}, which holds the tensor .*: download it again"),
    (double_a_tensor, r"both model-a.safetensors and model-b.safetensors hold the tensor .*: delete the files"),
    (cut_a_shard, rf"{SHARDS[1]} is damaged or cut short .*: download it again"),
    (point_at_the_weights, rf"{SINGLE} is a Git LFS pointer, not the file itself: run `git lfs pull` in "),
    (point_at_a_shard, rf"{SHARDS[1]} is a Git LFS pointer, not the file itself: run `git lfs pull` in "),
    (point_at_the_config, r"config.json is a Git LFS pointer, not the file itself: run `git lfs pull` in "),
    (point_at_the_tokenizer, r"tokenizer.json is a Git LFS pointer, not the file itself: run `git lfs pull` in "),
    (keep_the_adapter, r"a LoRA adapter .adapter_config.json. and no model: merge it into owner/base first"),
    (keep_the_adapter_alone, r"a LoRA adapter .adapter_config.json. and no model: merge it into owner/base first"),
    (convert_to_pickles, r"found \['pytorch_model.bin'\].: convert it to safetensors"),
    (keep_gguf, r"holds GGUF files .model-Q4_K_M.gguf.: the original checkpoint, in safetensors, is expected"),
    (keep_gguf_alone, r"holds GGUF files .model-Q4_K_M.gguf.: the original checkpoint, in safetensors, is expected"),
]


@pytest.mark.parametrize(("change", "sentence"), SENTENCES, ids=lambda part: getattr(part, "__name__", ""))
def test_each_has_a_sentence_of_its_own(
    any_checkpoint: Path, change: Callable[[Path], None], sentence: str, tiny_gemma3_bundle
) -> None:
    change(any_checkpoint)
    for entry in (digest, find_bundle, lambda model: require_fit(model, tiny_gemma3_bundle.path)):
        with pytest.raises(CheckpointError, match=sentence) as error:
            entry(any_checkpoint)
        assert str(any_checkpoint) in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("position", [0, -1])
def test_one_value_that_is_no_number_is_the_checkpoints_fault(
    any_checkpoint: Path, value: float, position: int
) -> None:
    name = vision_names(any_checkpoint)[position]
    called = tower_class(any_checkpoint).canonical_name(name)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[name].view(-1)[-1] = value
        return tensors

    rewrite(any_checkpoint, change)
    digest(any_checkpoint)
    with pytest.raises(CheckpointError, match=rf"the checkpoint holds NaN or infinity in {called} \(1 of the"):
        tower_of(any_checkpoint)


def test_a_merged_model_may_keep_its_adapter_beside_it(any_checkpoint: Path) -> None:
    expected = digest(any_checkpoint)
    (any_checkpoint / "adapter_config.json").write_text("{}")
    save_file({"lora_A.weight": torch.zeros(2)}, any_checkpoint / "adapter_model.safetensors")
    assert digest(any_checkpoint) == expected


def test_other_weights_are_another_digest(any_checkpoint: Path, tmp_path: Path) -> None:
    assert digest(as_second_version(any_checkpoint, tmp_path / "v2")) != digest(any_checkpoint)
