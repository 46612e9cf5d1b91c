"""Qwen3-VL's three-axis rope positions, and the part of a request that a window of its tokens needs.

Reference: `Qwen3VLModel.get_rope_index` of `transformers.models.qwen3_vl.modeling_qwen3_vl` (5.24).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turbovit.engines.errors import InputError


@dataclass(frozen=True)
class VisionSpan:
    """One image, or one temporal step of a video, in the prompt.

    Attributes:
        begin: position of its first token.
        rows, columns: of its tokens (merged patches).
    """

    begin: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.begin + self.rows * self.columns


def mrope_positions(length: int, spans: Sequence[VisionSpan]) -> tuple[Tensor, int]:
    """Positions of every token on the axes time, row and column.

    Text counts up on all three together. An image stands still in time and spreads over rows and columns from the
    present count; the text behind it goes on from the larger of the two.

    Args:
        length: tokens of the prompt.
        spans: sorted, disjoint.

    Returns:
        int64 [3, length], and the delta: the next position less `length`.
    """
    positions = torch.empty(3, length, dtype=torch.int64)
    count, done = 0, 0
    for span in spans:
        text = span.begin - done
        positions[:, done : span.begin] = torch.arange(count, count + text)
        count += text
        rows, columns = torch.meshgrid(torch.arange(span.rows), torch.arange(span.columns), indexing="ij")
        positions[0, span.begin : span.end] = count
        positions[1, span.begin : span.end] = count + rows.flatten()
        positions[2, span.begin : span.end] = count + columns.flatten()
        count += max(span.rows, span.columns)
        done = span.end
    positions[:, done:] = torch.arange(count, count + length - done)
    return positions, int(positions.max()) + 1 - length if length else 0


def request_window(request: Mapping[str, Any], begin: int, end: int) -> dict[str, Any]:
    """What of a request belongs to its tokens [begin, end), for prefill in chunks.

    Args:
        request: with ``input_ids``, and ``input_embeddings``, ``input_embedding_ranges`` and ``input_meta`` where it
            has images.

    Returns:
        The same entries for the window alone; ranges count from its beginning, the delta is the whole request's.

    Raises:
        InputError: the window is not one of the prompt's.
    """
    length = len(request["input_ids"])
    if not 0 <= begin <= end <= length:
        raise InputError(f"the window {begin} to {end} is no part of a prompt of {length} tokens")
    window: dict[str, Any] = {"input_ids": request["input_ids"][begin:end]}
    rows: list[tuple[int, int]] = []  # of all embeddings one behind the other: what the window has of each run
    embeddings, ranges, offset = [], [], 0
    for tensor, (first, last) in zip(
        request.get("input_embeddings", []), request.get("input_embedding_ranges", []), strict=True
    ):
        low, high = max(first, begin), min(last, end)
        if low < high:
            embeddings.append(tensor[low - first : high - first])
            ranges.append([low - begin, high - begin])
            rows.append((offset + low - first, offset + high - first))
        offset += last - first
    if ranges:
        window |= {"input_embeddings": embeddings, "input_embedding_ranges": ranges}
    meta = request.get("input_meta")
    if meta is not None:
        levels = meta.get("deepstack_embeds", [])
        window["input_meta"] = {
            "mrope_position_ids": meta["mrope_position_ids"][:, begin:end],
            "mrope_position_delta": meta["mrope_position_delta"],
            "deepstack_embeds": [_rows(level, rows) for level in levels],
        }
    return window


def _rows(level: Tensor, rows: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat([level[:0], *(level[first:last] for first, last in rows)])
