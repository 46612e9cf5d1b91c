"""Qwen3-VL's pixels, grids and timestamps are those of transformers' own processors, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
import warnings
import weakref
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from turbovit.engines import qwen3_vl
from turbovit.engines.byte_cache import ByteCache
from turbovit.engines.errors import InputError
from turbovit.engines.preprocessor import Video
from turbovit.engines.qwen3_vl import Qwen3VLPreprocessor, grid_inputs
from turbovit.export.layers import PixelNorm

FACTS = {"merge": 2, "positions_side": 48, "temporal_patch": 2}
AS_UINT8 = {"do_rescale": False, "do_normalize": False}
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
NORM = PixelNorm(0.5, 0.5, 1 / 255)
# width x height -> rows and columns of patches.
GRIDS = {
    (26, 28): (18, 16),
    (1, 200): (228, 2),
    (200, 1): (2, 228),
    (1, 1): (16, 16),
    (640, 480): (30, 40),
    (33, 1700): (116, 4),
    (257, 255): (16, 16),
    (1000, 700): (44, 62),
    (2500, 1600): (100, 156),
}


@pytest.fixture(scope="module")
def preprocessor(tiny_qwen3_vl: Path) -> Qwen3VLPreprocessor:
    return Qwen3VLPreprocessor(tiny_qwen3_vl, FACTS)


@pytest.fixture(scope="module")
def reference(tiny_qwen3_vl: Path) -> Any:
    return reference_from(tiny_qwen3_vl)


def reference_from(folder: Path) -> Any:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    assert type(processor).__name__ == "Qwen3VLProcessor"
    return processor


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    noise = np.random.default_rng([*size, seed]).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(noise)


def clip(frames: int, size: tuple[int, int], fps: float | None = 2, step: int = 1, seed: int = 0) -> Video:
    generator = np.random.default_rng([frames, *size, seed])
    noise = generator.integers(0, 256, (frames, size[1], size[0], 3), dtype=np.uint8)
    return Video(noise, fps, tuple(range(0, frames * step, step)))


def video_outputs(reference: Any, video: Video, **options: Any) -> Any:
    """What the whole processor makes of a prompt with one video."""
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(
        total_num_frames=video.frame_indices[-1] + 1, fps=video.fps, frames_indices=list(video.frame_indices)
    )
    options = {"do_sample_frames": False, "cap_pixels_per_frame": False, "return_tensors": "pt", **options}
    options["input_data_format"] = "channels_last"  # it would guess, and take 3 rows for channels
    return reference(text=[VIDEO], videos=[video.frames], video_metadata=[metadata], **options)


def test_grid_inputs_equal_the_references() -> None:
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

    sizes = [2, 4, 6, 10, 26, 30, 40, 46, 48, 50, 64, 94, 96, 98, 128]
    grids = [(h, w) for h in sizes for w in sizes] + [(2, 8000), (256, 256)]
    grids += [grid for side in range(2, 514, 2) for grid in ((2, side), (side, 2))]  # the axes are planned apart
    for side in (48, 7):
        for height, width in grids:
            grid = torch.tensor([[1, height, width]])
            index, weight = get_vision_interpolation_indices_and_weights(
                grid, side, align_corners=True, spatial_merge_size=2
            )
            got = grid_inputs(height, width, 2, side)
            assert torch.equal(got["interp_index"], index.T.int()), (height, width)
            assert torch.equal(got["interp_weight"], weight.T), (height, width)
            assert torch.equal(got["patch_position"], get_vision_position_ids(grid, 2).int()), (height, width)


def test_grid_inputs_are_computed_once_a_grid() -> None:
    assert grid_inputs(4, 6, 2, 48) is grid_inputs(4, 6, 2, 48)
    assert grid_inputs(4, 6, 2, 48) is not grid_inputs(6, 4, 2, 48)


def test_grids_of_256_sizes_up_to_4096x4096_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ByteCache(qwen3_vl._GRIDS.limit)
    monkeypatch.setattr(qwen3_vl, "_GRIDS", cache)
    sizes = [(height, width) for height in range(16, 257, 16) for width in range(16, 257, 16)]  # 190 MB in all
    assert len(sizes) == 256
    assert sizes[-1] == (256, 256)
    made = [weakref.ref(grid_inputs(*size, 2, 48)["interp_weight"]) for size in sizes]
    alive = [tensor() for tensor in made if tensor() is not None]
    assert sum(tensor.nbytes for tensor in alive) * 40 // 16 <= cache.bytes <= 64 << 20  # 16 of 40 bytes a patch
    assert len(alive) < 60
    assert grid_inputs(*sizes[-1], 2, 48) is grid_inputs(*sizes[-1], 2, 48)
    assert made[-1]() is grid_inputs(*sizes[-1], 2, 48)["interp_weight"]


@pytest.mark.parametrize(("size", "grid"), GRIDS.items(), ids=str)
def test_an_images_pixels_and_normalised_values_equal_the_references(
    size: tuple[int, int], grid: tuple[int, int], preprocessor: Qwen3VLPreprocessor, reference: Any
) -> None:
    image = picture(size)
    pixels = preprocessor.pixels_from_image(image)
    assert pixels.rows.dtype == torch.uint8
    assert pixels.rows.shape == (1, grid[0] * grid[1], 1536)
    assert (pixels.grid, pixels.group) == ((1, *grid), grid)
    assert pixels.runs == (grid[0] * grid[1] // 4,)
    assert pixels.timestamps == ()
    raw = reference.image_processor(image, return_tensors="pt", **AS_UINT8)
    assert torch.equal(pixels.rows[0], raw["pixel_values"])
    assert raw["image_grid_thw"].tolist() == [[1, *grid]]
    assert torch.equal(NORM(pixels.rows[0]), reference.image_processor(image, return_tensors="pt")["pixel_values"])


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (3, 900)], ids=str)
def test_an_extreme_shape_is_refused(size: tuple[int, int], preprocessor: Qwen3VLPreprocessor) -> None:
    with pytest.raises(InputError, match="aspect ratio must be smaller than 200"):
        preprocessor.pixels_from_image(picture(size))
    preprocessor.pixels_from_image(picture((1, 200)))


def test_a_turned_photo_is_made_upright_first(preprocessor: Qwen3VLPreprocessor, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = BytesIO()
    picture((640, 480)).save(buffer, "JPEG", exif=exif)
    (tmp_path / "turned.jpg").write_bytes(buffer.getvalue())
    pixels = preprocessor.pixels_from_image(tmp_path / "turned.jpg")
    assert pixels.grid == (1, 40, 30)
    upright = np.rot90(np.asarray(Image.open(buffer)), -1)  # an array has no EXIF data
    assert torch.equal(pixels.rows, preprocessor.pixels_from_image(upright.copy()).rows)


def test_transparent_pixels_are_white(preprocessor: Qwen3VLPreprocessor) -> None:
    pixels = preprocessor.pixels_from_image(Image.new("RGBA", (256, 256), (255, 0, 0, 0)))
    assert pixels.rows.unique().tolist() == [255]


@pytest.mark.parametrize("size", [{"longest_edge": 100_000}, {"shortest_edge": 500_000}], ids=str)
def test_a_given_size_is_the_references(
    size: dict[str, int], preprocessor: Qwen3VLPreprocessor, reference: Any
) -> None:
    image, video = picture((640, 480)), clip(4, (320, 240))
    full = {"shortest_edge": 65536, "longest_edge": 16777216} | size
    pixels = preprocessor.pixels_from_image(image, size=size)
    assert pixels.grid != preprocessor.pixels_from_image(image).grid
    assert torch.equal(
        pixels.rows[0], reference.image_processor(image, size=full, return_tensors="pt", **AS_UINT8)["pixel_values"]
    )
    full = {"shortest_edge": 4096, "longest_edge": 25165824} | size
    pixels = preprocessor.pixels_from_video(video, size=size)
    assert pixels.grid != preprocessor.pixels_from_video(video).grid
    outputs = video_outputs(reference, video, size=full, **AS_UINT8)
    assert torch.equal(pixels.rows.flatten(0, 1), outputs["pixel_values_videos"])


def test_sizes_that_contradict_each_other_are_refused(preprocessor: Qwen3VLPreprocessor) -> None:
    with pytest.raises(InputError, match="at least 65536 and at most 1000 pixels contradict"):
        preprocessor.pixels_from_image(picture((64, 64)), size={"longest_edge": 1000})
    with pytest.raises(InputError, match="at least 99999999 and at most 25165824 pixels contradict"):
        preprocessor.pixels_from_video(clip(2, (64, 64)), size={"shortest_edge": 99999999})


VIDEOS = {
    **{f"{frames} frames": clip(frames, (96, 64)) for frames in range(2, 8)},
    "5 frames 480x320": clip(5, (480, 320)),
    "30 fps, every tenth": clip(6, (50, 130), 30, 10),
    "23.976 fps": clip(5, (200, 100), 23.976, 7),
    "no fps": clip(4, (100, 60), None, 12),
    "smaller than a patch": clip(4, (3, 5)),
    "thin": clip(2, (1, 200)),
    "channels last looks like first": clip(3, (3, 3)),
}


@pytest.mark.parametrize("video", VIDEOS.values(), ids=VIDEOS)
def test_a_videos_pixels_grid_and_timestamps_equal_the_references(
    video: Video, preprocessor: Qwen3VLPreprocessor, reference: Any
) -> None:
    pixels = preprocessor.pixels_from_video(video)
    raw = video_outputs(reference, video, **AS_UINT8)
    assert pixels.rows.dtype == torch.uint8
    assert torch.equal(pixels.rows.flatten(0, 1), raw["pixel_values_videos"])
    normalised = video_outputs(reference, video)["pixel_values_videos"]
    assert torch.equal(NORM(pixels.rows).flatten(0, 1), normalised)
    assert pixels.grid is not None
    assert [list(pixels.grid)] == raw["video_grid_thw"].tolist()
    steps, height, width = pixels.grid
    assert pixels.group == (height, width)
    assert pixels.runs == (height * width // 4,) * steps
    assert len(pixels.rows) == steps == -(-len(video.frames) // 2)
    text = reference.tokenizer.decode(raw["input_ids"][0])
    assert re.findall(r"<[\d.]+ seconds>", text) == [f"<{seconds:.1f} seconds>" for seconds in pixels.timestamps]


def test_the_example_video(preprocessor: Qwen3VLPreprocessor) -> None:
    pixels = preprocessor.pixels_from_video(VIDEOS["5 frames 480x320"])
    assert pixels.grid == (3, 20, 30)
    assert sum(pixels.runs) == 450
    assert [f"<{seconds:.1f} seconds>" for seconds in pixels.timestamps] == [
        "<0.2 seconds>",
        "<1.2 seconds>",
        "<2.0 seconds>",
    ]


def test_a_video_without_a_frame_rate_is_taken_to_have_24(preprocessor: Qwen3VLPreprocessor) -> None:
    assert preprocessor.pixels_from_video(clip(4, (64, 64), None, 24)).timestamps == (0.5, 2.5)
    assert preprocessor.pixels_from_video(clip(4, (64, 64), 48, 24)).timestamps == (0.25, 1.25)


FRAMES = clip(4, (64, 64)).frames
ARRAYS = {"read-only": FRAMES.copy(), "reversed": FRAMES[:, ::-1], "strided": FRAMES.repeat(2, 2)[:, :, ::2]}
ARRAYS["read-only"].setflags(write=False)


@pytest.mark.parametrize("frames", ARRAYS.values(), ids=ARRAYS)
def test_any_array_of_frames_is_taken(frames: np.ndarray, preprocessor: Qwen3VLPreprocessor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = preprocessor.pixels_from_video(Video(frames, 2, (0, 1, 2, 3)))
    assert torch.equal(got.rows, preprocessor.pixels_from_video(Video(frames.copy(), 2, (0, 1, 2, 3))).rows)


BAD_VIDEOS = {
    "one frame": (Video(FRAMES[:1], 2, (0,)), "1 frames, expected at least 2"),
    "no frame": (Video(FRAMES[:0], 2, ()), r"shape \[0, 64, 64, 3\], expected some pixels"),
    "no rows": (Video(FRAMES[:, :0], 2, (0, 1, 2, 3)), r"shape \[4, 0, 64, 3\]"),
    "floats": (Video(FRAMES.astype(np.float32), 2, (0, 1, 2, 3)), r"float32 \[4, 64, 64, 3\], expected a uint8 array"),
    "grey": (Video(FRAMES[..., 0], 2, (0, 1, 2, 3)), r"uint8 \[4, 64, 64\], expected"),
    "one channel": (Video(FRAMES[..., :1], 2, (0, 1, 2, 3)), r"uint8 \[4, 64, 64, 1\], expected"),
    "a list": (Video([[0]], 2, (0,)), "its frames are list"),  # type: ignore[arg-type]
    "too few numbers": (Video(FRAMES, 2, (0, 1)), "4 frames and 2 frame numbers"),
    "negative fps": (Video(FRAMES, -1, (0, 1, 2, 3)), "-1 frames a second"),
    "nan fps": (Video(FRAMES, float("nan"), (0, 1, 2, 3)), "nan frames a second"),
    "too thin": (clip(2, (1, 201)), "aspect ratio must be smaller than 200"),
}


@pytest.mark.parametrize(("video", "message"), BAD_VIDEOS.values(), ids=BAD_VIDEOS)
def test_a_video_that_cannot_be_is_refused(video: Video, message: str, preprocessor: Qwen3VLPreprocessor) -> None:
    with pytest.raises(InputError, match=message):
        preprocessor.pixels_from_video(video)


def changed(folder: Path, target: Path, **files: dict[str, Any] | None) -> Path:
    """A copy of the processor files with other entries; None takes an entry or a file away."""
    copied = Path(shutil.copytree(folder, target / "model", ignore=shutil.ignore_patterns("*.safetensors")))
    for name, changes in files.items():
        path = copied / f"{name}.json"
        if changes is None:
            path.unlink()
        else:
            entries = json.loads(path.read_text()) | changes
            path.write_text(json.dumps({key: value for key, value in entries.items() if value is not None}))
    return copied


PROCESSORS: dict[str, dict[str, Any]] = {
    "old names of the size": {"preprocessor_config": {"size": None, "min_pixels": 1024, "max_pixels": 40960}},
    "another resampling": {"preprocessor_config": {"resample": 2}, "video_preprocessor_config": {"resample": 2}},
    "no video processor": {"video_preprocessor_config": None},
}


@pytest.mark.parametrize("files", PROCESSORS.values(), ids=PROCESSORS)
def test_processor_files_mean_what_they_mean_to_the_reference(
    files: dict[str, Any], tiny_qwen3_vl: Path, tmp_path: Path
) -> None:
    folder = changed(tiny_qwen3_vl, tmp_path, **files)
    reference, preprocessor = reference_from(folder), Qwen3VLPreprocessor(folder, FACTS)
    assert_same(preprocessor, reference, picture((300, 200)), clip(4, (100, 60)))


def assert_same(preprocessor: Qwen3VLPreprocessor, reference: Any, image: Image.Image, video: Video) -> None:
    expected: Tensor = reference.image_processor(image, return_tensors="pt", **AS_UINT8)["pixel_values"]
    assert torch.equal(preprocessor.pixels_from_image(image).rows[0], expected)
    expected = video_outputs(reference, video, **AS_UINT8)["pixel_values_videos"]
    assert torch.equal(preprocessor.pixels_from_video(video).rows.flatten(0, 1), expected)


def test_a_processor_that_does_not_name_its_class_is_taken(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    """A bundle has no config.json that would say it."""
    folder = changed(tiny_qwen3_vl, tmp_path, preprocessor_config={"image_processor_type": None}, config=None)
    assert Qwen3VLPreprocessor(folder, FACTS).pixels_from_image(picture((64, 64))).grid == (1, 16, 16)


@pytest.mark.parametrize("change", [{"image_mean": [0.4] * 3}, {"patch_size": 14}, {"rescale_factor": 0.1}], ids=str)
def test_videos_are_refused_where_their_processor_differs(
    change: dict[str, Any], tiny_qwen3_vl: Path, tmp_path: Path
) -> None:
    preprocessor = Qwen3VLPreprocessor(changed(tiny_qwen3_vl, tmp_path, video_preprocessor_config=change), FACTS)
    preprocessor.pixels_from_image(picture((64, 64)))
    (name,) = change
    with pytest.raises(InputError, match=rf"the video processor's {name} is .*: this model takes no videos"):
        preprocessor.pixels_from_video(clip(2, (64, 64)))


def test_the_released_processor_files_give_the_same_pixels(data: Path) -> None:
    folder = data / "realdata/qwen3_vl/Qwen3-VL-8B-Instruct"
    preprocessor, reference = Qwen3VLPreprocessor(folder, FACTS), reference_from(folder)
    for size in ((640, 480), (26, 28), (1, 200)):
        assert_same(preprocessor, reference, picture(size), clip(3, size))
    video = VIDEOS["5 frames 480x320"]
    text = reference.tokenizer.decode(video_outputs(reference, video)["input_ids"][0])
    times = preprocessor.pixels_from_video(video).timestamps
    assert re.findall(r"<[\d.]+ seconds>", text) == [f"<{seconds:.1f} seconds>" for seconds in times]
