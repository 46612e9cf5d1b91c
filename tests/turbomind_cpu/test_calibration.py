"""The rig is right about what stock TurboMind supports: its answers are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from turbomind_cpu.agreement import assert_agrees
from turbomind_cpu.checkpoints import MODELS, prompt
from turbomind_cpu.reference import Reference
from turbomind_cpu.rig import Answer, Job, Request, Rig

pytestmark = pytest.mark.slow

NEW_TOKENS = 8
LENGTHS = (5, 37, 64, 130)
LONG, PREFILL = 600, 256
STOP_AT, CANCEL_AFTER, ENDLESS = 4, 3, 400


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
    in_chunks: list[Answer]  # to LONG_PROMPT, and to SINGLE beside it
    whole: list[Answer]


@pytest.fixture(scope="module", params=MODELS)
def run(
    request: pytest.FixtureRequest,
    rig: Rig,
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Reference],
) -> Run:
    folder, expected = checkpoint(request.param), reference(request.param)
    greedy = expected.tokens(SINGLE, NEW_TOKENS)
    rounds = [
        [Request(SINGLE, logits=True)],
        [Request(ids, logits=True) for ids in BATCH],
        [Request(SINGLE, stop_token_ids=(greedy[STOP_AT],))],
        [Request(SINGLE, max_new_tokens=ENDLESS, cancel_after=CANCEL_AFTER)],
    ]
    long = [[Request(LONG_PROMPT, max_new_tokens=2, logits=True), Request(SINGLE, logits=True)]]
    jobs = [
        Job(folder, rounds),
        Job(folder, long, {"session_len": 1024, "max_prefill_token_num": PREFILL}),
        Job(folder, long, {"session_len": 1024, "max_prefill_token_num": 1024}),
    ]
    answers = rig.generate(jobs)
    (single,), batch, (stopped,), (cancelled,) = answers[0]
    return Run(expected, greedy, single, batch, stopped, cancelled, answers[1][0], answers[2][0])


def test_greedy_tokens_are_the_references(run: Run) -> None:
    assert run.single.status == "FINISH"
    assert run.single.tokens == run.greedy


def test_logits_are_the_references(run: Run) -> None:
    assert_agrees(run.single, run.reference.logits(Request(SINGLE), run.single.tokens))


def test_a_batch_of_different_lengths_is_answered_as_each_alone(run: Run) -> None:
    assert [len(answer.tokens) for answer in run.batch] == [NEW_TOKENS] * len(LENGTHS)
    for ids, answer in zip(BATCH, run.batch, strict=True):
        assert_agrees(answer, run.reference.logits(Request(ids), answer.tokens))


@pytest.mark.parametrize("prefill", ["in_chunks", "whole"])
def test_a_long_prompt_is_answered_beside_one_that_decodes(run: Run, prefill: str) -> None:
    for ids, answer in zip((LONG_PROMPT, SINGLE), getattr(run, prefill), strict=True):
        assert_agrees(answer, run.reference.logits(Request(ids), answer.tokens))


def test_a_stop_word_ends_the_answer(run: Run) -> None:
    assert run.stopped.status == "FINISH"
    assert run.stopped.tokens == run.greedy[: run.greedy.index(run.greedy[STOP_AT]) + 1]


def test_a_cancelled_request_ends_early(run: Run) -> None:
    assert run.cancelled.status == "CANCEL"
    assert run.cancelled.tokens[:CANCEL_AFTER] == run.greedy[:CANCEL_AFTER]
    assert len(run.cancelled.tokens) < ENDLESS
