"""The rig is right about what stock TurboMind supports: its answers are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from turbomind_cpu.agreement import assert_agrees
from turbomind_cpu.checkpoints import MODELS, VOCABULARY
from turbomind_cpu.reference import Reference
from turbomind_cpu.rig import Answer, Job, Request, Rig

NEW_TOKENS = 8
LENGTHS = (5, 37, 64, 130)
LONG, PREFILL = 600, 256
STOP_AT, CANCEL_AFTER, ENDLESS = 4, 3, 400


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SINGLE, LONG_PROMPT = prompt(37, 1), prompt(LONG, 2)
BATCH = [prompt(length, 10 + length) for length in LENGTHS]


@dataclass(frozen=True)
class Run:
    """What one model was asked, and answered."""

    reference: Reference
    greedy: list[int]  # the reference's answer to SINGLE
    single: Answer
    batch: list[Answer]
    stopped: Answer
    cancelled: Answer
    in_chunks: Answer
    whole: Answer
    launches: list[str]


@pytest.fixture(scope="module", params=MODELS)
def run(
    request: pytest.FixtureRequest,
    rig: Rig,
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    folder, expected = checkpoint(request.param), reference(request.param)
    greedy = expected.tokens(SINGLE, NEW_TOKENS)
    rounds = [
        [Request(SINGLE, logits=True)],
        [Request(ids, logits=True) for ids in BATCH],
        [Request(SINGLE, stop_token_ids=(greedy[STOP_AT],))],
        [Request(SINGLE, max_new_tokens=ENDLESS, cancel_after=CANCEL_AFTER)],
    ]
    long = [[Request(LONG_PROMPT, max_new_tokens=2, logits=True)]]
    trace = tmp_path_factory.mktemp("trace") / "launches"
    jobs = [
        Job(folder, rounds),
        Job(folder, long, {"session_len": 1024, "max_prefill_token_num": PREFILL}),
        Job(folder, long, {"session_len": 1024, "max_prefill_token_num": 1024}),
    ]
    answers = rig.generate(jobs, trace=trace)
    (single,), batch, (stopped,), (cancelled,) = answers[0]
    launches = trace.read_text().splitlines() if trace.exists() else []
    return Run(expected, greedy, single, batch, stopped, cancelled, answers[1][0][0], answers[2][0][0], launches)


def test_greedy_tokens_are_the_references(run: Run) -> None:
    assert run.single.status == "FINISH"
    assert run.single.tokens == run.greedy


def test_logits_are_the_references(run: Run) -> None:
    assert_agrees(run.single, run.reference.logits(Request(SINGLE), run.single.tokens))


def test_a_batch_of_different_lengths_is_answered_as_each_alone(run: Run) -> None:
    assert [len(answer.tokens) for answer in run.batch] == [NEW_TOKENS] * len(LENGTHS)
    for ids, answer in zip(BATCH, run.batch, strict=True):
        assert_agrees(answer, run.reference.logits(Request(ids), answer.tokens))


def test_a_prompt_in_chunks_is_answered_as_a_whole_one(run: Run) -> None:
    for answer in (run.in_chunks, run.whole):
        assert_agrees(answer, run.reference.logits(Request(LONG_PROMPT), answer.tokens))


def test_a_stop_word_ends_the_answer(run: Run) -> None:
    assert run.stopped.status == "FINISH"
    assert run.stopped.tokens == run.greedy[: run.greedy.index(run.greedy[STOP_AT]) + 1]


def test_a_cancelled_request_ends_early(run: Run) -> None:
    assert run.cancelled.status == "CANCEL"
    assert run.cancelled.tokens[:CANCEL_AFTER] == run.greedy[:CANCEL_AFTER]
    assert len(run.cancelled.tokens) < ENDLESS
