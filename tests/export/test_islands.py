"""What has to be in float32 is, in every family and form of attention; a graph where it is not is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
from tower_checks import tower_of, write_base_graph

from turbovit.engines.errors import BuildError
from turbovit.export.islands import Islands, inspect_islands, islands_from_file
from turbovit.export.precision import in_precision
from turbovit.export.rewrites import FORMS
from turbovit.export.to_onnx import derive_graph

# Norms, layers of attention, and ropes: one for q and one for k of each layer.
EXPECTED = {"gemma3": (6, 2, 0), "llama4": (6, 2, 4), "qwen3_vl": (12, 4, 8), "deepseek_vl2": (5, 2, 0)}
HALF = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
Graphs = Callable[..., Path]


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Graphs:
    """The file of a family's graph in a precision, a form of attention and with layers in float32."""
    folder = tmp_path_factory.mktemp("graphs")

    def graph(family: str, precision: str, form: str = "attention", raised: tuple[str, ...] = ()) -> Path:
        name = f"{family}.{precision}.{'-'.join(raised)}"
        base = folder / f"{name}.attention.onnx"
        if not base.exists():
            tower = tower_of(request.getfixturevalue(f"tiny_{family}"))
            write_base_graph(in_precision(tower, precision, raised), base, precision)
        file = folder / f"{name}.{form}.onnx"
        if not file.exists():
            derive_graph(base, file, form)
        return file

    return graph


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("family", EXPECTED)
def test_norms_softmax_rope_and_pixels_are_in_float32(graphs: Graphs, family: str, precision: str, form: str) -> None:
    islands = islands_from_file(graphs(family, precision, form))
    norms, layers, ropes = EXPECTED[family]
    assert islands.half
    assert (len(islands.norms), len(islands.rotations)) == (norms, ropes)
    shown, hidden = (layers, 0) if form == "matmul" else (0, layers)
    assert (len(islands.softmaxes), len(islands.hidden)) == (shown, hidden)
    assert islands.pixels
    assert ("up to the runtime" in str(islands)) == bool(hidden)


def test_a_graph_in_float32_says_so(graphs: Graphs) -> None:
    islands = islands_from_file(graphs("gemma3", "fp32"))
    assert not islands.half
    assert str(islands) == "all of the graph is in float32"


def test_the_report_in_words() -> None:
    names = ("a", "b")
    islands = Islands(half=True, norms=names, softmaxes=(), hidden=names, rotations=(), pixels=names)
    assert str(islands) == (
        "in float32: pixel normalisation, 2 norms; "
        "2 softmaxes are inside attention nodes, their precision is up to the runtime"
    )


def test_attention_in_a_raised_layer_has_its_softmax_in_float32(graphs: Graphs) -> None:
    islands = islands_from_file(graphs("gemma3", "bf16", raised=("blocks.1",)))
    assert (len(islands.softmaxes), len(islands.hidden)) == (1, 1)


def test_softmax_precision_of_an_attention_node_counts(graphs: Graphs) -> None:
    model = ir.load(graphs("gemma3", "bf16"))
    for node in model.graph:
        if node.op_type == "Attention":
            node.attributes.add(ir.AttrInt64("softmax_precision", ir.DataType.FLOAT))
    assert len(inspect_islands(model).softmaxes) == 2


def first(model: ir.Model, op_type: str, place: int = 0) -> ir.Node:
    return [node for node in model.graph if node.op_type == op_type][place]


def in_half(model: ir.Model, node: ir.Node, half: ir.DataType) -> None:
    """Let a node compute in half precision: cast its float32 inputs down and its output back."""
    inspect_islands(model)  # nothing is wrong with it so far, and every value has a type now
    for place, value in enumerate(node.inputs):
        if value is not None and value.dtype == ir.DataType.FLOAT:
            cast = ir.node("Cast", [value], {"to": half}, name=f"down_{place}")
            cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(half), value.shape
            model.graph.insert_before(node, cast)
            node.replace_input_with(place, cast.outputs[0])
    back = ir.node("Cast", [node.outputs[0]], {"to": ir.DataType.FLOAT}, name="up")
    back.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    for user, place in tuple(node.outputs[0].uses()):
        user.replace_input_with(place, back.outputs[0])
    model.graph.insert_after(node, back)
    back.replace_input_with(0, node.outputs[0])
    node.outputs[0].type = ir.TensorType(half)


@pytest.mark.parametrize(
    ("family", "op_type"),
    [
        ("gemma3", "LayerNormalization"),
        ("gemma3", "RMSNormalization"),
        ("gemma3", "Softmax"),
        ("gemma3", "ReduceMean"),  # of the pooling
        ("gemma3", "Sub"),  # of the pixels
        ("gemma3", "Div"),
        ("llama4", "Neg"),  # of rope
        ("qwen3_vl", "Neg"),
        ("qwen3_vl", "Cos"),
        ("qwen3_vl", "Sin"),
        ("qwen3_vl", "Mul"),  # of the interpolation
    ],
)
@pytest.mark.parametrize("precision", HALF)
def test_a_node_in_half_precision_is_refused_by_name(graphs: Graphs, family: str, op_type: str, precision: str) -> None:
    model = ir.load(graphs(family, precision, "matmul"))
    node = first(model, op_type)
    in_half(model, node, HALF[precision])
    with pytest.raises(
        BuildError, match=f"1 nodes in half precision, which must be in float32: {op_type} {node.name}$"
    ):
        inspect_islands(model)


def test_every_multiplication_of_rope_counts(graphs: Graphs) -> None:
    places = [
        place for place, node in enumerate(n for n in ir.load(graphs("llama4", "bf16")).graph if n.op_type == "Mul")
    ]
    assert len(places) == 8  # with cos and sin, for q and k of two layers
    for place in places:
        model = ir.load(graphs("llama4", "bf16"))
        in_half(model, first(model, "Mul", place), HALF["bf16"])
        with pytest.raises(BuildError, match="1 nodes in half precision"):
            inspect_islands(model)


def test_a_norm_that_keeps_its_statistics_in_half_precision_is_refused(graphs: Graphs) -> None:
    model = ir.load(graphs("gemma3", "fp16"))
    first(model, "LayerNormalization").attributes.add(ir.AttrInt64("stash_type", ir.DataType.FLOAT16))
    with pytest.raises(BuildError, match="must be in float32: LayerNormalization"):
        inspect_islands(model)


def test_a_norm_taken_apart_in_half_precision_is_refused(graphs: Graphs) -> None:
    """Also a form that no one thought of: its reduction is none of what half precision is for."""
    model = ir.load(graphs("gemma3", "bf16"))
    node = first(model, "Gelu")
    mean = ir.node("ReduceMean", [node.outputs[0]], {"keepdims": 1}, name="statistics")
    model.graph.insert_after(node, mean)
    with pytest.raises(BuildError, match="ReduceMean statistics"):
        inspect_islands(model)


def test_pixels_cast_straight_to_half_precision_are_refused(graphs: Graphs) -> None:
    model = ir.load(graphs("gemma3", "bf16"))
    cast = first(model, "Cast")
    cast.attributes.add(ir.AttrInt64("to", HALF["bf16"]))
    cast.outputs[0].type = ir.TensorType(HALF["bf16"])
    with pytest.raises(BuildError, match="half precision"):
        inspect_islands(model)


def test_a_table_of_pixels_in_half_precision_is_refused(graphs: Graphs) -> None:
    model = ir.load(graphs("llama4", "bf16"))
    gather = first(model, "Gather")
    gather.inputs[0].type = gather.outputs[0].type = ir.TensorType(HALF["bf16"])  # type: ignore[union-attr]
    with pytest.raises(BuildError, match=rf"make half precision of pixels directly: Gather {gather.name}"):
        inspect_islands(model)


@pytest.mark.parametrize("op_type", ["LayerNormalization", "Attention"])
def test_what_cannot_be_found_is_an_error(graphs: Graphs, op_type: str) -> None:
    model = ir.load(graphs("llama4", "bf16"))
    for node in [node for node in model.graph if node.op_type == op_type]:
        node.outputs[0].replace_all_uses_with(node.inputs[0])  # type: ignore[arg-type]
        model.graph.remove(node, safe=True)
    what = {"LayerNormalization": "norm", "Attention": "softmax"}[op_type]
    with pytest.raises(BuildError, match=f"the graph has no {what} that could be inspected"):
        inspect_islands(model)


def test_the_error_names_the_file(graphs: Graphs, tmp_path: Path) -> None:
    model = ir.load(graphs("gemma3", "fp16", "matmul"))
    in_half(model, first(model, "Softmax"), HALF["fp16"])
    ir.save(model, tmp_path / "broken.onnx")
    with pytest.raises(BuildError, match=r"^broken.onnx: the graph has 1 nodes .*: Softmax"):
        islands_from_file(tmp_path / "broken.onnx")
