"""Pixels are, bit for bit, those of transformers' own processors, whatever the size of the image."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from turbovit.engines.bundle import Bundle
from turbovit.engines.encoder import PROCESSOR_FOLDER
from turbovit.engines.errors import InputError
from turbovit.engines.families import family_from_name, load
from turbovit.engines.gemma3 import PAN_AND_SCAN_VARIABLE, PROCESSOR_OPTIONS

UINT8: dict[str, Any] = {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}
FAMILIES = ("gemma3", "llama4", "qwen3_vl")
SIDES = st.one_of(st.integers(1, 64), st.integers(1, 1500), st.sampled_from([335, 336, 337, 672, 896, 1344]))


@pytest.fixture(scope="module")
def bundles(tiny_gemma3_bundle: Bundle, tiny_llama4_bundle: Bundle, tiny_qwen3_vl_bundle: Bundle) -> dict[str, Bundle]:
    return dict(zip(FAMILIES, (tiny_gemma3_bundle, tiny_llama4_bundle, tiny_qwen3_vl_bundle), strict=True))


@cache
def pair(family: str, folder: Path, facts: tuple[tuple[str, Any], ...]) -> tuple[Any, Any]:
    """Our preprocessor and transformers' image processor."""
    from transformers import AutoImageProcessor

    return load(family_from_name(family).preprocessor)(folder, dict(facts)), AutoImageProcessor.from_pretrained(folder)


def noise(width: int, height: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def require_equal(bundle: Bundle, family: str, image: Image.Image, **options: Any) -> None:
    ours, theirs = pair(family, bundle.path / PROCESSOR_FOLDER, tuple(bundle.manifest.facts.items()))
    try:
        expected = theirs(image, **UINT8, **options)["pixel_values"]
    except ValueError:
        with pytest.raises(InputError):
            ours.pixels_from_image(image)
        return
    rows = ours.pixels_from_image(image).rows
    assert rows.dtype == torch.uint8
    assert rows.is_contiguous()
    assert torch.equal(rows, expected.reshape(rows.shape))


@pytest.mark.parametrize("family", FAMILIES)
@given(width=SIDES, height=SIDES, seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_pixels_are_the_processors(family: str, width: int, height: int, seed: int, bundles: dict[str, Bundle]) -> None:
    require_equal(bundles[family], family, noise(width, height, seed))


@pytest.mark.parametrize("size", [(1920, 1080), (1080, 1920), (300, 900), (2000, 640), (257, 256)])
def test_crops_are_the_processors(
    size: tuple[int, int], bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PAN_AND_SCAN_VARIABLE, "1")
    require_equal(bundles["gemma3"], "gemma3", noise(*size, 0), **{**PROCESSOR_OPTIONS, "do_pan_and_scan": True})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_pixels_are_the_processors_on_older_cpus(family: str, capability: str, bundles: dict[str, Bundle]) -> None:
    """Without AVX2 torch resizes in floats, which it rounds: still the same values."""
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from turbovit.engines.bundle import open_bundle
from test_resizing import noise, require_equal
for size in ((640, 480), (333, 777), (1, 40), (1500, 900)):
    require_equal(open_bundle({str(bundles[family].path)!r}), {family!r}, noise(*size, 0))
"""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr


def test_the_image_is_not_changed(bundles: dict[str, Bundle]) -> None:
    """It is read where it lies, not copied first."""
    image = noise(640, 480, 0)
    before = image.tobytes()
    for family in FAMILIES:
        ours, _ = pair(family, bundles[family].path / PROCESSOR_FOLDER, tuple(bundles[family].manifest.facts.items()))
        ours.pixels_from_image(image).rows.zero_()
        assert image.tobytes() == before
