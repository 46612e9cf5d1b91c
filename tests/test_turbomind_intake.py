"""The intake harness itself: hand-made requests come back from the real TurboMind tensor map unharmed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from turbomind_intake import Intake, intake, intakes, skip_reason

SKIP_REASON = skip_reason()
needs_turbomind = pytest.mark.skipif(SKIP_REASON is not None, reason=str(SKIP_REASON))

HIDDEN = 24
IMAGE_ID, TEXT_ID = 262_144, 7


def image_request(ranges: list[list[int]], tokens: int, seed: int) -> dict[str, Any]:
    """A request as `to_turbomind` returns it; float32 rows that 16 bits cannot hold exactly."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = [TEXT_ID + position for position in range(tokens)]
    for begin, end in ranges:
        input_ids[begin:end] = [IMAGE_ID] * (end - begin)
    return {
        "prompt": "two images",
        "input_ids": input_ids,
        "input_embeddings": [torch.randn(end - begin, HIDDEN, generator=generator) for begin, end in ranges],
        "input_embedding_ranges": ranges,
    }


TWO_IMAGES = image_request([[3, 8], [11, 15]], tokens=20, seed=0)
# Tiles of one image and its end: ranges that touch, that start the prompt and that end it.
FROM_END_TO_END = image_request([[0, 1], [1, 6], [8, 12]], tokens=12, seed=1)
TEXT_ONLY: dict[str, Any] = {"prompt": "no image", "input_ids": [1, 2, 3]}
WITH_META = {**TWO_IMAGES, "input_meta": {"grid_thw": torch.tensor([[1, 4, 4]]), "note": "not read"}}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("turbomind")


@pytest.fixture(scope="module")
def in_bfloat16(workspace: Path) -> list[Intake]:
    return intakes([TWO_IMAGES, FROM_END_TO_END, TEXT_ONLY, WITH_META], workspace, "bfloat16")


def assert_same(taken: Intake, request: dict[str, Any], dtype: torch.dtype) -> None:
    assert taken.input_embeddings is not None
    assert taken.input_embedding_ranges is not None
    assert taken.input_ids.dtype == taken.input_embedding_ranges.dtype == torch.int32
    assert taken.input_embeddings.dtype == dtype
    assert taken.input_ids.tolist() == request["input_ids"]
    assert taken.input_embedding_ranges.tolist() == request["input_embedding_ranges"]
    assert torch.equal(taken.input_embeddings, torch.cat(request["input_embeddings"]).to(dtype))


@needs_turbomind
@pytest.mark.parametrize(("position", "request_"), [(0, TWO_IMAGES), (1, FROM_END_TO_END)])
def test_images_come_back_equal_in_bfloat16(in_bfloat16: list[Intake], position: int, request_: dict[str, Any]) -> None:
    assert_same(in_bfloat16[position], request_, torch.bfloat16)


@needs_turbomind
def test_images_come_back_equal_in_float16(workspace: Path) -> None:
    assert_same(intake(TWO_IMAGES, workspace, "float16"), TWO_IMAGES, torch.float16)


@needs_turbomind
def test_every_row_lands_in_the_range_of_its_image(in_bfloat16: list[Intake]) -> None:
    taken = in_bfloat16[1]
    assert taken.input_embeddings is not None
    assert taken.input_embedding_ranges is not None
    offset = 0
    for embeds, (begin, end) in zip(
        FROM_END_TO_END["input_embeddings"], taken.input_embedding_ranges.tolist(), strict=True
    ):
        assert taken.input_ids[begin:end].tolist() == [IMAGE_ID] * len(embeds)
        assert torch.equal(taken.input_embeddings[offset : offset + end - begin], embeds.bfloat16())
        offset += end - begin
    assert offset == len(taken.input_embeddings) == taken.input_ids.eq(IMAGE_ID).sum()


@needs_turbomind
def test_a_text_only_request_has_no_embeddings(in_bfloat16: list[Intake]) -> None:
    taken = in_bfloat16[2]
    assert taken.input_ids.tolist() == TEXT_ONLY["input_ids"]
    assert taken.input_embeddings is None
    assert taken.input_embedding_ranges is None


@needs_turbomind
def test_input_meta_is_accepted_and_ignored(in_bfloat16: list[Intake]) -> None:
    assert_same(in_bfloat16[3], WITH_META, torch.bfloat16)
    assert in_bfloat16[0].ignored == {"prompt"}
    assert in_bfloat16[3].ignored == {"prompt", "input_meta"}


@needs_turbomind
def test_a_refused_request_raises_with_the_reason(workspace: Path) -> None:
    multimodal = {**TEXT_ONLY, "multimodal": [{"modality": "image"}]}
    with pytest.raises(RuntimeError, match=r"(?s)does not support TurboMind multimodal.*request 1 .*refused"):
        intakes([TEXT_ONLY, multimodal], workspace)


def test_a_missing_compiler_is_a_reason_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert skip_reason() is not None
