"""Optimisation profiles: what users may give, and what the families give themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from turbovit.engines.bundle import Profile, TensorSpec
from turbovit.engines.errors import BuildError
from turbovit.engines.families import FAMILIES, family_from_name, load
from turbovit.engines.profiles import profile_for, text_from_profile
from turbovit.export.plan import plan_build
from turbovit.export.profiles import buckets, profile_from_text, shapes_from_profile

LIMITS = {"frames": 8, "merged": 16384}


def test_a_profile_gives_a_range_for_every_symbol() -> None:
    profile = profile_from_text(" merged=64:256:1024, frames=1:1:2", LIMITS, "frames")
    assert profile == Profile({"frames": (1, 1, 2), "merged": (64, 256, 1024)})
    assert list(profile.ranges) == ["frames", "merged"]  # in the limits' order: equal profiles give equal manifests
    assert profile_from_text(text_from_profile(profile), LIMITS, "frames") == profile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the profile is '', expected frames=MIN:OPT:MAX,merged=MIN:OPT:MAX"),
        ("frames=1:1:2", "expected frames=MIN:OPT:MAX,merged=MIN:OPT:MAX"),
        ("frames=1:1:2,merged=64:256", "expected frames=MIN:OPT:MAX"),
        ("frames=1:1:2,merged=64:256:1024,tiles=1:1:1", "expected frames=MIN:OPT:MAX"),
        ("frames=1:1:2,frames=1:1:2,merged=1:2:3", "expected frames=MIN:OPT:MAX"),
        ("frames=1:1:2,merged=-1:2:3", "expected frames=MIN:OPT:MAX"),
        ("frames=1:1:2,merged=0:2:3", "merged is 0:2:3, expected 1 <= MIN <= OPT <= MAX"),
        ("frames=1:1:2,merged=4:2:8", "merged is 4:2:8, expected 1 <= MIN <= OPT <= MAX"),
        ("frames=1:3:2,merged=1:2:8", "frames is 1:3:2, expected 1 <= MIN <= OPT <= MAX"),
        ("frames=1:1:9,merged=1:2:8", "at most 9 frames, and the bundle's limit is 8"),
        ("frames=2:2:2,merged=1:2:8", "frames start at 2, expected 1: one alone must run too"),
    ],
)
def test_a_profile_that_makes_no_sense_is_an_error_that_says_what_to_give(text: str, message: str) -> None:
    with pytest.raises(BuildError) as caught:
        profile_from_text(text, LIMITS, "frames")
    assert message in str(caught.value)


def test_shapes_follow_the_symbols() -> None:
    inputs = (TensorSpec("pixels", "uint8", ("frames", "4*merged", 6)), TensorSpec("index", "int32", (4, "4*merged")))
    profile = Profile({"frames": (1, 2, 3), "merged": (5, 6, 7)})
    assert shapes_from_profile(profile, inputs) == {
        "pixels": ((1, 20, 6), (2, 24, 6), (3, 28, 6)),
        "index": ((4, 20), (4, 24), (4, 28)),
    }


@pytest.mark.parametrize("limit", [1, 2, 255, 256, 257, 1000, 1024, 5000, 16384])
def test_buckets_hold_every_size_once(limit: int) -> None:
    ranges = buckets(limit, [256, 1024, 4096])
    assert [size for low, _, high in ranges for size in range(low, high + 1)] == list(range(1, limit + 1))
    assert all(low <= best <= high for low, best, high in ranges)


@pytest.mark.parametrize("family", [row.name for row in FAMILIES])
@pytest.mark.parametrize("images", [None, 1, 2, 5, 30])
def test_a_familys_profiles_hold_one_row_of_every_size_and_a_full_batch_of_small_ones(
    request: pytest.FixtureRequest, family: str, images: int | None
) -> None:
    model: Path = request.getfixturevalue(f"tiny_{family}")
    manifest = plan_build(model, "auto", ["onnxruntime"], {"images": images} if images else {}).manifest
    tower = _tower(model, family)
    profiles = tower.default_profiles(manifest.limits)
    batch, *others = manifest.limits
    for size in {1, 2, 100, 255, 256, 257, 1024, 1025, 4097, 16384} if others else {1}:
        assert profile_for(profiles, {batch: 1, **dict.fromkeys(others, size)}) is not None
    assert profile_for(profiles, {batch: manifest.limits[batch], **dict.fromkeys(others, 1)}) is not None
    for profile in profiles:
        assert profile_from_text(text_from_profile(profile), manifest.limits, batch) == profile
    assert profile_for(profiles, {batch: manifest.limits[batch] + 1, **dict.fromkeys(others, 1)}) is None


def test_qwen3_vls_profiles_hold_every_run_that_its_preprocessor_makes(tiny_qwen3_vl: Path) -> None:
    from turbovit.engines.qwen3_vl import Qwen3VLPreprocessor

    manifest = plan_build(tiny_qwen3_vl, "auto", ["onnxruntime"], {}).manifest
    profiles = _tower(tiny_qwen3_vl, "qwen3_vl").default_profiles(manifest.limits)
    preprocessor = Qwen3VLPreprocessor(tiny_qwen3_vl, manifest.facts)
    for height in range(2, 257, 2):
        for width in {2, height, min(65536 // height, 256)}:
            frames = min(preprocessor.max_rows((height, width)), manifest.limits["frames"])
            assert profile_for(profiles, {"frames": frames, "merged": height * width // 4}) is not None


@pytest.mark.parametrize(
    ("family", "tokens"), [("gemma3", 4096), ("llama4", 577), ("qwen3_vl", 400), ("deepseek_vl2", 729)]
)
def test_towers_count_the_tokens_that_attend_to_each_other(
    request: pytest.FixtureRequest, family: str, tokens: int
) -> None:
    tower = _tower(request.getfixturevalue(f"tiny_{family}"), family)
    assert tower.tokens({"images": 3, "tiles": 3, "frames": 3, "merged": 100}) == tokens


def _tower(model: Path, family: str):  # type: ignore[no-untyped-def]
    from turbovit.export.checkpoint import open_checkpoint

    tower = load(family_from_name(family).tower)
    checkpoint = open_checkpoint(model)
    with torch.device("meta"):
        return tower(tower.spec_from_config(checkpoint.config, tower.image_processor(checkpoint.folder)))
