"""Run in a child of `rig.Rig`: greedy answers of TurboMind to saved jobs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import torch
from turbomind_cpu.child import function_of
from turbomind_cpu.rig import Answer, Job, Request

ENGINE = {
    "dtype": "bfloat16",
    "devices": [0],
    "device_num": 1,
    "session_len": 512,
    "max_batch_size": 8,
    "max_prefill_token_num": 512,
    "enable_metrics": False,
}


def main(sent: str, received: str) -> None:
    jobs: list[Job] = torch.load(sent, weights_only=False)
    torch.save([run(job) for job in jobs], received)


def run(job: Job) -> list[list[Answer]]:
    from lmdeploy.messages import TurbomindEngineConfig
    from lmdeploy.turbomind import TurboMind

    config = TurbomindEngineConfig(**{**ENGINE, **job.engine})
    with function_of(job.within)() if job.within else contextlib.nullcontext():
        engine = TurboMind(str(job.model), engine_config=config)
    try:
        return [asyncio.run(run_round(engine, requests)) for requests in job.rounds]
    finally:
        engine.close()


async def run_round(engine: Any, requests: list[Request]) -> list[Answer]:
    return await asyncio.gather(*(answer(engine, number, request) for number, request in enumerate(requests, 1)))


async def answer(engine: Any, number: int, request: Request) -> Answer:
    from lmdeploy.messages import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=request.max_new_tokens,
        stop_token_ids=list(request.stop_token_ids) or None,
        output_logits="all" if request.logits else None,
        **{"top_k": 1, **request.generation},
    )
    instance = engine.create_instance()
    tokens: list[int] = []
    output = None
    async for output in instance.async_stream_infer(
        number,
        request.input_ids,
        input_embeddings=request.input_embeddings,
        input_embedding_ranges=request.input_embedding_ranges,
        gen_config=config,
        stream_output=True,
    ):
        tokens += output.token_ids
        if request.cancel_after is not None and len(tokens) >= request.cancel_after:
            await instance.async_cancel(number)
    if output is None:
        raise RuntimeError(f"request {number} of {len(request.input_ids)} tokens got no answer")
    logits = None if output.logits is None else output.logits.float().clone()
    return Answer(tokens, output.status.name, logits)
