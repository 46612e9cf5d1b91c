"""Nothing is timed that is not equal, and everything that is found is in the report."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from turbovit.benchmarks import bench_encoder
from turbovit.benchmarks.baselines import LinearPatches, transformers_tower, with_linear_patches
from turbovit.benchmarks.bench_encoder import (
    EAGER,
    LINEAR,
    PLAIN,
    Options,
    engine_name,
    require_equal,
)
from turbovit.benchmarks.flops import Product, Work
from turbovit.benchmarks.report import Report
from turbovit.benchmarks.subjects import Subject, case_of_images, families
from turbovit.benchmarks.timing import Spread
from turbovit.engines.errors import CertificationError, InputError, UnsupportedModelError

SIZE = (256, 256)


def options(tmp_path: Path, contenders: tuple[str, ...] = ()) -> Options:
    return Options(("qwen3_vl",), "tiny", None, [SIZE, (512, 256)], [1, 2], 2, contenders, tmp_path)


@pytest.fixture
def _quick(subjects: dict[str, Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's bundle in place of a new one, and no pauses."""
    monkeypatch.setattr(bench_encoder, "subject", lambda row, *rest: subjects[row.name])
    alternating = bench_encoder.alternating
    monkeypatch.setattr(bench_encoder, "alternating", lambda runs, rounds: alternating(runs, rounds, settle=0))


@pytest.mark.usefixtures("_quick")
def test_a_report_has_samples_machine_equality_and_targets(tmp_path: Path) -> None:
    contenders = ("eager", "linear", "plain", "turbovit")
    found = json.loads(json.dumps(bench_encoder.bench_encoder(options(tmp_path, contenders)).to_json()))
    assert found["schema"] == 1
    assert found["machine"]["cores"] >= 1
    assert torch.__version__.startswith(found["machine"]["versions"]["torch"])
    timed = [one for one in found["measurements"] if one["unit"] == "s"]
    assert {one["case"] for one in timed} == {"256x256", "512x256", "2 x 256x256"}
    assert {one["contender"] for one in timed} == {
        EAGER,
        LINEAR,
        PLAIN,
        engine_name("onnxruntime"),
        engine_name("torch"),
    }
    for one in timed:
        assert len(one["samples"]) == 2
        assert min(one["samples"]) <= one["median"] <= max(one["samples"])
        assert one["patches"] == {"256x256": 256, "512x256": 512, "2 x 256x256": 512}[one["case"]]
        assert one["flops"] > 0
    assert {one["contender"] for one in found["equal"]} == {one["contender"] for one in timed} - {EAGER}
    assert all(one["difference"] <= one["bound"] == 1e-5 for one in found["equal"])
    assert any("onnxruntime" in one["contender"] for one in found["measurements"] if one["unit"] == "flop/s")
    assert len(found["targets"]) == 6


@pytest.mark.usefixtures("_quick")
def test_unequal_outputs_are_not_timed(
    tmp_path: Path, subjects: dict[str, Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(family: str, checkpoint: Path) -> nn.Module:
        tower = transformers_tower(family, checkpoint)
        with torch.no_grad():
            tower.model.model.visual.merger.linear_fc2.weight[3, 5] += 0.01
        return tower

    monkeypatch.setattr(bench_encoder, "transformers_tower", broken)
    monkeypatch.setattr(bench_encoder, "alternating", lambda *_: pytest.fail("it was timed"))
    with pytest.raises(CertificationError, match=r"features of 'turbovit, onnxruntime' is off .* not timed"):
        bench_encoder.bench_encoder(options(tmp_path, ("eager", "turbovit, onnxruntime")))


@pytest.mark.parametrize("wrong", [float("nan"), 1.001])
def test_any_difference_counts(wrong: float) -> None:
    right = torch.ones(2, 3, 4)
    other = right.clone()
    other[1] *= wrong
    found = Report("encoder", {})
    require_equal("f", "c", {"a": lambda: {"x": right}, "b": lambda: {"x": right.clone()}}, found)
    assert [one.difference for one in found.equal] == [0.0]
    with pytest.raises(CertificationError, match="x of 'b' is off"):
        require_equal("f", "c", {"a": lambda: {"x": right}, "b": lambda: {"x": other}}, found)


@pytest.mark.parametrize(("family", "count"), [("gemma3", 1), ("qwen3_vl", 1), ("llama4", 0), ("deepseek_vl2", 1)])
def test_patch_convolutions_become_linear(family: str, count: int, subjects: dict[str, Subject]) -> None:
    assert with_linear_patches(transformers_tower(family, subjects[family].checkpoint)) == count


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv2d(3, 8, (2, 4), (2, 4)), (2, 3, 6, 8)),
        (nn.Conv3d(3, 8, (2, 4, 3), (2, 4, 3), bias=False), (5, 3, 2, 8, 9)),
    ],
)
@torch.no_grad()
def test_a_linear_patch_embedding_is_the_convolution(
    convolution: nn.Conv2d | nn.Conv3d, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(LinearPatches(convolution)(x), convolution(x), rtol=1e-5, atol=1e-6)


def test_overlapping_patches_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        LinearPatches(nn.Conv2d(3, 8, 4, 2))


def test_a_family_that_transformers_lacks_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="has no vision tower for newvl"):
        transformers_tower("newvl", tmp_path)


def test_towers_that_are_the_same_are_measured_once() -> None:
    names = [row.name for row in families(None)]
    assert "qwen3_vl" in names
    assert "qwen3_vl_moe" not in names
    assert [row.name for row in families(["qwen3_vl_moe"])] == ["qwen3_vl_moe"]


def test_a_case_keeps_to_the_limits_of_one_run(subjects: dict[str, Subject]) -> None:
    encoder = subjects["gemma3"].encoder()
    case = case_of_images(encoder, (640, 480), 2)
    assert (case.images, case.tokens, case.patches) == (2, 512, 8192)
    with pytest.raises(InputError, match="9 images 640x480 are 9 images, one run takes 8"):
        case_of_images(encoder, (640, 480), 9)
    encoder.close()


def test_a_share_of_the_machines_rate_above_one_is_no_figure() -> None:
    product = Product(1, 5, 10)
    work, spreads = Work(product.flops, {product: 1}), {engine_name("onnxruntime"): Spread((1.0,))}
    for rate, targets in ((2.0 * product.flops, 1), (0.5 * product.flops, 0)):
        found = Report("encoder", {})
        case = SimpleNamespace(label="c")
        bench_encoder._add_targets("f", case, work, spreads, rate, found)  # type: ignore[arg-type]
        assert (len(found.targets), len(found.skipped)) == (targets, 1 - targets)
