"""What TurboMind answers for DeepSeek-VL2, beside transformers: ``python -m turbovit.benchmarks.turbomind_answers``.

Tiny synthetic checkpoints of its language halves that TurboMind has kernels for; conversations go through LMDeploy's
own classes, with a compiled tower, into TurboMind itself. It runs over whatever CUDA is there: the machine's, or
stand-ins.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from turbovit.benchmarks.agreement import BOUND, Agreement, agreement
from turbovit.benchmarks.turbomind_side import Answer, Request, TurboMindSide

LANGUAGES = ("mha", "mla", "base")
NEW_TOKENS = 6
CHUNK = 256  # tokens of a prefill

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A conversation through TurboMind, beside the reference.

    Attributes:
        name: what it is a case of.
        prompt: how many tokens the prompt has.
        tokens, expected: what TurboMind chose; what the reference would have, given the tokens before.
        problem: what else is wrong; empty where nothing is.
    """

    name: str
    prompt: int
    tokens: list[int]
    expected: list[int]
    agreement: Agreement
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Whether it is within all bounds."""
        return self.agreement.holds and not self.problem


@dataclass(frozen=True)
class Subject:
    """A checkpoint on both sides."""

    checkpoint: Path
    side: Any
    reference: Any

    @classmethod
    def made(cls, language: str, folder: Path) -> Subject:
        """Written, built and opened in `folder`."""
        from turbovit.benchmarks.lmdeploy_side import LMDeploySide
        from turbovit.benchmarks.reference_deepseek_vl2 import DeepseekVL2Reference
        from turbovit.export.build import build
        from turbovit.export.samples import write_sample

        checkpoint = folder / language
        write_sample("deepseek_vl2", checkpoint, language=language)
        bundle = build(checkpoint, folder / f"{language}-bundle").bundle.path
        return cls(checkpoint, LMDeploySide(checkpoint, bundle), DeepseekVL2Reference(checkpoint))

    def request(self, messages: Messages) -> Request:
        """What LMDeploy hands to the engine."""
        return Request.of(self.side.request(messages), max_new_tokens=NEW_TOKENS, logits=True)

    def compare(self, name: str, messages: Messages, answer: Answer) -> Case:
        """An answer beside the whole reference model, which is given the tokens that TurboMind chose."""
        from turbovit.benchmarks.reference import chat_from_lmdeploy

        inputs = dict(self.reference.inputs_from_messages(chat_from_lmdeploy(messages)))
        prompt = inputs["input_ids"].shape[1]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([answer.tokens[:-1]])], dim=1)
        inputs["images_seq_mask"] = inputs["input_ids"][0] == self.reference.image_id
        logits = self.reference.logits(inputs)
        assert answer.logits is not None
        expected = logits[-len(answer.tokens) :].argmax(dim=1).tolist()
        return Case(name, prompt, answer.tokens, expected, agreement(answer.tokens, answer.logits, logits))


def conversations() -> dict[str, Messages]:
    """Text alone, several turns, and one to three images, two of them side by side; the same on every machine."""
    one, square, other, tiny = (_image(*size) for size in ((700, 350), (300, 300), (350, 380), (64, 80)))
    turns = [_user("What is this?"), {"role": "assistant", "content": "A map."}, _user("Of which city, and when?")]
    return {
        "text": [_user("The river")],
        "turns": turns,
        "one image": [_user("What is this?", one)],
        "adjacent images": [_user(square, other, "which is larger?")],
        "images in two turns": [
            _user(square, "A first"),
            {"role": "assistant", "content": "Yes."},
            _user("And", other),
        ],
        "three images": [_user(square, "or", other, tiny, "?")],
    }


def _user(*parts: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts],
    }


def _image(width: int, height: int) -> dict[str, Any]:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), np.uint8)
    return {"type": "image_data", "image_data": {"data": Image.fromarray(pixels)}}


def cases(subject: Subject, names: Sequence[str] = ()) -> Iterator[Case]:
    """Conversations (all, or those named) one by one, four at once, prefilled in chunks, stopped and cancelled."""
    chats = {name: chat for name, chat in conversations().items() if name in names or not names}
    requests = {name: subject.request(chat) for name, chat in chats.items()}
    with TurboMindSide(subject.checkpoint) as turbomind:
        together = list(chats)[:4]
        answers = dict(zip(together, turbomind.answers([requests[name] for name in together]), strict=True))
        answers |= {name: turbomind.answers([requests[name]])[0] for name in chats if name not in together}
        for name, chat in chats.items():
            yield subject.compare(name, chat, answers[name])
        if not names:
            for special in (_stopped, _cancelled, _without_features):
                yield special(subject, turbomind, chats, requests, answers)
    if not names:
        with TurboMindSide(subject.checkpoint, max_prefill_token_num=CHUNK) as turbomind:
            name = "adjacent images"
            (answer,) = turbomind.answers([requests[name]])
            yield subject.compare(f"{name}, in chunks of {CHUNK}", chats[name], answer)


def _stopped(subject: Subject, turbomind: TurboMindSide, chats: Any, requests: Any, answers: Any) -> Case:
    """The answer ends with the first stop token, which is its own third."""
    name, whole = "turns", answers["turns"].tokens[:3]
    (answer,) = turbomind.answers([replace(requests[name], stop_token_ids=(whole[-1],))])
    case = subject.compare("a stop token", chats[name], answer)
    expected = whole[: whole.index(whole[-1]) + 1]
    return _with_problem(case, answer.tokens == expected, f"its tokens are {answer.tokens}, expected {expected}")


def _cancelled(subject: Subject, turbomind: TurboMindSide, chats: Any, requests: Any, answers: Any) -> Case:
    """One of two requests is cancelled; the other is answered as it is alone."""
    name, endless = "turns", replace(requests["text"], max_new_tokens=64, cancel_after=2)
    cancelled, other = turbomind.answers([endless, requests[name]])
    case = subject.compare("beside a cancelled request", chats[name], other)
    case = _with_problem(case, cancelled.status == "CANCEL", f"the cancelled one ended with {cancelled.status}")
    return _with_problem(case, len(cancelled.tokens) < 64, f"the cancelled one has {len(cancelled.tokens)} tokens")


def _without_features(subject: Subject, turbomind: TurboMindSide, chats: Any, requests: Any, answers: Any) -> Case:
    """A request without its features gets other logits: they do reach the engine."""
    name = "one image"
    with_features = subject.compare("features reach the engine", chats[name], answers[name])
    bare = replace(requests[name], input_embeddings=None, input_embedding_ranges=None)
    without = subject.compare(name, chats[name], turbomind.answers([bare])[0])
    off = without.agreement.overall
    return _with_problem(with_features, off > 10 * BOUND, f"without its features they are {off:.3f} off")


def _with_problem(case: Case, fine: bool, problem: str) -> Case:
    return case if fine else replace(case, problem="; ".join(filter(None, [case.problem, problem])))


def check(languages: Sequence[str], folder: Path, names: Sequence[str] = ()) -> dict[str, list[Case]]:
    """The cases of each language half; checkpoints and bundles are written into `folder`."""
    return {language: list(cases(Subject.made(language, folder), names)) for language in languages}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line a case. 0: all are within the bounds; 1: one is not."""
    parser = argparse.ArgumentParser(prog="python -m turbovit.benchmarks.turbomind_answers", description=__doc__)
    parser.add_argument("--language", default=",".join(LANGUAGES), help="separated by commas")
    parser.add_argument("--cases", default="", help="conversations, separated by commas; by default all there is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    given = parser.parse_args(arguments)
    names = tuple(filter(None, given.cases.split(",")))
    with tempfile.TemporaryDirectory(prefix="turbovit-turbomind-") as folder:
        found = check(given.language.split(","), Path(folder), names)
    for language, results in found.items():
        for case in results:
            print(line_from_case(language, case))
    if given.json is not None:
        plain = {name: [{**asdict(case), "passed": case.passed} for case in results] for name, results in found.items()}
        given.json.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    return 0 if all(case.passed for results in found.values() for case in results) else 1


def line_from_case(language: str, case: Case) -> str:
    """Such as ``mha, text: passed; 8 tokens in, 6 of 6 the reference's, logits 0.9% off``."""
    equal = sum(mine == best for mine, best in zip(case.tokens, case.expected, strict=True))
    off = case.agreement
    verdict = "passed" if case.passed else f"FAILED {case.problem}".strip()
    return (
        f"{language}, {case.name}: {verdict}; {case.prompt} tokens in, {equal} of {len(case.tokens)} chosen as the "
        f"reference does; logits {off.overall:.2%} off, worst row {off.worst_row:.2%}, choices {off.lag:.3f} "
        f"deviations below the best"
    )


def command(*arguments: str) -> None:
    """`main`, as a function of strings that ends the process where a case is not within the bounds."""
    status = main(arguments)
    if status:
        sys.exit(status)


if __name__ == "__main__":
    sys.exit(main())
