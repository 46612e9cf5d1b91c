"""The forms that attention takes in a graph, each made from the exported ONNX ``Attention`` node.

- ``attention``: the node as exported (opset 23).
- ``multihead``: ONNX Runtime's ``com.microsoft.MultiHeadAttention``. Its CPU kernel works in blocks, where the one
  of ``Attention`` materialises all scores (for 8,160 patches: over 4 GB and five times slower).
- ``matmul``: MatMul, Softmax in float32, MatMul. Parses everywhere, and TensorRT-RTX fuses it in half precision.

A rewrite returns how many nodes it changed, and one that leaves an ``Attention`` node behind is an error.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript.rewriter.pattern import MatchResult, RewriteRule, RewriteRuleClassBase

from turbovit.engines.errors import BuildError

_HEADS_FIRST = [0, 2, 1, 3]  # [batch, tokens, heads, size] <-> [batch, heads, tokens, size]
_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def attention_count(model: ir.Model) -> int:
    """How many ONNX ``Attention`` nodes the graph has."""
    return sum(node.op_type == "Attention" and node.domain == "" for node in model.graph)


def rewrite_attention(model: ir.Model, form: str) -> int:
    """Bring every attention of `model` into `form`, in place.

    Returns:
        How many nodes were changed.

    Raises:
        BuildError: the form is unknown, or a node could not be changed; says why.
    """
    if form not in FORMS:
        raise BuildError(f"unknown attention form {form!r}; available: {', '.join(FORMS)}")
    expected = attention_count(model)
    rule_class = FORMS[form]
    if rule_class is None:
        return 0
    instance = rule_class()
    rule = RewriteRule(instance.pattern, instance.rewrite, instance.check, name=form)
    changed = rule.apply_to_model(model)
    RemoveUnusedNodesPass()(model)  # ONNX Runtime computes what nothing reads, and keeps it until the run ends
    if changed != expected or attention_count(model):
        reasons = "; ".join(dict.fromkeys(instance.refusals)) or "the nodes around it have another shape"
        raise BuildError(f"{changed} of {expected} Attention nodes could be brought into the form {form!r}: {reasons}")
    return changed


class _AttentionRule(RewriteRuleClassBase):
    """What both rules check: plain bidirectional attention whose parts all have its heads and head size."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals: list[str] = []

    @abstractmethod
    def shapes(self, heads: int, size: int) -> dict[str, tuple[int | None, ...]]:
        """The shapes that the pattern's values must have, by name; None where any size will do."""

    def check(self, context: Any, attention: Any, **values: ir.Value) -> MatchResult:
        result = MatchResult()
        reason = _reason(attention)
        if reason is None:
            shapes = self.shapes(attention.shape[1], attention.shape[3])
            reason = next((text for name in shapes if (text := _misfit(values[name], shapes[name]))), None)
        if reason:
            self.refusals.append(reason)
            return result.fail(reason, attention)
        return result


class _MultiHead(_AttentionRule):
    """q, k, v [batch, tokens, heads, size] transposed, Attention, transpose and reshape back -> MultiHeadAttention.

    That one works on [batch, tokens, heads * size]: where q, k or v was just reshaped from it (no rope between), the
    reshape goes too.
    """

    def pattern(self, op: Any, query: Any, key: Any, value: Any, out_shape: Any) -> Any:
        q, k, v = (op.Transpose(part, perm=_HEADS_FIRST) for part in (query, key, value))
        attention = op.Attention(q, k, v, _outputs=["attention"], _allow_other_inputs=True)
        return op.Reshape(op.Transpose(attention, perm=_HEADS_FIRST), out_shape, _outputs=["joined"])

    def shapes(self, heads: int, size: int) -> dict[str, tuple[int | None, ...]]:
        parts = dict.fromkeys(("query", "key", "value"), (None, None, heads, size))
        return {**parts, "joined": (None, None, heads * size)}

    def rewrite(self, op: Any, query: Any, key: Any, value: Any, attention: Any, **_: Any) -> Any:
        heads, size = attention.shape[1], attention.shape[3]
        attributes: dict[str, Any] = {"num_heads": heads}
        scale = _attribute(attention, "scale", None)
        if scale is not None:
            attributes["scale"] = scale
        parts = (_joined(op, part, heads * size) for part in (query, key, value))
        return op.MultiHeadAttention(*parts, _domain="com.microsoft", _version=1, **attributes)


def _joined(op: Any, part: ir.Value, width: int) -> ir.Value:
    """[batch, tokens, heads, size] as [batch, tokens, width]."""
    node = part.producer()
    source = node.inputs[0] if node is not None and node.op_type == "Reshape" else None
    if source is not None and _misfit(source, (None, None, width)) is None:
        return source
    return op.Reshape(part, op.Constant(value_ints=[0, 0, width]))


class _MatMul(_AttentionRule):
    """Attention on [batch, heads, tokens, size] -> MatMul, Softmax (in float32), MatMul.

    The query is scaled in float32 and before the product: bfloat16 would round the scale itself, by up to 0.4 percent
    of every score, and unscaled scores are nearer to float16's limit.
    """

    def pattern(self, op: Any, query: Any, key: Any, value: Any) -> Any:
        return op.Attention(query, key, value, _outputs=["attention"], _allow_other_inputs=True)

    def shapes(self, heads: int, size: int) -> dict[str, tuple[int | None, ...]]:
        return dict.fromkeys(("query", "key", "value"), (None, heads, None, size))

    def rewrite(self, op: Any, query: Any, key: Any, value: Any, attention: Any, **_: Any) -> Any:
        size = attention.shape[3]
        half = query.dtype in _HALF

        def wide(value: Any) -> Any:
            return op.Cast(value, to=ir.DataType.FLOAT) if half else value

        def narrow(value: Any) -> Any:
            return op.Cast(value, to=query.dtype) if half else value

        scale = ir.tensor(_attribute(attention, "scale", size**-0.5), dtype=ir.DataType.FLOAT)
        scaled = narrow(op.Mul(wide(query), op.Constant(value=scale)))
        scores = op.MatMul(scaled, op.Transpose(key, perm=[0, 1, 3, 2]))
        return op.MatMul(narrow(op.Softmax(wide(scores), axis=-1)), value)


FORMS: dict[str, Callable[[], _AttentionRule] | None] = {
    "attention": None,
    "multihead": _MultiHead,
    "matmul": _MatMul,
}


def _reason(attention: Any) -> str | None:
    if any(extra is not None for extra in attention.producer().inputs[3:]):
        return "it has a mask or a cache"
    if _attribute(attention, "is_causal", 0):
        return "it is causal"
    if _attribute(attention, "softcap", 0.0):
        return "it caps its scores"
    shape = attention.shape
    if shape is None or len(shape) != 4 or not isinstance(shape[1], int) or not isinstance(shape[3], int):
        return f"its output has the shape {shape}, expected [batch, heads, tokens, size] with fixed heads and size"
    return None


def _misfit(value: ir.Value, expected: tuple[int | None, ...]) -> str | None:
    if value.shape is None or value.dtype is None:
        return f"the shape or dtype of {value.name} is unknown"
    if len(value.shape) == len(expected) and all(
        dim in (None, found) for dim, found in zip(expected, value.shape, strict=True)
    ):
        return None
    wanted = ", ".join("any" if dim is None else str(dim) for dim in expected)
    return f"{value.name} has the shape {value.shape}, expected [{wanted}]"


def _attribute(value: Any, name: str, default: Any) -> Any:
    attribute = value.producer().attributes.get(name)
    return default if attribute is None else attribute.value
