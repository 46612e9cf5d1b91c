"""How much memory an engine is said to need, and what is refused for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from turbovit.engines.bundle import Profile
from turbovit.engines.errors import BuildError
from turbovit.export import memory
from turbovit.export.memory import (
    GIB,
    estimate,
    gpu_memory_lines,
    require_build_memory,
    require_gpu_memory,
    weight_bytes,
)
from turbovit.export.plan import plan_build
from turbovit.export.tower import Tower


@pytest.fixture
def gemma(tiny_gemma3: Path) -> Tower:
    return plan_build(tiny_gemma3, "auto", ["onnxruntime"], {}).described()


@pytest.fixture
def qwen(tiny_qwen3_vl: Path) -> Tower:
    return plan_build(tiny_qwen3_vl, "auto", ["onnxruntime"], {}).described()


def images(most: int) -> Profile:
    return Profile({"images": (1, 1, most)})


def frames(count: int, merged: int) -> Profile:
    return Profile({"frames": (1, 1, count), "merged": (1, 1, merged)})


def test_weights_are_those_of_the_file(gemma: Tower, every_precision) -> None:  # type: ignore[no-untyped-def]
    for precision in ("fp32", "fp16", "bf16"):
        size = every_precision.file(f"weights.{precision}.bin").stat().st_size
        assert weight_bytes(gemma, precision) == pytest.approx(size, rel=0.05)  # norms stay in float32


def test_activations_grow_with_the_batch_and_scores_with_the_square_of_the_patches(gemma: Tower, qwen: Tower) -> None:
    one, eight = (estimate(gemma, images(count), "fp16").activations for count in (1, 8))
    assert eight == pytest.approx(8 * one, rel=0.01)
    kept = ("blocks.0.attention.qkv",)
    fused, apart = ([estimate(qwen, frames(1, n), "fp16", r).activations for n in (4096, 8192)] for r in ((), kept))
    assert fused[1] == pytest.approx(2 * fused[0], rel=0.01)
    assert apart[1] == pytest.approx(4 * apart[0], rel=0.1)
    scores = 4 * 16384**2 * 8  # of 16,384 patches and four heads: all, in float32, before and behind the softmax
    assert scores < apart[0] < 1.1 * scores
    assert estimate(qwen, frames(1, 4096), "fp32").activations == apart[0]


@pytest.mark.parametrize("layer", ["blocks", "blocks.1", "blocks.1.attention", "blocks.1.attention.qkv"])
def test_a_block_whose_attention_stays_in_float32_counts_its_scores(qwen: Tower, layer: str) -> None:
    fused = estimate(qwen, frames(1, 4096), "fp16").activations
    assert estimate(qwen, frames(1, 4096), "fp16", (layer,)).activations > 4 * fused


@pytest.mark.parametrize("layer", ["blocks.1.attention.out", "blocks.1.mlp"])
def test_another_layer_in_float32_doubles_the_activations_and_its_weights(qwen: Tower, layer: str) -> None:
    qwen.spec = replace(qwen.spec, hidden=1152, inner=4304)  # of a tiny tower pixels are the most
    fused, kept = (estimate(qwen, frames(1, 4096), "fp16", layers) for layers in ((), (layer,)))
    assert 1.5 * fused.activations < kept.activations < 2 * fused.activations
    parameters = sum(parameter.numel() for parameter in qwen.get_submodule(layer).parameters())
    assert kept.weights == fused.weights + 2 * parameters


def test_a_parameter_of_the_towers_own_counts_as_it_is_kept(gemma: Tower) -> None:
    assert weight_bytes(gemma, "fp16", ("position",)) == weight_bytes(gemma, "fp16") + 2 * gemma.position.numel()


def test_an_engine_that_cannot_fit_is_refused_with_both_numbers(qwen: Tower) -> None:
    profiles = [frames(1, 64), frames(1, 16384)]
    lines = list(gpu_memory_lines(qwen, profiles, "fp32", ()))
    assert [line.split(":")[0] for line in lines] == ["profile frames=1"] * 2
    with pytest.raises(BuildError) as caught:
        require_gpu_memory(qwen, profiles, "fp32", (), 24 * GIB)
    text = str(caught.value)
    assert "the profile frames=1:1:1,merged=1:1:16384 needs about " in text
    assert "there are 24.0 GiB: take a smaller one with --profile" in text
    require_gpu_memory(qwen, profiles[:1], "fp32", (), 24 * GIB)
    require_gpu_memory(qwen, profiles, "fp16", (), 24 * GIB)


def test_a_build_that_this_machine_has_no_memory_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_build_memory(0)
    monkeypatch.setattr(memory, "_available", lambda: 3 * GIB)
    require_build_memory(GIB // 2)
    with pytest.raises(
        BuildError, match=r"compiling needs about 4\.5 GiB of this machine's memory, 3\.0 GiB are avail"
    ):
        require_build_memory(GIB)
    monkeypatch.setattr(memory, "_available", lambda: None)  # no /proc: nothing is known
    require_build_memory(1000 * GIB)


def test_what_is_available_is_read_from_the_kernel() -> None:
    available = memory._available()
    assert available is None or available > GIB // 4


def test_a_plan_refuses_before_anything_is_exported(tiny_gemma3: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    from turbovit.export.plan import CompileOptions

    options = CompileOptions(capabilities=("8.9",), gpu_memory=GIB // 10)
    with pytest.raises(BuildError, match=r"the profile images=1:4:8 needs about 0\.2 GiB .* there are 0\.1 GiB"):
        plan_build(tiny_gemma3, "fp16", ["tensorrt_rtx"], {}, options)
