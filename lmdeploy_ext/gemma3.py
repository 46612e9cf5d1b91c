"""Gemma 3's prompts: boi, soft tokens and eoi framed by blank lines, tokenised as one joined string.

Reference: `transformers.models.gemma3.processing_gemma3.Gemma3Processor` (5.24).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

from turbovit.engines.errors import InputError
from turbovit.engines.preprocessor import Encoded
from turbovit.lmdeploy_ext.base import CompiledVisionModel
from turbovit.lmdeploy_ext.prompt import expanded, ids_from_prompt, ids_from_text, text_from_ids, turbomind_request

_BOI, _EOI, _SOFT = "<start_of_image>", "<end_of_image>", "<image_soft_token>"


class CompiledGemma3(CompiledVisionModel):
    """Gemma 3 over an engine. Every crop of an image is one run of soft tokens."""

    reserved: ClassVar[tuple[str, ...]] = (_BOI, _EOI, _SOFT)
    placeholders: ClassVar[Mapping[str, str]] = {"image": _BOI}

    def request_from_text(self, prompt: str, encoded: Sequence[Encoded], tokenizer: Any) -> dict[str, Any]:
        text = self._expanded(prompt, encoded)
        return self._expanded_request(text, ids_from_prompt(text, tokenizer), encoded)

    def request_from_ids(self, ids: list[int], encoded: Sequence[Encoded], tokenizer: Any) -> dict[str, Any]:
        """From ids with one boi an image, or with every image already expanded (as the reference's processor does).

        Unexpanded ids go through their text, so that blank lines merge with what stands beside them exactly as in
        a text prompt. Ids that no text gives back are expanded where they stand.
        """
        if self._fact("image_token_id") in ids:
            return self._expanded_request(None, ids, encoded)
        text = text_from_ids(ids, tokenizer)
        if text is not None:
            return self._expanded_request(None, ids_from_text(self._expanded(text, encoded), tokenizer), encoded)
        boi = self._fact("boi_token_id")
        if ids.count(boi) != len(encoded):
            raise InputError(f"the token ids have {ids.count(boi)} x {boi} ({_BOI}) for {len(encoded)} images")
        images = (ids_from_text(_image_text(one.runs), tokenizer) for one in encoded)
        return self._expanded_request(
            None, list(chain(*(next(images) if token == boi else [token] for token in ids))), encoded
        )

    def _expanded(self, prompt: str, encoded: Sequence[Encoded]) -> str:
        for word in (_SOFT, _EOI):
            if word in prompt:
                raise InputError(f"the prompt holds {word!r}: write one {_BOI!r} for each image and nothing else of it")
        return expanded(prompt, _BOI, [_image_text(one.runs) for one in encoded])

    def _expanded_request(self, prompt: str | None, ids: list[int], encoded: Sequence[Encoded]) -> dict[str, Any]:
        embeddings = list(chain(*(one.embeddings for one in encoded)))
        return turbomind_request(prompt, ids, (self._fact("image_token_id"),), embeddings)


def _image_text(runs: Sequence[int]) -> str:
    """What stands for an image in the prompt: the whole image, and its pan-and-scan crops where it has any."""
    whole, *crops = (f"\n\n{_BOI}{_SOFT * tokens}{_EOI}\n\n" for tokens in runs)
    if not crops:
        return whole
    return f"Here is the original image {whole} and here are some crops to help you see better {' '.join(crops)}"
