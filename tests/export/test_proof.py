"""A build opens its own bundle and encodes with it: what could not be used is refused, and leaves nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from turbovit.engines.bundle import Bundle
from turbovit.engines.encoder import open_encoder
from turbovit.engines.errors import BuildError, CertificationError, CheckpointError
from turbovit.engines.families import distinct_families
from turbovit.engines.gemma3 import Gemma3Preprocessor
from turbovit.engines.preprocessor import Encoded
from turbovit.export.build import build
from turbovit.export.proof import proof_pixels, prove

IMAGE, VIDEO, DEEPSEEK = "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"
PLAIN = ("gemma3", "llama4", "qwen3_vl")
OTHERS = {"gemma3": "Qwen2VLImageProcessor", "llama4": "SiglipImageProcessor", "qwen3_vl": "Gemma3ImageProcessorFast"}
Change = Mapping[str, Any] | str | None  # entries, a whole text, or the file's absence


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Path]:
    """Makes a copy of a family's tiny sample with a change in one of its processor files."""

    def copy(family: str, file: str, change: Change) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(request.getfixturevalue(f"tiny_{family}"), folder)
        path = folder / file
        if change is None:
            path.unlink()
        elif isinstance(change, str):
            path.write_text(change)
        else:
            path.write_text(json.dumps(json.loads(path.read_text()) | dict(change)))
        return folder

    return copy


@pytest.mark.parametrize(
    ("family", "file", "change", "message"),
    [
        *((family, IMAGE, None, f"has no {IMAGE}: download") for family in PLAIN),
        *((family, IMAGE, "{", f"{IMAGE} cannot be read as JSON") for family in PLAIN),
        *((family, IMAGE, {"image_processor_type": other}, f'image_processor_type is "{other}"')
          for family, other in OTHERS.items()),
        ("gemma3", IMAGE, {"size": {"shortest_edge": 896}}, 'is written {"height": 896, "width": 896}'),
        ("llama4", IMAGE, {"size": 336}, 'resizes to 336, .*is written {"height": 336, "width": 336}'),
        ("qwen3_vl", IMAGE, {"size": {"height": 448, "width": 448}}, f'^{IMAGE} .* size is .*"shortest_edge"'),
        ("qwen3_vl", IMAGE, {"size": {"shortest_edge": 9, "longest_edge": 4}}, "size is .*, expected least"),
        ("qwen3_vl", VIDEO, None, f"has no {VIDEO} "),
        ("qwen3_vl", VIDEO, "[]", f"{VIDEO} holds a JSON list"),
        ("qwen3_vl", VIDEO, {"size": {"height": 448, "width": 448}}, f'^{VIDEO} .* size is .*"shortest_edge"'),
        ("qwen3_vl", VIDEO, {"video_processor_type": "LlavaVideoProcessor"}, 'expected "Qwen3VLVideoProcessor"'),
        ("gemma3", IMAGE, {"resample": "best"}, f"processor files of .*{IMAGE}.* are not those of a Gemma3"),
        ("llama4", IMAGE, {"max_patches": "many"}, f"processor files of .*{IMAGE}.* are not those of a Llama4"),
        ("qwen3_vl", VIDEO, {"temporal_patch_size": "two"}, "temporal_patch_size is \"two\""),
        ("deepseek_vl2", DEEPSEEK, None, f"has no {DEEPSEEK}"),
        ("deepseek_vl2", DEEPSEEK, {"candidate_resolutions": "384"}, 'candidate_resolutions is "384"'),
    ],
    ids=str,
)  # fmt: skip
def test_processor_files_that_cannot_be_used_are_refused_before_anything_is_computed(
    family: str, file: str, change: Change, message: str, checkpoint: Callable[..., Path], store: Path
) -> None:
    steps: list[str] = []
    with pytest.raises(CheckpointError, match=message):
        build(checkpoint(family, file, change), report=steps.append)
    assert steps == ["checking the checkpoint"]
    assert not store.exists() or all(path.suffix == ".lock" for path in store.iterdir())


@pytest.mark.parametrize("family", [row.name for row in distinct_families()])
def test_every_familys_bundle_encodes_a_picture_and_a_video_where_it_takes_them(
    family: str, request: pytest.FixtureRequest
) -> None:
    bundle = request.getfixturevalue(f"tiny_{family}_bundle")
    steps: list[str] = []
    prove(bundle, bundle.manifest.engines, steps.append)
    assert len(steps) == 1
    assert steps[0].startswith("encoding an image with onnxruntime")
    timestamps = [bool(pixels.timestamps) for pixels in proof_pixels(bundle)]
    assert timestamps == ([False, True] if family == "qwen3_vl" else [False])


def test_the_reference_tower_encodes_where_no_engine_runs(
    tiny_gemma3: Path, store: Path, quick_export: list[str]
) -> None:
    steps: list[str] = []
    (engine,) = build(tiny_gemma3, precision="bf16", report=steps.append).new
    assert engine.verdict == "not run"
    proofs = [step for step in steps if step.startswith("encoding an image")]
    assert proofs == [f"encoding an image with torch {torch.__version__} on cpu"]


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[Encoded], Encoded]) -> None:
    whole = Gemma3Preprocessor.encoded_from_rows
    monkeypatch.setattr(
        Gemma3Preprocessor, "encoded_from_rows", lambda self, outputs, pixels: change(whole(self, outputs, pixels))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda encoded: Encoded(encoded.features * float("nan"), encoded.runs), "not finite"),
        (lambda encoded: Encoded(encoded.features[1:], encoded.runs), r"shape \(255, 64\), expected \(256, 64\)"),
    ],
)
def test_features_that_no_prompt_has_room_for_leave_nothing(
    change: Callable[[Encoded], Encoded],
    message: str,
    tiny_gemma3: Path,
    copied: Bundle,
    store: Path,
    quick_export: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil(monkeypatch, change)
    with pytest.raises(CertificationError, match=message):
        build(tiny_gemma3)
    assert all(path.suffix == ".lock" for path in store.iterdir())
    before = {path: path.read_bytes() for path in copied.path.rglob("*") if path.is_file()}
    with pytest.raises(CertificationError, match=message):
        build(tiny_gemma3, copied.path, precision="fp16")
    assert {path: path.read_bytes() for path in copied.path.rglob("*") if path.is_file()} == before


def test_limits_that_leave_no_room_for_an_image_are_refused(tiny_qwen3_vl: Path, store: Path) -> None:
    """The processor makes no image of fewer than 65,536 pixels."""
    with pytest.raises(BuildError, match=r"would refuse even a picture of 64x64: .*--max-pixels"):
        build(tiny_qwen3_vl, limits={"pixels": 65535}, runtimes=())
    bundle = build(tiny_qwen3_vl, limits={"pixels": 65536}, runtimes=()).bundle
    assert bundle.manifest.limits["merged"] == 64


def test_what_was_proved_is_what_a_user_opens(tiny_gemma3_bundle: Bundle) -> None:
    encoder = open_encoder(tiny_gemma3_bundle.path)
    (encoded,) = encoder.encode_pixels(proof_pixels(tiny_gemma3_bundle))
    assert encoded.features.shape == (256, tiny_gemma3_bundle.manifest.facts["hidden"])
