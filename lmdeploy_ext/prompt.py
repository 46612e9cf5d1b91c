"""From a conversation and its images to an engine's request: prompt, ids, and what stands at the placeholders."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from turbovit.engines.errors import InputError
from turbovit.engines.preprocessor import Encoded, Item


def expanded(prompt: str, placeholder: str, replacements: Sequence[str], inner: Sequence[str]) -> str:
    """`prompt` with the n-th `placeholder` replaced by the n-th of `replacements`.

    Args:
        inner: the strings that only replacements may bring in.

    Raises:
        InputError: the numbers differ, or one of `inner` is there already.
    """
    for word in inner:
        if word in prompt:
            raise InputError(
                f"the prompt holds {word!r}: write one {placeholder!r} for each image and nothing else of it"
            )
    pieces = prompt.split(placeholder)
    if len(pieces) - 1 != len(replacements):
        raise InputError(
            f"the prompt has {len(pieces) - 1} x {placeholder!r} for {len(replacements)} images: it needs one each"
        )
    return pieces[0] + "".join(text + piece for text, piece in zip(replacements, pieces[1:], strict=True))


def expanded_ids(
    ids: Sequence[int], placeholders: Mapping[int, str], replacements: Sequence[Sequence[int]]
) -> list[int]:
    """`ids` with the n-th placeholder replaced by the n-th of `replacements`.

    Args:
        placeholders: their ids, and how they are written.

    Raises:
        InputError: the numbers differ.
    """
    count = sum(token in placeholders for token in ids)
    if count != len(replacements):
        names = " or ".join(f"{token} ({word})" for token, word in placeholders.items())
        raise InputError(f"the token ids have {count} x {names} for {len(replacements)} images")
    remaining = iter(replacements)
    return list(chain(*(next(remaining) if token in placeholders else (token,) for token in ids)))


def ids_from_prompt(prompt: str, tokenizer: Any) -> list[int]:
    """Token ids of a whole prompt, with exactly one BOS where the tokenizer adds one.

    Args:
        tokenizer: LMDeploy's `Tokenizer`.
    """
    bos = tokenizer.model.model.bos_token
    begins_with_bos = bool(bos) and prompt.startswith(bos)
    return tokenizer.encode(prompt, add_bos=True, add_special_tokens=not begins_with_bos)


def ids_from_text(text: str, tokenizer: Any) -> list[int]:
    """Token ids of a text as it stands, without BOS."""
    return tokenizer.encode(text, add_bos=True, add_special_tokens=False)


def text_from_ids(ids: Sequence[int], tokenizer: Any) -> str | None:
    """The text that tokenises to exactly `ids`, or None where there is none."""
    text = tokenizer.model.model.decode(ids, skip_special_tokens=False)
    return text if ids_from_text(text, tokenizer) == list(ids) else None


def refuse_unknown_ids(ids: Sequence[int], tokenizer: Any) -> None:
    """Refuse ids that no embedding stands behind.

    Raises:
        InputError: names the first one.
    """
    size = len(tokenizer.model.model)
    for token in ids:
        if not 0 <= token < size:
            raise InputError(f"the token ids hold {token}, the tokenizer has 0 to {size - 1}")


def runs_of(ids: Sequence[int], tokens: Collection[int]) -> list[list[int]]:
    """[begin, end) of every longest run of one of `tokens`."""
    runs: list[list[int]] = []
    for position, value in enumerate(ids):
        if value in tokens:
            if runs and runs[-1][1] == position and ids[position - 1] == value:
                runs[-1][1] += 1
            else:
                runs.append([position, position + 1])
    return runs


def check_runs(runs: Iterable[Sequence[int]], items: Iterable[Item]) -> None:
    """Make sure that [begin, end) of the runs of placeholders in a prompt are those of its images, in prompt order.

    Raises:
        InputError: they are not.
    """
    found, expected = [end - begin for begin, end in runs], list(chain(*(one.runs for one in items)))
    if found != expected:
        raise InputError(f"the prompt has runs of {found} image tokens, its images have {expected}")


def turbomind_request(
    prompt: str | None, ids: list[int], runs: list[list[int]], encoded: Sequence[Encoded]
) -> dict[str, Any]:
    """TurboMind's request: an embedding [tokens, hidden] for each of `runs`."""
    request = {"prompt": prompt, "input_ids": ids}
    embeddings = list(chain(*(one.embeddings for one in encoded)))
    return {**request, "input_embeddings": embeddings, "input_embedding_ranges": runs} if runs else request


def pytorch_request(prompt: str | None, ids: list[int], entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The PyTorch engine's request.

    Args:
        entries: pixels, place in the prompt and more of each image, as the family's input processor there takes them.
    """
    request: dict[str, Any] = {"prompt": prompt, "input_ids": ids}
    return {**request, "multimodal": entries} if entries else request
