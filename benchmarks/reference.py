"""The reference that requests are proved against: transformers' own processor and whole model, in float32.

It shares no code with `turbovit.lmdeploy_ext`: what it says about a conversation is what transformers says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Comparison:
    """A request beside the reference.

    Attributes:
        ids_equal: whether the token ids are the reference's.
        logits_error: largest absolute difference of the logits; None where the ids differ.
    """

    ids_equal: bool
    logits_error: float | None


class Reference(ABC):
    """A family's processor and model."""

    @abstractmethod
    def __init__(self, checkpoint: Path):
        """Load both from a checkpoint folder."""

    @abstractmethod
    def inputs_from_messages(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Mapping[str, Tensor]:
        """The processor's output for a chat in Hugging Face's form, batch 1; `options` are its keyword arguments."""

    @abstractmethod
    def inputs_from_prompt(self, prompt: str, images: Sequence[Any], **options: Any) -> Mapping[str, Tensor]:
        """The processor's output for a prompt without chat template, batch 1."""

    @abstractmethod
    def logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The whole model's logits [tokens, vocabulary]."""

    @abstractmethod
    def spliced_logits(self, request: Mapping[str, Any]) -> Tensor:
        """The language model's logits with a request's embeddings in place of its placeholders."""

    def tower_outputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the model's own vision tower and projector give for an engine's inputs, as an engine names it.

        Args:
            inputs: on the model's device, as the family's engines take them.

        Raises:
            NotImplementedError: the reference has no tower that could be run so.
        """
        raise NotImplementedError(f"{type(self).__name__} has no tower of its own to run")

    def compare(self, request: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> Comparison:
        """A request beside the processor's output for the same conversation."""
        if list(request["input_ids"]) != inputs["input_ids"][0].tolist():
            return Comparison(ids_equal=False, logits_error=None)
        difference = self.spliced_logits(request) - self.logits(inputs)
        return Comparison(ids_equal=True, logits_error=float(difference.abs().max()))


def spliced(embeddings: Tensor, request: Mapping[str, Any]) -> Tensor:
    """`embeddings` [tokens, hidden] with the request's own at its ranges."""
    result = embeddings.clone()
    for rows, (begin, end) in zip(
        request.get("input_embeddings", []), request.get("input_embedding_ranges", []), strict=True
    ):
        result[begin:end] = rows
    return result


def chat_from_lmdeploy(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation in LMDeploy's form (with PIL images as ``image_data``) in Hugging Face's.

    Of videos it has the places alone: a reference gets their frames as LMDeploy loads them. A tool's answer that is a
    string stays one: chat templates write lists as data.
    """

    def content(message: Mapping[str, Any]) -> Any:
        given = message.get("content")
        return given if message["role"] == "tool" and isinstance(given, str) else _parts(given)

    return [{**message, "content": content(message)} for message in messages]


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [_part(part) for part in content or ()]


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    if part["type"].startswith("video"):
        return {"type": "video"}
    return {"type": "image", "image": part["image_data"]["data"]}


def float32_model(model_class: Any, checkpoint: Path) -> Any:
    """A transformers model in eval mode and float32."""
    return model_class.from_pretrained(checkpoint, dtype=torch.float32).eval()
