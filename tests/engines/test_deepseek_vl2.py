"""DeepSeek-VL2's views and rows of tokens are those of its original code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import torch
from deepseek_vl2_goldens import CHECKPOINT, CONVERSATIONS, GREY, RESOLUTIONS, digest
from PIL import ExifTags, Image, ImageOps

from turbovit.benchmarks.reference_deepseek_vl2 import DeepseekVL2Reference
from turbovit.engines.bundle import Bundle
from turbovit.engines.deepseek_vl2 import DeepseekVL2Preprocessor, best_resolution
from turbovit.engines.encoder import Encoder, open_encoder
from turbovit.export.deepseek_vl2 import DeepseekVL2Tower

FACTS: dict[str, Any] = {"tile": 384, "tokens_per_side": 14, "hidden": 4, "global_view_pos": "head"}
# The same on every Pillow: 13 resizes tall images in another order and is up to two grey levels off.
PILLOW_13 = int(PIL.__version__.split(".")[0]) >= 13
# Width and height, and columns and rows of tiles.
GRIDS = {
    (1, 1): (1, 1),
    (384, 384): (1, 1),
    (1000, 1000): (3, 3),
    (640, 480): (2, 2),
    (1920, 1080): (4, 2),
    (4000, 300): (9, 1),
    (300, 4000): (1, 9),
    (1, 4000): (1, 1),  # of which nothing is left
    (769, 1): (3, 1),
}


@pytest.fixture(scope="module")
def preprocessor() -> DeepseekVL2Preprocessor:
    return DeepseekVL2Preprocessor(CHECKPOINT, FACTS)


@pytest.fixture(scope="module")
def reference() -> DeepseekVL2Reference:
    """The processor alone."""
    reference = DeepseekVL2Reference.__new__(DeepseekVL2Reference)
    reference.settings = json.loads((CHECKPOINT / "processor_config.json").read_text())
    return reference


def picture(size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(np.random.default_rng(size).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def test_every_resolution_of_the_original_is_chosen_with_its_tokens(preprocessor: DeepseekVL2Preprocessor) -> None:
    candidates = [tuple(pair) for pair in json.loads((CHECKPOINT / "config.json").read_text())["candidate_resolutions"]]
    assert len(RESOLUTIONS) == 394
    for width, height, best_width, best_height, *_, tokens in RESOLUTIONS:
        assert best_resolution((width, height), candidates) == (best_width, best_height), (width, height)
        assert preprocessor.tokens(best_height // 384, best_width // 384) == tokens


def test_every_placing_of_the_original_is_met(preprocessor: DeepseekVL2Preprocessor) -> None:
    """Where the image stands on its grey canvases; a sample of the sizes, the small ones."""
    checked = 0
    for row in (row for row in RESOLUTIONS if row[0] * row[1] < 200_000):
        width, height, best_width, best_height, *placings, _ = row
        white = Image.new("RGB", (width, height), "white")
        for (w, h, x, y), canvas in zip(
            (placings[:4], placings[4:]), ((384, 384), (best_width, best_height)), strict=True
        ):
            view = np.asarray(preprocessor._padded(white, canvas))[..., 0]
            inside = np.zeros(canvas[::-1], bool)
            inside[y : y + h, x : x + w] = True
            assert (view == np.where(inside, 255, 127)).all(), row
        checked += 1
    assert checked > 100


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_pixels_are_the_originals_bit_by_bit(name: str, data: Path, preprocessor: DeepseekVL2Preprocessor) -> None:
    golden = CONVERSATIONS[name]
    views = []
    for number, image in enumerate(golden["images"]):
        path = data / f"golden/deepseek_vl2/images/{image}.png"
        pixels = preprocessor.pixels_from_image(path, cropping=len(golden["images"]) <= 2)
        assert pixels.runs == (golden["num_image_tokens"][number],)
        assert pixels.grid == (1, *golden["images_spatial_crop"][number][::-1])
        views += [*pixels.rows]
    assert len(views) == len(golden["tiles"])
    if PILLOW_13:
        assert [digest(view.permute(1, 2, 0)) for view in views] == [tile["sha256_u8_hwc"] for tile in golden["tiles"]]


def test_pixels_of_the_image_at_hand_are_the_originals(preprocessor: DeepseekVL2Preprocessor) -> None:
    pixels = preprocessor.pixels_from_image(GREY)
    tiles = CONVERSATIONS["one_gray500x333"]["tiles"]
    assert pixels.rows.dtype == torch.uint8
    assert pixels.rows.shape == (3, 3, 384, 384)
    assert (pixels.grid, pixels.runs) == ((1, 1, 2), (617,))
    assert [digest(view.permute(1, 2, 0)) for view in pixels.rows] == [tile["sha256_u8_hwc"] for tile in tiles]


@pytest.mark.parametrize("size", GRIDS, ids=str)
def test_views_equal_a_plain_reading_of_the_original(
    size: tuple[int, int], preprocessor: DeepseekVL2Preprocessor, reference: DeepseekVL2Reference
) -> None:
    columns, rows = GRIDS[size]
    for cropping in (True, False):
        pixels = preprocessor.pixels_from_image(picture(size), cropping=cropping)
        wanted_columns, wanted_rows, views = reference._views(picture(size), cropping)
        assert pixels.grid == (1, wanted_rows, wanted_columns) == ((1, rows, columns) if cropping else (1, 1, 1))
        assert torch.equal(pixels.rows, torch.stack(views))


def test_of_an_image_thinner_than_half_a_pixel_the_canvas_is_left(preprocessor: DeepseekVL2Preprocessor) -> None:
    pixels = preprocessor.pixels_from_image(Image.new("RGB", (1, 4000), "white"))
    assert pixels.runs == (421,)
    assert pixels.rows.unique().tolist() == [127]


def test_transparency_is_dropped_and_orientation_comes_first(preprocessor: DeepseekVL2Preprocessor) -> None:
    red = preprocessor.pixels_from_image(Image.new("RGBA", (256, 256), (255, 0, 0, 0)))
    assert red.rows[:, 0].unique().tolist() == [255]
    assert red.rows[:, 1:].unique().tolist() == [0]
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    turned = picture((640, 300))
    turned.info["exif"] = exif.tobytes()
    upright = preprocessor.pixels_from_image(ImageOps.exif_transpose(turned))
    assert upright.grid == (1, 2, 1)
    assert torch.equal(preprocessor.pixels_from_image(turned).rows, upright.rows)


def test_processor_files_decide_colour_and_tiles(tmp_path: Path) -> None:
    config = json.loads((CHECKPOINT / "processor_config.json").read_text())
    config |= {"image_mean": [0.2, 0.4, 0.9], "candidate_resolutions": [[384, 384], [768, 384]]}
    (tmp_path / "processor_config.json").write_text(json.dumps(config))
    pixels = DeepseekVL2Preprocessor(tmp_path, FACTS).pixels_from_image(Image.new("RGB", (4000, 2000), "white"))
    assert pixels.grid == (1, 1, 2)
    assert pixels.rows[0, :, 0, 0].tolist() == [51, 102, 229]


def numbered(rows: int, columns: int) -> torch.Tensor:
    """Features [views, 196, 4]: view, row and column of the token, and 1."""
    views = 1 + rows * columns
    grid = torch.cartesian_prod(torch.arange(views), torch.arange(14), torch.arange(14)).float()
    return torch.cat([grid, torch.ones(len(grid), 1)], dim=1).reshape(views, 196, 4)


@pytest.mark.parametrize("position", ["head", "tail"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 1), (1, 3), (2, 2), (3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_newlines_and_separator_stand_as_in_the_original(
    position: str, rows: int, columns: int, dtype: torch.dtype
) -> None:
    preprocessor = DeepseekVL2Preprocessor(CHECKPOINT, {**FACTS, "global_view_pos": position})
    preprocessor.tensors = {"image_newline": torch.full((4,), -1.0), "view_seperator": torch.full((4,), -2.0)}
    image = Image.new("RGB", (384 * columns, 384 * rows))
    pixels = preprocessor.pixels_from_image(image)
    assert pixels.grid == (1, rows, columns)
    encoded = preprocessor.encoded_from_rows({"features": numbered(rows, columns).to(dtype)}, pixels)
    assert encoded.features.dtype == dtype
    newline, separator = [-1.0] * 4, [-2.0] * 4
    whole = [row for y in range(14) for row in ([[0.0, y, x, 1.0] for x in range(14)] + [newline])]
    local: list[list[float]] = []
    for y in range(14 * rows):
        views = [1 + y // 14 * columns + column for column in range(columns)]
        local += [[view, y % 14, x, 1.0] for view in views for x in range(14)] + [newline]
    expected = [*whole, separator, *local] if position == "head" else [*local, separator, *whole]
    assert encoded.features.tolist() == expected
    assert encoded.runs == (len(expected),)
    assert [tensor.dtype for tensor in preprocessor.tensors.values()] == [dtype] * 2  # placed once, then kept


@pytest.fixture(scope="module")
def encoder(tiny_deepseek_vl2_bundle: Bundle) -> Encoder:
    return open_encoder(tiny_deepseek_vl2_bundle, device="cpu")


def test_the_bundle_carries_the_rows_between(encoder: Encoder, tiny_deepseek_vl2: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(tiny_deepseek_vl2 / "model.safetensors")
    assert encoder.preprocessor.tensors.keys() == {"image_newline", "view_seperator"}
    for name, tensor in encoder.preprocessor.tensors.items():
        assert torch.equal(tensor, tensors[name])
    (encoded,) = encoder.encode([picture((384, 384))])
    assert torch.equal(encoded.features[210], tensors["view_seperator"])
    assert torch.equal(encoded.features[14], tensors["image_newline"])


def test_images_of_mixed_tile_counts_get_their_own_features_in_order(encoder: Encoder) -> None:
    images = [picture(size) for size in ((100, 90), (768, 384), (640, 480), (384, 1100))]
    together = encoder.encode(images)
    assert [one.grid for one in together] == [(1, 1, 1), (1, 1, 2), (1, 2, 2), (1, 3, 1)]
    for image, found in zip(images, together, strict=True):
        (alone,) = encoder.encode([image])
        torch.testing.assert_close(found.features, alone.features, rtol=0, atol=1e-5)
    uncut = encoder.encode(images, cropping=False)
    assert [len(one.features) for one in uncut] == [421] * 4


def test_features_of_one_image_stay_while_others_run(encoder: Encoder) -> None:
    (first,) = encoder.encode([picture((300, 200))])
    before = first.features.clone()
    encoder.encode([picture((200, 300)), picture((10, 10))])
    assert torch.equal(first.features, before)


@pytest.mark.parametrize(("max_batch", "expected"), [(None, [10, 7]), (100, [10, 7]), (4, [4, 4, 4, 4, 1])])
def test_no_run_is_larger_than_10_tiles_or_the_batch(
    max_batch: int | None, expected: list[int], encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    run = encoder.runner.run
    monkeypatch.setattr(encoder.runner, "run", lambda inputs: (sizes.append(len(inputs["pixels"])), run(inputs))[1])
    items = [encoder.preprocessor.pixels_from_image(picture(size)) for size in ((50, 50), (1152, 1152), (640, 480))]
    encoder.encode_pixels(items, max_batch)
    assert sizes == expected


def test_normalised_pixels_are_the_originals_bit_by_bit(preprocessor: DeepseekVL2Preprocessor) -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    with torch.device("meta"):
        tower = DeepseekVL2Tower(
            DeepseekVL2Tower.spec_from_config(config, DeepseekVL2Tower.image_processor(CHECKPOINT))
        )
    rows = preprocessor.pixels_from_image(GREY).rows
    tiles = CONVERSATIONS["one_gray500x333"]["tiles"]
    assert [digest(tower.normalise(row)) for row in rows] == [tile["sha256_f32_chw"] for tile in tiles]
    from torchvision.transforms import functional

    values = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    expected = functional.normalize(functional.to_tensor(values), [0.5], [0.5])
    assert torch.equal(tower.normalise(torch.arange(256).to(torch.uint8).reshape(1, 16, 16)), expected)


def test_a_bundle_whose_rows_were_changed_is_refused(tiny_deepseek_vl2_bundle: Bundle, tmp_path: Path) -> None:
    from turbovit.engines.errors import BundleError

    folder = Path(shutil.copytree(tiny_deepseek_vl2_bundle.path, tmp_path / "bundle"))
    file = folder / "extra_tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(BundleError, match=r"extra_tensors.safetensors is damaged"):
        open_encoder(folder)
    file.unlink()
    with pytest.raises(BundleError, match=r"extra_tensors.safetensors, which the manifest names, is missing"):
        open_encoder(folder)
