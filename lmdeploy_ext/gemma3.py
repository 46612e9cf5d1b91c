"""Gemma 3's prompts: boi, soft tokens and eoi framed by blank lines, tokenised as one joined string.

Reference: `transformers.models.gemma3.processing_gemma3.Gemma3Processor` (5.24).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from turbovit.engines.options import value_at
from turbovit.engines.preprocessor import Item
from turbovit.lmdeploy_ext.base import CompiledVisionModel
from turbovit.lmdeploy_ext.conversation import Conversation
from turbovit.lmdeploy_ext.prompt import (
    expanded,
    expanded_ids,
    ids_from_prompt,
    ids_from_text,
    text_from_ids,
)

_BOI, _EOI, _SOFT = "<start_of_image>", "<end_of_image>", "<image_soft_token>"


class CompiledGemma3(CompiledVisionModel):
    """Gemma 3 over an engine. Every crop of an image is one run of soft tokens."""

    reserved: ClassVar[tuple[str, ...]] = (_BOI, _EOI, _SOFT)
    placeholders: ClassVar[Mapping[str, str]] = {"image": _BOI}

    def media_options(
        self, kind: str, conversation: Conversation, mm_processor_kwargs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return {"do_pan_and_scan": value_at(mm_processor_kwargs, "do_pan_and_scan")}

    def request_from_text(self, prompt: str, items: Sequence[Item], tokenizer: Any) -> dict[str, Any]:
        text = self._expanded(prompt, items)
        return self._expanded_request(text, ids_from_prompt(text, tokenizer), items)

    def request_from_ids(self, ids: list[int], items: Sequence[Item], tokenizer: Any) -> dict[str, Any]:
        """From ids with one boi an image, or with every image already expanded (as the reference's processor does).

        Unexpanded ids go through their text, so that blank lines merge with what stands beside them exactly as in
        a text prompt. Ids that no text gives back are expanded where they stand.
        """
        if self._fact("image_token_id") in ids:
            return self._expanded_request(None, ids, items)
        text = text_from_ids(ids, tokenizer)
        if text is not None:
            return self._expanded_request(None, ids_from_text(self._expanded(text, items), tokenizer), items)
        images = [ids_from_text(_image_text(one.runs), tokenizer) for one in items]
        return self._expanded_request(None, expanded_ids(ids, {self._fact("boi_token_id"): _BOI}, images), items)

    def _expanded(self, prompt: str, items: Sequence[Item]) -> str:
        return expanded(prompt, _BOI, [_image_text(one.runs) for one in items], inner=(_SOFT, _EOI))

    def _expanded_request(self, prompt: str | None, ids: list[int], items: Sequence[Item]) -> dict[str, Any]:
        return self.request(prompt, ids, (self._fact("image_token_id"),), items)


def _image_text(runs: Sequence[int]) -> str:
    """What stands for an image in the prompt: the whole image, and its pan-and-scan crops where it has any."""
    whole, *crops = (f"\n\n{_BOI}{_SOFT * tokens}{_EOI}\n\n" for tokens in runs)
    if not crops:
        return whole
    return f"Here is the original image {whole} and here are some crops to help you see better {' '.join(crops)}"
