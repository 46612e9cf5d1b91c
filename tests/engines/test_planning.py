"""What is planned for an image of any size - canvas, fitted size, crops - is what the reference plans.

Photos have exact ratios, where the last bit of a quotient decides about a pixel: all sizes k*a x k*b with a and b up to
16 and sides up to 6,000 are compared, without pixels. The reference is the processors' own code path, stopped where it
resizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepseek_vl2_goldens import CHECKPOINT
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from turbovit.benchmarks.reference_deepseek_vl2 import DeepseekVL2Reference
from turbovit.engines import gemma3, llama4, qwen3_vl
from turbovit.engines.deepseek_vl2 import best_resolution
from turbovit.engines.errors import InputError
from turbovit.engines.gemma3 import PAN_AND_SCAN_VARIABLE, PROCESSOR_OPTIONS

LARGEST, PARTS = 6000, range(1, 17)
SIZES = sorted({(k * a, k * b) for a, b in product(PARTS, PARTS) for k in range(1, LARGEST // max(a, b) + 1)})
ANY_SIZE = st.tuples(*[st.one_of(st.integers(1, 400), st.integers(1, 20_000))] * 2)
UINT8: dict[str, Any] = {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}
MODULES = {"gemma3": gemma3, "llama4": llama4, "qwen3_vl": qwen3_vl}
FACTS = {"tokens_per_crop": 256, "tokens_per_tile": 144, "merge": 2, "positions_side": 48, "temporal_patch": 2}
# Every so many of the sizes are compared, for seconds: Llama 4's plan takes ten times as long as the others'. All of
# them have been compared once, and none differed.
EVERY = {"gemma3": 3, "llama4": 17, "llama4 to the largest canvas": 17, "qwen3_vl": 3}


class PlannedError(Exception):
    """Not a failure: carries what has been planned when the first pixels are to be resized."""


@contextmanager
def stopped_where_it_resizes(family: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Images are tensors without memory from here on, and a processor that is to resize one raises `PlannedError`."""
    from transformers.image_processing_backends import TorchvisionBackend
    from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor
    from transformers.models.llama4 import image_processing_llama4

    canvases: list[list[int]] = []
    best_fit, crops = image_processing_llama4.get_best_fit, Gemma3ImageProcessor.pan_and_scan_batched

    def resize(self: Any, image: Any, size: Any, **_: Any) -> Any:
        raise PlannedError([*canvases, (int(size.height), int(size.width))])

    def get_best_fit(*arguments: Any, **options: Any) -> Any:
        best = best_fit(*arguments, **options)
        canvases[:] = [best.tolist()]
        return best

    def pan_and_scan_batched(self: Any, images: Any, **options: Any) -> Any:
        raise PlannedError([tuple(crop.shape) for crop in crops(self, images, **options)])

    with patch.context() as within:
        within.setattr(MODULES[family], "readable_rgb", lambda image, alpha: image)
        within.setattr(MODULES[family], "pixels_from_rgb", lambda image: image[None])
        within.setattr(TorchvisionBackend, "resize", resize)
        within.setattr(image_processing_llama4, "get_best_fit", get_best_fit)
        within.setattr(Gemma3ImageProcessor, "pan_and_scan_batched", pan_and_scan_batched)
        within.setenv(PAN_AND_SCAN_VARIABLE, "1")
        yield


def plans(family: str, processor: Any, preprocessor: Any, patch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Functions from a size to its plan: the reference's and ours."""
    options = {**PROCESSOR_OPTIONS, "do_pan_and_scan": True} if family == "gemma3" else {}
    arguments = handed_on(processor, options, patch)

    def reference(image: torch.Tensor) -> Any:
        return processor._preprocess([image], **arguments)

    for plan in (reference, preprocessor.pixels_from_image):

        def planned(size: tuple[int, int], plan: Callable[..., Any] = plan) -> Any:
            try:
                plan(torch.zeros((), dtype=torch.uint8).expand(3, *size[::-1]))
            except PlannedError as stopped:
                return stopped.args[0]
            except (InputError, ValueError):
                return "refused"
            raise AssertionError("nothing was resized")

        yield planned


def handed_on(processor: Any, options: dict[str, Any], patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments that a processor's call hands on to the function that plans and resizes."""

    def stop(images: Any, *arguments: Any, **named: Any) -> None:
        assert not arguments
        raise PlannedError(named)

    with patch.context() as within:
        within.setattr(processor, "_preprocess", stop)
        with pytest.raises(PlannedError) as stopped:
            processor(Image.new("RGB", (64, 64)), **UINT8, **options)
    return stopped.value.args[0]


def differing(functions: Sequence[Callable[..., Any]], sizes: Sequence[tuple[int, int]]) -> list[Any]:
    reference, ours = functions
    return [(size, reference(size), ours(size)) for size in sizes if reference(size) != ours(size)][:10]


@pytest.fixture(scope="module")
def folders(tiny_gemma3: Path, tiny_llama4: Path, tiny_qwen3_vl: Path, tmp_path_factory: Any) -> dict[str, Path]:
    from transformers import Llama4ImageProcessor

    largest = tmp_path_factory.mktemp("processors") / "llama4"
    Llama4ImageProcessor.from_pretrained(tiny_llama4, resize_to_max_canvas=True).save_pretrained(largest)
    return {
        "gemma3": tiny_gemma3,
        "llama4": tiny_llama4,
        "llama4 to the largest canvas": largest,
        "qwen3_vl": tiny_qwen3_vl,
    }


def opened(setting: str, folder: Path) -> tuple[str, Any, Any]:
    """The family, transformers' processor and ours."""
    from transformers import AutoImageProcessor

    from turbovit.engines.families import family_from_name, load

    family = setting.split()[0]
    preprocessor = load(family_from_name(family).preprocessor)(folder, FACTS)
    return family, AutoImageProcessor.from_pretrained(folder), preprocessor


@pytest.mark.parametrize("setting", EVERY)
def test_every_exact_ratio_is_planned_as_the_reference_does(
    setting: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, processor, preprocessor = opened(setting, folders[setting])
    functions = [*plans(family, processor, preprocessor, monkeypatch)]
    sizes = SIZES[:: EVERY[setting]]
    assert len(sizes) > 6000
    with stopped_where_it_resizes(family, monkeypatch):
        assert len({str(functions[0](size)) for size in sizes[::100]}) > 10  # it does plan
        assert differing(functions, sizes) == []


@pytest.mark.parametrize("setting", EVERY)
def test_any_size_is_planned_as_the_reference_does(
    setting: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, processor, preprocessor = opened(setting, folders[setting])
    functions = [*plans(family, processor, preprocessor, monkeypatch)]

    @given(size=ANY_SIZE)
    @settings(max_examples=300, deadline=None, derandomize=True)
    def check(size: tuple[int, int]) -> None:
        assert differing(functions, [size]) == []

    with stopped_where_it_resizes(family, monkeypatch):
        check()


def test_a_plan_in_float64_would_be_seen(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comparison of exact ratios is for: numbers of another type at the reference's own function."""
    from transformers.models.llama4.image_processing_llama4 import get_max_res_without_distortion

    canvas, photo = (1344, 1344), (1600, 1200)  # height, width
    as_there = get_max_res_without_distortion(photo, tuple(torch.tensor(canvas)))
    assert [int(side) for side in as_there] == [1344, 1007]
    assert get_max_res_without_distortion(photo, canvas) == (1344, 1008)
    _, processor, preprocessor = opened("llama4", folders["llama4"])
    with stopped_where_it_resizes("llama4", monkeypatch):
        for plan in plans("llama4", processor, preprocessor, monkeypatch):
            assert plan((1200, 1600)) == [[1344, 1008], (1344, 1007)]
            assert plan((3840, 5760)) == [[1680, 1008], (1511, 1008)]


@pytest.mark.parametrize("setting", EVERY)
@pytest.mark.parametrize("size", [(1200, 1600), (5760, 3840), (3024, 4032), (672, 896), (48, 36)], ids=str)
def test_photos_of_exact_ratios_have_the_references_pixels(
    setting: str, size: tuple[int, int], folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PAN_AND_SCAN_VARIABLE, "1")
    family, processor, preprocessor = opened(setting, folders[setting])
    options = {**PROCESSOR_OPTIONS, "do_pan_and_scan": True} if family == "gemma3" else {}
    image = Image.fromarray(np.random.default_rng(size).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    rows = preprocessor.pixels_from_image(image).rows
    assert torch.equal(rows, processor(image, **UINT8, **options)["pixel_values"].reshape(rows.shape))


@pytest.fixture(scope="module")
def deepseek_vl2() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The rule as the original's loop states it, which the goldens pin, and ours."""
    reference = DeepseekVL2Reference.__new__(DeepseekVL2Reference)
    reference.settings = json.loads((CHECKPOINT / "processor_config.json").read_text())
    candidates = [tuple(pair) for pair in reference.settings["candidate_resolutions"]]
    return lambda size: reference._best_resolution(*size), lambda size: best_resolution(size, candidates)


def test_deepseek_vl2_takes_the_originals_resolution(
    deepseek_vl2: tuple[Callable[..., Any], Callable[..., Any]],
) -> None:
    assert differing(deepseek_vl2, SIZES[::5]) == []


@given(size=ANY_SIZE)
@settings(max_examples=2000, deadline=None, derandomize=True)
def test_deepseek_vl2_takes_the_originals_resolution_for_any_size(
    deepseek_vl2: tuple[Callable[..., Any], Callable[..., Any]], size: tuple[int, int]
) -> None:
    assert differing(deepseek_vl2, [size]) == []
