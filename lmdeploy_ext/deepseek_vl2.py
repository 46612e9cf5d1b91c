"""DeepSeek-VL2's prompts, in the conversation format of its original code, tokenised turn by turn.

Reference: the original's ``processing_deepseek_vl_v2.py`` (``format_messages_v2``, ``tokenize_with_images``) and
``conversation.py`` (github.com/deepseek-ai/DeepSeek-VL2). The released checkpoints have no chat template, and the one
that LMDeploy has for them, where their folder is called so, loses BOS and writes answers with a space before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

from turbovit.engines.deepseek_vl2 import MOST_CROPPED
from turbovit.engines.errors import InputError
from turbovit.engines.preprocessor import Item, Pixels
from turbovit.lmdeploy_ext import adapter
from turbovit.lmdeploy_ext.base import CompiledVisionModel
from turbovit.lmdeploy_ext.conversation import Conversation, with_markers_applied
from turbovit.lmdeploy_ext.prompt import expanded_ids, ids_from_text, runs_of
from turbovit.lmdeploy_ext.pytorch_engine.adapter import is_beside_compiled_tower
from turbovit.lmdeploy_ext.rendering import Form, Messages, messages_from_turns

_IMAGE, _USER, _ASSISTANT = "<image>", "<|User|>", "<|Assistant|>"
_LMDEPLOYS_TEMPLATES = ("base", "deepseek-vl2")  # the first where the folder is not called deepseek-vl2


@dataclass(frozen=True)
class Segment:
    """A text that is tokenised on its own.

    Attributes:
        ends: whether the end-of-sentence token follows.
    """

    text: str
    ends: bool = False


@dataclass(frozen=True)
class Dialogue:
    """A conversation in the original's format, with one placeholder an image; BOS stands before it."""

    segments: tuple[Segment, ...]


class CompiledDeepseekVL2(CompiledVisionModel):
    """DeepSeek-VL2 over an engine. An image is one run of tokens, and two may stand side by side."""

    reserved: ClassVar[tuple[str, ...]] = (_IMAGE,)
    placeholders: ClassVar[Mapping[str, str]] = {"image": _IMAGE}
    has_own_format: ClassVar[bool] = True

    def build_own_preprocessor(self, trust_remote_code: bool) -> None:
        """Nothing with an engine: the bundle has all of it, and LMDeploy's own needs packages that cannot be there."""
        if (self.backend != "turbomind" or self.with_llm) and not is_beside_compiled_tower():
            super().build_own_preprocessor(trust_remote_code)

    def entries(self, ids: list[int], runs: Sequence[Sequence[int]], pixels: Sequence[Pixels]) -> list[dict[str, Any]]:
        """One entry an image, with the columns and rows of its tiles."""
        entries = super().entries(ids, runs, pixels)
        for entry, one in zip(entries, pixels, strict=True):
            assert one.grid is not None
            entry["images_spatial_crop"] = (one.grid[2], one.grid[1])
        return entries

    def check_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template: Any,
        tools: Sequence[Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().check_messages(messages, chat_template, tools, template_options, options)
        conversation = self._conversation(messages)
        if self._writes_prompt(chat_template) and not conversation.has_token_ids:
            self._dialogue(messages_from_turns(with_markers_applied(conversation), self._form(chat_template)), tools)

    def is_raw(self, chat_template: Any) -> bool:
        return adapter.is_raw(chat_template) and not self._writes_prompt(chat_template)

    def media_options(
        self, kind: str, conversation: Conversation, mm_processor_kwargs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return {"cropping": len(conversation.media) <= MOST_CROPPED}

    def request_from_text(self, prompt: str, items: Sequence[Item], tokenizer: Any) -> dict[str, Any]:
        text = prompt.removeprefix(tokenizer.model.model.bos_token)
        return {**self._segments_request([Segment(text)], items, tokenizer), "prompt": prompt}

    def request_from_ids(self, ids: list[int], items: Sequence[Item], tokenizer: Any) -> dict[str, Any]:
        """From ids with one image token an image, or with every image already expanded (as the original's processor
        does). The image token is one of its own, so that what replaces it merges with nothing beside it."""
        return self._expanded_request(None, ids, items, tokenizer)

    def _writes_prompt(self, chat_template: Any) -> bool:
        """Whether the original's format is written instead; a template that a user chose or edited is left to it."""
        return not adapter.sent_raw(chat_template) and adapter.is_unedited(chat_template, _LMDEPLOYS_TEMPLATES)

    def _prompt(
        self, conversation: Conversation, chat_template: Any, tools: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> Any:
        prompt = super()._prompt(conversation, chat_template, tools, options)
        if not self._writes_prompt(chat_template) or conversation.has_token_ids:
            return prompt
        return self._dialogue(messages_from_turns(with_markers_applied(conversation), self._form(chat_template)), tools)

    def _written(
        self, messages: Messages, chat_template: Any, tools: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> str:
        if not self._writes_prompt(chat_template):
            return super()._written(messages, chat_template, tools, options)
        return "".join(segment.text for segment in self._dialogue(messages, tools).segments)

    def _form(self, chat_template: Any) -> Form:
        """Contents are strings for every template: those written for this model join them with others."""
        return replace(super()._form(chat_template), takes_parts=False)

    def _dialogue(self, messages: Messages, tools: Sequence[Any] | None) -> Dialogue:
        if tools:
            raise InputError("this model's conversation format has no tools: leave 'tools' out")
        dialogue = Dialogue(tuple(chain(*(_segments(index, message) for index, message in enumerate(messages)))))
        if messages[-1]["role"] == "system":
            raise InputError("the conversation is a system message alone: a user message must follow it")
        return dialogue

    def _request(self, prompt: Any, items: Sequence[Item], tokenizer: Any) -> dict[str, Any]:
        if isinstance(prompt, Dialogue):
            return self._segments_request(prompt.segments, items, tokenizer)
        return super()._request(prompt, items, tokenizer)

    def _segments_request(self, segments: Sequence[Segment], items: Sequence[Item], tokenizer: Any) -> dict[str, Any]:
        special = tokenizer.model.model
        image = special.convert_tokens_to_ids(_IMAGE)
        if segments[-1].ends:  # an answer to continue
            segments = [*segments[:-1], Segment(segments[-1].text)]
        ids = [special.bos_token_id]
        for segment in segments:
            first, *others = segment.text.split(_IMAGE)
            ids += ids_from_text(first, tokenizer)
            for piece in others:
                ids += [image, *ids_from_text(piece, tokenizer)]
            ids += [special.eos_token_id] if segment.ends else []
        text = "".join(segment.text + (special.eos_token if segment.ends else "") for segment in segments)
        return self._expanded_request(special.bos_token + text, ids, items, tokenizer)

    def _expanded_request(
        self, prompt: str | None, ids: list[int], items: Sequence[Item], tokenizer: Any
    ) -> dict[str, Any]:
        image = tokenizer.model.model.convert_tokens_to_ids(_IMAGE)
        lengths = [sum(one.runs) for one in items]
        if ids.count(image) != sum(lengths) or not items:
            ids = expanded_ids(ids, {image: _IMAGE}, [[image] * length for length in lengths])
        return self.request_from_runs(prompt, ids, _cut(runs_of(ids, (image,)), lengths), items)


def _segments(index: int, message: Mapping[str, Any]) -> Iterable[Segment]:
    """One message as it is tokenised: a question brings the beginning of the answer with it."""
    role, text = message["role"], message["content"].strip()
    if message.get("tool_calls"):
        raise InputError(f"message {index} ({role}): this model's conversation format has no tool calls")
    if role == "user":
        yield Segment(f"{_USER}: {text}\n\n{_ASSISTANT}:" if text else f"{_USER}:{_ASSISTANT}:")
    elif role == "assistant":
        yield Segment(text, ends=True)
    elif role == "system" and index == 0:
        yield Segment(text)
    else:
        raise InputError(
            f"message {index} ({role}): this model's conversations are of user and assistant, and of system in the "
            f"first message alone"
        )


def _cut(runs: Iterable[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Runs of image tokens cut where one image ends and the next begins; a run that no images fill stays whole."""
    remaining, cut = list(lengths), []
    for begin, end in runs:
        inside: list[int] = []
        while remaining and sum(inside) < end - begin:
            inside.append(remaining.pop(0))
        for length in inside if sum(inside) == end - begin else [end - begin]:
            cut.append([begin, begin + length])
            begin += length
    return cut
