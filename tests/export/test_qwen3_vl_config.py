"""Qwen3-VL's configs and tensors: the released ones are met exactly, and errors say what cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from tower_checks import assert_same_tensors, assert_tensors_become_parameters, changed_copy, read, tower_from

from turbovit.engines.errors import BuildError, CheckpointError, TurbovitError, UnsupportedModelError
from turbovit.export.plan import plan_build
from turbovit.export.qwen3_vl import Qwen3VLSpec, Qwen3VLTower

PREPROCESSOR: dict[str, Any] = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
PREPROCESSOR |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
LARGE: dict[str, Any] = {"hidden_size": 1152, "depth": 27, "intermediate_size": 4304}
LARGE |= {"deepstack_visual_indexes": [8, 16, 24]}
SMALL: dict[str, Any] = {"hidden_size": 1024, "depth": 24, "intermediate_size": 4096}
SMALL |= {"deepstack_visual_indexes": [5, 11, 17]}
# Of the released checkpoints: vision config, tensors, parameters with all mergers.
RELEASED: dict[str, tuple[dict[str, Any], int, int]] = {
    "Qwen3-VL-2B-Instruct": (SMALL | {"out_hidden_size": 2048}, 315, 406_957_056),
    "Qwen3-VL-4B-Instruct": (SMALL | {"out_hidden_size": 2560}, 315, 415_347_712),
    "Qwen3-VL-8B-Instruct": (LARGE | {"out_hidden_size": 4096}, 351, 576_388_336),
    "Qwen3-VL-32B-Instruct": (LARGE | {"out_hidden_size": 5120}, 351, 595_266_800),
    "Qwen3-VL-30B-A3B-Instruct": (LARGE | {"out_hidden_size": 2048}, 351, 538_631_408),
    "Qwen3-VL-235B-A22B-Instruct": (LARGE | {"out_hidden_size": 4096}, 351, 576_388_336),
}


def config(**vision: Any) -> dict[str, Any]:
    """What the released config.json files say about the vision side."""
    shared = {"hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "model_type": "qwen3_vl", "num_heads": 16}
    shared |= {"num_position_embeddings": 2304, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return {"model_type": "qwen3_vl", "vision_config": shared | LARGE | {"out_hidden_size": 4096} | vision}


def spec_from(preprocessor: Mapping[str, Any] = PREPROCESSOR, **vision: Any) -> Qwen3VLSpec:
    return Qwen3VLTower.spec_from_config(config(**vision), preprocessor)


@pytest.mark.parametrize(("vision", "tensors", "parameters"), RELEASED.values(), ids=RELEASED)
def test_sizes_of_the_released_checkpoints(vision: dict[str, Any], tensors: int, parameters: int) -> None:
    shapes = Qwen3VLTower.tensor_shapes(spec_from(**vision))
    assert len(shapes) == tensors
    assert sum(map(prod, shapes.values())) == parameters


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs_and_tensors_are_taken(name: str, data: Path) -> None:
    folder = data / "realdata/qwen3_vl"
    shapes = {name: tuple(shape) for name, shape in read(folder / name / "vision_tensors.shapes.json").items()}
    preprocessor = read(folder / "Qwen3-VL-8B-Instruct/preprocessor_config.json")
    full = read(folder / name / "config.json")
    spec = Qwen3VLTower.spec_from_config(full, preprocessor)
    assert spec == spec_from(**RELEASED[name][0])
    assert Qwen3VLTower.tensor_shapes(spec) == shapes
    facts = Qwen3VLTower(small(spec)).facts(full)
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    assert [facts[name] for name in ids] == [151655, 151656, 151652, 151653]


def small(spec: Qwen3VLSpec) -> Qwen3VLSpec:
    return replace(spec, hidden=64, layers=1, inner=8, levels=())


def test_released_tensors_and_others_are_told_apart(data: Path) -> None:
    index = read(data / "realdata/qwen3_vl/Qwen3-VL-8B-Instruct/model.safetensors.index.json")["weight_map"]
    vision = {name for name in index if Qwen3VLTower.is_checkpoint_vision(name)}
    assert vision == set(Qwen3VLTower.tensor_shapes(spec_from()))
    assert len(index) > len(vision)


@pytest.mark.parametrize("vision", [SMALL, LARGE], ids=["1024", "1152"])
def test_the_tensors_become_the_towers_parameters_exactly(vision: dict[str, Any]) -> None:
    assert_tensors_become_parameters(Qwen3VLTower, spec_from(**vision))


def test_a_patchs_values_are_in_channel_frame_row_column_order() -> None:
    name = "model.visual.patch_embed.proj.weight"
    kernel = torch.arange(2 * 3 * 2 * 16 * 16.0).reshape(2, 3, 2, 16, 16)
    (row, _) = Qwen3VLTower.state_from_tensors(spec_from(), {name: kernel})["embedding.weight"]
    assert row[1 * 2 * 256 + 1 * 256 + 3 * 16 + 5] == kernel[0, 1, 1, 3, 5]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act is 'gelu', supported: 'gelu_pytorch_tanh'"),
        ({"in_channels": 4}, UnsupportedModelError, "in_channels is 4, supported: 3"),
        ({"rope_parameters": {"rope_theta": 5e5}}, UnsupportedModelError, "rope_theta is 500000.0, supported"),
        ({"num_position_embeddings": 2300}, CheckpointError, "do not fit in .*positions=2300"),
        ({"num_position_embeddings": 0}, CheckpointError, "num_position_embeddings is 0"),
        ({"num_heads": 7}, CheckpointError, "do not fit in .*heads=7"),
        ({"num_heads": 0}, CheckpointError, "num_heads is 0, expected a whole number of at least 1"),
        ({"num_heads": 64}, CheckpointError, "heads=64"),  # 18 values a head: nine pairs are no two halves
        ({"hidden_size": 1144, "num_heads": 4}, CheckpointError, "hidden=1144"),
        (
            {"deepstack_visual_indexes": [8, 27]},
            CheckpointError,
            r"deepstack_visual_indexes is \[8, 27\], .* from 0 to 26",
        ),
        ({"deepstack_visual_indexes": [-1]}, CheckpointError, r"deepstack_visual_indexes is \[-1\]"),
        ({"deepstack_visual_indexes": [8, 8]}, CheckpointError, r"deepstack_visual_indexes is \[8, 8\]"),
        ({"depth": 0, "deepstack_visual_indexes": []}, CheckpointError, "vision_config.depth is 0"),
        ({"patch_size": 0}, CheckpointError, "patch_size is 0"),
        ({"patch_size": [16, 16]}, CheckpointError, r"patch_size is \[16, 16\], expected a whole"),
        ({"spatial_merge_size": 0}, CheckpointError, "spatial_merge_size is 0"),
        ({"hidden_size": "wide"}, CheckpointError, 'vision_config.hidden_size is "wide", expected a whole number'),
        ({"hidden_size": None}, CheckpointError, "vision_config.hidden_size is null, expected a whole number"),
    ],
    ids=str,
)
def test_a_vision_config_that_cannot_be_is_an_error(
    change: dict[str, Any], error: type[TurbovitError], message: str
) -> None:
    with pytest.raises(error, match=message):
        spec_from(**change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"patch_size": 14}, CheckpointError, "the processor's patch_size is 14, the vision tower's 16"),
        ({"patch_size": None}, CheckpointError, "the processor's patch_size is 14"),  # its class's default
        ({"merge_size": 4}, CheckpointError, "the processor's merge_size is 4, the vision tower's 2"),
        ({"temporal_patch_size": 1}, CheckpointError, "temporal_patch_size is 1, the vision tower's 2"),
        ({"image_mean": [0.48, 0.46, 0.41]}, UnsupportedModelError, "image_mean is .*one value for all channels"),
        ({"image_mean": None}, UnsupportedModelError, "image_mean is .*one value for all channels"),
        ({"image_std": [0.5, 0.5, 0.4]}, UnsupportedModelError, "image_std is .*one value for all channels"),
        ({"do_resize": False}, UnsupportedModelError, "do_resize, do_rescale and do_normalize must all be on"),
        ({"do_rescale": False}, UnsupportedModelError, "must all be on"),
        ({"do_normalize": False}, UnsupportedModelError, "must all be on"),
    ],
    ids=str,
)
def test_a_processor_that_the_tower_cannot_follow_is_an_error(
    change: dict[str, Any], error: type[TurbovitError], message: str
) -> None:
    with pytest.raises(error, match=message):
        spec_from(PREPROCESSOR | change)
    left_out = {name: value for name, value in (PREPROCESSOR | change).items() if value is not None}
    with pytest.raises(error, match=message):
        spec_from(left_out)


def test_processor_settings_reach_the_spec() -> None:
    changed = {"image_mean": 0.4, "image_std": [0.2] * 3, "rescale_factor": 0.01}
    spec = spec_from(PREPROCESSOR | changed)
    assert (spec.mean, spec.std, spec.scale) == (0.4, 0.2, 0.01)
    assert spec_from(PREPROCESSOR | {"rescale_factor": None}).scale == spec_from().scale == 1 / 255


def test_names_without_the_leading_model_are_taken(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    folder = changed_copy(
        tiny_qwen3_vl, tmp_path, lambda tensors: {name.removeprefix("model."): t for name, t in tensors.items()}
    )
    assert_same_tensors(Qwen3VLTower, tiny_qwen3_vl, folder)


def test_a_tensor_under_both_names_is_an_error(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    name = "visual.pos_embed.weight"
    folder = changed_copy(tiny_qwen3_vl, tmp_path, lambda tensors: tensors | {name: tensors[f"model.{name}"].clone()})
    with pytest.raises(CheckpointError, match=rf"1 there twice \(model.{name}\)"):
        tower_from(Qwen3VLTower, folder)


def test_missing_unknown_and_misshapen_tensors_are_listed(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.visual.deepstack_merger_list.3.norm.bias"] = tensors.pop("model.visual.merger.norm.bias")
        tensors["model.visual.blocks.1.norm1.weight"] = torch.ones(65)
        return tensors

    with pytest.raises(CheckpointError) as caught:
        tower_from(Qwen3VLTower, changed_copy(tiny_qwen3_vl, tmp_path, change))
    message = str(caught.value)
    assert "1 missing (model.visual.merger.norm.bias)" in message
    assert "1 unknown (model.visual.deepstack_merger_list.3.norm.bias)" in message
    assert "1 of another shape (model.visual.blocks.1.norm1.weight [65], expected [64])" in message


def test_limits_are_given_in_images_and_pixels(tiny_qwen3_vl: Path) -> None:
    def limits(**given: int) -> dict[str, int]:
        return plan_build(tiny_qwen3_vl, "fp32", ["onnxruntime"], given).manifest.limits

    assert limits() == {"frames": 8, "merged": 16384}
    assert limits(images=2, pixels=1_000_000) == {"frames": 2, "merged": 976}
    with pytest.raises(BuildError, match="the limit of pixels is 1000, expected at least 1024"):
        limits(pixels=1000)
