"""Gemma 3's pixels are those of transformers' own Gemma3Processor, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from turbovit.engines.errors import InputError
from turbovit.engines.gemma3 import PAN_AND_SCAN_VARIABLE, PROCESSOR_OPTIONS, Gemma3Preprocessor
from turbovit.export.layers import PixelNorm

SIZES = [(1, 1), (1, 2000), (30, 150), (150, 30), (100, 2000), (640, 480), (896, 896), (897, 895), (1920, 1080)]
# width x height -> crops besides the whole image, with pan and scan on: at least 256 px, at most 4, ratio 1.2 or more.
CROPS = {(1920, 1080): 2, (1080, 1920): 2, (2000, 300): 4, (300, 2000): 4, (614, 512): 0, (615, 512): 2, (900, 255): 0}
FACTS = {"tokens_per_crop": 256}
TEXT = "<start_of_image>"
AS_UINT8 = {"do_rescale": False, "do_normalize": False}


@pytest.fixture(scope="module")
def reference(tiny_gemma3: Path) -> Any:
    return reference_from(tiny_gemma3)


def reference_from(folder: Path) -> Any:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    assert type(processor).__name__ == "Gemma3Processor"
    return processor


@pytest.fixture(scope="module")
def preprocessor(tiny_gemma3: Path) -> Gemma3Preprocessor:
    return Gemma3Preprocessor(tiny_gemma3, FACTS)


def picture(size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(np.random.default_rng(size).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def pixel_values(reference: Any, image: Image.Image, **options: Any) -> torch.Tensor:
    return reference(images=image, text=TEXT, images_kwargs=options, return_tensors="pt")["pixel_values"]


def test_the_processors_options_are_those_of_the_installed_transformers() -> None:
    from transformers.models.gemma3 import processing_gemma3

    processor = processing_gemma3.Gemma3Processor
    if hasattr(processor, "images_kwargs"):
        theirs = processor.images_kwargs
    else:  # before 5.2x
        theirs = processing_gemma3.Gemma3ProcessorKwargs._defaults["images_kwargs"]
    assert theirs == PROCESSOR_OPTIONS


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pixels_and_normalised_values_equal_the_references(
    size: tuple[int, int], preprocessor: Gemma3Preprocessor, reference: Any
) -> None:
    image = picture(size)
    pixels = preprocessor.pixels_from_image(image)
    assert pixels.rows.dtype == torch.uint8
    assert pixels.rows.shape == (1, 3, 896, 896)
    assert pixels.runs == (256,)
    assert torch.equal(pixels.rows, pixel_values(reference, image, **AS_UINT8))
    normalise = PixelNorm(0.5, 0.5, 1 / 255)
    assert torch.equal(normalise(pixels.rows), pixel_values(reference, image))


def test_every_pixel_value_is_normalised_as_the_reference_does(reference: Any) -> None:
    ramp = np.arange(896 * 896 * 3, dtype=np.uint32).reshape(896, 896, 3).astype(np.uint8)  # no resizing
    rows = torch.from_numpy(ramp).permute(2, 0, 1)[None]
    assert rows.unique().tolist() == list(range(256))
    got = PixelNorm(0.5, 0.5, 1 / 255)(rows)
    assert torch.equal(got, pixel_values(reference, Image.fromarray(ramp)))


@pytest.mark.parametrize(("size", "crops"), CROPS.items(), ids=str)
def test_pan_and_scan_gives_the_whole_image_and_then_its_crops(
    size: tuple[int, int],
    crops: int,
    preprocessor: Gemma3Preprocessor,
    reference: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = picture(size)
    whole = preprocessor.pixels_from_image(image)
    monkeypatch.setenv(PAN_AND_SCAN_VARIABLE, "1")
    pixels = preprocessor.pixels_from_image(image)
    assert pixels.runs == (256,) * (1 + crops)
    assert torch.equal(pixels.rows[:1], whole.rows)
    assert torch.equal(pixels.rows, pixel_values(reference, image, do_pan_and_scan=True, **AS_UINT8))


def test_crops_go_from_left_to_right(preprocessor: Gemma3Preprocessor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PAN_AND_SCAN_VARIABLE, "1")
    stripes = np.repeat(np.array([10, 200], np.uint8), 960)[None, :, None].repeat(1080, 0).repeat(3, 2)
    pixels = preprocessor.pixels_from_image(stripes)
    assert pixels.rows.float().mean((1, 2, 3)).tolist() == [pytest.approx(105, abs=1), 10, 200]


CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "released": {},
    "pan and scan on": {"preprocessor_config.json": {"do_pan_and_scan": True}},
    "pan and scan on, other crops": {
        "preprocessor_config.json": {
            "do_pan_and_scan": True,
            "pan_and_scan_min_crop_size": 100,
            "pan_and_scan_max_num_crops": 8,
            "pan_and_scan_min_ratio_to_activate": 1.0,
        }
    },
    "another resampling": {"preprocessor_config.json": {"resample": 3}},
    "nested in the processor's": {
        "processor_config.json": {
            "image_processor": {"do_pan_and_scan": True, "resample": 3, "size": {"height": 896, "width": 896}}
        }
    },
}


@pytest.mark.parametrize("switch", [None, "0", "1"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_processor_files_mean_what_they_mean_to_the_reference(
    config: dict[str, dict[str, Any]],
    switch: str | None,
    tiny_gemma3: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gemma3Processor hands its class's pan-and-scan defaults to every call, so that only the variable turns it on."""
    folder = Path(shutil.copytree(tiny_gemma3, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))
    for name, changes in config.items():
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))
    asked = {} if switch is None else {"do_pan_and_scan": switch == "1"}
    if switch is not None:
        monkeypatch.setenv(PAN_AND_SCAN_VARIABLE, switch)
    image = picture((700, 300))
    expected = pixel_values(reference_from(folder), image, **asked, **AS_UINT8)
    assert len(expected) == (3 if switch == "1" else 1)
    assert torch.equal(Gemma3Preprocessor(folder, FACTS).pixels_from_image(image).rows, expected)


@pytest.mark.parametrize(("value", "on"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("Off", False)])
def test_the_variable_may_be_a_word(
    value: str, on: bool, preprocessor: Gemma3Preprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PAN_AND_SCAN_VARIABLE, value)
    assert preprocessor.pan_and_scan is on


@pytest.mark.parametrize("value", ["", "2", "yes please"])
def test_any_other_value_of_the_variable_is_refused(
    value: str, preprocessor: Gemma3Preprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PAN_AND_SCAN_VARIABLE, value)
    with pytest.raises(InputError, match=rf"{PAN_AND_SCAN_VARIABLE}='{value}', expected one of 1, true, on, 0"):
        preprocessor.pixels_from_image(picture((4, 4)))


def test_transparent_pixels_are_white(preprocessor: Gemma3Preprocessor) -> None:
    pixels = preprocessor.pixels_from_image(Image.new("RGBA", (256, 256), (255, 0, 0, 0)))
    assert pixels.rows.unique().tolist() == [255]


def test_features_are_one_run_a_crop_in_order(
    preprocessor: Gemma3Preprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PAN_AND_SCAN_VARIABLE, "1")
    pixels = preprocessor.pixels_from_image(picture((1920, 1080)))
    features = torch.arange(3 * 256 * 2.0).reshape(3, 256, 2)
    encoded = preprocessor.encoded_from_rows({"features": features}, pixels)
    assert torch.equal(torch.stack(encoded.embeddings), features)
    assert torch.equal(encoded.features, features.flatten(0, 1))
