"""A limit on the tokens of one prefill splits a prompt: the engine looks its embeddings up in as many runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from turbomind_cpu.checkpoints import prompt
from turbomind_cpu.rig import Job, Request, Rig

# Without `async_` the engine does not run a step ahead, of which an answer's end makes nothing.
ENGINE = {"session_len": 1024, "max_prefill_token_num": 256, "async_": 0}


def test_600_tokens_are_three_runs(cpu_rig: Rig, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    trace = tmp_path / "launches"
    cpu_rig.generate([Job(checkpoint("qwen3"), [[Request(prompt(600, 2), max_new_tokens=1)]], ENGINE)], trace=trace)
    assert sum("embeddingLookupKernel" in name for name in trace.read_text().splitlines()) == 3
