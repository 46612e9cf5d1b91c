"""Runs LMDeploy's decoder, compiled tower included, on the CPU: Triton's interpreter stands in for its compiler.

Run with a checkpoint, its bundle and a file of requests; writes the logits of each request beside it. Triton reads
``TRITON_INTERPRET`` when it is imported, so this is a process of its own. Dynamo is off: what LMDeploy compiles with it
would cost more to compile than to run.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}

import torch
from pytorch_engine_steps import BLOCK, EngineSteps, pretended_gpu

from turbovit.lmdeploy_ext import install

# What the kernels took from triton before the interpreter could put its own in place.
ALIASES: dict[str, dict[str, Any]] = {
    "flashattention": {"tl_log2": "log2", "tl_exp2": "exp2"},
    "pagedattention": {"tl_log2": "log2", "tl_exp2": "exp2"},
    "activation": {"fast_expf": "exp"},
}


def interpret() -> None:
    """Give Triton a driver that it asks about its target, and kernels the interpreter's functions."""
    import triton
    import triton.language as tl

    target = SimpleNamespace(backend="cuda", arch=89, warp_size=32)
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_benchmarker=lambda: lambda kernel, quantiles, **_: [1.0] * len(quantiles),
    )
    triton.runtime.driver.set_active(driver)
    for module, aliases in ALIASES.items():
        kernels = import_module(f"lmdeploy.pytorch.kernels.cuda.{module}")
        for alias, name in aliases.items():
            setattr(kernels, alias, lambda value, name=name: getattr(tl, name)(value))


def logits_of(checkpoint: Path, bundle: Path, requests: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Logits [tokens, vocabulary] of every request, all in one prefill."""
    engine = EngineSteps(checkpoint, bundle)
    for request in requests:
        engine.add(request)
    inputs, config = engine.prefill(), engine.config
    shape = (engine.cache.num_gpu_blocks, BLOCK, config.num_key_value_heads, config.head_dim)
    caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_layers)]
    with engine.context(inputs, caches) as context:
        hidden = engine.model(**engine.model.prepare_inputs_for_generation(past_key_values=caches, context=context))
        logits = engine.model.get_logits(hidden)[0]
    return list(logits.split([len(request["input_ids"]) for request in requests]))


if __name__ == "__main__":
    checkpoint, bundle, file = map(Path, sys.argv[1:])
    requests = torch.load(file, weights_only=False)
    install()  # as in the process of the engine, which it is pickled into with the config
    with pretended_gpu():
        interpret()
        torch.save(logits_of(checkpoint, bundle, requests), file.with_suffix(".logits"))
