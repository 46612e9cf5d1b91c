"""Certificates: the figures, the bounds, and that nothing wrong hides in an average."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from turbovit.engines.bundle import Bundle, OutputError, read_manifest, text_from_manifest, write_manifest
from turbovit.engines.errors import BuildError, BundleError, CertificationError
from turbovit.engines.runner import Runner
from turbovit.export.certify import (
    bound_text,
    certificate_from_runner,
    certified,
    describe,
    output_error,
    read_reference,
    verify_engines,
    with_engine,
    within_bound,
    write_reference,
)
from turbovit.export.checkpoint import image_processor_config, open_checkpoint
from turbovit.export.gemma3 import Gemma3Tower
from turbovit.export.tower import load_tower

BOUNDS = {"fp32": 1e-5, "fp16": 0.999, "bf16": 0.99}
Change = Callable[[Tensor], Tensor]


def silent(step: str) -> None:
    """No progress."""


class Doctored(Runner):
    """Gives the reference's outputs, changed."""

    runtime = "onnxruntime"

    def __init__(self, bundle: Bundle, precision: str, change: Change):
        super().__init__(bundle.manifest, replace(bundle.manifest.engines[0], precision=precision), torch.device("cpu"))
        self._known = {len(sample.inputs["pixels"]): expected for sample, expected in read_reference(bundle)}
        self._change = change

    @classmethod
    def open(cls, *_: object) -> Runner:
        raise NotImplementedError

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        raise NotImplementedError

    @property
    def description(self) -> str:
        return "a test"

    def _infer(self, inputs: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
        return {"features": self._change(self._known[len(inputs["pixels"])]["features"].clone())}


def errors(got: Tensor, reference: Tensor) -> OutputError:
    return output_error("features", got, reference)


def test_figures_by_hand() -> None:
    reference = torch.tensor([[[3.0, 4.0], [0.0, 5.0]], [[1.0, 0.0], [0.0, 1.0]]])
    got = torch.tensor([[[3.0, 4.0], [0.0, 5.0]], [[0.0, 1.0], [0.0, 1.5]]])
    error = errors(got, reference)
    assert error.relative_l2 == pytest.approx((1 + 1 + 0.25) ** 0.5 / 2**0.5)  # of the second row
    assert error.worst_cosine == pytest.approx(0.0, abs=1e-12)
    assert error.max_abs == 1.0
    assert error.finite


def test_equal_outputs_have_no_error() -> None:
    reference = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    error = errors(reference, reference)
    assert (error.relative_l2, error.max_abs, error.finite) == (0.0, 0.0, True)
    assert error.worst_cosine == pytest.approx(1.0)


def test_figures_are_computed_in_double_precision() -> None:
    reference = torch.ones(1, 1, 1_000_000)
    got = reference.clone()
    got[0, 0, 0] += 1e-3
    assert errors(got, reference).relative_l2 == pytest.approx(1e-6, rel=1e-3)
    assert 0 < 1 - errors(got, reference).worst_cosine < 1e-11


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_outputs_are_compared_as_they_are(dtype: torch.dtype) -> None:
    reference = torch.tensor([[[1.0, 1 / 3]]])
    got = reference.to(dtype)
    assert errors(got, reference).max_abs == abs(got[0, 0, 1].item() - reference[0, 0, 1].item()) > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("precision", BOUNDS)
def test_what_is_not_finite_never_passes(value: float, precision: str) -> None:
    reference = torch.ones(2, 3, 4)
    got = reference.clone()
    got[1, 2, 3] = value
    error = errors(got, reference)
    assert not error.finite
    assert not within_bound(precision, error)
    assert error.relative_l2 > 1e300
    assert error.max_abs > 1e300
    assert error.worst_cosine == -1.0
    json.dumps([error.relative_l2, error.worst_cosine, error.max_abs], allow_nan=False)


@pytest.mark.parametrize(
    ("precision", "relative", "cosine", "passes"),
    [
        ("fp32", 1e-5, 0.0, True),
        ("fp32", 1.0001e-5, 1.0, False),
        ("fp16", 0.0447, 0.999, True),
        ("fp16", 0.0, 0.99899, False),
        ("fp16", 0.0448, 1.0, False),  # twice the length has a cosine of 1
        ("bf16", 0.1414, 0.99, True),
        ("bf16", 0.0, 0.98999, False),
        ("bf16", 0.1415, 1.0, False),
    ],
)
def test_each_precision_has_its_bounds(precision: str, relative: float, cosine: float, passes: bool) -> None:
    assert within_bound(precision, OutputError("features", relative, cosine, 0.0, True)) is passes
    assert not within_bound(precision, OutputError("features", relative, cosine, 0.0, False))
    number = f"{BOUNDS[precision]:g}"
    assert bound_text(precision).startswith(f"{precision}: ")
    assert number in bound_text(precision)


def certificate(bundle: Bundle, precision: str, change: Change) -> tuple[bool, OutputError]:
    made = certificate_from_runner(bundle, Doctored(bundle, precision, change), silent)
    (error,) = made.outputs
    assert made.shapes == ("2 images", "1 image")
    assert made.ran_on == "a test"
    return made.passed, error


def unchanged(features: Tensor) -> Tensor:
    return features


@pytest.mark.parametrize("precision", BOUNDS)
def test_the_reference_itself_passes(tiny_gemma3_bundle: Bundle, precision: str) -> None:
    assert certificate(tiny_gemma3_bundle, precision, unchanged)[0]


def negate_a_token(features: Tensor) -> Tensor:
    features[-1, 17] *= -1
    return features


def swap_two_tokens(features: Tensor) -> Tensor:
    features[:, [3, 4]] = features[:, [4, 3]]
    return features


def swap_rows(features: Tensor) -> Tensor:
    return features.flip(0)


def repeat_the_first_row(features: Tensor) -> Tensor:
    return features[:1].expand_as(features)


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("change", [negate_a_token, swap_two_tokens, swap_rows, repeat_the_first_row])
def test_a_wrong_token_or_row_is_caught(tiny_gemma3_bundle: Bundle, precision: str, change: Change) -> None:
    assert not certificate(tiny_gemma3_bundle, precision, change)[0]


def test_a_wrong_token_would_hide_in_the_mean(tiny_gemma3_bundle: Bundle) -> None:
    features = read_reference(tiny_gemma3_bundle)[0][1]["features"]
    cosine = F.cosine_similarity(negate_a_token(features.clone()), features, dim=-1)
    assert cosine.mean() > BOUNDS["bf16"]


def test_one_row_slightly_off_is_caught_in_float32(tiny_gemma3_bundle: Bundle) -> None:
    def scale_last_row(features: Tensor) -> Tensor:
        if len(features) > 1:
            features[-1] *= 1 + 1.3e-5
        return features

    features = read_reference(tiny_gemma3_bundle)[0][1]["features"]
    over_all = (scale_last_row(features.clone()) - features).norm() / features.norm()
    assert over_all < BOUNDS["fp32"]
    passed, error = certificate(tiny_gemma3_bundle, "fp32", scale_last_row)
    assert not passed
    assert error.relative_l2 == pytest.approx(1.3e-5, rel=0.01)


@pytest.mark.parametrize("rows", [1, 2])
def test_one_bad_shape_is_not_made_good_by_another(tiny_gemma3_bundle: Bundle, rows: int) -> None:
    def spoil(features: Tensor) -> Tensor:
        if len(features) == rows:
            features[0, 0, 0] = float("nan")
        return features

    passed, error = certificate(tiny_gemma3_bundle, "bf16", spoil)
    assert not passed
    assert (error.finite, error.worst_cosine) == (False, -1.0)


def test_a_certificate_survives_the_manifest_even_with_nan(tiny_gemma3_bundle: Bundle, tmp_path: Path) -> None:
    runner = Doctored(tiny_gemma3_bundle, "fp16", lambda features: features * float("nan"))
    made = certificate_from_runner(tiny_gemma3_bundle, runner, silent)
    engine = replace(tiny_gemma3_bundle.manifest.engines[0], precision="fp16", certificate=made)
    manifest = with_engine(tiny_gemma3_bundle.manifest, engine)
    assert [engine.verdict for engine in manifest.engines] == ["failed", "passed"]
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    json.loads(text_from_manifest(manifest), parse_constant=pytest.fail)  # called for NaN and Infinity
    assert len(describe(made)) < 300
    assert "NOT FINITE" in describe(made)


def test_an_engine_is_certified_again_with_the_same_figures(copied: Bundle) -> None:
    (engine,) = copied.manifest.engines
    lines: list[str] = []
    again = certified(copied, replace(engine, certificate=None, not_run="not yet"), lines.append)
    assert again.certificate is not None
    assert engine.certificate is not None
    assert again.verdict == "passed"
    assert again.not_run is None
    assert again.certificate.shapes == engine.certificate.shapes == ("2 images", "1 image")
    assert [error.relative_l2 <= BOUNDS["fp32"] for error in again.certificate.outputs] == [True]
    assert [line.split(": ")[1] for line in lines] == ["2 images", "1 image"]


def test_changed_weights_fail_certification(copied: Bundle) -> None:
    weights = np.memmap(copied.file("weights.fp32.bin"), np.float32, "r+")
    weights[1000] += 1.0
    weights.flush()
    (engine,) = copied.manifest.engines
    with pytest.raises(
        CertificationError, match=r"model\.fp32\..* missed its bound: features: relative L2 .*bound: fp"
    ):
        certified(copied, engine, silent)
    (verified,) = verify_engines(copied, None, silent)
    assert verified.verdict == "failed"


def test_a_float32_engine_that_does_not_load_is_an_error(copied: Bundle) -> None:
    (engine,) = copied.manifest.engines
    copied.file(engine.file).write_bytes(b"no graph")
    with pytest.raises(BuildError, match=f"does not load: onnxruntime .* cannot load {engine.file}"):
        certified(copied, engine, silent)


def test_an_engine_that_cannot_run_here_is_not_run_and_says_why(copied: Bundle) -> None:
    engine = replace(copied.manifest.engines[0], precision="bf16", file="missing.onnx")
    tried = certified(copied, engine, silent)
    assert tried.verdict == "not run"
    assert tried.certificate is None
    assert "cannot load missing.onnx" in str(tried.not_run)


def test_verifying_a_runtime_that_the_bundle_lacks_is_an_error(tiny_gemma3_bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="has no engine for 'tensorrt'; it has onnxruntime"):
        verify_engines(tiny_gemma3_bundle, "tensorrt", silent)


def test_the_reference_is_read_back_as_it_was_written(
    tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(tiny_gemma3)
    spec = Gemma3Tower.spec_from_config(checkpoint.config, image_processor_config(tiny_gemma3))
    tower = load_tower(Gemma3Tower, spec, checkpoint)
    batches: list[int] = []
    run = tower.run

    def counted(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        batches.append(len(inputs["pixels"]))
        return run(inputs)

    monkeypatch.setattr(tower, "run", counted)
    samples = tower.samples(5)
    write_reference(tower, samples, tmp_path / "reference.safetensors", silent)
    assert batches == [1, 1]  # row by row, and the row that both samples hold only once
    assert stat.S_IMODE((tmp_path / "reference.safetensors").stat().st_mode) == 0o644

    pairs = read_reference(Bundle(tmp_path, tiny_gemma3_bundle.manifest))
    assert [sample.label for sample, _ in pairs] == [sample.label for sample in samples]
    for (sample, outputs), written in zip(pairs, samples, strict=True):
        assert torch.equal(sample.inputs["pixels"], written.inputs["pixels"])
        assert outputs.keys() == {"features"}
        expected = run(written.inputs)["features"]
        assert errors(outputs["features"], expected).relative_l2 < 1e-6
    assert torch.equal(pairs[0][1]["features"][1:], pairs[1][1]["features"])
