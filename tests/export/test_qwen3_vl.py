"""Qwen3-VL's tower, in torch and as a graph: the reference's features and deepstack levels on any grid."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from turbovit.engines.bundle import Bundle
from turbovit.engines.encoder import open_encoder
from turbovit.engines.qwen3_vl import grid_inputs
from turbovit.export.build import build
from turbovit.export.checkpoint import SINGLE, image_processor_config, open_checkpoint
from turbovit.export.layers import PixelNorm
from turbovit.export.qwen3_vl import Qwen3VLTower
from turbovit.export.tower import load_tower

BOUND = 1e-5  # the certificate's float32 bound on relative L2
NORM = PixelNorm(0.5, 0.5, 1 / 255)
# frames, rows and columns of patches: the smallest, thin ones, that of the learned positions, square and not.
GRIDS = [(1, 2, 2), (2, 2, 200), (1, 200, 2), (2, 48, 48), (3, 4, 6), (8, 6, 4), (1, 46, 50), (1, 96, 10), (1, 30, 62)]
FULL_WIDTH = {
    1152: {"num_heads": 16, "intermediate_size": 4304, "out_hidden_size": 96, "depth": 2},
    1024: {"num_heads": 16, "intermediate_size": 4096, "out_hidden_size": 80, "depth": 1},
}
SMALL = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 24, "depth": 4}
PREPROCESSOR: dict[str, Any] = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
PREPROCESSOR |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def tower_from(folder: Path) -> Qwen3VLTower:
    checkpoint = open_checkpoint(folder)
    spec = Qwen3VLTower.spec_from_config(checkpoint.config, image_processor_config(folder))
    return load_tower(Qwen3VLTower, spec, checkpoint)


def inputs_of(frames: int, height: int, width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(frames * 10**6 + height * 1000 + width)
    pixels = torch.randint(0, 256, (frames, height * width, 1536), generator=generator).to(torch.uint8)
    return {"pixels": pixels, **grid_inputs(height, width, 2, 48)}


@torch.inference_mode()
def assert_equal_the_reference(outputs: Mapping[str, Tensor], visual: Any, grid: tuple[int, int, int]) -> None:
    """Every output, frame by frame. `visual` is transformers' vision model."""
    pixels = NORM(inputs_of(*grid)["pixels"]).flatten(0, 1)
    found = visual(pixels, grid_thw=torch.tensor([grid]))
    expected = {"features": found.pooler_output}
    expected |= {f"deepstack_{level}": tensor for level, tensor in enumerate(found.deepstack_features)}
    assert list(outputs) == list(expected)
    for name, tensor in outputs.items():
        for row, reference in zip(tensor, expected[name].unflatten(0, (grid[0], -1)), strict=True):
            assert row.shape == reference.shape
            assert (row - reference).norm() <= BOUND * reference.norm(), (name, grid)


def visual_from(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval().model.visual


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_vl_moe"])
def test_features_and_levels_equal_the_reference_on_any_grid(kind: str, request: pytest.FixtureRequest) -> None:
    folder, bundle = (request.getfixturevalue(f"tiny_{kind}{suffix}") for suffix in ("", "_bundle"))
    visual, tower, runner = visual_from(folder), tower_from(folder), open_encoder(bundle, device="cpu").runner
    for grid in GRIDS:
        assert_equal_the_reference(tower.run(inputs_of(*grid)), visual, grid)
        assert_equal_the_reference(runner.run(inputs_of(*grid)), visual, grid)


def write_random_vision(folder: Path, levels: tuple[int, ...], **sizes: int) -> Any:
    """A checkpoint of a vision side alone, no weight left at its default; returns transformers' model of it."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    vision = {**sizes, "deepstack_visual_indexes": list(levels)}
    visual = Qwen3VLVisionModel(Qwen3VLVisionConfig.from_dict(vision)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for name, weight in visual.named_parameters():
        std = prod(weight.shape[1:]) ** -0.5 if weight.ndim > 1 else 0.1
        weight.data = torch.randn(weight.shape, generator=generator) * (0.5 if "pos_embed" in name else std)
        if "norm" in name and name.endswith("weight"):
            weight.data += 1
    save_file({f"model.visual.{name}": tensor for name, tensor in visual.named_parameters()}, folder / SINGLE)
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": vision}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    video = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}, "video_processor_type": "Qwen3VLVideoProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(PREPROCESSOR | video))
    return visual


@pytest.mark.slow
@pytest.mark.parametrize("hidden", FULL_WIDTH)
def test_features_and_levels_equal_the_reference_at_full_width(hidden: int, tmp_path: Path) -> None:
    visual = write_random_vision(tmp_path, (0,), hidden_size=hidden, **FULL_WIDTH[hidden])
    tower = tower_from(tmp_path)
    runner = open_encoder(build(tmp_path, tmp_path / "bundle").bundle, device="cpu").runner
    for grid in ((1, 14, 10), (2, 6, 30), (1, 32, 40)):
        assert_equal_the_reference(tower.run(inputs_of(*grid)), visual, grid)
        assert_equal_the_reference(runner.run(inputs_of(*grid)), visual, grid)


@pytest.mark.parametrize("levels", [(), (1,), (2, 0)], ids=str)
def test_any_levels_are_taken(levels: tuple[int, ...], tmp_path: Path) -> None:
    visual = write_random_vision(tmp_path, levels, **SMALL)
    bundle = build(tmp_path, tmp_path / "bundle").bundle
    names = ["features", *(f"deepstack_{level}" for level in range(len(levels)))]
    assert [spec.name for spec in bundle.manifest.outputs] == names
    assert bundle.manifest.facts["deepstack_levels"] == len(levels)
    certificate = bundle.manifest.engines[0].certificate
    assert certificate is not None
    assert sorted(output.output for output in certificate.outputs) == sorted(names)
    runner = open_encoder(bundle, device="cpu").runner
    for grid in ((2, 4, 6), (1, 30, 2)):
        assert_equal_the_reference(tower_from(tmp_path).run(inputs_of(*grid)), visual, grid)
        assert_equal_the_reference(runner.run(inputs_of(*grid)), visual, grid)


def graph(bundle: Bundle, name: str) -> ir.Model:
    return ir.load(bundle.file(name))


def count(model: ir.Model, op: str) -> int:
    return sum(node.op_type == op for node in model.graph)


def test_every_attention_is_a_multihead_attention(tiny_qwen3_vl_bundle: Bundle) -> None:
    base = graph(tiny_qwen3_vl_bundle, "model.fp32.attention.onnx")
    multihead = graph(tiny_qwen3_vl_bundle, "model.fp32.multihead.onnx")
    assert (count(base, "Attention"), count(base, "MultiHeadAttention")) == (4, 0)
    assert (count(multihead, "Attention"), count(multihead, "MultiHeadAttention")) == (0, 4)


@pytest.mark.parametrize("form", ["attention", "multihead"])
def test_frames_and_patches_stay_symbolic(form: str, tiny_qwen3_vl_bundle: Bundle) -> None:
    model = graph(tiny_qwen3_vl_bundle, f"model.fp32.{form}.onnx")
    assert {str(value.name): str(value.shape).replace(" ", "") for value in model.graph.inputs} == {
        "pixels": "[frames,4*merged,1536]",
        "interp_index": "[4,4*merged]",
        "interp_weight": "[4,4*merged]",
        "patch_position": "[4*merged,2]",
    }
    names = ["features", "deepstack_0", "deepstack_1", "deepstack_2"]
    assert {str(value.name): str(value.shape) for value in model.graph.outputs} == dict.fromkeys(
        names, "[frames,merged,64]"
    )


@pytest.fixture(scope="module")
def half_bundle(tiny_qwen3_vl: Path, tiny_qwen3_vl_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The shared bundle with engines in float16 and bfloat16 added."""
    folder = tmp_path_factory.mktemp("bundles") / "half"
    shutil.copytree(tiny_qwen3_vl_bundle.path, folder)
    build(tiny_qwen3_vl, folder, precision="fp16")
    return build(tiny_qwen3_vl, folder, precision="bf16").bundle


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_rope_positions_and_norms_are_float32_in_half_precision(precision: str, half_bundle: Bundle) -> None:
    model = graph(half_bundle, f"model.{precision}.multihead.onnx")
    half = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}[precision]
    turned = [node for node in model.graph if node.op_type in ("Cos", "Sin")]
    assert len(turned) == 2
    multiplied = [use.node for node in turned for use in node.outputs[0].uses()]
    assert [node.op_type for node in multiplied] == ["Mul"] * 16  # cos and sin, for query and key of four layers
    float32 = [*turned, *multiplied, *(node for node in model.graph if node.op_type == "LayerNormalization")]
    assert {node.outputs[0].dtype for node in float32} == {ir.DataType.FLOAT}
    heads = [node for node in model.graph if node.op_type == "MultiHeadAttention"]
    joined = [value.producer() for node in heads for value in node.inputs if value is not None]
    assert [node.inputs[0].dtype for node in joined if node is not None] == [half] * 12
    assert {value.dtype for value in model.graph.outputs} == {half}


def test_a_float16_engine_passes_every_outputs_certificate(half_bundle: Bundle) -> None:
    engine = half_bundle.manifest.engine("onnxruntime", "fp16")
    assert engine is not None
    assert engine.verdict == "passed"
    assert engine.certificate is not None
    names = {"features", "deepstack_0", "deepstack_1", "deepstack_2"}
    assert {output.output for output in engine.certificate.outputs} == names


def test_samples_are_seeded_of_several_grids_and_within_the_limits(tiny_qwen3_vl: Path) -> None:
    tower = tower_from(tiny_qwen3_vl)
    first, again, other = tower.samples(0), tower.samples(0), tower.samples(1)
    assert all(sample.within(tower.inputs(), tower.default_limits()) for sample in first)
    assert len({tuple(sample.inputs["pixels"].shape) for sample in first}) == len(first)
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a.inputs["pixels"], b.inputs["pixels"])
        assert not torch.equal(a.inputs["pixels"], c.inputs["pixels"])
    sizes = dict(zip(("frames", "merged"), first[0].inputs["pixels"].shape, strict=False))
    assert min(sizes.values()) > 1  # the exporter specialises a 1
