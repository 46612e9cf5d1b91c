"""Looks at a graph in half precision: is everything in float32 that has to be?

Norms (statistics and factors), softmax, rope, means, interpolation and the normalisation of pixels are computed in
float32. An exporter may give each of them many forms, whole or taken apart. So the graph may hold nothing in half
precision but matrix products, sums, GELU, attention and what moves values about: whatever form those take, some
of it is none of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from turbovit.engines.errors import BuildError

_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_NORMS = ("LayerNormalization", "RMSNormalization")
_ATTENTIONS = ("Attention", "MultiHeadAttention")
_PRODUCTS = ("MatMul", "Gemm", *_ATTENTIONS)
_MOVES = {"Concat", "Constant", "Expand", "Gather", "Identity", "Pad", "Reshape", "Slice", "Split", "Squeeze"}
_MAY_BE_HALF = {"Add", "Cast", "Gelu", "Transpose", "Unsqueeze", *_PRODUCTS, *_MOVES}  # a Cast stands at every border
_SHOWN = 5


@dataclass(frozen=True)
class Islands:
    """What a graph computes in float32.

    Attributes:
        half: whether anything in the graph is in half precision.
        norms: names of its norms.
        softmaxes: names of the nodes that compute a softmax in float32.
        hidden: names of attention nodes in half precision, whose softmax is inside and up to the runtime.
        rotations: names of the nodes that turn halves of a head around, one a rotated tensor.
        pixels: names of the nodes that compute with pixels before the first matrix product.
    """

    half: bool
    norms: tuple[str, ...]
    softmaxes: tuple[str, ...]
    hidden: tuple[str, ...]
    rotations: tuple[str, ...]
    pixels: tuple[str, ...]

    def __str__(self) -> str:
        if not self.half:
            return "all of the graph is in float32"
        parts = [f"{len(self.norms)} norms", f"{len(self.softmaxes)} softmaxes", f"{len(self.rotations)} ropes"]
        text = f"in float32: pixel normalisation, {', '.join(part for part in parts if not part.startswith('0 '))}"
        if self.hidden:
            text += f"; {len(self.hidden)} softmaxes are inside attention nodes, their precision is up to the runtime"
        return text


def islands_from_file(path: Path) -> Islands:
    """As `inspect_islands`, of a graph that was written to a file; its weights are not read.

    Raises:
        BuildError: as there; names the file.
    """
    try:
        return inspect_islands(ir.load(path))
    except BuildError as error:
        raise BuildError(f"{path.name}: {error}") from None


def inspect_islands(model: ir.Model) -> Islands:
    """Make sure that norms, softmax, rope and the normalisation of pixels are computed in float32.

    Args:
        model: gets the types that its values lack.

    Raises:
        BuildError: a node computes in half precision what belongs into float32, a type is unknown, or the graph has no
            norm, softmax or pixels where they can be found; names the nodes.
    """
    ShapeInferencePass()(model)
    nodes = list(model.graph)
    _refuse("whose type is unknown", (node for node in nodes if any(out.dtype is None for out in node.outputs)))
    _refuse("in half precision, which must be in float32", (node for node in nodes if _wrongly_half(node)))
    pixels = list(_pixel_nodes(model))
    _refuse("that make half precision of pixels directly", (node for node in pixels if _is_half(node.outputs)))
    attentions = [node for node in nodes if node.op_type in _ATTENTIONS]
    hidden = [node for node in attentions if _hides_softmax(node)]
    softmaxes = [node for node in nodes if node.op_type == "Softmax"]
    softmaxes += [node for node in attentions if node not in hidden]
    islands = Islands(
        half=any(_is_half(node.outputs) for node in nodes),
        norms=_names(node for node in nodes if node.op_type in _NORMS),
        softmaxes=_names(softmaxes),
        hidden=_names(hidden),
        rotations=_names(node for node in nodes if node.op_type == "Concat" and _turns(node)),
        pixels=_names(pixels),
    )
    for what, found in (("norm", islands.norms), ("softmax", (*softmaxes, *hidden)), ("pixel input", islands.pixels)):
        if not found:
            raise BuildError(f"the graph has no {what} that could be inspected: the exporter wrote it in another form")
    return islands


def _refuse(fault: str, nodes: Iterable[ir.Node]) -> None:
    found = [f"{node.op_type} {node.name}" for node in nodes]
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise BuildError(f"the graph has {len(found)} nodes {fault}: {', '.join(found[:_SHOWN])}{more}")


def _names(nodes: Iterable[ir.Node]) -> tuple[str, ...]:
    return tuple(str(node.name) for node in nodes)


def _is_half(values: Iterable[ir.Value | None]) -> bool:
    return any(value is not None and value.dtype in _HALF for value in values)


def _wrongly_half(node: ir.Node) -> bool:
    if node.op_type in _NORMS:
        stash = node.attributes.get("stash_type")
        return _is_half(node.inputs) or (stash is not None and stash.as_int() != ir.DataType.FLOAT)
    return _is_half((*node.inputs, *node.outputs)) and node.op_type not in _MAY_BE_HALF


def _hides_softmax(node: ir.Node) -> bool:
    """An Attention node computes its softmax in the dtype of its inputs, or as its softmax_precision says."""
    precision = node.attributes.get("softmax_precision")
    return _is_half(node.inputs) and (precision is None or precision.as_int() != ir.DataType.FLOAT)


def _turns(node: ir.Node) -> bool:
    """Whether a Concat joins the halves of a head in reverse, one of them negated."""
    first = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    return first is not None and first.op_type == "Neg"


def _pixel_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """The nodes from the uint8 inputs on, up to the cast of what was computed in float32, or the first product."""
    waiting = [value for value in model.graph.inputs if value.dtype == ir.DataType.UINT8]
    while waiting:
        for user in waiting.pop().consumers():
            if user.op_type in (*_PRODUCTS, "Shape") or _from_float(user):
                continue
            yield user
            waiting += user.outputs


def _from_float(node: ir.Node) -> bool:
    """Whether it casts what was computed in float32."""
    return node.op_type == "Cast" and node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT
