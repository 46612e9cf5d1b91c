"""DeepSeek-VL2's configs and tensors: the released ones are met exactly, and errors say what cannot be."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_vl2_goldens import RELEASED
from torch import Tensor
from tower_checks import assert_same_tensors, assert_tensors_become_parameters, changed_copy, read, tower_from

from turbovit.engines.errors import CheckpointError, TurbovitError, UnsupportedModelError
from turbovit.engines.families import architecture_from_config, family_from_architecture
from turbovit.export.checkpoint import open_checkpoint
from turbovit.export.deepseek_vl2 import DeepseekVL2Spec, DeepseekVL2Tower
from turbovit.export.plan import plan_build

VISION: dict[str, Any] = {"layers": 27, "mlp_ratio": 3.7362, "patch_size": 14, "width": 1152, "model_type": "vision"}
PROCESSOR: dict[str, Any] = {"candidate_resolutions": [[384, 384], [768, 384]], "patch_size": 14, "downsample_ratio": 2}
PROCESSOR |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "normalize": True, "image_token": "<image>"}
RELEASED_SPEC = DeepseekVL2Spec(1152, 27, 16, 4304, 384, 14, 2, (4608, 1280, 1280), 0.5, 0.5, True)
WIDTHS = dict(zip(RELEASED, (1280, 2048, 2560), strict=True))
TENSORS = 27 * 12 + 2 + 1 + 2 + 13 + 4 + 2  # blocks, patches, positions, norm, unused pool, projector, rows between
PARAMETERS = {1280: 435_767_360, 2048: 441_865_280, 2560: 446_585_920}


def config(vision: Mapping[str, Any] = {}, projector: Mapping[str, Any] = {}, **model: Any) -> dict[str, Any]:
    """What the released config.json files say about the vision side."""
    return {
        "model_type": "deepseek_vl_v2",
        "vision_config": VISION | dict(vision),
        "projector_config": {"model_type": "mlp_projector", "n_embed": 1280} | dict(projector),
        "language_config": {"architectures": ["DeepseekV2ForCausalLM"]},
        "tile_tag": "2D",
        **model,
    }


def spec_from(given: Mapping[str, Any] | None = None, **processor: Any) -> DeepseekVL2Spec:
    return DeepseekVL2Tower.spec_from_config(config() if given is None else given, PROCESSOR | processor)


def test_sizes_of_the_released_checkpoints() -> None:
    assert spec_from() == RELEASED_SPEC
    assert (RELEASED_SPEC.grid, RELEASED_SPEC.side, RELEASED_SPEC.out) == (27, 14, 1280)
    for width, parameters in PARAMETERS.items():
        shapes = DeepseekVL2Tower.tensor_shapes(spec_from(config(projector={"n_embed": width})))
        assert len(shapes) == TENSORS
        assert sum(map(prod, shapes.values())) == parameters


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs_and_tensors_are_taken(name: str, data: Path) -> None:
    folder = data / "realdata/deepseek_vl2" / name
    shapes = {name: tuple(shape) for name, shape in read(folder / "vision_tensors.shapes.json").items()}
    full = read(folder / "config.json")
    assert family_from_architecture(open_checkpoint(folder).architecture).name == "deepseek_vl2"
    spec = DeepseekVL2Tower.spec_from_config(full, DeepseekVL2Tower.image_processor(folder))
    width = WIDTHS[name]
    assert spec == replace(RELEASED_SPEC, projector=(4608, width, width))
    assert DeepseekVL2Tower.tensor_shapes(spec) == shapes
    facts = DeepseekVL2Tower(replace(spec, hidden=64, layers=1, inner=8, projector=(256, width))).facts(full)
    assert facts == {"tile": 384, "tokens_per_side": 14, "hidden": width, "global_view_pos": "head"}


def test_released_tensors_and_others_are_told_apart(data: Path) -> None:
    index = read(data / "realdata/deepseek_vl2/deepseek-vl2/model.safetensors.index.json")["weight_map"]
    vision = {name for name in index if DeepseekVL2Tower.is_checkpoint_vision(name)}
    assert vision == set(DeepseekVL2Tower.tensor_shapes(spec_from()))
    assert len(index) > len(vision)


def test_the_language_half_names_the_architecture_where_nothing_else_does() -> None:
    assert architecture_from_config(config()) == "DeepseekVLV2ForCausalLM"
    assert architecture_from_config(config(architectures=["DeepseekVLV2ForCausalLM"])) == "DeepseekVLV2ForCausalLM"
    assert architecture_from_config(config(architectures=["DeepseekOCRForCausalLM"])) == "DeepseekOCRForCausalLM"
    for other in (
        {"language_config": {"architectures": ["DeepseekV2ForCausalLM"]}},  # no vision half
        config(language_config={"architectures": ["LlamaForCausalLM"]}),
        config(language_config={"architectures": []}),
        config(language_config="DeepseekV2ForCausalLM"),
        {"architectures": []},
        {},
    ):
        assert architecture_from_config(other) is None
    with pytest.raises(UnsupportedModelError, match=r"architecture None is not .*DeepseekVLV2ForCausalLM"):
        family_from_architecture(None)


def test_the_tensors_become_the_towers_parameters_exactly() -> None:
    assert_tensors_become_parameters(DeepseekVL2Tower, spec_from())
    assert_tensors_become_parameters(DeepseekVL2Tower, spec_from(config(projector={"depth": 3, "mlp_ratio": 2})))


def test_the_unused_pool_is_wanted_and_left_out(tiny_deepseek_vl2: Path, tmp_path: Path) -> None:
    pool = [name for name in DeepseekVL2Tower.tensor_shapes(RELEASED_SPEC) if "attn_pool" in name]
    assert len(pool) == 13
    tower = tower_from(DeepseekVL2Tower, tiny_deepseek_vl2)
    assert not [name for name in tower.state_dict() if "pool" in name]


def test_values_of_a_patch_are_in_channel_row_column_order() -> None:
    spec = replace(RELEASED_SPEC, hidden=2, heads=1, layers=1, inner=2, projector=(8, 4))
    tensors = {name: torch.zeros(shape) for name, shape in DeepseekVL2Tower.tensor_shapes(spec).items()}
    kernel = torch.arange(2 * 3 * 14 * 14.0).reshape(2, 3, 14, 14)
    tensors["vision.patch_embed.proj.weight"] = kernel
    row = DeepseekVL2Tower.state_from_tensors(spec, tensors)["embedding.weight"][1]
    assert row[2 * 196 + 5 * 14 + 3] == kernel[1, 2, 5, 3]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (config(tile_tag="1D"), UnsupportedModelError, "config.json: tile_tag is '1D', supported: '2D'"),
        (config(global_view_pos="both"), CheckpointError, 'global_view_pos is "both", expected head or tail'),
        (config({"class_token": True}), UnsupportedModelError, "vision_config.class_token is True, supported: False"),
        (config({"ignore_head": False}), UnsupportedModelError, "vision_config.ignore_head is False"),
        (config({"global_pool": "avg"}), UnsupportedModelError, "global_pool is 'avg', supported: 'map'"),
        (
            config({}, {"projector_type": "linear"}),
            UnsupportedModelError,
            "projector_type is 'linear'",
        ),
        (config({}, {"token_pooling": True}), UnsupportedModelError, "projector_config.token_pooling is True"),
        (config({"heads": 7}), CheckpointError, "do not fit in .*heads=7"),
        (config({"heads": 0}), CheckpointError, "vision_config.heads is 0, expected a whole number of at least 1"),
        (config({"layers": 0}), CheckpointError, "vision_config.layers is 0"),
        (config({"width": 1024}), CheckpointError, r"hidden=1024.*projector=\(4608, 1280, 1280\)"),
        (config({"width": "wide"}), CheckpointError, 'vision_config.width is "wide", expected a whole number'),
        (config({"patch_size": 0}), CheckpointError, "patch_size is 0"),
        (config({}, {"n_embed": 1280.5}), CheckpointError, "projector_config.n_embed is 1280.5, expected a whole"),
        (config(vision_config=["siglip"]), CheckpointError, r'vision_config is \["siglip"\], expected an object'),
        (config({"image_size": 448}), CheckpointError, r"the first must be \[448, 448\]"),
        (config({"patch_size": 16}), CheckpointError, "patch_size is 14, the vision tower's 16"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_is_an_error(given: dict[str, Any], error: type[TurbovitError], message: str) -> None:
    with pytest.raises(error, match=message):
        spec_from(given)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"patch_size": 16}, CheckpointError, "patch_size is 16, the vision tower's 14"),
        ({"downsample_ratio": None}, CheckpointError, "has no downsample_ratio, expected a whole"),
        (
            {"candidate_resolutions": None},
            CheckpointError,
            r"has no candidate_resolutions, expected a list of ",
        ),
        ({"candidate_resolutions": []}, CheckpointError, r"is \[\], expected a list"),
        ({"candidate_resolutions": [[384, 0]]}, CheckpointError, "expected a list"),
        ({"candidate_resolutions": [[768, 384]]}, CheckpointError, r"the first must be \[384, 384\]"),
        ({"candidate_resolutions": [[384, 384], [384, 400]]}, CheckpointError, "the others made of such tiles"),
        ({"image_mean": [0.48, 0.46, 0.41]}, UnsupportedModelError, "image_mean is .*one value for all channels"),
        ({"image_std": [0.5, 0.5, 0.4]}, UnsupportedModelError, "image_std is .*one value for all channels"),
        ({"normalize": False}, UnsupportedModelError, "normalize is False, supported: True"),
        ({"sft_format": "plain"}, UnsupportedModelError, "sft_format is 'plain', supported: 'deepseek'"),
        ({"image_token": "<img>"}, UnsupportedModelError, "image_token is '<img>', supported: '<image>'"),
    ],
    ids=str,
)
def test_a_processor_that_cannot_be_followed_is_an_error(
    change: dict[str, Any], error: type[TurbovitError], message: str
) -> None:
    with pytest.raises(error, match=message):
        spec_from(**change)


def test_settings_reach_the_spec() -> None:
    given = config({"heads": 8, "layers": 2}, {"n_embed": 64, "depth": 3, "mlp_ratio": 2}, global_view_pos="tail")
    spec = spec_from(given, image_mean=0.4, image_std=[0.2] * 3)
    assert (spec.heads, spec.layers, spec.projector) == (8, 2, (4608, 128, 128, 64))
    assert (spec.mean, spec.std, spec.global_first) == (0.4, 0.2, False)
    assert DeepseekVL2Tower(replace(spec, layers=1)).facts(given)["global_view_pos"] == "tail"
    defaults = spec_from(image_mean=None, image_std=None, normalize=None, image_token=None)
    assert defaults == RELEASED_SPEC


def test_a_config_stays_as_it_was() -> None:
    given = config()
    before = copy.deepcopy(given)
    spec_from(given)
    assert given == before


def test_names_with_a_leading_model_are_taken(tiny_deepseek_vl2: Path, tmp_path: Path) -> None:
    folder = changed_copy(
        tiny_deepseek_vl2, tmp_path, lambda tensors: {f"model.{name}": tensor for name, tensor in tensors.items()}
    )
    assert_same_tensors(DeepseekVL2Tower, tiny_deepseek_vl2, folder)


def test_missing_unknown_and_misshapen_tensors_are_listed(tiny_deepseek_vl2: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["vision.blocks.2.norm1.bias"] = tensors.pop("vision.blocks.1.norm1.bias")
        tensors["projector.layers.4.bias"] = torch.ones(64)
        tensors["image_newline"] = torch.ones(65)
        del tensors["view_seperator"]
        return tensors

    with pytest.raises(CheckpointError) as caught:
        tower_from(DeepseekVL2Tower, changed_copy(tiny_deepseek_vl2, tmp_path, change))
    message = str(caught.value)
    assert "2 missing (" in message
    assert "vision.blocks.1.norm1.bias" in message
    assert "view_seperator" in message
    assert "2 unknown (projector.layers.4.bias, vision.blocks.2.norm1.bias)" in message
    assert "1 of another shape (image_newline [65], expected [64])" in message


def test_a_checkpoint_without_its_processor_file_is_an_error(tiny_deepseek_vl2: Path, tmp_path: Path) -> None:
    folder = changed_copy(tiny_deepseek_vl2, tmp_path, lambda tensors: tensors)
    (folder / "processor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no processor_config.json"):
        plan_build(folder, "fp32", ["onnxruntime"], {})


def test_limits_are_given_in_images(tiny_deepseek_vl2: Path) -> None:
    assert plan_build(tiny_deepseek_vl2, "fp32", ["onnxruntime"], {}).manifest.limits == {"tiles": 10}
    assert plan_build(tiny_deepseek_vl2, "fp32", ["onnxruntime"], {"images": 4}).manifest.limits == {"tiles": 4}


def test_another_place_of_the_global_view_makes_another_bundle(tiny_deepseek_vl2: Path, tmp_path: Path) -> None:
    folder = changed_copy(tiny_deepseek_vl2, tmp_path, lambda tensors: tensors)
    tail = read(folder / "config.json") | {"global_view_pos": "tail"}
    (folder / "config.json").write_text(json.dumps(tail))
    one, other = (plan_build(path, "fp32", ["onnxruntime"], {}).manifest for path in (tiny_deepseek_vl2, folder))
    assert one.identity != other.identity
