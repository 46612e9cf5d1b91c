"""Run in a child of `rig.Rig`: greedy answers of TurboMind to saved jobs."""

from __future__ import annotations

import contextlib

import torch
from turbomind_cpu.child import function_of
from turbomind_cpu.rig import Answer, Job

from turbovit.benchmarks.turbomind_side import TurboMindSide

ENGINE = {"dtype": "bfloat16", "session_len": 512, "max_prefill_token_num": 512, "cache_max_entry_count": 0.8}


def main(sent: str, received: str) -> None:
    jobs: list[Job] = torch.load(sent, weights_only=False)
    torch.save([run(job) for job in jobs], received)


def run(job: Job) -> list[list[Answer]]:
    with function_of(job.within)() if job.within else contextlib.nullcontext():
        side = TurboMindSide(job.model, **{**ENGINE, **job.engine})
    with side:
        return [side.answers(requests) for requests in job.rounds]
