"""Qwen3-VL bundles: images and videos in, features and every deepstack level in order, as transformers gives them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from turbovit.engines import qwen3_vl
from turbovit.engines.bundle import Bundle
from turbovit.engines.encoder import Encoder, open_encoder
from turbovit.engines.errors import EngineInputError, InputError
from turbovit.engines.gemma3 import Gemma3Preprocessor
from turbovit.engines.preprocessor import Encoded, Video
from turbovit.engines.runner import Runner, Tensors
from turbovit.export.plan import plan_build

FP32_RELATIVE_L2 = 1e-5  # the certificate's bound
DIFFERENT = 0.1  # what two images' features differ by at least, in relative L2
Item = Image.Image | Video


@pytest.fixture(scope="module")
def encoder(tiny_qwen3_vl_bundle: Bundle) -> Encoder:
    return open_encoder(tiny_qwen3_vl_bundle, device="cpu")


def picture(seed: int, width: int = 256, height: int = 256) -> Image.Image:
    # Blocks rather than noise: resized, they still differ from one seed to the next.
    blocks = np.random.default_rng(seed).integers(0, 256, (-(-height // 16), -(-width // 16), 3), dtype=np.uint8)
    return Image.fromarray(blocks.repeat(16, 0).repeat(16, 1)[:height, :width])


def clip(seed: int, frames: int, width: int, height: int, fps: float | None = 2) -> Video:
    pictures = [np.asarray(picture(100 * seed + frame, width, height)) for frame in range(frames)]
    return Video(np.stack(pictures), fps, tuple(range(frames)))


# Equal grids apart from each other, grids with as many patches as another, videos with an image's grid.
MIXED: tuple[Item, ...] = (
    picture(0),
    clip(1, 5, 96, 64),
    picture(2, 512, 128),
    picture(3),
    clip(4, 4, 256, 256, 30),
    picture(5, 128, 512),
    clip(6, 2, 64, 96, None),
    picture(7, 480, 320),
    clip(8, 3, 96, 64, 24),
)


def images(*seeds: int) -> list[Image.Image]:
    return [picture(seed) for seed in seeds]


def outputs(one: Encoded) -> Tensor:
    """[1 + levels, tokens, hidden]."""
    return torch.stack([one.features, *one.deepstack])


def worst_l2(got: Tensor, expected: Tensor) -> float:
    """The largest relative L2 of any output."""
    difference = (got.double() - expected.double()).flatten(1).norm(dim=1)
    return float((difference / expected.double().flatten(1).norm(dim=1)).max())


def assert_close(got: Sequence[Encoded], expected: Sequence[Encoded]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert (one.runs, one.grid, one.timestamps) == (other.runs, other.grid, other.timestamps)
        assert worst_l2(outputs(one), outputs(other)) <= FP32_RELATIVE_L2


class Reference:
    """transformers' processors and model, one image or video at a time."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor = AutoProcessor.from_pretrained(folder)

    @torch.inference_mode()
    def outputs(self, item: Item) -> Tensor:
        """[1 + levels, tokens, hidden]."""
        if isinstance(item, Video):
            options: dict[str, Any] = {"do_sample_frames": False, "cap_pixels_per_frame": False}
            made = self.processor.video_processor([item.frames], return_tensors="pt", **options)
            found = self.model.get_video_features(made["pixel_values_videos"], made["video_grid_thw"])
        else:
            made = self.processor.image_processor(item, return_tensors="pt")
            found = self.model.get_image_features(made["pixel_values"], made["image_grid_thw"])
        return torch.stack([torch.cat(list(level)) for level in (found.pooler_output, *found.deepstack_features)])


@pytest.fixture(scope="module")
def reference(tiny_qwen3_vl: Path) -> Reference:
    return Reference(tiny_qwen3_vl)


def test_images_and_videos_equal_the_reference_in_order(encoder: Encoder, reference: Reference) -> None:
    got = encoder.encode(MIXED)
    expected = [reference.outputs(item) for item in MIXED]
    for one, theirs in zip(got, expected, strict=True):
        assert worst_l2(outputs(one), theirs) <= FP32_RELATIVE_L2
    everything = [level for theirs in expected for level in theirs]
    for index, a in enumerate(everything):  # so that a swap of images or of levels would be seen
        for b in everything[:index]:
            assert a.shape != b.shape or worst_l2(a[None], b[None]) > DIFFERENT


def test_a_moe_models_images_and_videos_equal_the_reference(
    tiny_qwen3_vl_moe: Path, tiny_qwen3_vl_moe_bundle: Bundle
) -> None:
    encoder, reference = open_encoder(tiny_qwen3_vl_moe_bundle, device="cpu"), Reference(tiny_qwen3_vl_moe)
    for one, item in zip(encoder.encode(MIXED), MIXED, strict=True):
        assert worst_l2(outputs(one), reference.outputs(item)) <= FP32_RELATIVE_L2


@pytest.mark.slow
@pytest.mark.parametrize("size", [(2048, 2048), (256, 16384)], ids=str)
def test_grids_of_16384_patches_equal_the_reference(
    size: tuple[int, int], encoder: Encoder, reference: Reference
) -> None:
    image = picture(1, *size)
    (one,) = encoder.encode([image])
    assert one.runs == (4096,)
    assert worst_l2(outputs(one), reference.outputs(image)) <= FP32_RELATIVE_L2


def test_tokens_runs_and_levels(encoder: Encoder) -> None:
    image, video = encoder.encode([picture(0, 640, 480), clip(0, 5, 480, 320)])
    assert image.features.shape == (300, 64)
    assert [level.shape for level in image.deepstack] == [(300, 64)] * 3
    assert (image.runs, image.grid, image.timestamps) == ((300,), (1, 30, 40), ())
    assert (video.runs, video.grid, video.timestamps) == ((150,) * 3, (3, 20, 30), (0.25, 1.25, 2.0))
    assert [len(part) for part in video.embeddings] == [150] * 3


def test_levels_keep_their_numbers_order(encoder: Encoder) -> None:
    pixels = encoder.preprocessor.pixels_from_image(picture(0))
    rows = {f"deepstack_{level}": torch.full((1, 64, 2), float(level)) for level in range(12)}
    shuffled = dict(sorted({**rows, "features": torch.full((1, 64, 2), 99.0)}.items()))
    encoded = encoder.preprocessor.encoded_from_rows(shuffled, pixels)
    assert outputs(encoded)[:, 0, 0].tolist() == [99, *range(12)]


def test_a_model_without_levels_gives_none(encoder: Encoder) -> None:
    pixels = encoder.preprocessor.pixels_from_image(picture(0))
    assert encoder.preprocessor.encoded_from_rows({"features": torch.zeros(1, 64, 2)}, pixels).deepstack == ()


def test_batching_changes_no_result(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = []
    for item in MIXED:
        prepare = "pixels_from_video" if isinstance(item, Video) else "pixels_from_image"
        pixels.append(getattr(encoder.preprocessor, prepare)(item))
    expected = [encoder.encode([item])[0] for item in MIXED]
    for max_batch in (None, 1, 2, 100):
        assert_close(encoder.encode_pixels(pixels, max_batch), expected)
    monkeypatch.setattr(qwen3_vl, "PATCHES_A_RUN", 300)
    assert_close(encoder.encode_pixels(pixels), expected)


def test_rows_of_a_grid_share_a_run_up_to_its_patches(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, int]] = []
    run = encoder.runner.run

    def noted(inputs: Tensors) -> dict[str, Tensor]:
        shapes.append((inputs["pixels"].shape[0], inputs["pixels"].shape[1]))
        return run(inputs)

    monkeypatch.setattr(encoder.runner, "run", noted)
    encoder.encode([*images(0, 1), clip(2, 4, 256, 256), picture(3, 512, 128)])
    assert shapes == [(4, 256), (1, 256)]  # of equal size, and yet another grid
    shapes.clear()
    monkeypatch.setattr(qwen3_vl, "PATCHES_A_RUN", 600)
    encoder.encode(images(0, 1, 2))
    assert shapes == [(2, 256), (1, 256)]


@pytest.mark.parametrize(("grid", "rows"), [((16, 16), 64), ((128, 128), 1), ((256, 256), 1), ((64, 64), 4)], ids=str)
def test_a_run_has_as_many_rows_as_its_patches_allow(grid: tuple[int, int], rows: int, encoder: Encoder) -> None:
    assert encoder.preprocessor.max_rows(grid) == rows


def test_an_image_gives_the_same_alone_and_among_others(encoder: Encoder) -> None:
    alone = encoder.encode(images(3))
    assert_close(encoder.encode(images(0, 1, 2, 3, 4, 5, 6, 7))[3:4], alone)
    assert_close(encoder.encode(images(*range(10)))[3:4], alone)  # more than one run


def test_eight_threads_get_their_own_features(encoder: Encoder) -> None:
    items = [*MIXED[:7], picture(9)]
    expected = [encoder.encode([item])[0] for item in items]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert_close(list(pool.map(lambda item: encoder.encode([item])[0], items)), expected)


def test_cached_grids_are_not_changed_by_use(encoder: Encoder) -> None:
    cached = qwen3_vl.grid_inputs(16, 16, 2, 48)
    before = {name: tensor.clone() for name, tensor in cached.items()}
    first = encoder.encode(images(0))
    encoder.encode([picture(1, 512, 128), picture(2)])
    assert_close(encoder.encode(images(0)), first)
    assert qwen3_vl.grid_inputs(16, 16, 2, 48) is cached
    assert all(torch.equal(cached[name], tensor) for name, tensor in before.items())


def limited(bundle: Bundle, checkpoint: Path, pixels: int) -> Bundle:
    """As built with another --max-pixels; the engine is the same."""
    limits = plan_build(checkpoint, "fp32", ["onnxruntime"], {"pixels": pixels}).manifest.limits
    return Bundle(bundle.path, replace(bundle.manifest, limits=limits))


def test_a_larger_image_than_the_bundle_was_built_for_is_refused(
    encoder: Encoder, tiny_qwen3_vl: Path, tiny_qwen3_vl_bundle: Bundle
) -> None:
    small = open_encoder(limited(tiny_qwen3_vl_bundle, tiny_qwen3_vl, 256 * 256), device="cpu")
    message = r"16x18 patches gives 72 tokens, this bundle was built for at most 64: .* larger --max-pixels"
    with pytest.raises(InputError, match=rf"image 2 of 2: its grid of {message}") as caught:
        small.encode([picture(0), picture(1, 288, 256)])
    assert isinstance(caught.value, ValueError)
    with pytest.raises(InputError, match="video 1 of 1: its grid of 20x30 patches gives 150 tokens"):
        small.encode([clip(0, 4, 480, 320)])
    assert_close(small.encode([picture(0), clip(0, 8, 256, 256)]), encoder.encode([picture(0), clip(0, 8, 256, 256)]))


def shapes_only(encoder: Encoder, frames: int, height: int, width: int) -> dict[str, Tensor]:
    rows = torch.empty(frames, height * width, 1536, dtype=torch.uint8, device="meta")
    return encoder.preprocessor.inputs_from_rows(rows, (height, width))


def test_the_processors_largest_image_is_within_the_limits(encoder: Encoder) -> None:
    assert encoder.runner._check(shapes_only(encoder, 1, 256, 256)) == {"frames": 1, "merged": 16384}
    assert encoder.runner._check(shapes_only(encoder, 8, 2, 32768)) == {"frames": 8, "merged": 16384}
    for beyond, number in (((1, 2, 32770), "16385 merged"), ((9, 2, 2), "9 frames")):
        with pytest.raises(EngineInputError, match=number) as caught:
            encoder.runner._check(shapes_only(encoder, *beyond))
        assert isinstance(caught.value, ValueError)


class Zeros(Runner):
    """Checks what goes in, and computes nothing."""

    open = unavailable = None  # type: ignore[assignment]
    description = "zeros"

    def _infer(self, inputs: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
        return {name: torch.zeros(shape) for name, shape in shapes.items()}


def test_an_image_of_16_million_pixels_and_a_larger_one_are_taken(tiny_qwen3_vl_bundle: Bundle) -> None:
    manifest = tiny_qwen3_vl_bundle.manifest
    encoder = Encoder(tiny_qwen3_vl_bundle, Zeros(manifest, manifest.engines[0], torch.device("cpu")))
    for size, tokens in {(4096, 4096): 16384, (5000, 4500): 16214}.items():
        (one,) = encoder.encode([Image.new("RGB", size)])
        assert one.runs == (tokens,)
        assert outputs(one).shape == (4, tokens, 64)


def test_gemma3_takes_no_videos(tiny_gemma3: Path) -> None:
    with pytest.raises(InputError, match="this model takes images, no videos"):
        Gemma3Preprocessor(tiny_gemma3, {"tokens_per_crop": 256}).pixels_from_video(clip(0, 2, 64, 64))
