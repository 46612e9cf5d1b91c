"""Run in a child of `rig.Rig`: greedy answers of TurboMind to saved jobs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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

SESSIONS = itertools.count(1)  # the engine may still hold one whose last token has been seen


def main(sent: str, received: str) -> None:
    jobs: list[Job] = torch.load(sent, weights_only=False)
    torch.save([run(job) for job in jobs], received)


def run(job: Job) -> list[list[Answer]]:
    from lmdeploy import turbomind
    from lmdeploy.messages import TurbomindEngineConfig

    if not turbomind.is_available():
        raise RuntimeError("TurboMind's extension did not import: no CUDA driver?") from turbomind._import_error
    config = TurbomindEngineConfig(**{**ENGINE, **job.engine})
    with function_of(job.within)() if job.within else contextlib.nullcontext():
        engine = turbomind.TurboMind(str(job.model), engine_config=config)
    try:
        return [asyncio.run(run_round(engine, requests)) for requests in job.rounds]
    finally:
        engine.close()


async def run_round(engine: Any, requests: list[Request]) -> list[Answer]:
    return await asyncio.gather(*(answer(engine, request) for request in requests))


async def answer(engine: Any, request: Request) -> Answer:
    from lmdeploy.messages import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=request.max_new_tokens,
        stop_token_ids=list(request.stop_token_ids) or None,
        output_logits="all" if request.logits else None,
        **{"top_k": 1, **request.generation},
    )
    instance, session = engine.create_instance(), next(SESSIONS)
    tokens: list[int] = []
    output = None
    async for output in instance.async_stream_infer(
        session,
        request.input_ids,
        input_embeddings=request.input_embeddings,
        input_embedding_ranges=request.input_embedding_ranges,
        gen_config=config,
        stream_output=True,
    ):
        tokens += output.token_ids
        if request.cancel_after is not None and len(tokens) >= request.cancel_after:
            await instance.async_cancel(session)
    if output is None:
        raise RuntimeError(f"a request of {len(request.input_ids)} tokens got no answer")
    logits = None if output.logits is None else output.logits.float().clone()
    return Answer(tokens, output.status.name, logits)
