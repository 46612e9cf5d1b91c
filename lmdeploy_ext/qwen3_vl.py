"""Qwen3-VL's prompts, positions and deepstack levels, dense and MoE.

Reference: `transformers.models.qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor` (5.24). LMDeploy takes this family as
new-style: what `preprocess` returns for a prompt goes to the engine as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

from turbovit.engines.errors import InputError
from turbovit.engines.preprocessor import Item, Pixels, joined_levels
from turbovit.lmdeploy_ext import adapter
from turbovit.lmdeploy_ext.base import CompiledVisionModel
from turbovit.lmdeploy_ext.conversation import Conversation
from turbovit.lmdeploy_ext.mrope import VisionSpan, mrope_positions
from turbovit.lmdeploy_ext.prompt import expanded_ids, ids_from_prompt, ids_from_text, runs_of, text_from_ids

_START, _END, _IMAGE, _VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
_PADS = {_IMAGE: "image", _VIDEO: "video"}
_SIZES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # as LMDeploy calls them, and the processors


class CompiledQwen3VL(CompiledVisionModel):
    """Qwen3-VL over an engine: an image is one run of tokens, a video one a temporal step."""

    reserved: ClassVar[tuple[str, ...]] = (_START, _END, _IMAGE, _VIDEO, "<|vision_pad|>")
    joins_system_texts: ClassVar[bool] = False
    placeholders: ClassVar[Mapping[str, str]] = {kind: f"{_START}{pad}{_END}" for pad, kind in _PADS.items()}

    tokenizer: Any
    processor: Any  # set by LMDeploy's class

    def build_model(self, trust_remote_code: bool = False) -> None:
        super().build_model(trust_remote_code)
        if self.compiled:
            self._open_tokenizer()

    def open_preprocessor(self) -> None:
        super().open_preprocessor()
        self._open_tokenizer()

    def get_input_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template: Any,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str | list[int]:
        """The prompt, with one placeholder an image or video: a text, or the token ids that were sent.

        Raises:
            InputError: a message cannot be used, or a text holds a reserved string.
        """
        if not self.compiled:
            return super().get_input_prompt(messages, chat_template, tools, chat_template_kwargs)  # type: ignore[misc]
        return self._prompt(self._conversation(messages), chat_template, tools, chat_template_kwargs or {})

    def preprocess(  # type: ignore[override]  # LMDeploy recognises new-style models by these parameters
        self,
        messages: list[dict],
        input_prompt: str | list[int] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The engine's request for `input_prompt`; without one, as the base class does, with one entry an image or
        temporal step of a video.

        Args:
            mm_processor_kwargs: for ``image`` and ``video`` each ``min_pixels`` and ``max_pixels``; those of a video
                are of all its frames together.

        Raises:
            InputError: an image or video cannot be used, or the prompt's placeholders are not theirs.
        """
        if not self.compiled:
            return super(CompiledVisionModel, self).preprocess(messages, input_prompt, mm_processor_kwargs)  # type: ignore[misc]
        pixels = self._all_pixels(messages, mm_processor_kwargs)
        if input_prompt is None:
            return self._preprocessed(messages, pixels)
        items = self.encoder.encode_pixels(pixels) if self.encoder else pixels
        return self._request(input_prompt, items, self.tokenizer)

    def entry_tokens(self, runs: Sequence[int]) -> list[int]:
        return list(runs)

    def request_from_text(self, prompt: str, items: Sequence[Item], tokenizer: Any) -> dict[str, Any]:
        text, ordered = _expanded(prompt, items)
        return self._meta_request(text, ids_from_prompt(text, tokenizer), ordered)

    def request_from_ids(self, ids: list[int], items: Sequence[Item], tokenizer: Any) -> dict[str, Any]:
        """From ids with one placeholder an image or video, or with all of them expanded (as the reference's processor
        does).

        A video's time merges with what stands before it where no vision start is between, so unexpanded ids go
        through their text. Ids that no text gives back are expanded where they stand.
        """
        kinds = self._kinds
        pads = [kinds[token] for token in ids if token in kinds]
        if len(pads) == len(items):
            text = text_from_ids(ids, tokenizer)
            if text is not None:
                text, ordered = _expanded(text, items)
                return self._meta_request(None, ids_from_text(text, tokenizer), ordered)
            ordered = _in_prompt_order(pads, items)
            ids = expanded_ids(ids, kinds, [ids_from_text(_text(one), tokenizer) for one in ordered])
        else:
            ordered = _in_order_of_runs([kinds[ids[begin]] for begin, _ in runs_of(ids, kinds)], items)
        return self._meta_request(None, ids, ordered)

    def entries(self, ids: list[int], runs: Sequence[Sequence[int]], pixels: Sequence[Pixels]) -> list[dict[str, Any]]:
        """One entry an image or temporal step of a video."""
        steps = [(one, patches) for one in pixels for patches in one.rows]
        return [
            adapter.grid_entry(_kind(one), patches, self._grid(one), (begin, end), ids[begin])
            for (one, patches), (begin, end) in zip(steps, runs, strict=True)
        ]

    @property
    def _kinds(self) -> dict[int, str]:
        return {self._fact(f"{kind}_token_id"): kind for kind in _PADS.values()}

    def _meta_request(self, prompt: str | None, ids: list[int], items: Sequence[Any]) -> dict[str, Any]:
        kinds = self._kinds
        request = self.request(prompt, ids, kinds, items)
        begins = [begin for begin, _ in runs_of(ids, kinds)]
        found, expected = [kinds[ids[begin]] for begin in begins], [_kind(one) for one in items for _ in one.runs]
        if found != expected:
            raise InputError(f"the prompt has runs of {', '.join(found)} tokens, expected {', '.join(expected)}")
        if self.encoder is None:  # LMDeploy's PyTorch engine makes the positions from the grids
            return request
        shapes = chain(*([self._merged(one)] * len(one.runs) for one in items))
        spans = [VisionSpan(begin, rows, columns) for begin, (rows, columns) in zip(begins, shapes, strict=True)]
        positions, delta = mrope_positions(len(ids), spans)
        meta = {
            "mrope_position_ids": positions,
            "mrope_position_delta": delta,
            "deepstack_embeds": joined_levels(items),
        }
        return {**request, "input_meta": meta}

    def _merged(self, one: Item) -> tuple[int, int]:
        rows, columns = self._grid(one)
        merge = self._fact("merge")
        return rows // merge, columns // merge

    def _grid(self, one: Item) -> tuple[int, int]:
        assert one.grid is not None
        return one.grid[1], one.grid[2]

    def _open_tokenizer(self) -> None:
        self.tokenizer = adapter.tokenizer(self.model_path)  # LMDeploy gives new-style models none

    def media_options(
        self, kind: str, conversation: Conversation, mm_processor_kwargs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        given = mm_processor_kwargs.get(kind) or {}
        size = {_SIZES[name]: value for name, value in given.items() if value is not None}
        largest = getattr(self.processor, f"{kind}_processor").size["longest_edge"]
        if size.get("shortest_edge", 0) > largest:  # so that a small picture is not blown up beyond all memory
            raise InputError(f"mm_processor_kwargs has {given!r} for {kind!r}, min_pixels can be at most {largest}")
        return {"size": size} if size else {}


def _expanded(prompt: str, items: Sequence[Item]) -> tuple[str, list[Item]]:
    """The prompt with all of its images and videos in it, and these in its order."""
    pieces = re.split(f"({'|'.join(map(re.escape, _PADS))})", prompt)
    ordered = _in_prompt_order([_PADS[piece] for piece in pieces[1::2]], items)
    texts = (_text(one) for one in ordered)
    return "".join(next(texts) if piece in _PADS else piece for piece in pieces), ordered


def _kind(one: Item) -> str:
    return "video" if one.timestamps else "image"


def _in_prompt_order(kinds: Iterable[str], items: Sequence[Item]) -> list[Item]:
    """The n-th image for the n-th image placeholder, the n-th video for the n-th video placeholder."""
    kinds = list(kinds)
    waiting = {kind: [one for one in items if _kind(one) == kind] for kind in _PADS.values()}
    for pad, kind in _PADS.items():
        if kinds.count(kind) != len(waiting[kind]):
            raise InputError(
                f"the prompt has {kinds.count(kind)} x {pad!r} for {len(waiting[kind])} {kind}s: it needs one each"
            )
    queues = {kind: iter(members) for kind, members in waiting.items()}
    return [next(queues[kind]) for kind in kinds]


def _in_order_of_runs(kinds: Iterable[str], items: Sequence[Item]) -> list[Item]:
    """As `_in_prompt_order`, where every temporal step of a video has a run of its own; what has no run comes last."""
    runs = {
        kind: chain(*([one, *[None] * (len(one.runs) - 1)] for one in items if _kind(one) == kind))
        for kind in _PADS.values()
    }
    begun = [next(runs[kind], None) for kind in kinds]
    return [one for one in chain(begun, *runs.values()) if one is not None]


def _text(one: Item) -> str:
    """What stands for an image or video in the prompt, inside the vision start and end that the template writes."""
    if not one.timestamps:
        return _IMAGE * one.runs[0]
    steps = zip(one.timestamps, one.runs, strict=True)
    return "".join(f"<{seconds:.1f} seconds>{_START}{_VIDEO * tokens}{_END}" for seconds, tokens in steps)
