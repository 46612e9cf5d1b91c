"""What makes a bundle another one, and which bundle of the store a checkpoint gets."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turbovit.engines.bundle import MANIFEST, Bundle, write_manifest
from turbovit.engines.errors import BundleError, UnsupportedModelError
from turbovit.export.plan import bundle_from_name, find_bundle, plan_build, require_fit

Changed = Callable[..., Path]


def identity(model: Path, **limits: int) -> str:
    return plan_build(model, "auto", ["onnxruntime"], limits).manifest.identity


@pytest.mark.parametrize(
    "change",
    [
        {"tensor": "vision_tower.vision_model.encoder.layers.1.mlp.fc1.bias"},
        {"config": {"boi_token_index": 7}},
        {"config": {"image_token_index": 8}},
        {"preprocessor_config": {"image_mean": [0.4] * 3}},
        {"preprocessor_config": {"do_pan_and_scan": True}},
        {"preprocessor_config": {"resample": 3}},
    ],
    ids=lambda change: str(*change.values()),
)
def test_identity_changes_with(tiny_gemma3: Path, changed_model: Changed, change: dict[str, Any]) -> None:
    assert identity(changed_model(**change)) != identity(tiny_gemma3)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tensor": "language_model.model.norm.weight"},
        {"config": {"transformers_version": "5.0"}},
        {"chat_template": {"chat_template": "another"}},
    ],
    ids=["nothing", "text weights", "a version", "chat template"],
)
def test_identity_does_not_change_with(tiny_gemma3: Path, changed_model: Changed, change: dict[str, Any]) -> None:
    assert identity(changed_model(**change)) == identity(tiny_gemma3)


def test_identity_changes_with_limits(tiny_gemma3: Path) -> None:
    assert identity(tiny_gemma3, images=9) != identity(tiny_gemma3)
    assert identity(tiny_gemma3, images=8) == identity(tiny_gemma3)  # the default


def test_the_plan_names_the_checkpoint_by_its_whole_path(tiny_gemma3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_gemma3.parent)
    plan = plan_build(tiny_gemma3.name, "auto", ["onnxruntime", "onnxruntime"], {})
    assert plan.manifest.source.name == str(tiny_gemma3)
    assert [(new.runtime, new.precision) for new in plan.wanted] == [("onnxruntime", "fp32")]
    assert {"turbovit", "torch", "transformers", "onnx", "onnxscript", "onnxruntime", "python"} == {
        *plan.manifest.tools
    }


def test_an_unsupported_architecture_is_an_error_that_lists_the_supported(changed_model: Changed) -> None:
    model = changed_model(config={"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(UnsupportedModelError, match="'GPT2LMHeadModel' is not supported; supported: Gemma3"):
        plan_build(model, "auto", ["onnxruntime"], {})


@pytest.fixture
def shelve(tiny_gemma3_bundle: Bundle, store: Path) -> Callable[..., Path]:
    """Puts a copy of the shared bundle into the store, with changes in its manifest."""

    def put(name: str, age: int = 0, **changes: Any) -> Path:
        shutil.copytree(tiny_gemma3_bundle.path, store / name)
        write_manifest(store / name, replace(tiny_gemma3_bundle.manifest, **changes))
        os.utime(store / name / MANIFEST, (1e9 - age, 1e9 - age))
        return store / name

    return put


def test_the_newest_bundle_that_fits_is_found(tiny_gemma3: Path, shelve: Callable[..., Path]) -> None:
    assert find_bundle(tiny_gemma3) is None
    shelve("gemma3-a", age=2)
    newest = shelve("gemma3-b", age=1, limits={"images": 2})
    shelve("gemma3-c", age=3)
    source = plan_build(tiny_gemma3, "auto", ["onnxruntime"], {}).manifest.source
    shelve("gemma3-other-weights", source=replace(source, tensors_sha256="0" * 64))
    shelve("gemma3-other-config", source=replace(source, config=source.config | {"eps": 1e-5}))
    assert find_bundle(tiny_gemma3) == newest


def test_a_bundle_is_found_by_content_wherever_the_checkpoint_lies(
    changed_model: Changed, shelve: Callable[..., Path]
) -> None:
    there = shelve("gemma3-a")
    assert find_bundle(changed_model()) == there


@pytest.mark.parametrize(
    "change", [{"tensor": "vision_tower.vision_model.post_layernorm.bias"}, {"config": {"boi_token_index": 7}}]
)
def test_a_changed_checkpoint_gets_no_old_bundle(
    changed_model: Changed, shelve: Callable[..., Path], change: dict[str, Any]
) -> None:
    there = shelve("gemma3-a")
    model = changed_model(**change)
    assert find_bundle(model) is None
    with pytest.raises(BundleError, match=f"no engine bundle for {model}: build it with: turbovit build {model}"):
        bundle_from_name(str(model))
    with pytest.raises(BundleError, match=f"{there} was built from .*config of {model} are others"):
        require_fit(model, there)


def test_damaged_neighbours_and_builds_under_way_are_passed_over(
    tiny_gemma3: Path, shelve: Callable[..., Path]
) -> None:
    there = shelve("gemma3-a", age=9)
    (shelve("gemma3-b") / MANIFEST).write_text("{")
    (shelve("gemma3-c") / MANIFEST).write_text(json.dumps({"schema": 99}))
    (shelve("gemma3-d") / MANIFEST).unlink()
    shelve(".gemma3-a.part-01234567")
    assert find_bundle(tiny_gemma3) == there
    assert bundle_from_name(str(tiny_gemma3)) == there
    assert bundle_from_name(str(there)) == there
    require_fit(tiny_gemma3, there)
