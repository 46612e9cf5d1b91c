"""Llama 4's tower, in torch and as a graph: the reference's features for any number of tiles."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from turbovit.engines.bundle import Bundle
from turbovit.engines.encoder import open_encoder
from turbovit.export.build import build
from turbovit.export.checkpoint import SINGLE, image_processor_config, open_checkpoint
from turbovit.export.llama4 import Llama4Tower
from turbovit.export.tower import load_tower

BOUND = 1e-5  # the certificate's float32 bound on relative L2
COUNTS = range(1, 18)  # tiles; 17 are an image of 16 and its global view
FULL_WIDTH: dict[str, Any] = {"hidden_size": 1408, "num_attention_heads": 16, "intermediate_size": 5632}
FULL_WIDTH |= {"projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 4096}
PREPROCESSOR = {"image_processor_type": "Llama4ImageProcessorFast", "size": {"height": 336, "width": 336}}


def tower_from(folder: Path) -> Llama4Tower:
    checkpoint = open_checkpoint(folder)
    spec = Llama4Tower.spec_from_config(checkpoint.config, image_processor_config(folder))
    return load_tower(Llama4Tower, spec, checkpoint)


def tiles(count: int) -> Tensor:
    """uint8 [count, 3, 336, 336], no two alike."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, 3, 336, 336), generator=generator).to(torch.uint8)


def normalised(pixels: Tensor, **settings: Any) -> Tensor:
    """As the reference's image processor does it for a tile that needs no resizing."""
    from transformers import Llama4ImageProcessor

    processor = Llama4ImageProcessor(**settings)
    rows = [processor(tile, return_tensors="pt")["pixel_values"] for tile in pixels]
    return torch.cat(rows)


@torch.inference_mode()
def assert_equal_the_reference(features: Tensor, vision: Any, projector: Any, pixels: Tensor) -> None:
    """Tile by tile. `vision` and `projector` are transformers' modules."""
    hidden = vision(normalised(pixels).float(), return_dict=True).last_hidden_state
    expected = projector(hidden.flatten(0, 1)).unflatten(0, (len(pixels), 144))
    assert features.shape == expected.shape
    for row, reference in zip(features, expected, strict=True):
        assert (row - reference).norm() <= BOUND * reference.norm()


def test_features_equal_the_reference_for_any_number_of_tiles(tiny_llama4: Path, tiny_llama4_bundle: Bundle) -> None:
    from transformers import Llama4ForConditionalGeneration

    model = Llama4ForConditionalGeneration.from_pretrained(tiny_llama4, dtype=torch.float32).eval()
    tower, runner = tower_from(tiny_llama4), open_encoder(tiny_llama4_bundle, device="cpu").runner
    for count in COUNTS:
        inputs = {"pixels": tiles(count)}
        for outputs in (tower.run(inputs), runner.run(inputs)):
            assert list(outputs) == ["features"]
            assert_equal_the_reference(
                outputs["features"], model.vision_model, model.multi_modal_projector, inputs["pixels"]
            )


def write_random_vision(folder: Path, **sizes: Any) -> tuple[Any, Any]:
    """A checkpoint of a vision side alone, no weight left at its default; returns transformers' models of it."""
    from transformers import Llama4Config
    from transformers.models.llama4.modeling_llama4 import Llama4MultiModalProjector, Llama4VisionModel

    config = {"vision_config": {**sizes, "image_size": 336, "rope_theta": 10000}, "text_config": {"hidden_size": 96}}
    full = Llama4Config.from_dict(json.loads(json.dumps(config)))
    parts = {"vision_model": Llama4VisionModel(full.vision_config), "multi_modal_projector": None}
    parts["multi_modal_projector"] = Llama4MultiModalProjector(full)
    generator, tensors = torch.Generator().manual_seed(3), {}
    for prefix, part in parts.items():
        for name, weight in part.eval().requires_grad_(False).named_parameters():
            std = 0.5 if "embedding_vlm" in name else prod(weight.shape[1:]) ** -0.5 if weight.ndim > 1 else 0.1
            weight.data = torch.randn(weight.shape, generator=generator) * std
            if "norm" in name and name.endswith("weight"):
                weight.data += 1
            tensors[f"{prefix}.{name}"] = weight.data
    save_file(tensors, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Llama4ForConditionalGeneration"]}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return parts["vision_model"], parts["multi_modal_projector"]


@pytest.mark.slow
def test_features_equal_the_reference_at_full_width(tmp_path: Path) -> None:
    vision, projector = write_random_vision(tmp_path, num_hidden_layers=2, **FULL_WIDTH)
    pixels = tiles(2)
    inputs = {"pixels": pixels}
    assert_equal_the_reference(tower_from(tmp_path).run(inputs)["features"], vision, projector, pixels)
    runner = open_encoder(build(tmp_path, tmp_path / "bundle").bundle, device="cpu").runner
    assert_equal_the_reference(runner.run(inputs)["features"], vision, projector, pixels)


@pytest.mark.parametrize("settings", [{}, {"image_mean": [0.48] * 3, "image_std": [0.27] * 3, "rescale_factor": 1e-2}])
def test_every_pixel_value_is_normalised_as_the_reference_does(settings: dict[str, Any], tiny_llama4: Path) -> None:
    spec = Llama4Tower.spec_from_config(open_checkpoint(tiny_llama4).config, settings)
    with torch.device("meta"):
        tower = Llama4Tower(spec)
    pixels = (torch.arange(336 * 336) % 256).to(torch.uint8).reshape(1, 1, 336, 336).expand(1, 3, -1, -1)
    expected = normalised(pixels, **settings)
    assert expected.dtype == torch.bfloat16
    assert torch.equal(tower.normalise(pixels), expected.float())


def test_the_reference_normalises_as_float32_would_not() -> None:
    """What the table is for."""
    pixels = torch.full((1, 3, 336, 336), 128, dtype=torch.uint8)
    assert normalised(pixels).unique().tolist() == [0.0078125]
    assert (128 / 255 - 0.5) / 0.5 < 0.004


def graph(bundle: Bundle, form: str, precision: str = "fp32") -> ir.Model:
    return ir.load(bundle.file(f"model.{precision}.{form}.onnx"))


def count(model: ir.Model, op: str) -> int:
    return sum(node.op_type == op for node in model.graph)


def test_every_attention_is_a_multihead_attention(tiny_llama4_bundle: Bundle) -> None:
    base, multihead = (graph(tiny_llama4_bundle, form) for form in ("attention", "multihead"))
    assert (count(base, "Attention"), count(base, "MultiHeadAttention")) == (2, 0)
    assert (count(multihead, "Attention"), count(multihead, "MultiHeadAttention")) == (0, 2)


@pytest.mark.parametrize("form", ["attention", "multihead"])
def test_tiles_stay_symbolic_and_nothing_is_computed_in_vain(form: str, tiny_llama4_bundle: Bundle) -> None:
    model = graph(tiny_llama4_bundle, form)
    assert {value.name: str(value.shape) for value in model.graph.inputs} == {"pixels": "[tiles,3,336,336]"}
    assert {value.name: str(value.shape) for value in model.graph.outputs} == {"features": "[tiles,144,64]"}
    unread = [
        node.name
        for node in model.graph
        if not any(value.uses() or value in model.graph.outputs for value in node.outputs)
    ]
    assert unread == []
    assert count(model, "Cos") == count(model, "Sin") == 0  # rope is a constant


@pytest.mark.parametrize("form", ["attention", "multihead"])
def test_the_graph_holds_the_table_of_pixel_values_exactly(form: str, tiny_llama4_bundle: Bundle) -> None:
    model = graph(tiny_llama4_bundle, form)
    assert [use.node.op_type for use in model.graph.inputs[0].uses() if use.node.op_type != "Shape"] == ["Cast"]
    (gather,) = (node for node in model.graph if node.op_type == "Gather")
    assert gather.inputs[1].producer().op_type == "Cast"
    table = ir.convenience.get_const_tensor(gather.inputs[0])
    assert table is not None
    pixels = torch.arange(256).to(torch.uint8).repeat(441).reshape(1, 1, 336, 336).expand(1, 3, -1, -1)
    expected = normalised(pixels).float()[0, 0].flatten()[:256].numpy()
    assert np.array_equal(table.numpy(), expected[:, None])


def test_rope_and_norms_are_float32_in_half_precision(tiny_llama4: Path, tmp_path: Path) -> None:
    bundle = build(tiny_llama4, tmp_path / "half", precision="fp16").bundle
    model = graph(bundle, "multihead", "fp16")
    norms = [node for node in model.graph if node.op_type == "LayerNormalization"]
    assert len(norms) == 6
    assert {node.outputs[0].dtype for node in norms} == {ir.DataType.FLOAT}
    negated = [node for node in model.graph if node.op_type == "Neg"]
    assert len(negated) == 4  # query and key of two layers
    assert {node.outputs[0].dtype for node in negated} == {ir.DataType.FLOAT}
    assert {value.dtype for value in model.graph.outputs} == {ir.DataType.FLOAT16}
    engine = bundle.manifest.engine("onnxruntime", "fp16")
    assert engine is not None
    assert engine.verdict == "passed"


def test_features_of_a_bfloat16_checkpoint_equal_the_reference(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 128, "num_hidden_layers": 2}
    projector = {"projector_input_dim": 24, "projector_output_dim": 24, "vision_output_dim": 24}
    parts = write_random_vision(tmp_path, **sizes, **projector)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / SINGLE).items()}
    save_file(tensors, tmp_path / SINGLE)
    for weight in (weight for part in parts for weight in part.parameters()):
        weight.data = weight.data.bfloat16().float()
    pixels = tiles(2)
    assert_equal_the_reference(tower_from(tmp_path).run({"pixels": pixels})["features"], *parts, pixels)


def test_samples_are_seeded_of_several_counts_and_within_the_limits(tiny_llama4: Path) -> None:
    tower = tower_from(tiny_llama4)
    first, again, other = tower.samples(0), tower.samples(0), tower.samples(1)
    assert all(sample.within(tower.inputs(), tower.default_limits()) for sample in first)
    assert [sample.label for sample in first] == ["3 tiles", "2 tiles", "1 tile"]  # the exporter specialises a 1
    assert len({row.numpy().tobytes() for row in first[0].inputs["pixels"]}) == 3
    assert all(torch.equal(a.inputs["pixels"], b.inputs["pixels"]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].inputs["pixels"], other[0].inputs["pixels"])
