"""Run in a child of `rig.Rig`: released configs at full width, their tensors without data, over the wheel's own plans.

What is made of the extension's modules is recorded in place of its memory; builders and plans are LMDeploy's.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

LAYERS = 2


class Recorded:
    """In place of a module of the extension: its parameters' shapes and its children."""

    def __init__(self, config: Any):
        self.children: dict[str, Recorded] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def set_plan(self, plan: Any) -> None:
        assert plan is not None

    def add_child_raw(self, name: str, child: Recorded) -> None:
        assert name not in self.children
        self.children[name] = child

    def param(self, name: str) -> Any:
        def alloc(shape: list[int], dtype: Any) -> Any:
            from lmdeploy.turbomind.builders._base import _CPP_TO_TORCH

            assert name not in self.shapes
            self.shapes[name] = tuple(shape)
            size = torch.empty(shape, dtype=_CPP_TO_TORCH[dtype], device="meta").nbytes
            return SimpleNamespace(byte_size=size, type=dtype, copy_from=lambda tensor: None)

        return SimpleNamespace(alloc=alloc)


def main(sent: str, received: str) -> None:
    models: dict[str, dict[str, Any]] = json.loads(Path(sent).read_text())
    found: dict[str, Any] = {"plans": plans()}
    for dtype in ("bfloat16", "float16"):
        found[dtype] = {name: built(model["config"], model["shapes"], dtype) for name, model in models.items()}
    Path(received).write_text(json.dumps(found))


def plans() -> dict[str, dict[str, bool]]:
    """Whether the wheel has a plan for weights in a dtype, and for those of experts, on this capability."""
    from lmdeploy.turbomind import _tm
    from lmdeploy.turbomind.builders import _torch_dtype_to_cpp
    from lmdeploy.turbomind.weight_format import TrivialFormat

    def has_plan(dtype: str, grouped: bool) -> bool:
        query = _tm.WeightQuery()
        query.data_type = _torch_dtype_to_cpp(getattr(torch, dtype))
        query.weight_format = TrivialFormat(weight_dtype=query.data_type).make_data_format()
        query.input_dtype, query.grouped = _tm.DataType.TYPE_INVALID, grouped
        return _tm.Gemm().get_weight_plan(query) is not None

    return {
        dtype: {"dense": has_plan(dtype, False), "experts": has_plan(dtype, True)} for dtype in ("bfloat16", "float16")
    }


def built(config: dict[str, Any], shapes: dict[str, list[int]], dtype: str) -> dict[str, Any]:
    """The tensors that are left and the sizes of some modules, or what was raised."""
    from contextlib import nullcontext

    from lmdeploy.turbomind import _tm
    from lmdeploy.turbomind.builders import Context, _torch_dtype_to_cpp
    from lmdeploy.turbomind.builders._base import ParallelGroup
    from lmdeploy.turbomind.checkpoint import Prefix
    from lmdeploy.turbomind.weight_format import TrivialFormat, WeightFormatResolver

    from turbovit.lmdeploy_ext.deepseek_vl2_config import DeepseekVLV2Config
    from turbovit.lmdeploy_ext.turbomind_models import adapter, deepseek_vl2
    from turbovit.lmdeploy_ext.turbomind_models.models import LANGUAGE_HALVES

    left = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    checkpoint = SimpleNamespace(
        pop=lambda key, index=None: left.pop(key), get=lambda key, index=None: left[key], has=lambda key: key in left
    )
    data_type = _torch_dtype_to_cpp(getattr(torch, dtype))
    (half,) = LANGUAGE_HALVES.values()
    one, root = ParallelGroup(1, [0]), Recorded(None)
    with (
        patch.object(_tm, "create_module", Recorded),
        patch.object(deepseek_vl2, "config_problems", lambda *_: []),  # the largest has other ones
    ):
        try:
            resolver = WeightFormatResolver(formats=[TrivialFormat(weight_dtype=data_type)])
            model = adapter.source_model(half)(DeepseekVLV2Config(**config), resolver=resolver)
            context = Context([nullcontext()], _tm.Gemm(), data_type, _tm.DataType.TYPE_INVALID)
            groups = dict.fromkeys(("attn_tp", "mlp_tp", "ep", "model_tp", "dense_tp"), one)
            model.bind_runtime(ctx=context, root_handles=[root], **groups)
            model.model(Prefix(checkpoint))
        except (ValueError, RuntimeError) as error:
            return {"raised": f"{type(error).__name__}: {error}"}
    layer = root.children["text_model"].children["layers"].children[str(LAYERS - 1)].children
    attention, experts = layer["attention"].children, layer["moe_ffn"].children["experts"].children
    return {
        "left": sorted(left),
        "attention": {name: list(child.shapes["weight"]) for name, child in attention.items()},
        "experts": len(experts),
        "bias": list(layer["moe_ffn"].shapes.get("score_correction_bias", ())),
    }
