"""What a request holds at its peak: images are decoded one at a time, a video's frames are not copied."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from turbomind_qwen3_vl import write_video

from turbovit.engines.bundle import Bundle

CHILD = Path(__file__).parents[1] / "media_child.py"
SLACK = 50 << 20
SIDE = 4000
WIDTH, HEIGHT, FRAMES = 1600, 1600, 32


def peak(checkpoint: Path, bundle: Bundle, kind: str, count: int, *files: Path) -> int:
    command = [sys.executable, str(CHILD), str(checkpoint), str(bundle.path), kind, str(count), *map(str, files)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}  # what is freed goes back, and counts no more
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    return int(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_of_eight_images_one_at_a_time_is_decoded(
    tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, tmp_path: Path
) -> None:
    small, large = tmp_path / "small.png", tmp_path / "large.png"
    Image.new("RGB", (64, 64)).save(small)
    Image.new("RGB", (SIDE, SIDE), "red").save(large)
    decoded = SIDE * SIDE * 4  # bytes, as Pillow holds them
    assert peak(tiny_gemma3, tiny_gemma3_bundle, "image", 8, small, large) <= 2 * decoded + SLACK


@pytest.mark.slow
def test_the_frames_of_a_video_are_held_once(tiny_qwen3_vl: Path, tiny_qwen3_vl_bundle: Bundle, tmp_path: Path) -> None:
    small = write_video(tmp_path / "small.mp4", 64, 64, 4, 2, 0)
    large = write_video(tmp_path / "large.mp4", WIDTH, HEIGHT, FRAMES, 8, 0)
    decoded = WIDTH * HEIGHT * FRAMES * 3
    assert peak(tiny_qwen3_vl, tiny_qwen3_vl_bundle, "video", 1, small, large) <= 2 * decoded + SLACK
