"""The forms that attention takes in a graph, each made from the exported ONNX ``Attention`` node.

- ``attention``: the node as exported (opset 23).
- ``multihead``: ONNX Runtime's ``com.microsoft.MultiHeadAttention``. Its CPU kernel works in blocks, where the one
  of ``Attention`` materialises all scores (for 8,160 patches: over 4 GB and five times slower).
- ``matmul``: MatMul, Softmax, MatMul. Parses everywhere; compilers fuse it by pattern.

A rewrite returns how many nodes it changed, and one that leaves an ``Attention`` node behind is an error.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
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
    def shape(self, heads: int, size: int) -> tuple[int | None, ...]:
        """What the values that the rule takes and gives must have as shape; None where any size will do."""

    def check(self, context: Any, attention: Any, **values: ir.Value) -> MatchResult:
        result = MatchResult()
        reason = _reason(attention)
        if reason is None:
            expected = self.shape(attention.shape[1], attention.shape[3])
            parts = (values[name] for name in ("query", "key", "value", "joined") if name in values)
            reason = next((text for part in parts if (text := _misfit(part, expected))), None)
        if reason:
            self.refusals.append(reason)
            return result.fail(reason, attention)
        return result


class _MultiHead(_AttentionRule):
    """Transposed q, k, v, Attention, transpose and reshape back -> MultiHeadAttention on [batch, tokens, hidden]."""

    def pattern(
        self, op: Any, query: Any, key: Any, value: Any, q_shape: Any, k_shape: Any, v_shape: Any, out_shape: Any
    ) -> Any:
        q = op.Transpose(op.Reshape(query, q_shape), perm=_HEADS_FIRST)
        k = op.Transpose(op.Reshape(key, k_shape), perm=_HEADS_FIRST)
        v = op.Transpose(op.Reshape(value, v_shape), perm=_HEADS_FIRST)
        attention = op.Attention(q, k, v, _outputs=["attention"], _allow_other_inputs=True)
        return op.Reshape(op.Transpose(attention, perm=_HEADS_FIRST), out_shape, _outputs=["joined"])

    def shape(self, heads: int, size: int) -> tuple[int | None, ...]:
        return None, None, heads * size

    def rewrite(self, op: Any, query: Any, key: Any, value: Any, attention: Any, **_: Any) -> Any:
        attributes: dict[str, Any] = {"num_heads": attention.shape[1]}
        scale = _attribute(attention, "scale", None)
        if scale is not None:
            attributes["scale"] = scale
        return op.MultiHeadAttention(query, key, value, _domain="com.microsoft", _version=1, **attributes)


class _MatMul(_AttentionRule):
    """Attention on [batch, heads, tokens, size] -> MatMul, Softmax (in float32), MatMul."""

    def pattern(self, op: Any, query: Any, key: Any, value: Any) -> Any:
        return op.Attention(query, key, value, _outputs=["attention"], _allow_other_inputs=True)

    def shape(self, heads: int, size: int) -> tuple[int | None, ...]:
        return None, heads, None, size

    def rewrite(self, op: Any, query: Any, key: Any, value: Any, attention: Any, **_: Any) -> Any:
        size = attention.shape[3]
        scale = ir.tensor(_attribute(attention, "scale", size**-0.5), dtype=query.dtype)
        scores = op.MatMul(op.Mul(query, op.Constant(value=scale)), op.Transpose(key, perm=[0, 1, 3, 2]))
        if query.dtype in _HALF:
            weights = op.Softmax(op.Cast(scores, to=ir.DataType.FLOAT), axis=-1)
            return op.MatMul(op.Cast(weights, to=query.dtype), value)
        return op.MatMul(op.Softmax(scores, axis=-1), value)


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
