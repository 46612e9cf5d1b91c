"""DeepSeek-VL2's tower, in torch and as a graph: the original's features for any number of tiles."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from deepseek_vl2_goldens import CONVERSATIONS, chat
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from tower_checks import assert_same_tensors, changed_copy, tower_from

from turbovit.benchmarks.reference import chat_from_lmdeploy
from turbovit.benchmarks.reference_deepseek_vl2 import DeepseekVL2Reference
from turbovit.engines.bundle import Bundle
from turbovit.engines.encoder import Encoder, open_encoder
from turbovit.export.build import build
from turbovit.export.checkpoint import SINGLE
from turbovit.export.deepseek_vl2 import DeepseekVL2Tower
from turbovit.export.sample_deepseek_vl2 import _processor_config

BOUND = 1e-5  # the certificate's float32 bound on relative L2
COUNTS = range(1, 11)  # tiles; 10 are an image of 9 and its global view


def tiles(count: int) -> Tensor:
    """uint8 [count, 3, 384, 384], no two alike."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, 3, 384, 384), generator=generator).to(torch.uint8)


@torch.inference_mode()
def assert_equal_the_reference(features: Tensor, reference: DeepseekVL2Reference, pixels: Tensor) -> None:
    """Tile by tile."""
    assert len(features) == len(pixels)
    for row, view in zip(features, pixels, strict=True):
        (expected,) = reference.features(view[None])
        assert row.shape == expected.shape
        assert (row - expected).norm() <= BOUND * expected.norm()


def test_features_equal_the_reference_for_any_number_of_tiles(
    tiny_deepseek_vl2: Path, tiny_deepseek_vl2_bundle: Bundle
) -> None:
    reference = DeepseekVL2Reference(tiny_deepseek_vl2)
    tower = tower_from(DeepseekVL2Tower, tiny_deepseek_vl2)
    runner = open_encoder(tiny_deepseek_vl2_bundle, device="cpu").runner
    for count in COUNTS:
        inputs = {"pixels": tiles(count)}
        for outputs in (tower.run(inputs), runner.run(inputs)):
            assert list(outputs) == ["features"]
            assert_equal_the_reference(outputs["features"], reference, inputs["pixels"])


@pytest.fixture(scope="module")
def goldens(data: Path) -> Path:
    """What the original gave, and its checkpoints."""
    return data / "golden/deepseek_vl2"


@pytest.fixture(scope="module")
def golden_tower(goldens: Path) -> DeepseekVL2Tower:
    return tower_from(DeepseekVL2Tower, goldens / "ckpt/deepseek-vl2-golden-mha")


@pytest.fixture(scope="module")
def golden_encoder(goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder = tmp_path_factory.mktemp("bundles") / "golden"
    return open_encoder(build(goldens / "ckpt/deepseek-vl2-golden-mha", folder).bundle, device="cpu")


def expected_features(folder: Path, name: str) -> list[Tensor]:
    with np.load(folder / f"golden/{name}.npz") as stored:
        return [torch.from_numpy(stored[f"feat_{number}"]) for number in range(len(CONVERSATIONS[name]["images"]))]


@pytest.mark.parametrize("name", [name for name, golden in CONVERSATIONS.items() if golden["images"]])
@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
def test_features_equal_the_originals(
    runtime: str,
    name: str,
    goldens: Path,
    golden_tower: DeepseekVL2Tower,
    golden_encoder: Encoder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if runtime == "torch":
        monkeypatch.setattr(golden_encoder.runner, "run", golden_tower.run)
    images = [goldens / f"images/{image}.png" for image in CONVERSATIONS[name]["images"]]
    encoded = golden_encoder.encode(images, cropping=len(images) <= 2)
    for found, expected in zip(encoded, expected_features(goldens, name), strict=True):
        assert found.features.shape == expected.shape
        assert (found.features - expected).norm() <= BOUND * expected.norm()
        for row in (14, 29, 209, 210, -1):  # newlines and the separator are copied, not computed
            assert torch.equal(found.features[row], expected[row])


def test_both_golden_checkpoints_have_one_vision_side(goldens: Path) -> None:
    """So that either's features are proved."""
    folders = [goldens / f"ckpt/deepseek-vl2-golden-{kind}" for kind in ("mha", "mla")]
    assert_same_tensors(DeepseekVL2Tower, *folders)


def test_every_stage_equals_the_originals(goldens: Path, golden_tower: DeepseekVL2Tower) -> None:
    with np.load(goldens / "golden/intermediate_one_land640x480.npz") as stored:
        golden = {name: torch.from_numpy(stored[name]) for name in stored.files}
    stages: dict[str, Tensor] = {}
    modules = {"patch_embed": golden_tower.embedding, "vision_out": golden_tower.norm}
    modules |= {f"block{number}": block for number, block in enumerate(golden_tower.blocks)}
    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: stages.update({name: output}))
        for name, module in modules.items()
    ]
    pixels = golden.pop("pixels_u8_tile0").permute(2, 0, 1)[None]
    stages["projector_out"] = golden_tower.run({"pixels": pixels})["features"]
    stages["pos_added"] = stages["patch_embed"] + golden_tower.position
    for hook in hooks:
        hook.remove()
    assert stages.keys() == golden.keys()
    for name, found in stages.items():
        assert (found[0] - golden[name][0]).norm() <= BOUND * golden[name][0].norm(), name


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_the_reference_is_the_original(kind: str, goldens: Path) -> None:
    """What the tests and the demo compare with where the goldens are not: ids, features and the last logits."""
    reference = DeepseekVL2Reference(goldens / f"ckpt/deepseek-vl2-golden-{kind}")
    for name, golden in CONVERSATIONS.items():
        pictures = {image: Image.open(goldens / f"images/{image}.png") for image in golden["images"]}
        inputs = reference.inputs_from_messages(chat_from_lmdeploy(chat(golden, pictures)))
        with np.load(goldens / f"golden/{name}.npz") as stored:
            assert inputs["input_ids"][0].tolist() == stored["input_ids"].tolist()
            assert inputs["images_seq_mask"].tolist() == stored["images_seq_mask"].tolist()
            logits = torch.from_numpy(stored[f"last_logits_{kind}"])
        assert (reference.logits(inputs)[-1] - logits).abs().max() <= 2e-5
        with torch.inference_mode():
            found = reference.image_embeddings(inputs)
        for one, expected in zip(found, expected_features(goldens, name), strict=True):
            assert (one - expected).norm() <= BOUND * expected.norm()


def write_random_vision(folder: Path, **vision: Any) -> None:
    """A checkpoint of a vision side and the smallest of language halves, no weight left at its default."""
    config = {
        "vision_config": {"patch_size": 14, "mlp_ratio": 3.7362} | vision,
        "projector_config": {"n_embed": 96, "input_dim": vision["width"]},
        "language_config": {"architectures": ["DeepseekV2ForCausalLM"]},
    }
    processor = _processor_config()
    spec = DeepseekVL2Tower.spec_from_config(config, processor)
    generator, tensors = torch.Generator().manual_seed(3), {}
    for name, shape in DeepseekVL2Tower.tensor_shapes(spec).items():
        std = 0.5 if name.endswith("pos_embed") else prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.1
        tensors[name] = torch.randn(shape, generator=generator) * std + ("norm" in name and name.endswith("weight"))
    save_file(tensors, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").write_text(json.dumps(processor))


def vision_reference(folder: Path) -> DeepseekVL2Reference:
    from turbovit.benchmarks import reference_deepseek_vl2 as module

    config = json.loads((folder / "config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(folder / SINGLE).items()}
    reference = DeepseekVL2Reference.__new__(DeepseekVL2Reference)
    reference.settings = json.loads((folder / "processor_config.json").read_text())
    reference.model = module.DeepseekVL2VisionModel(config["vision_config"], tensors)
    return reference


@pytest.mark.slow
def test_features_equal_the_reference_at_full_width(tmp_path: Path) -> None:
    write_random_vision(tmp_path, width=1152, layers=2)  # heads by default, as the released configs have it
    reference, pixels = vision_reference(tmp_path), tiles(2)
    tower = tower_from(DeepseekVL2Tower, tmp_path)
    assert (tower.spec.heads, tower.spec.inner, tower.spec.image) == (16, 4304, 384)
    assert_equal_the_reference(tower.run({"pixels": pixels})["features"], reference, pixels)
    runner = open_encoder(build(tmp_path, tmp_path / "bundle").bundle, device="cpu").runner
    assert_equal_the_reference(runner.run({"pixels": pixels})["features"], reference, pixels)


def test_features_of_a_bfloat16_checkpoint_equal_the_reference(tmp_path: Path) -> None:
    write_random_vision(tmp_path, width=72, layers=2, heads=1)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / SINGLE).items()}
    save_file(tensors, tmp_path / SINGLE)
    found = tower_from(DeepseekVL2Tower, tmp_path).run({"pixels": tiles(2)})["features"]
    assert_equal_the_reference(found, vision_reference(tmp_path), tiles(2))


def graph(bundle: Bundle, form: str, precision: str = "fp32") -> ir.Model:
    return ir.load(bundle.file(f"model.{precision}.{form}.onnx"))


def count(model: ir.Model, op: str) -> int:
    return sum(node.op_type == op for node in model.graph)


def test_every_attention_is_a_multihead_attention(tiny_deepseek_vl2_bundle: Bundle) -> None:
    base, multihead = (graph(tiny_deepseek_vl2_bundle, form) for form in ("attention", "multihead"))
    assert (count(base, "Attention"), count(base, "MultiHeadAttention")) == (2, 0)
    assert (count(multihead, "Attention"), count(multihead, "MultiHeadAttention")) == (0, 2)


@pytest.mark.parametrize("form", ["attention", "multihead"])
def test_tiles_stay_symbolic_and_nothing_is_computed_in_vain(form: str, tiny_deepseek_vl2_bundle: Bundle) -> None:
    model = graph(tiny_deepseek_vl2_bundle, form)
    assert {value.name: str(value.shape) for value in model.graph.inputs} == {"pixels": "[tiles,3,384,384]"}
    assert {value.name: str(value.shape) for value in model.graph.outputs} == {"features": "[tiles,196,64]"}
    unread = [
        node.name
        for node in model.graph
        if not any(value.uses() or value in model.graph.outputs for value in node.outputs)
    ]
    assert unread == []
    assert not {"image_newline", "view_seperator"} & set(model.graph.initializers)


def test_pixels_are_cast_before_anything_else(tiny_deepseek_vl2_bundle: Bundle) -> None:
    """TensorRT moves no uint8 about."""
    model = graph(tiny_deepseek_vl2_bundle, "attention")
    assert {use.node.op_type for use in model.graph.inputs[0].uses()} <= {"Cast", "Shape"}


def test_norms_are_float32_in_half_precision_and_rows_keep_theirs(tiny_deepseek_vl2: Path, tmp_path: Path) -> None:
    bundle = build(tiny_deepseek_vl2, tmp_path / "half", precision="fp16").bundle
    model = graph(bundle, "multihead", "fp16")
    norms = [node for node in model.graph if node.op_type == "LayerNormalization"]
    assert len(norms) == 5
    assert {node.outputs[0].dtype for node in norms} == {ir.DataType.FLOAT}
    assert {value.dtype for value in model.graph.outputs} == {ir.DataType.FLOAT16}
    engine = bundle.manifest.engine("onnxruntime", "fp16")
    assert engine is not None
    assert engine.verdict == "passed"
    stored = load_file(bundle.file("extra_tensors.safetensors"))
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    encoder = open_encoder(bundle, device="cpu")
    (encoded,) = encoder.encode([np.zeros((384, 384, 3), np.uint8)])
    assert encoded.features.dtype == torch.float16
    assert torch.equal(encoded.features[210], stored["view_seperator"].half())


def test_an_engine_added_later_leaves_the_rows_as_they_are(
    tiny_deepseek_vl2: Path, tiny_deepseek_vl2_bundle: Bundle, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_deepseek_vl2_bundle.path, tmp_path / "bundle"))
    before = (folder / "extra_tensors.safetensors").read_bytes()
    bundle = build(tiny_deepseek_vl2, folder, precision="fp16").bundle
    assert (folder / "extra_tensors.safetensors").read_bytes() == before
    assert "extra_tensors.safetensors" in bundle.manifest.files
    assert Encoder(bundle, open_encoder(bundle, device="cpu").runner).preprocessor.tensors


def test_other_rows_make_another_bundle(tiny_deepseek_vl2: Path, tmp_path: Path) -> None:
    from turbovit.export.plan import plan_build

    changed = changed_copy(
        tiny_deepseek_vl2, tmp_path, lambda tensors: tensors | {"image_newline": tensors["image_newline"] + 1}
    )
    one, other = (plan_build(folder, "fp32", ["onnxruntime"], {}).manifest for folder in (tiny_deepseek_vl2, changed))
    assert one.identity != other.identity


def test_samples_are_seeded_of_several_counts_and_within_the_limits(tiny_deepseek_vl2: Path) -> None:
    tower = tower_from(DeepseekVL2Tower, tiny_deepseek_vl2)
    first, again, other = tower.samples(0), tower.samples(0), tower.samples(1)
    assert all(sample.within(tower.inputs(), tower.default_limits()) for sample in first)
    assert [sample.label for sample in first] == ["3 tiles", "2 tiles", "1 tile"]  # the exporter specialises a 1
    assert len({row.numpy().tobytes() for row in first[0].inputs["pixels"]}) == 3
    assert all(torch.equal(a.inputs["pixels"], b.inputs["pixels"]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].inputs["pixels"], other[0].inputs["pixels"])
