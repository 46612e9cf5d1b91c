"""Llama 4's configs and tensors: the released ones are met exactly, and errors say what cannot be."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from tower_checks import assert_same_tensors, assert_tensors_become_parameters, changed_copy, read, tower_from

from turbovit.engines.errors import CheckpointError, TurbovitError, UnsupportedModelError
from turbovit.export.llama4 import Llama4Spec, Llama4Tower

VISION: dict[str, Any] = {"hidden_size": 1408, "num_hidden_layers": 34, "num_attention_heads": 16}
VISION |= {"intermediate_size": 5632, "image_size": 336, "patch_size": 14, "num_channels": 3, "hidden_act": "gelu"}
VISION |= {"model_type": "llama4_vision_model", "norm_eps": 1e-5, "rope_theta": 10000, "pixel_shuffle_ratio": 0.5}
VISION |= {"projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 4096}
PREPROCESSOR: dict[str, Any] = {"size": {"height": 336, "width": 336}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
STEPS = ("do_resize", "do_rescale", "do_normalize")
RELEASED = ("Llama-4-Scout-17B-16E-Instruct", "Llama-4-Maverick-17B-128E-Instruct")
RELEASED_SPEC = Llama4Spec(1408, 34, 16, 5632, 336, 14, 10000.0, 4096, 4096, 5120, 0.5, 0.5, 1 / 255)
TENSORS, PARAMETERS = 554, 871_932_416


def config(**vision: Any) -> dict[str, Any]:
    """What the released config.json files say about the vision side."""
    text = {"model_type": "llama4_text", "hidden_size": 5120}
    return {
        "model_type": "llama4",
        "image_token_index": 200092,
        "vision_config": VISION | vision,
        "text_config": text,
    }


def spec_from(preprocessor: Mapping[str, Any] = PREPROCESSOR, **vision: Any) -> Llama4Spec:
    return Llama4Tower.spec_from_config(config(**vision), preprocessor)


def test_sizes_of_the_released_checkpoints() -> None:
    spec = spec_from()
    assert spec == RELEASED_SPEC
    assert (spec.grid, spec.tokens, spec.head_size) == (24, 144, 88)
    shapes = Llama4Tower.tensor_shapes(spec)
    assert len(shapes) == TENSORS
    assert sum(map(prod, shapes.values())) == PARAMETERS


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs_and_tensors_are_taken(name: str, data: Path) -> None:
    folder = data / "realdata/llama4"
    shapes = {name: tuple(shape) for name, shape in read(folder / name / "vision_tensors.shapes.json").items()}
    full = read(folder / name / "config.json")
    spec = Llama4Tower.spec_from_config(full, read(folder / RELEASED[0] / "preprocessor_config.json"))
    assert spec == RELEASED_SPEC
    assert Llama4Tower.tensor_shapes(spec) == shapes
    facts = Llama4Tower(replace(spec, hidden=64, layers=1, inner=8)).facts(full)
    assert facts == {"tokens_per_tile": 144, "hidden": 5120, "patch_token_id": 200092}


@pytest.mark.parametrize(
    ("name", "vision"),
    [
        ("vision_model.class_embedding", True),
        ("model.vision_model.model.layers.0.mlp.fc1.bias", True),
        ("multi_modal_projector.linear_1.weight", True),
        ("model.multi_modal_projector.linear_1.weight", True),
        ("language_model.model.layers.0.self_attn.q_proj.weight", False),
        ("language_model.lm_head.weight", False),
    ],
)
def test_vision_tensors_and_others_are_told_apart(name: str, vision: bool) -> None:
    assert Llama4Tower.is_checkpoint_vision(name) is vision


def test_the_tensors_become_the_towers_parameters_exactly() -> None:
    assert_tensors_become_parameters(Llama4Tower, spec_from())


def test_rope_pairs_are_reordered_in_every_head_of_query_and_key_alone() -> None:
    spec = replace(RELEASED_SPEC, hidden=16, heads=2, layers=1, inner=4, adapter_in=4, adapter_out=4, out=4)
    tensors = {name: torch.zeros(shape) for name, shape in Llama4Tower.tensor_shapes(spec).items()}
    for number, part in enumerate("qkv"):
        rows = torch.arange(16.0) + 100 * number
        tensors[f"vision_model.model.layers.0.self_attn.{part}_proj.bias"] = rows
        tensors[f"vision_model.model.layers.0.self_attn.{part}_proj.weight"] = rows[:, None].expand(16, 16)
    state = Llama4Tower.state_from_tensors(spec, tensors)
    order = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    expected = [*order, *(100 + row for row in order), *range(200, 216)]
    assert state["blocks.0.attention.qkv.bias"].tolist() == expected
    assert state["blocks.0.attention.qkv.weight"][:, 3].tolist() == expected


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden_act": "gelu_pytorch_tanh"}, UnsupportedModelError, "hidden_act is 'gelu_pytorch_tanh', .* 'gelu'"),
        ({"num_channels": 4}, UnsupportedModelError, "num_channels is 4, supported: 3"),
        ({"pixel_shuffle_ratio": 0.25}, UnsupportedModelError, "pixel_shuffle_ratio is 0.25, supported: 0.5"),
        ({"image_size": 330}, CheckpointError, "do not fit in .*image=330"),
        ({"image_size": 350}, CheckpointError, "image=350"),  # 25 patches a side: no pairs
        ({"patch_size": 0}, CheckpointError, "vision_config.patch_size is 0, expected a whole number of at least 1"),
        ({"patch_size": [14, 14]}, CheckpointError, r"patch_size is \[14, 14\], expected a whole"),
        ({"num_attention_heads": 7}, CheckpointError, "do not fit in .*heads=7"),
        ({"num_attention_heads": 0}, CheckpointError, "num_attention_heads is 0"),
        ({"num_attention_heads": 64}, CheckpointError, "heads=64"),  # 22 values a head: eleven pairs, no two halves
        ({"num_hidden_layers": 0}, CheckpointError, "num_hidden_layers is 0"),
        ({"rope_theta": None}, CheckpointError, "vision_config.rope_theta is null, expected a number above 0"),
        ({"projector_input_dim": 2048}, CheckpointError, "adapter_in=2048, adapter_out=4096"),
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
        ({"size": {"height": 448, "width": 448}}, CheckpointError, "resizes to .*448.*, the vision tower takes 336"),
        ({"image_mean": [0.48, 0.46, 0.41]}, UnsupportedModelError, "image_mean is .*one value for all channels"),
        ({"image_std": [0.5, 0.5, 0.4]}, UnsupportedModelError, "image_std is .*one value for all channels"),
        *(({step: False}, UnsupportedModelError, "do_resize, do_rescale and do_normalize must") for step in STEPS),
    ],
    ids=str,
)
def test_a_processor_that_the_tower_cannot_follow_is_an_error(
    change: dict[str, Any], error: type[TurbovitError], message: str
) -> None:
    with pytest.raises(error, match=message):
        spec_from(PREPROCESSOR | change)


def test_settings_reach_the_spec() -> None:
    spec = spec_from({"image_mean": 0.4, "image_std": [0.2] * 3, "rescale_factor": 0.01}, rope_theta=500)
    assert (spec.mean, spec.std, spec.scale, spec.theta) == (0.4, 0.2, 0.01, 500.0)


@pytest.mark.parametrize("preprocessor", [{}, dict.fromkeys([*PREPROCESSOR, "rescale_factor", *STEPS])])
def test_settings_left_out_or_null_are_the_processor_class_defaults(preprocessor: dict[str, Any]) -> None:
    assert spec_from(preprocessor) == RELEASED_SPEC


def test_a_config_stays_as_it_was() -> None:
    given = config()
    before = copy.deepcopy(given)
    Llama4Tower(replace(Llama4Tower.spec_from_config(given, PREPROCESSOR), layers=1, hidden=64)).facts(given)
    assert given == before


def test_missing_unknown_and_misshapen_tensors_are_listed(tiny_llama4: Path, tmp_path: Path) -> None:
    layer = "vision_model.model.layers."

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[f"{layer}2.mlp.fc1.bias"] = tensors.pop(f"{layer}1.mlp.fc1.bias")
        tensors["multi_modal_projector.linear_1.bias"] = torch.ones(64)
        tensors["vision_model.class_embedding"] = torch.ones(65)
        return tensors

    with pytest.raises(CheckpointError) as caught:
        tower_from(Llama4Tower, changed_copy(tiny_llama4, tmp_path, change))
    message = str(caught.value)
    assert f"1 missing ({layer}1.mlp.fc1.bias); 2 unknown (" in message
    assert f"{layer}2.mlp.fc1.bias" in message
    assert "multi_modal_projector.linear_1.bias" in message
    assert "1 of another shape (vision_model.class_embedding [65], expected [64])" in message


def test_names_of_newer_transformers_are_taken(tiny_llama4: Path, tmp_path: Path) -> None:
    folder = changed_copy(tiny_llama4, tmp_path, lambda tensors: {f"model.{name}": t for name, t in tensors.items()})
    assert_same_tensors(Llama4Tower, tiny_llama4, folder)
