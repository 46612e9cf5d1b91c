"""The classes that LMDeploy's PyTorch engine runs: each architecture's own, with the compiled tower in front.

`turbovit_module_map.py` names them. They are joined when they are first asked for, so that this module imports without
LMDeploy.
"""

from __future__ import annotations

import functools

from turbovit.engines.families import load
from turbovit.lmdeploy_ext.pytorch_engine import adapter

# Architecture to the `CompiledTowerModel` subclass that goes in front of LMDeploy's class of it.
COMPILED_HALVES = {
    "Gemma3ForConditionalGeneration": "turbovit.lmdeploy_ext.pytorch_engine.gemma3:Gemma3CompiledTower",
    "Llama4ForConditionalGeneration": "turbovit.lmdeploy_ext.pytorch_engine.llama4:Llama4CompiledTower",
    "Qwen3VLForConditionalGeneration": "turbovit.lmdeploy_ext.pytorch_engine.qwen3_vl:Qwen3VLCompiledTower",
    "Qwen3VLMoeForConditionalGeneration": "turbovit.lmdeploy_ext.pytorch_engine.qwen3_vl:Qwen3VLCompiledTower",
    "DeepseekVLV2ForCausalLM": "turbovit.lmdeploy_ext.pytorch_engine.deepseek_vl2:DeepseekVL2CompiledTower",
}


@functools.cache
def model_class(architecture: str) -> type:
    """The class for an architecture of `COMPILED_HALVES`."""
    compiled, stock = load(COMPILED_HALVES[architecture]), adapter.stock_model_class(architecture)
    return type(architecture, (compiled, stock), {"__module__": __name__, "__doc__": compiled.__doc__})


def __getattr__(name: str) -> type:
    if name not in COMPILED_HALVES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(COMPILED_HALVES)}")
    return model_class(name)
