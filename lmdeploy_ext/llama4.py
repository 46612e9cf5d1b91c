"""Llama 4's prompts: runs of patch tokens with separators between the tiles of an image, and its global view last.

Reference: `transformers.models.llama4.processing_llama4.Llama4Processor` (5.24).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from turbovit.engines.errors import InputError
from turbovit.engines.preprocessor import Item, Pixels
from turbovit.lmdeploy_ext.base import CompiledVisionModel
from turbovit.lmdeploy_ext.prompt import expanded, expanded_ids, ids_from_prompt, ids_from_text, runs_of

_START, _END, _IMAGE, _PATCH = "<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>"
_NEXT_COLUMN, _NEXT_ROW = "<|tile_x_separator|>", "<|tile_y_separator|>"


class CompiledLlama4(CompiledVisionModel):
    """Llama 4 over an engine. Every tile of an image is one run of patch tokens."""

    reserved: ClassVar[tuple[str, ...]] = (_START, _END, _IMAGE, _PATCH, _NEXT_COLUMN, _NEXT_ROW)
    placeholders: ClassVar[Mapping[str, str]] = {"image": _IMAGE}

    def request_from_text(self, prompt: str, items: Sequence[Item], tokenizer: Any) -> dict[str, Any]:
        inner = [word for word in self.reserved if word != _IMAGE]
        text = expanded(prompt, _IMAGE, [_image_text(one) for one in items], inner)
        return self._expanded_request(text, ids_from_prompt(text, tokenizer), items)

    def request_from_ids(self, ids: list[int], items: Sequence[Item], tokenizer: Any) -> dict[str, Any]:
        """From ids with one image token an image, or with every image already expanded (as the reference's processor
        does). The image token is one of its own, so that what replaces it merges with nothing beside it."""
        images = [ids_from_text(_image_text(one), tokenizer) for one in items]
        patch = self._fact("patch_token_id")
        if patch in ids:
            request = self._expanded_request(None, ids, items)
            _check_layouts(ids, runs_of(ids, (patch,)), images, items)
            return request
        image = tokenizer.model.model.convert_tokens_to_ids(_IMAGE)
        return self._expanded_request(None, expanded_ids(ids, {image: _IMAGE}, images), items)

    def entries(self, ids: list[int], runs: Sequence[Sequence[int]], pixels: Sequence[Pixels]) -> list[dict[str, Any]]:
        """One entry an image, for all between its start and end: a single tile has the image token before it."""
        entries = super().entries(ids, runs, pixels)
        for entry in entries:
            before = int(len(entry["pixel_values"]) == 1)
            entry["offset"] -= before
            entry["image_tokens"] += before
        return entries

    def _expanded_request(self, prompt: str | None, ids: list[int], items: Sequence[Item]) -> dict[str, Any]:
        return self.request(prompt, ids, (self._fact("patch_token_id"),), items)


def _check_layouts(
    ids: list[int], ranges: Sequence[Sequence[int]], images: Sequence[list[int]], items: Sequence[Item]
) -> None:
    """Refuse expanded ids that are of as many tiles as an image has, and lay them out as another image's."""
    first = 0
    for number, (image, one) in enumerate(zip(images, items, strict=True), 1):
        patches = ranges[first][0]
        begin = patches - image.index(ids[patches])
        if ids[begin : begin + len(image)] != image:
            assert one.grid is not None
            raise InputError(
                f"the token ids around the tiles of image {number} are not those of an image of "
                f"{one.grid[1]} rows and {one.grid[2]} columns of tiles"
            )
        first += len(one.runs)


def _image_text(one: Item) -> str:
    """What stands for an image in the prompt: its tiles row by row where it has several, and its global view."""
    assert one.grid is not None
    _, rows, columns = one.grid
    tile = _PATCH * one.runs[0]
    row = _NEXT_COLUMN.join([tile] * columns) + _NEXT_ROW
    tiles = row * rows if rows * columns > 1 else ""
    return f"{_START}{tiles}{_IMAGE}{tile}{_END}"
