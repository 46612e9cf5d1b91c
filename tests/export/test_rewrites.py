"""Attention forms: every node rewritten and counted, equal numbers, and a reason for each refusal."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbovit.engines.errors import BuildError
from turbovit.export.rewrites import FORMS, attention_count, rewrite_attention

REWRITTEN = [form for form, rule in FORMS.items() if rule is not None]
LAYERS, HEADS, SIZE = 2, 3, 8
HIDDEN = HEADS * SIZE

PLAIN = "Attention (q_heads, k_heads, v_heads)"


def graph(attention: str = PLAIN, *, x: str = "batch, tokens, 24", split: str = "0, 0, 3, 8", key: str = "x") -> str:
    """One attention as the exporter writes it: heads split off, attention, heads joined again.

    Args:
        attention: the node in the middle.
        x: shape of the input.
        split: shape that splits the heads off.
        key: which input key and value are made of: `x`, or `narrow`, which has one head.
    """
    key_split = {"x": "split", "narrow": "one_head"}[key]
    return f"""
<ir_version: 10, opset_import: ["" : 23]>
attention (float[{x}] x, float[batch, tokens, 8] narrow, float[tokens, tokens] mask) => (float[batch, tokens, 24] y)
{{
    split = Constant <value = int64[4] {{{split}}}> ()
    one_head = Constant <value = int64[4] {{0, 0, 1, 8}}> ()
    join = Constant <value = int64[3] {{0, 0, 24}}> ()
    q = Reshape (x, split)
    k = Reshape ({key}, {key_split})
    v = Reshape ({key}, {key_split})
    q_heads = Transpose <perm = [0, 2, 1, 3]> (q)
    k_heads = Transpose <perm = [0, 2, 1, 3]> (k)
    v_heads = Transpose <perm = [0, 2, 1, 3]> (v)
    mixed = {attention}
    back = Transpose <perm = [0, 2, 1, 3]> (mixed)
    y = Reshape (back, join)
}}
"""


class Stack(nn.Module):
    """Residual attention layers."""

    def __init__(self, scale: float | None):
        super().__init__()
        self.scale = scale
        self.qkv = nn.ModuleList(nn.Linear(HIDDEN, 3 * HIDDEN) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.qkv:
            query, key, value = (part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in layer(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(query, key, value, scale=self.scale).transpose(1, 2).flatten(2)
        return x


@cache
def stack(scale: float | None) -> Stack:
    """Weights that float16 holds exactly and that give softmax something to do."""
    torch.manual_seed(0)
    model = Stack(scale)
    for parameter in model.parameters():
        parameter.data = (parameter.data * 2).half().float()
    return model.requires_grad_(False)


@cache
def exported(scale: float | None, dtype: torch.dtype) -> onnx.ModelProto:
    """The ONNX graph of `stack`, batch and tokens symbolic."""
    model = Stack(scale).to(dtype).eval()
    model.load_state_dict(stack(scale).state_dict())
    shapes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")},)
    arguments = (torch.zeros(2, 5, HIDDEN, dtype=dtype),)
    program = torch.onnx.export(model, arguments, dynamo=True, opset_version=23, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    return program.model_proto


def rewritten(proto: onnx.ModelProto, form: str) -> onnx.ModelProto:
    model = ir.from_proto(proto)
    rewrite_attention(model, form)
    return ir.to_proto(model)


def run(proto: onnx.ModelProto, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    first, *unused = session.get_inputs()
    sizes = {value.name: [dim if isinstance(dim, int) else 1 for dim in value.shape] for value in unused}
    feeds = {first.name: x.numpy()} | {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    (output,) = session.run(None, feeds)
    return torch.from_numpy(output)


def from_text(text: str, *, inferred: bool = True) -> ir.Model:
    proto = onnx.parser.parse_model(text)
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto, strict_mode=True) if inferred else proto)


@pytest.mark.parametrize("form", REWRITTEN)
def test_every_attention_is_rewritten_and_counted(form: str) -> None:
    model = ir.from_proto(exported(None, torch.float32))
    assert attention_count(model) == LAYERS
    assert rewrite_attention(model, form) == LAYERS
    operators = Counter(node.op_type for node in model.graph)
    assert operators["Attention"] == 0
    assert operators[{"multihead": "MultiHeadAttention", "matmul": "Softmax"}[form]] == LAYERS
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


@pytest.mark.parametrize("form", REWRITTEN)
def test_no_node_is_left_whose_result_nothing_reads(form: str) -> None:
    model = ir.from_proto(exported(None, torch.float32))
    rewrite_attention(model, form)
    outputs = set(model.graph.outputs)
    dead = [node.name for node in model.graph if not any(out.uses() or out in outputs for out in node.outputs)]
    assert dead == []


def test_the_exported_form_is_left_as_it_is() -> None:
    model = ir.from_proto(exported(None, torch.float32))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert rewrite_attention(model, "attention") == 0
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("form", REWRITTEN)
@pytest.mark.parametrize("scale", [None, 0.8])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 33), (3, 7)])
def test_a_rewritten_graph_equals_the_module(form: str, scale: float | None, batch: int, tokens: int) -> None:
    x = torch.randn(batch, tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = stack(scale)(x)
    got = run(rewritten(exported(scale, torch.float32), form), x)
    # The certificate's float32 bound, on every row.
    assert ((got - expected).flatten(1).norm(dim=1) <= 1e-5 * expected.flatten(1).norm(dim=1)).all()


@pytest.mark.parametrize("form", REWRITTEN)
@pytest.mark.parametrize("scale", [None, 0.8])
def test_a_rewritten_float16_graph_is_close_to_the_float32_module(form: str, scale: float | None) -> None:
    x = torch.randn(3, 33, HIDDEN, generator=torch.Generator().manual_seed(1)).half()
    expected = stack(scale)(x.float())
    got = run(rewritten(exported(scale, torch.float16), form), x)
    assert got.dtype == torch.float16
    assert F.cosine_similarity(got.float(), expected, dim=-1).min() >= 0.999  # the certificate's float16 bound


def test_the_scale_has_a_say_in_these_numbers() -> None:
    x = torch.randn(3, 33, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert F.cosine_similarity(stack(None)(x), stack(0.8)(x), dim=-1).min() < 0.99


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_matmul_form_takes_its_softmax_in_float32(dtype: torch.dtype) -> None:
    model = ir.from_proto(exported(None, dtype))
    rewrite_attention(model, "matmul")
    inferred = ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(model), strict_mode=True))
    softmaxes = [node for node in inferred.graph if node.op_type == "Softmax"]
    assert [node.inputs[0].dtype for node in softmaxes] == [ir.DataType.FLOAT] * LAYERS


@pytest.mark.parametrize("form", REWRITTEN)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (graph(PLAIN.replace(" ", " <is_causal = 1> ", 1)), "it is causal"),
        (graph(PLAIN.replace(" ", " <softcap = 30.0> ", 1)), "it caps its scores"),
        (graph(PLAIN.replace("v_heads", "v_heads, mask")), "it has a mask or a cache"),
        (graph(key="narrow"), r"(narrow|k|k_heads) has the shape .*, expected \["),
        (graph(x="batch, tokens, width", split="0, 0, -1, 8"), "with fixed heads and size"),
    ],
    ids=["causal", "softcap", "mask", "one head for all keys", "symbolic heads"],
)
def test_an_attention_that_a_form_cannot_express_is_refused_with_the_reason(form: str, text: str, reason: str) -> None:
    with pytest.raises(BuildError, match=f"0 of 1 Attention nodes .* {form!r}: .*{reason}"):
        rewrite_attention(from_text(text), form)


@pytest.mark.parametrize("form", REWRITTEN)
def test_unknown_shapes_are_refused(form: str) -> None:
    with pytest.raises(BuildError, match=r"0 of 1 .* shape None, expected \[batch, heads, tokens, size\]"):
        rewrite_attention(from_text(graph(), inferred=False), form)


def test_heads_joined_to_another_rank_are_no_multihead() -> None:
    text = graph().replace("3] {0, 0, 24}", "2] {-1, 24}").replace("[batch, tokens, 24] y", "[rows, 24] y")
    with pytest.raises(BuildError, match=r"y has the shape \[rows,24\], expected \[any, any, 24\]"):
        rewrite_attention(from_text(text), "multihead")


def test_heads_split_from_another_rank_are_joined_before_the_multihead() -> None:
    text = graph(x="rows, 24", split="1, -1, 3, 8")
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
    expected = run(onnx.parser.parse_model(text), x)
    got = run(rewritten(ir.to_proto(from_text(text)), "multihead"), x)
    assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_heads_in_another_order_are_no_multihead() -> None:
    text = graph().replace("[0, 2, 1, 3]> (mixed)", "[0, 1, 2, 3]> (mixed)")
    with pytest.raises(BuildError, match=r"0 of 1 .*: the nodes around it have another shape"):
        rewrite_attention(from_text(text), "multihead")


@pytest.mark.parametrize("form", REWRITTEN)
def test_one_refused_node_among_others_is_an_error_that_counts(form: str) -> None:
    model = ir.from_proto(exported(None, torch.float32))
    second = [node for node in model.graph if node.op_type == "Attention"][1]
    second.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
    with pytest.raises(BuildError, match=f"{LAYERS - 1} of {LAYERS} Attention nodes .*: it is causal"):
        rewrite_attention(model, form)


def test_an_unknown_form_is_an_error_that_lists_the_forms() -> None:
    with pytest.raises(BuildError, match="'fused'; available: attention, multihead, matmul"):
        rewrite_attention(from_text(graph()), "fused")
