"""Llama 4's tiles are those of transformers' own Llama4ImageProcessor, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from turbovit.engines.bundle import Bundle
from turbovit.engines.encoder import Encoder, open_encoder
from turbovit.engines.llama4 import Llama4Preprocessor
from turbovit.export.checkpoint import image_processor_config, open_checkpoint
from turbovit.export.llama4 import Llama4Tower

# width x height -> rows and columns of tiles; there is a global view where they are more than one.
GRIDS = {
    (1, 1): (1, 1),
    (30, 150): (1, 1),
    (335, 336): (1, 1),
    (336, 336): (1, 1),
    (337, 336): (1, 2),
    (336, 337): (2, 1),
    (672, 336): (1, 2),
    (672, 672): (2, 2),
    (1008, 672): (2, 3),
    (1344, 1344): (4, 4),
    (640, 480): (2, 2),
    (1920, 1080): (3, 5),
    (1080, 1920): (5, 3),
    (1, 2000): (6, 1),
    (2000, 1): (1, 6),
    (4000, 30): (1, 12),
    (5376, 336): (1, 16),
    (336, 8000): (16, 1),
    (3000, 2000): (3, 5),
}
FACTS = {"tokens_per_tile": 144}


@pytest.fixture(scope="module")
def preprocessor(tiny_llama4: Path) -> Llama4Preprocessor:
    return Llama4Preprocessor(tiny_llama4, FACTS)


@pytest.fixture(scope="module")
def reference(tiny_llama4: Path) -> Any:
    from transformers import Llama4ImageProcessor

    return Llama4ImageProcessor.from_pretrained(tiny_llama4)


@pytest.fixture(scope="module")
def tower(tiny_llama4: Path) -> Llama4Tower:
    """Without weights: its pixel table is of the architecture."""
    config = open_checkpoint(tiny_llama4).config
    with torch.device("meta"):
        return Llama4Tower(Llama4Tower.spec_from_config(config, image_processor_config(tiny_llama4)))


def picture(size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(np.random.default_rng(size).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


@pytest.mark.parametrize("size", GRIDS, ids=str)
def test_pixels_and_normalised_values_equal_the_references(
    size: tuple[int, int], preprocessor: Llama4Preprocessor, reference: Any, tower: Llama4Tower
) -> None:
    image = picture(size)
    rows, columns = GRIDS[size]
    count = rows * columns + (rows * columns > 1)
    pixels = preprocessor.pixels_from_image(image)
    assert pixels.rows.dtype == torch.uint8
    assert pixels.rows.shape == (count, 3, 336, 336)
    assert pixels.grid == (1, rows, columns)
    assert pixels.runs == (144,) * count
    expected = reference(image, return_tensors="pt")
    assert expected["aspect_ratios"].tolist() == [[rows, columns]]
    assert expected["pixel_values"].dtype == torch.bfloat16
    assert torch.equal(tower.normalise(pixels.rows), expected["pixel_values"].float())
    raw = reference(image, do_rescale=False, do_normalize=False, return_tensors="pt")["pixel_values"]
    assert torch.equal(pixels.rows, raw)


def test_an_image_of_8000x8000_is_16_tiles_and_the_global_view(preprocessor: Llama4Preprocessor) -> None:
    pixels = preprocessor.pixels_from_image(Image.new("RGB", (8000, 8000), (3, 2, 1)))
    assert (len(pixels.rows), pixels.grid) == (17, (1, 4, 4))


def test_tiles_go_row_by_row_and_the_global_view_is_last(preprocessor: Llama4Preprocessor) -> None:
    values = np.array([[10, 60, 110], [160, 210, 250]], np.uint8)
    image = values.repeat(336, 0).repeat(336, 1)[..., None].repeat(3, 2)
    tiles = preprocessor.pixels_from_image(image).rows
    assert [tile.unique().tolist() for tile in tiles[:-1]] == [[value] for value in values.flatten()]
    assert tiles[-1].float().mean().item() == pytest.approx(values.mean(), abs=1)
    assert len(tiles[-1].unique()) > 5


def test_what_is_left_of_the_canvas_is_black_at_the_right_and_the_bottom(preprocessor: Llama4Preprocessor) -> None:
    tiles = preprocessor.pixels_from_image(Image.new("RGB", (400, 100), "white")).rows
    assert len(tiles) == 3
    left, right = tiles[0], tiles[1]
    assert left[:, :100].unique().tolist() == right[:, :100, :64].unique().tolist() == [255]
    assert left[:, 100:].unique().tolist() == right[:, :, 64:].unique().tolist() == [0]
    assert tiles[2].unique().tolist() == [255]  # the global view is stretched


def test_transparent_pixels_are_white(preprocessor: Llama4Preprocessor) -> None:
    pixels = preprocessor.pixels_from_image(Image.new("RGBA", (336, 336), (255, 0, 0, 0)))
    assert pixels.rows.unique().tolist() == [255]


@pytest.mark.parametrize(
    ("settings", "count"), [({"max_patches": 4}, 5), ({"resize_to_max_canvas": True}, 17)], ids=str
)
def test_processor_files_mean_what_they_mean_to_the_reference(
    settings: dict[str, Any], count: int, tiny_llama4: Path, tmp_path: Path
) -> None:
    from transformers import Llama4ImageProcessor

    folder = Path(shutil.copytree(tiny_llama4, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))
    reference = Llama4ImageProcessor.from_pretrained(folder, **settings)
    reference.save_pretrained(folder)
    image = picture((700, 690))
    expected = reference(image, do_rescale=False, do_normalize=False, return_tensors="pt")["pixel_values"]
    assert len(expected) == count
    assert torch.equal(Llama4Preprocessor(folder, FACTS).pixels_from_image(image).rows, expected)


@pytest.fixture(scope="module")
def encoder(tiny_llama4_bundle: Bundle) -> Encoder:
    return open_encoder(tiny_llama4_bundle, device="cpu")


SIZES = [(100, 90), (672, 336), (336, 336), (336, 672), (1, 1)]  # 1, 3, 1, 3 and 1 tiles


def test_images_of_mixed_tile_counts_get_their_own_features_in_order(encoder: Encoder) -> None:
    images = [picture(size) for size in SIZES]
    together = encoder.encode(images)
    assert [one.runs for one in together] == [(144,) * count for count in (1, 3, 1, 3, 1)]
    for image, found in zip(images, together, strict=True):
        (alone,) = encoder.encode([image])
        assert found.grid == alone.grid
        torch.testing.assert_close(found.features, alone.features, rtol=0, atol=1e-5)
    for runs, rows in ((one.embeddings, one.features) for one in together):
        assert torch.equal(torch.cat(runs), rows)


@pytest.mark.parametrize(
    ("max_batch", "expected"), [(None, [17, 6]), (100, [17, 6]), (17, [17, 6]), (5, [5, 5, 5, 5, 3]), (1, [1] * 23)]
)
def test_no_run_is_larger_than_17_tiles_or_the_batch(
    max_batch: int | None, expected: list[int], encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def run(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Features that say which tile they are of: the colour of its middle."""
        sizes.append(len(inputs["pixels"]))
        return {"features": inputs["pixels"][:, None, :, 168, 168].float().expand(-1, 144, -1)}

    monkeypatch.setattr(encoder.runner, "run", run)
    prepare = encoder.preprocessor.pixels_from_image
    items = [prepare(picture(size)) for size in ((672, 672), (1344, 1344), (50, 50))]  # 5, 17 and 1 tiles
    encoded = encoder.encode_pixels(items, max_batch)
    assert sizes == expected
    for one, item in zip(encoded, items, strict=True):
        assert torch.equal(one.features, item.rows[:, :, 168, 168].float().repeat_interleave(144, dim=0))
