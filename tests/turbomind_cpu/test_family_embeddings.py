"""What the real engine does with images' rows: each family's requests, into a text model that stock TurboMind has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from turbomind_cpu.agreement import BOUND, agreement, assert_agrees
from turbomind_cpu.checkpoints import qwen3, write
from turbomind_cpu.reference import Reference
from turbomind_cpu.rig import Answer, Job, Request, Rig
from turbomind_requests import image, noise, text, user

from turbovit.engines.families import FAMILIES
from turbovit.engines.gemma3 import PAN_AND_SCAN_VARIABLE

pytestmark = pytest.mark.slow

SEVERAL = ("llama4", "gemma3")  # an image has a range for each of its tiles or crops
HIDDEN, VOCABULARY = 64, 2048  # of the families' tiny samples
CHAT = [user(text("this"), image(noise(200, 120, 1)), text("and that"), image(noise(300, 900, 2)), text("?"))]
ENGINE = {"session_len": 4096, "max_prefill_token_num": 2048}


def shifted(request: Request) -> Request:
    """Every row one token late."""
    ranges = request.input_embedding_ranges or []
    return replace(request, input_embedding_ranges=[[begin + 1, end + 1] for begin, end in ranges])


def reversed_(request: Request) -> Request:
    """The same rows, the last first."""
    parts = request.input_embeddings or []
    return replace(request, input_embeddings=list(torch.cat(parts).flip(0).split([len(part) for part in parts])))


@pytest.fixture(scope="module")
def requests_(request: pytest.FixtureRequest) -> dict[str, Request]:
    from turbovit.benchmarks.lmdeploy_side import LMDeploySide

    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PAN_AND_SCAN_VARIABLE, "1")
        for family in FAMILIES:
            checkpoint = request.getfixturevalue(f"tiny_{family.name}")
            bundle = request.getfixturevalue(f"tiny_{family.name}_bundle")
            prompt = LMDeploySide(checkpoint, bundle.path).request(CHAT)
            made[family.name] = Request.of(prompt, max_new_tokens=2, logits=True)
    return made


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = partial(qwen3, hidden_size=HIDDEN, vocab_size=VOCABULARY, max_position_embeddings=4096)
    return write(make, tmp_path_factory.mktemp("models") / "qwen3-text")


@pytest.fixture(scope="module")
def reference(text_model: Path) -> Reference:
    return Reference(text_model)


@pytest.fixture(scope="module")
def answers(requests_: dict[str, Request], text_model: Path, rig: Rig) -> dict[str, list[Answer]]:
    """Each family's request as it is, shifted and reversed, in one batch."""
    rounds = [[request, shifted(request), reversed_(request)] for request in requests_.values()]
    return dict(zip(requests_, rig.generate([Job(text_model, rounds, ENGINE)])[0], strict=True))


@dataclass(frozen=True)
class Asked:
    """A family's request, and the answers to it, shifted and reversed."""

    family: str
    request: Request
    right: Answer
    shifted: Answer
    reversed: Answer


@pytest.fixture(params=[family.name for family in FAMILIES])
def asked(request: pytest.FixtureRequest, requests_: dict[str, Request], answers: dict[str, list[Answer]]) -> Asked:
    return Asked(request.param, requests_[request.param], *answers[request.param])


def test_rows_stand_where_the_ranges_say(asked: Asked, reference: Reference) -> None:
    ranges, images = asked.request.input_embedding_ranges or (), 2
    assert len(ranges) > images if asked.family in SEVERAL else len(ranges) == images
    assert {part.dtype for part in asked.request.input_embeddings or ()} == {torch.float32}  # the engine's is bfloat16
    assert_agrees(asked.right, reference.logits(asked.request, asked.right.tokens))


@pytest.mark.parametrize("mistake", ["shifted", "reversed"])
def test_rows_elsewhere_are_another_answer(asked: Asked, mistake: str, reference: Reference) -> None:
    answer = getattr(asked, mistake)
    assert agreement(answer, reference.logits(asked.request, answer.tokens)).overall > 2 * BOUND
