"""Three-axis positions, and the part of a request that a window of its tokens gets."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from turbomind_qwen3_vl import Pair

from turbovit.engines.errors import InputError
from turbovit.lmdeploy_ext.mrope import VisionSpan, mrope_positions, request_window

HIDDEN, LEVELS = 6, 3


def test_the_positions_of_two_small_images_are_as_written_down() -> None:
    """4 text, an image of grid (1, 4, 6), 2 text, an image of grid (1, 6, 4), 3 text."""
    positions, delta = mrope_positions(21, [VisionSpan(4, 2, 3), VisionSpan(12, 3, 2)])
    assert delta == -6
    first, second, last = [0, 1, 2, 3], [7, 8], [12, 13, 14]
    assert positions.tolist() == [
        [*first, 4, 4, 4, 4, 4, 4, *second, 9, 9, 9, 9, 9, 9, *last],
        [*first, 4, 4, 4, 5, 5, 5, *second, 9, 9, 10, 10, 11, 11, *last],
        [*first, 4, 5, 6, 4, 5, 6, *second, 9, 10, 9, 10, 9, 10, *last],
    ]


@pytest.mark.parametrize("length", [0, 1, 7])
def test_text_alone_counts_up(length: int) -> None:
    positions, delta = mrope_positions(length, [])
    assert positions.tolist() == [list(range(length))] * 3
    assert delta == 0


def test_an_image_at_the_end_counts_with_its_larger_side() -> None:
    positions, delta = mrope_positions(2 + 5, [VisionSpan(2, 1, 5)])
    assert positions[:, -1].tolist() == [2, 2, 6]
    assert delta == 0
    assert mrope_positions(6, [VisionSpan(0, 2, 3)])[1] == -3


@pytest.mark.parametrize("seed", range(30))
def test_random_layouts_have_the_positions_of_the_reference(seed: int, qwen3_vl: Pair) -> None:
    generator = np.random.default_rng(seed)
    kinds: list[int] = []  # 0 text, 1 image, 2 video, for every token
    spans: list[VisionSpan] = []
    grids: dict[int, list[list[int]]] = {1: [], 2: []}
    kinds += [0] * int(generator.integers(0, 4))
    for _ in range(int(generator.integers(1, 6))):
        kind, rows, columns = int(generator.integers(1, 3)), *map(int, generator.integers(1, 7, 2))
        steps = int(generator.integers(1, 5)) if kind == 2 else 1
        grids[kind].append([steps, 2 * rows, 2 * columns])
        for _ in range(steps):
            spans.append(VisionSpan(len(kinds), rows, columns))
            kinds += [kind] * (rows * columns)
            kinds += [0] * int(generator.integers(1, 9))
    if seed % 3 == 0:  # nothing behind the last image
        del kinds[spans[-1].end :]

    types = torch.tensor([kinds])
    images, videos = (torch.tensor(grids[kind]) if grids[kind] else None for kind in (1, 2))
    expected, delta = qwen3_vl.reference.model.model.get_rope_index(torch.ones_like(types), types, images, videos)
    positions = mrope_positions(len(kinds), spans)
    assert torch.equal(positions[0], expected[:, 0])
    assert positions[1] == int(delta)


def request_of(ranges: list[list[int]], length: int) -> dict[str, Any]:
    """Every number of its own, so that one in the wrong place is seen."""
    rows = sum(end - begin for begin, end in ranges)
    features = torch.arange(rows * HIDDEN, dtype=torch.float32).reshape(rows, HIDDEN)
    return {
        "prompt": "text",
        "input_ids": list(range(100, 100 + length)),
        "input_embeddings": list(features.split([end - begin for begin, end in ranges])),
        "input_embedding_ranges": ranges,
        "input_meta": {
            "mrope_position_ids": torch.arange(3 * length).reshape(3, length),
            "mrope_position_delta": -5,
            "deepstack_embeds": [features + 1000 * level for level in range(1, LEVELS + 1)],
        },
    }


REQUEST = request_of([[3, 9], [9, 12], [15, 16], [18, 24]], length=27)


def with_features(request: dict[str, Any]) -> torch.Tensor:
    """[tokens, hidden]: the features at their ranges, nothing elsewhere."""
    spread = torch.full((len(request["input_ids"]), HIDDEN), -1.0)
    for rows, (begin, end) in zip(
        request.get("input_embeddings", []), request.get("input_embedding_ranges", []), strict=True
    ):
        spread[begin:end] = rows
    return spread


def assert_windows_make_the_whole(cuts: list[int]) -> None:
    windows = [request_window(REQUEST, begin, end) for begin, end in pairwise(cuts)]
    metas = [window["input_meta"] for window in windows]
    whole = REQUEST["input_meta"]
    assert [token for window in windows for token in window["input_ids"]] == REQUEST["input_ids"]
    assert torch.equal(torch.cat(list(map(with_features, windows))), with_features(REQUEST))
    positions = torch.cat([meta["mrope_position_ids"] for meta in metas], dim=1)
    assert torch.equal(positions, whole["mrope_position_ids"])
    for level, expected in enumerate(whole["deepstack_embeds"]):
        assert torch.equal(torch.cat([meta["deepstack_embeds"][level] for meta in metas]), expected)
    for window, meta in zip(windows, metas, strict=True):
        assert meta["mrope_position_delta"] == whole["mrope_position_delta"]
        rows = sum(map(len, window.get("input_embeddings", [])))
        assert [len(level) for level in meta["deepstack_embeds"]] == [rows] * LEVELS


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9, 26, 27])
def test_equal_windows_make_the_whole(size: int) -> None:
    assert_windows_make_the_whole([*range(0, 27, size), 27])


@pytest.mark.parametrize("seed", range(30))
def test_random_windows_make_the_whole(seed: int) -> None:
    generator = np.random.default_rng(seed)
    cuts = generator.integers(0, 28, generator.integers(0, 6))  # some windows are empty
    assert_windows_make_the_whole([0, *sorted(map(int, cuts)), 27])


def test_a_window_through_an_image_has_its_part() -> None:
    window = request_window(REQUEST, 5, 10)
    assert window["input_embedding_ranges"] == [[0, 4], [4, 5]]
    assert torch.equal(window["input_embeddings"][0], REQUEST["input_embeddings"][0][2:])
    assert torch.equal(window["input_embeddings"][1], REQUEST["input_embeddings"][1][:1])
    assert torch.equal(window["input_meta"]["deepstack_embeds"][2], REQUEST["input_meta"]["deepstack_embeds"][2][2:7])


@pytest.mark.parametrize(("begin", "end"), [(0, 3), (12, 15), (16, 18), (24, 27), (0, 0), (7, 7), (27, 27)])
def test_a_window_without_images_has_no_features(begin: int, end: int) -> None:
    window = request_window(REQUEST, begin, end)
    assert window.keys() == {"input_ids", "input_meta"}
    assert window["input_ids"] == REQUEST["input_ids"][begin:end]
    assert [level.shape for level in window["input_meta"]["deepstack_embeds"]] == [(0, HIDDEN)] * LEVELS
    assert window["input_meta"]["mrope_position_ids"].shape == (3, end - begin)


def test_a_window_of_a_text_request_without_meta_has_its_ids() -> None:
    assert request_window({"prompt": "x", "input_ids": [4, 5, 6]}, 1, 3) == {"input_ids": [5, 6]}


@pytest.mark.parametrize(("begin", "end"), [(-1, 3), (4, 3), (0, 28), (28, 28), (-3, -1)])
def test_a_window_outside_the_prompt_is_refused(begin: int, end: int) -> None:
    with pytest.raises(InputError, match=rf"window {begin} to {end} .*of 27 tokens"):
        request_window(REQUEST, begin, end)


def test_windows_leave_the_request_as_it_was() -> None:
    before = request_of(REQUEST["input_embedding_ranges"], length=27)
    window = request_window(REQUEST, 0, 27)
    assert window["input_embedding_ranges"] == REQUEST["input_embedding_ranges"]
    assert window["input_embedding_ranges"][0] is not REQUEST["input_embedding_ranges"][0]
    assert torch.equal(with_features(REQUEST), with_features(before))
