"""The exported graph: symbolic shapes, shared weights, and float32 where half precision would hurt."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor

from turbovit.engines.bundle import Bundle, TensorSpec
from turbovit.engines.errors import BuildError
from turbovit.export.layers import Attention, LayerNorm
from turbovit.export.plan import PRECISIONS
from turbovit.export.rewrites import FORMS
from turbovit.export.to_onnx import OPSET, derive_graph, onnx_from_tower, save_base_graph
from turbovit.export.tower import Sample, Tower

LAYERS = 2  # of the tiny sample
HALF = ["fp16", "bf16"]
ELEMENTS = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


class FakeTower(Tower):
    """Merges four patches into one token; the patch count is tied to the token count."""

    input_names = ("pixels", "bias")
    output_names = ("features",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = LayerNorm(12)
        self.attention = Attention(12, 2)

    def forward(self, pixels: Tensor, bias: Tensor) -> Tensor:
        x = self.norm(pixels.to(bias.dtype)) + bias
        return self.attention(x).unflatten(1, (-1, 4)).flatten(2)

    def inputs(self) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("pixels", "uint8", ("frames", "4*merged", 12)),
            TensorSpec("bias", "float32", ("4*merged", 12)),
        )

    def outputs(self, dtype: str) -> tuple[TensorSpec, ...]:
        return (TensorSpec("features", dtype, ("frames", "merged", 48)),)

    def samples(self, seed: int) -> list[Sample]:
        generator = torch.Generator().manual_seed(seed)
        return [sample(frames, merged, generator) for frames, merged in ((2, 3), (1, 5))]

    @classmethod
    def spec_from_config(cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    @classmethod
    def is_vision(cls, name: str) -> bool:
        raise NotImplementedError

    @classmethod
    def tensor_shapes(cls, spec: Any) -> dict[str, tuple[int, ...]]:
        raise NotImplementedError

    @classmethod
    def state_from_tensors(cls, spec: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        raise NotImplementedError

    def facts(self, config: Mapping[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def default_limits(self) -> dict[str, int]:
        raise NotImplementedError


class FixedFrames(FakeTower):
    """Works for two frames only."""

    def forward(self, pixels: Tensor, bias: Tensor) -> Tensor:
        return super().forward(pixels.reshape(2, -1, 12), bias)


class FramesInPython(FakeTower):
    """Turns the number of frames into a Python number."""

    def forward(self, pixels: Tensor, bias: Tensor) -> Tensor:
        return super().forward(torch.stack(list(pixels)), bias)


class WithoutAttention(FakeTower):
    def forward(self, pixels: Tensor, bias: Tensor) -> Tensor:
        return (self.norm(pixels.to(bias.dtype)) + bias).unflatten(1, (-1, 4)).flatten(2)


class TwoFeatures(FakeTower):
    """Gives another shape than it says."""

    def forward(self, pixels: Tensor, bias: Tensor) -> Tensor:
        return super().forward(pixels, bias).repeat(1, 1, 2)


def sample(frames: int, merged: int, generator: torch.Generator) -> Sample:
    pixels = torch.randint(0, 256, (frames, 4 * merged, 12), generator=generator).to(torch.uint8)
    return Sample("", {"pixels": pixels, "bias": torch.randn(4 * merged, 12, generator=generator)})


def exported(tower: Tower) -> ir.Model:
    tower.eval().requires_grad_(False)
    return onnx_from_tower(tower, tower.samples(0)[0], tower.outputs("float32"))


@pytest.fixture(scope="module")
def graphs(every_precision: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny tower in every precision and form."""
    folder = tmp_path_factory.mktemp("graphs") / "bundle"
    shutil.copytree(every_precision.path, folder)
    for precision in PRECISIONS:
        base, derived = (folder / f"model.{precision}.{form}.onnx" for form in ("attention", "matmul"))
        assert derive_graph(base, derived, "matmul") == LAYERS
    return folder


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def nodes(model: ir.Model, *kinds: str) -> list[ir.Node]:
    found = [node for node in model.graph if node.op_type in kinds]
    assert found
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("form", FORMS)
def test_inputs_and_outputs_are_named_and_symbolic(graphs: Path, precision: str, form: str) -> None:
    graph = ir.load(graphs / f"model.{precision}.{form}.onnx").graph
    (pixels,), (features,) = graph.inputs, graph.outputs
    assert (pixels.name, pixels.dtype, str(pixels.shape)) == ("pixels", ir.DataType.UINT8, "[images,3,896,896]")
    assert (features.name, features.dtype) == ("features", ELEMENTS[precision])
    assert str(features.shape) == "[images,256,64]"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("form", FORMS)
def test_the_graph_passes_the_checker(graphs: Path, precision: str, form: str) -> None:
    onnx.checker.check_model(str(graphs / f"model.{precision}.{form}.onnx"), full_check=True)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("form", "attention"),
    [
        ("attention", {"Attention": LAYERS}),
        ("multihead", {"MultiHeadAttention": LAYERS}),
        ("matmul", {"Softmax": LAYERS}),
    ],
)
def test_a_node_stands_for_each_layer_of_the_tower(
    graphs: Path, precision: str, form: str, attention: dict[str, int]
) -> None:
    model = ir.load(graphs / f"model.{precision}.{form}.onnx")
    found = operators(model)
    norms = {"LayerNormalization": 2 * LAYERS + 1, "RMSNormalization": 1, "Gelu": LAYERS}
    assert {kind: found[kind] for kind in norms | attention} == norms | attention
    assert sum(found[kind] for kind in ("Attention", "MultiHeadAttention", "Softmax")) == LAYERS
    assert not found.keys() & {"Conv", "GatherND", "Loop", "If", "Sqrt", "Erf", "Tanh"}
    assert model.opset_imports[""] == OPSET


def test_the_gelu_is_the_tanh_one(graphs: Path) -> None:
    gelus = nodes(ir.load(graphs / "model.fp32.attention.onnx"), "Gelu")
    assert [node.attributes["approximate"].value for node in gelus] == ["tanh"] * LAYERS


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("form", FORMS)
def test_norms_softmax_and_pixel_arithmetic_are_float32_in_half_precision(
    graphs: Path, precision: str, form: str
) -> None:
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.load(graphs / f"model.{precision}.{form}.onnx")))
    for node in nodes(model, "LayerNormalization", "RMSNormalization", "Softmax", "Sub", "Div"):
        values = [*node.inputs, *node.outputs]
        assert [value.dtype for value in values if value is not None] == [ir.DataType.FLOAT] * len(values), node.name
    assert {value.dtype for node in nodes(model, "MatMul", "Gelu") for value in node.inputs} == {ELEMENTS[precision]}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_tensorrt_can_parse_the_graph(graphs: Path, precision: str) -> None:
    # Its parser refuses softmax_precision, and any operator but Cast on uint8.
    model = ir.load(graphs / f"model.{precision}.attention.onnx")
    assert all("softmax_precision" not in node.attributes for node in nodes(model, "Attention"))
    assert [node.op_type for node in model.graph.inputs[0].consumers()] == ["Cast"]
    assert sum(value.dtype == ir.DataType.UINT8 for node in model.graph for value in node.outputs) == 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_forms_of_a_precision_share_one_weight_file(graphs: Path, precision: str) -> None:
    assert {path.name for path in graphs.glob("*.bin")} == {f"weights.{each}.bin" for each in PRECISIONS}
    size = (graphs / f"weights.{precision}.bin").stat().st_size
    for form in FORMS:
        path = graphs / f"model.{precision}.{form}.onnx"
        weights = [value.const_value for value in ir.load(path).graph.initializers.values()]
        outside = [weight for weight in weights if isinstance(weight, ir.ExternalTensor)]
        assert {weight.location for weight in outside} == {f"weights.{precision}.bin"}
        assert 0.95 * size < sum(weight.nbytes for weight in outside) <= size
        assert sum(weight.nbytes for weight in weights if weight not in outside) < 10_000
        assert path.stat().st_size < 150_000  # 2 layers of nodes


def test_another_form_is_derived_without_the_weights(graphs: Path, tmp_path: Path) -> None:
    base = tmp_path / "base.onnx"
    base.write_bytes((graphs / "model.fp32.attention.onnx").read_bytes())
    assert derive_graph(base, tmp_path / "derived.onnx", "matmul") == LAYERS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.onnx", "derived.onnx"]
    assert (tmp_path / "derived.onnx").read_bytes() == (graphs / "model.fp32.matmul.onnx").read_bytes()


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph of `FakeTower` with its weights beside it."""
    path = tmp_path_factory.mktemp("merging") / "base.onnx"
    save_base_graph(exported(FakeTower()), path, "weights.bin")
    return path


def test_tied_dimensions_stay_symbolic(merging: Path) -> None:
    graph = ir.load(merging).graph
    shapes = {value.name: str(value.shape).replace(" ", "") for value in (*graph.inputs, *graph.outputs)}
    assert shapes == {
        "pixels": "[frames,4*merged,12]",
        "bias": "[4*merged,12]",
        "features": "[frames,merged,48]",
    }


@pytest.mark.parametrize("form", ["multihead", "matmul"])
def test_tied_dimensions_run_in_every_size(merging: Path, form: str) -> None:
    path = merging.with_name(f"{form}.onnx")
    assert derive_graph(merging, path, form) == 1
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    tower = FakeTower().eval()
    for frames, merged in ((1, 1), (3, 2), (2, 7)):
        inputs = sample(frames, merged, torch.Generator().manual_seed(merged)).inputs
        (got,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        expected = tower.run(inputs)["features"]
        assert got.shape == (frames, merged, 48)
        assert (torch.from_numpy(got) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("tower", [FixedFrames, FramesInPython])
def test_a_tower_that_fixes_its_batch_is_refused(tower: type[FakeTower]) -> None:
    with pytest.raises(BuildError, match=r"(?i)specialized|specialised|constraint"):
        exported(tower())


def test_outputs_other_than_the_tower_says_are_refused() -> None:
    with pytest.raises(BuildError, match=r"outputs are .*frames.*96.*expected .*frames.*48"):
        exported(TwoFeatures())


def test_a_graph_without_attention_nodes_is_refused() -> None:
    with pytest.raises(BuildError, match="no Attention node"):
        exported(WithoutAttention())
