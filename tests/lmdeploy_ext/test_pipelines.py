"""Pipelines after `install()`: PIL images reach the engine, and the PyTorch engine's config takes the compiled tower
along, or says why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import FakeEngine, assert_same, machine_that_can
from turbomind_requests import noise

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.engines.bundle import Bundle
from turbovit.engines.errors import BundleError, UnsupportedBackendError
from turbovit.lmdeploy_ext import install
from turbovit.lmdeploy_ext.bundle_choice import BUNDLE_VARIABLE, COMPILED_VISION_VARIABLE
from turbovit.lmdeploy_ext.pytorch_engine import has_compiled_vision

Pipelines = Callable[..., tuple[Any, FakeEngine]]


@pytest.fixture
def pipelines() -> Iterator[Pipelines]:
    """Starts pipelines whose engines record; closes them."""
    import lmdeploy

    install()
    started: list[Any] = []
    engines: list[FakeEngine] = []

    def start(model: Path, config: Any) -> tuple[Any, FakeEngine]:
        started.append(lmdeploy.pipeline(str(model), backend_config=config))
        return started[-1], engines[-1]

    with machine_that_can(engines.append):
        yield start
    for pipe in started:
        pipe.close()


@pytest.fixture(params=["turbomind", "pytorch"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def config_for(backend: str, **options: Any) -> Any:
    import lmdeploy

    kind = {"turbomind": lmdeploy.TurbomindEngineConfig, "pytorch": lmdeploy.PytorchEngineConfig}[backend]
    return kind(max_batch_size=4, **options)


@pytest.mark.parametrize("family", ["gemma3", "llama4", "qwen3_vl"])
def test_pil_images_reach_the_engine(
    family: str, backend: str, pipelines: Pipelines, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = request.getfixturevalue(f"tiny_{family}")
    bundle = request.getfixturevalue(f"tiny_{family}_bundle")
    monkeypatch.setenv(BUNDLE_VARIABLE, str(bundle.path))
    pipe, engine = pipelines(checkpoint, config_for(backend))
    pictures = [noise(60, 40, 0), noise(33, 70, 1, channels=4)]
    answer = pipe(("what is it?", pictures))
    side = LMDeploySide(checkpoint, bundle.path, backend)
    chat = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, *map(image_part, pictures)]}]
    expected = side.request(chat)
    got = engine.requests[int(answer.text)]
    assert len(expected[{"turbomind": "input_embeddings", "pytorch": "multimodal"}[backend]]) >= len(pictures)
    assert_same(got, expected)


def image_part(picture: Any) -> dict[str, Any]:
    return {"type": "image_data", "image_data": {"data": picture}}


def test_the_pytorch_engines_config_takes_the_tower_along(
    tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BUNDLE_VARIABLE, str(tiny_gemma3_bundle.path))
    _, engine = pipelines(tiny_gemma3, config_for("pytorch", session_len=999))
    assert has_compiled_vision(engine.engine_config)
    assert engine.engine_config.session_len == 999


def test_without_a_bundle_the_command_is_given(
    tiny_gemma3: Path, pipelines: Pipelines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURBOVIT_HOME", str(tmp_path))
    with pytest.raises(BundleError, match=rf"turbovit build {tiny_gemma3}"):
        pipelines(tiny_gemma3, config_for("pytorch"))


@pytest.mark.parametrize("way", ["variable", "text only"])
def test_the_vision_half_can_be_left_to_lmdeploy(
    way: str, tiny_gemma3: Path, pipelines: Pipelines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURBOVIT_HOME", str(tmp_path))
    if way == "variable":
        monkeypatch.setenv(COMPILED_VISION_VARIABLE, "0")
    config = config_for("pytorch", language_model_only=way == "text only")
    pipe, engine = pipelines(tiny_gemma3, config)
    assert engine.engine_config is config
    assert not has_compiled_vision(config)
    assert engine.requests[int(pipe("what is it?").text)]["input_ids"]


def test_what_a_compiled_tower_cannot_do_is_refused(
    tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BUNDLE_VARIABLE, str(tiny_gemma3_bundle.path))
    for options, words in (
        ({"custom_module_map": "/my/map.py"}, "a custom_module_map of its own, /my/map.py"),
        ({"device_type": "ascend"}, "got device_type 'ascend'"),
    ):
        with pytest.raises(UnsupportedBackendError, match=rf"{words}.*{COMPILED_VISION_VARIABLE}=0"):
            pipelines(tiny_gemma3, config_for("pytorch", **options))


def test_models_of_others_keep_their_config(tmp_path: Path) -> None:
    import json

    import lmdeploy

    from turbovit.lmdeploy_ext.engine_config import prepared_engine_config

    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    config = lmdeploy.PytorchEngineConfig()
    assert prepared_engine_config(str(tmp_path), config) is config
