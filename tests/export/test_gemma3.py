"""Gemma 3's tower: the reference's features, the released tensors, and errors for what cannot be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from turbovit.engines.errors import CheckpointError, TurbovitError, UnsupportedModelError
from turbovit.export.checkpoint import SINGLE, image_processor_config, open_checkpoint
from turbovit.export.gemma3 import Gemma3Spec, Gemma3Tower
from turbovit.export.layers import PixelNorm
from turbovit.export.tower import Sample, checked_names, load_tower

BOUND = 1e-5  # the certificate's float32 bound on relative L2
VISION: dict[str, Any] = {
    "hidden_size": 1152,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "intermediate_size": 4304,
}
VISION |= {"image_size": 896, "patch_size": 14, "model_type": "siglip_vision_model", "vision_use_head": False}
PREPROCESSOR = {"size": {"height": 896, "width": 896}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
# Of the released checkpoints: width of the language model, parameters of vision tower and projector.
RELEASED = {"4b": (2560, 419_816_304), "12b": (3840, 421_290_864), "27b": (5376, 423_060_336)}
RELEASED_TENSORS = 439


def config(out: int = 2560, **vision: Any) -> dict[str, Any]:
    """What the released config.json files say about the vision side."""
    return {
        "model_type": "gemma3",
        "mm_tokens_per_image": 256,
        "vision_config": VISION | vision,
        "text_config": {"model_type": "gemma3_text", "hidden_size": out},
    }


def tower_from(folder: Path) -> Gemma3Tower:
    checkpoint = open_checkpoint(folder)
    spec = Gemma3Tower.spec_from_config(checkpoint.config, image_processor_config(folder))
    return load_tower(Gemma3Tower, spec, checkpoint)


def reference_from(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def pixels(folder: Path, count: int) -> tuple[Tensor, Tensor]:
    """Images of several shapes through the checkpoint's processor: uint8, and the reference's floats."""
    from transformers import Gemma3ImageProcessor

    processor = Gemma3ImageProcessor.from_pretrained(folder)
    generator = torch.Generator().manual_seed(7)
    sizes = [(300, 500), (896, 896), (1200, 64)][:count]
    images = [torch.randint(0, 256, (3, *size), generator=generator).to(torch.uint8) for size in sizes]
    options = {"do_pan_and_scan": False, "return_tensors": "pt"}
    raw = processor(images, **options, do_rescale=False, do_normalize=False)["pixel_values"]
    return raw, processor(images, **options)["pixel_values"]


@torch.inference_mode()
def assert_features_equal(folder: Path, count: int) -> None:
    raw, normalised = pixels(folder, count)
    assert raw.dtype == torch.uint8
    expected = reference_from(folder).get_image_features(normalised).pooler_output
    got = tower_from(folder).run({"pixels": raw})["features"]
    assert got.shape == expected.shape
    for row, reference in zip(got, expected, strict=True):
        assert (row - reference).norm() <= BOUND * reference.norm()


@pytest.mark.parametrize("count", [1, 3])
def test_features_equal_the_reference(tiny_gemma3: Path, count: int) -> None:
    assert_features_equal(tiny_gemma3, count)


def test_features_of_a_bfloat16_checkpoint_equal_the_reference(tiny_gemma3: Path, tmp_path: Path) -> None:
    folder = copied(tiny_gemma3, tmp_path, lambda tensors: {name: t.bfloat16() for name, t in tensors.items()})
    assert_features_equal(folder, 1)


@pytest.mark.slow
def test_features_equal_the_reference_at_full_width(tmp_path: Path) -> None:
    write_random_model(tmp_path, config(num_hidden_layers=2))
    assert_features_equal(tmp_path, 1)


def write_random_model(folder: Path, full: dict[str, Any]) -> None:
    """A checkpoint as transformers itself saves it, with a minimal language model and no weight left at its default."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {"num_hidden_layers": 1, "intermediate_size": 8, "head_dim": 8, "num_attention_heads": 1}
    full["text_config"] |= text | {"num_key_value_heads": 1, "vocab_size": 16}
    model = Gemma3ForConditionalGeneration(Gemma3Config.from_dict(full))
    generator = torch.Generator().manual_seed(3)
    for name, weight in model.named_parameters():
        std = prod(weight.shape[1:]) ** -0.5 if weight.ndim > 1 else 0.1
        if name.endswith("mm_input_projection_weight"):
            std = weight.shape[0] ** -0.5
        weight.data = torch.randn(weight.shape, generator=generator) * std
        if "layer" in name and "norm" in name and name.endswith("weight"):
            weight.data += 1
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))


@pytest.mark.parametrize(("mean", "std", "scale"), [(0.5, 0.5, 1 / 255), (0.48145466, 0.26862954, 1 / 256)])
def test_every_pixel_value_is_normalised_as_the_reference_does(mean: float, std: float, scale: float) -> None:
    from transformers import Gemma3ImageProcessor

    processor = Gemma3ImageProcessor(image_mean=[mean] * 3, image_std=[std] * 3, rescale_factor=scale)
    image = torch.arange(256).to(torch.uint8).repeat(3, 1, 1)
    (expected,) = processor(image, do_resize=False, do_pan_and_scan=False, return_tensors="pt")["pixel_values"]
    assert torch.equal(PixelNorm(mean, std, scale)(image), expected)


def test_a_checkpoint_saved_by_transformers_gives_the_same_features(tiny_gemma3: Path, tmp_path: Path) -> None:
    from transformers import AutoProcessor

    reference_from(tiny_gemma3).save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(tiny_gemma3).save_pretrained(tmp_path)
    assert not (tmp_path / "preprocessor_config.json").exists()  # it writes the settings elsewhere
    raw, _ = pixels(tiny_gemma3, 1)
    inputs = {"pixels": raw}
    assert torch.equal(tower_from(tmp_path).run(inputs)["features"], tower_from(tiny_gemma3).run(inputs)["features"])


@pytest.mark.parametrize("size", RELEASED)
def test_sizes_of_the_released_checkpoints(size: str) -> None:
    out, parameters = RELEASED[size]
    spec = Gemma3Tower.spec_from_config(config(out), PREPROCESSOR)
    shapes = Gemma3Tower.tensor_shapes(spec)
    assert len(shapes) == RELEASED_TENSORS
    assert sum(map(prod, shapes.values())) == parameters
    assert spec == Gemma3Spec(1152, 27, 16, 4304, 1e-6, 896, 14, 256, out, 0.5, 0.5, 1 / 255)
    assert (spec.grid, spec.pooled, spec.pool) == (64, 16, 4)


@pytest.mark.parametrize("size", RELEASED)
def test_released_configs_and_tensors_are_taken(data: Path, tmp_path: Path, size: str) -> None:
    folder = data / f"realdata/gemma3/gemma-3-{size}-it"
    shapes = {name: tuple(shape) for name, shape in read(folder / "vision_tensors.shapes.json").items()}
    preprocessor = read(data / "realdata/gemma3/gemma-3-27b-it/preprocessor_config.json")
    spec = Gemma3Tower.spec_from_config(read(folder / "config.json"), preprocessor)
    assert Gemma3Tower.tensor_shapes(spec) == shapes
    shutil.copy(folder / "config.json", tmp_path)
    write_header(tmp_path / SINGLE, shapes | {"language_model.model.norm.weight": (spec.out,)})
    assert checked_names(Gemma3Tower, spec, open_checkpoint(tmp_path)) == sorted(shapes)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def write_header(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A bfloat16 safetensors file whose tensors are a hole: it takes no space."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act is 'gelu', supported: 'gelu_pytorch_tanh'"),
        ({"image_size": 890}, CheckpointError, "do not divide .*image=890"),
        ({"num_attention_heads": 7}, CheckpointError, "do not divide .*heads=7"),
        (
            {"num_attention_heads": 0},
            CheckpointError,
            "num_attention_heads is 0, expected a whole number",
        ),
        ({"patch_size": 0}, CheckpointError, "vision_config.patch_size is 0"),
        ({"num_hidden_layers": -1}, CheckpointError, "num_hidden_layers is -1"),
        ({"hidden_size": "wide"}, CheckpointError, 'vision_config.hidden_size is "wide", expected a whole number'),
        ({"hidden_size": None}, CheckpointError, "vision_config.hidden_size is null, expected a whole number"),
    ],
)
def test_a_vision_config_that_cannot_be_is_an_error(
    change: dict[str, Any], error: type[TurbovitError], message: str
) -> None:
    with pytest.raises(error, match=message):
        Gemma3Tower.spec_from_config(config(**change), PREPROCESSOR)


@pytest.mark.parametrize("tokens", [255, 8192, 9])
def test_a_token_count_that_the_patches_cannot_give_is_an_error(tokens: int) -> None:
    with pytest.raises(CheckpointError, match=f"tokens={tokens}"):
        Gemma3Tower.spec_from_config(config() | {"mm_tokens_per_image": tokens}, PREPROCESSOR)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"size": {"height": 448, "width": 448}},
            CheckpointError,
            "resizes to .*448.*, the vision tower takes 896x896",
        ),
        ({"size": {"shortest_edge": 896}}, CheckpointError, "resizes to .*shortest_edge"),
        ({"image_mean": [0.48, 0.46, 0.41]}, UnsupportedModelError, "image_mean is .*one value for all channels"),
        ({"image_std": [0.5, 0.5, 0.4]}, UnsupportedModelError, "image_std is .*one value for all channels"),
        ({"do_resize": False}, UnsupportedModelError, "do_resize, do_rescale and do_normalize must all be on"),
        ({"do_rescale": False}, UnsupportedModelError, "must all be on"),
        ({"do_normalize": False}, UnsupportedModelError, "must all be on"),
    ],
)
def test_a_processor_that_the_tower_cannot_follow_is_an_error(
    change: dict[str, Any], error: type[TurbovitError], message: str
) -> None:
    with pytest.raises(error, match=message):
        Gemma3Tower.spec_from_config(config(), PREPROCESSOR | change)


def test_processor_settings_reach_the_spec() -> None:
    spec = Gemma3Tower.spec_from_config(
        config(), PREPROCESSOR | {"image_mean": 0.4, "image_std": [0.2] * 3, "rescale_factor": 0.01}
    )
    assert (spec.mean, spec.std, spec.scale) == (0.4, 0.2, 0.01)


@pytest.mark.parametrize("preprocessor", [{}, dict.fromkeys([*PREPROCESSOR, "rescale_factor", "do_rescale"])])
def test_settings_left_out_or_null_are_the_processor_class_defaults(preprocessor: dict[str, Any]) -> None:
    full = config()
    assert Gemma3Tower.spec_from_config(full, preprocessor) == Gemma3Tower.spec_from_config(full, PREPROCESSOR)


def copied(source: Path, target: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> Path:
    """A copy of a checkpoint with changed tensors."""
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(source / name, target)
    save_file(dict(change(load_file(source / SINGLE))), target / SINGLE)
    return target


def test_missing_unknown_and_misshapen_tensors_are_listed(tiny_gemma3: Path, tmp_path: Path) -> None:
    layer = "vision_tower.vision_model.encoder.layers."

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[f"{layer}2.mlp.fc1.bias"] = tensors.pop(f"{layer}1.mlp.fc1.bias")
        tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = torch.ones(65)
        return {name: tensor for name, tensor in tensors.items() if f"{layer}0.mlp" not in name}

    with pytest.raises(CheckpointError) as caught:
        tower_from(copied(tiny_gemma3, tmp_path, change))
    message = str(caught.value)
    assert "do not fit its config.json: 5 missing (" in message
    assert f"{layer}1.mlp.fc1.bias" in message
    assert f"1 unknown ({layer}2.mlp.fc1.bias)" in message
    assert "1 of another shape (multi_modal_projector.mm_soft_emb_norm.weight [65], expected [64])" in message


def test_many_missing_tensors_are_counted(tiny_gemma3: Path, tmp_path: Path) -> None:
    folder = copied(tiny_gemma3, tmp_path, lambda _: {"vision_tower.other": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"39 missing \(.* and 34 more\); 1 unknown \(.*other\)"):
        tower_from(folder)


@pytest.mark.parametrize(
    "renamed",
    [
        lambda name: f"model.{name}",
        lambda name: name.replace("vision_tower.vision_model.", "vision_tower."),
        lambda name: f"model.{name}".replace("vision_tower.vision_model.", "vision_tower."),
    ],
    ids=["model", "no vision_model", "both"],
)
def test_names_of_newer_transformers_are_taken(
    tiny_gemma3: Path, tmp_path: Path, renamed: Callable[[str], str]
) -> None:
    folder = copied(tiny_gemma3, tmp_path, lambda tensors: {renamed(name): t for name, t in tensors.items()})
    expected = tower_from(tiny_gemma3).state_dict()
    got = tower_from(folder).state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_a_tensor_under_both_names_is_an_error(tiny_gemma3: Path, tmp_path: Path) -> None:
    name = "vision_tower.vision_model.post_layernorm.bias"
    folder = copied(tiny_gemma3, tmp_path, lambda tensors: tensors | {f"model.{name}": tensors[name].clone()})
    with pytest.raises(CheckpointError, match=rf"1 there twice \({name}\)"):
        tower_from(folder)


def test_samples_are_seeded_and_within_the_limits(tiny_gemma3: Path) -> None:
    tower = tower_from(tiny_gemma3)
    first, again, other = tower.samples(0), tower.samples(0), tower.samples(1)
    assert [sample.label for sample in first] == ["2 images", "1 image"]
    assert all(sample.within(tower.inputs(), tower.default_limits()) for sample in first)
    assert same(first[0], again[0])
    assert not same(first[0], other[0])
    assert len({bytes(row.numpy().tobytes()) for row in first[0].inputs["pixels"]}) == 2


def same(a: Sample, b: Sample) -> bool:
    return torch.equal(a.inputs["pixels"], b.inputs["pixels"])


def test_a_sample_beyond_a_limit_is_told(tiny_gemma3: Path) -> None:
    tower = tower_from(tiny_gemma3)
    assert [sample.within(tower.inputs(), {"images": 1}) for sample in tower.samples(0)] == [False, True]
