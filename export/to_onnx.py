"""From a tower to an ONNX graph: export, checks, attention form, and one external weight file per precision."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir
import torch

from turbovit.engines.bundle import TensorSpec
from turbovit.engines.errors import BuildError
from turbovit.engines.shapes import split_dim
from turbovit.export.rewrites import attention_count, rewrite_attention
from turbovit.export.tower import Sample, Tower

OPSET = 23  # the first with Attention and RMSNormalization


def onnx_from_tower(tower: Tower, sample: Sample, outputs: tuple[TensorSpec, ...]) -> ir.Model:
    """Export a tower with symbolic batch and patch counts.

    Args:
        tower: in eval mode, in the precision that the graph shall have.
        sample: inputs to trace with; no symbolic dimension may be 1, or it is specialised.
        outputs: what the graph's outputs must be.

    Raises:
        BuildError: the export failed, or the graph is not what the tower says it is.
    """
    inputs = tower.inputs()
    arguments = tuple(sample.inputs[spec.name] for spec in inputs)
    symbols: dict[str, torch.export.Dim] = {}
    shapes = tuple(
        {axis: _dim(dim, symbols) for axis, dim in enumerate(spec.shape) if isinstance(dim, str)} for spec in inputs
    )
    exporter_log = logging.getLogger("torch.onnx")
    level = exporter_log.level
    exporter_log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside the exporter
            program = torch.onnx.export(
                tower,
                arguments,
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=shapes,
                input_names=[spec.name for spec in inputs],
                output_names=[spec.name for spec in outputs],
                verbose=False,
            )
    except Exception as error:  # the exporter wraps whatever went wrong inside it
        raise BuildError(f"the ONNX export failed: {error}") from error
    finally:
        exporter_log.setLevel(level)
    assert program is not None
    assert program.exported_program is not None
    model: ir.Model = program.model
    model.producer_name = "turbovit"
    _check_values("input", inputs, model.graph.inputs)
    _rename_symbols(model, _symbol_names(program.exported_program, inputs))
    _check_values("output", outputs, model.graph.outputs)
    if not attention_count(model):
        raise BuildError("the exported graph has no Attention node: the exporter took attention apart")
    return model


def save_base_graph(model: ir.Model, path: Path, weights: str) -> None:
    """Write the exported graph to `path` and its weights to the file `weights` beside it; `model` loses them.

    onnxscript's rewrite rules are global and keep the last graph that they saw, so that its weights would stay.
    """
    ir.save(model, path, external_data=weights)
    for value in model.graph.initializers.values():
        value.const_value = None


def derive_graph(base: Path, path: Path, form: str) -> int:
    """Write the graph of `base` to `path`, in the same folder, with attention in `form`.

    The new graph refers to the weight file of `base`, which is neither read nor written.

    Returns:
        How many attentions were rewritten.
    """
    model = ir.load(base)
    changed = rewrite_attention(model, form)
    ir.save(model, path)
    return changed


def _dim(dim: str, symbols: dict[str, torch.export.Dim]) -> object:
    factor, symbol = split_dim(dim)
    assert symbol is not None
    known = symbols.setdefault(symbol, torch.export.Dim(symbol))
    return known if factor == 1 else factor * known


def _symbol_names(program: torch.export.ExportedProgram, inputs: tuple[TensorSpec, ...]) -> dict[str, str]:
    """The exporter's symbols (``s85``) to ours: it gives a multiple of a symbol our name, but not the symbol in it."""
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    return {
        str(symbol): str(split_dim(dim)[1])
        for node, spec in zip(placeholders[-len(inputs) :], inputs, strict=True)
        for size, dim in zip(node.meta["val"].shape, spec.shape, strict=True)
        if isinstance(dim, str)
        for symbol in size.node.expr.free_symbols
    }


def _rename_symbols(model: ir.Model, names: dict[str, str]) -> None:
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names))

    def renamed(dim: int | ir.SymbolicDim) -> int | str | ir.SymbolicDim:
        text = dim.value if isinstance(dim, ir.SymbolicDim) else None
        return dim if text is None else pattern.sub(lambda found: names[found[0]], text)

    for node in model.graph:
        for value in node.outputs:
            if value.shape is not None:
                value.shape = ir.Shape([renamed(dim) for dim in value.shape])


def _check_values(kind: str, specs: tuple[TensorSpec, ...], values: Sequence[ir.Value]) -> None:
    found = [(value.name, _dtype(value), _shape(value)) for value in values]
    expected = [(spec.name, spec.dtype, tuple(str(dim).replace(" ", "") for dim in spec.shape)) for spec in specs]
    if found != expected:
        raise BuildError(f"the exported graph's {kind}s are {found}, expected {expected}: a dimension was specialised")


def _dtype(value: ir.Value) -> str:
    return {"float": "float32"}.get(str(value.dtype).lower(), str(value.dtype).lower())


def _shape(value: ir.Value) -> tuple[str, ...]:
    dims = value.shape if value.shape is not None else ()
    return tuple(str(dim.value if isinstance(dim, ir.SymbolicDim) else dim).replace(" ", "") for dim in dims)
