"""Which bundle a vision model opens, and what it says where there is none that fits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from turbovit.engines.bundle import Bundle
from turbovit.engines.errors import BundleError, CheckpointError, RuntimeUnavailableError, UnsupportedModelError
from turbovit.export import build as build_module
from turbovit.export.checkpoint import SINGLE
from turbovit.lmdeploy_ext import load_vision_model
from turbovit.lmdeploy_ext.bundle_choice import AUTO_BUILD_VARIABLE, BUNDLE_VARIABLE


@pytest.fixture(autouse=True)
def _empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOVIT_HOME", str(tmp_path / "home"))


@pytest.fixture
def _no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing asked for a build")

    monkeypatch.setattr(build_module, "build", refuse)


@pytest.fixture
def other_weights(tiny_gemma3: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "other"
    shutil.copytree(tiny_gemma3, folder)
    tensors = load_file(folder / SINGLE)
    tensors["multi_modal_projector.mm_input_projection_weight"][0, 0] += 1
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    return folder


def opened(model: Any) -> Path:
    return model.encoder.bundle.path


@pytest.mark.usefixtures("_no_build")
def test_no_bundle_is_an_error_with_the_command_that_builds_one(tiny_gemma3: Path) -> None:
    with pytest.raises(BundleError) as error:
        load_vision_model(tiny_gemma3)
    assert f"turbovit build {tiny_gemma3}" in str(error.value)


def test_a_bundle_is_built_on_the_first_start_where_that_is_wanted(
    tiny_gemma3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(AUTO_BUILD_VARIABLE, "1")
    built = opened(load_vision_model(tiny_gemma3))
    assert built.parent == tmp_path / "home" / "bundles"
    monkeypatch.setattr(build_module, "build", None)
    for value in ("1", "0"):
        monkeypatch.setenv(AUTO_BUILD_VARIABLE, value)
        assert opened(load_vision_model(tiny_gemma3)) == built


@pytest.mark.usefixtures("_no_build")
def test_an_argument_wins_over_the_environment(
    tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BUNDLE_VARIABLE, str(tiny_gemma3_bundle.path))
    assert opened(load_vision_model(tiny_gemma3)) == tiny_gemma3_bundle.path
    monkeypatch.setenv(BUNDLE_VARIABLE, str(tmp_path / "nothing"))
    assert opened(load_vision_model(tiny_gemma3, bundle=tiny_gemma3_bundle.path)) == tiny_gemma3_bundle.path
    with pytest.raises(BundleError, match=r"nothing is not a turbovit bundle"):
        load_vision_model(tiny_gemma3)


@pytest.mark.usefixtures("_no_build")
def test_a_bundle_of_other_weights_is_refused(other_weights: Path, tiny_gemma3_bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=rf"was built from .*gemma3-tiny.*turbovit build {other_weights}"):
        load_vision_model(other_weights, bundle=tiny_gemma3_bundle.path)


@pytest.mark.usefixtures("_no_build")
def test_what_cannot_be_loaded_is_a_typed_error(tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnavailableError, match="unknown device 'gpu'"):
        load_vision_model(tiny_gemma3, bundle=tiny_gemma3_bundle.path, device="gpu")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    with pytest.raises(UnsupportedModelError, match="'LlamaForCausalLM' is not supported; supported: Gemma3For"):
        load_vision_model(tmp_path)


@pytest.mark.usefixtures("_no_build")
def test_a_folder_that_is_no_checkpoint_is_a_typed_error(tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(CheckpointError, match=str(folder)):
            load_vision_model(folder)
