"""What install() changes in LMDeploy, and what it leaves as it was."""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from turbomind_requests import assistant, image, noise, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.engines.bundle import Bundle
from turbovit.engines.errors import UnsupportedBackendError
from turbovit.engines.families import FAMILIES, family_from_name
from turbovit.lmdeploy_ext import adapter, install
from turbovit.lmdeploy_ext.base import CompiledVisionModel
from turbovit.lmdeploy_ext.bundle_choice import BUNDLE_VARIABLE

GEMMA3 = family_from_name("gemma3")


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    install()


def stock_class(name: str = GEMMA3.registry_name) -> Any:
    """LMDeploy's own class, which ours is a subclass of."""
    from lmdeploy.vl.model.base import VISION_MODELS

    compiled, stock = VISION_MODELS.get(name).__bases__
    assert issubclass(compiled, CompiledVisionModel)
    return stock


def test_a_second_install_changes_nothing() -> None:
    from lmdeploy import archs
    from lmdeploy.serve.processors import multimodal
    from lmdeploy.vl import engine
    from lmdeploy.vl.model.base import VISION_MODELS

    def state() -> list[Any]:
        processor = vars(multimodal.MultimodalProcessor)
        names = ("_parse_multimodal_item", "_get_text_prompt_input", "_get_multimodal_prompt_input")
        patched = [multimodal.ImageMediaIO, multimodal.VideoMediaIO, engine._raise_exception_on_finish]
        patched.append(archs.autoget_backend)
        return [dict(VISION_MODELS.module_dict), *patched, *(processor[name] for name in names)]

    before = state()
    install()
    assert state() == before


def test_names_and_order_of_the_registry_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmdeploy.vl.model.base import VISION_MODELS

    stock = {**VISION_MODELS.module_dict, **{row.registry_name: stock_class(row.registry_name) for row in FAMILIES}}
    monkeypatch.setattr(VISION_MODELS, "_module_dict", dict(stock))
    adapter.register_vision_models()
    assert list(VISION_MODELS.module_dict) == list(stock)
    changed = {name for name, module in VISION_MODELS.module_dict.items() if module is not stock[name]}
    assert changed == {row.registry_name for row in FAMILIES}


def test_the_match_rule_is_lmdeploys(tiny_gemma3: Path) -> None:
    from lmdeploy.archs import get_model_arch
    from lmdeploy.vl.model.base import VISION_MODELS

    ours = adapter.vision_model_class(GEMMA3)
    assert ours.match.__func__ is stock_class().match.__func__
    assert ours._arch == stock_class()._arch == GEMMA3.architectures[0]
    config = get_model_arch(str(tiny_gemma3))[1]
    assert [module for module in VISION_MODELS.module_dict.values() if module.match(config)] == [ours]


def answers(checkpoint: Path, model_class: Any, monkeypatch: pytest.MonkeyPatch, side: LMDeploySide) -> list[Any]:
    """What a MultimodalProcessor for backend pytorch makes of some chats with this vision class."""
    from lmdeploy.serve.processors import MultimodalProcessor
    from lmdeploy.vl.engine import ImageEncoder
    from lmdeploy.vl.model.base import VISION_MODELS

    monkeypatch.setitem(VISION_MODELS._module_dict, GEMMA3.registry_name, model_class)
    encoder = ImageEncoder(str(checkpoint), "pytorch")
    assert type(encoder.model) is model_class
    processor = MultimodalProcessor(side.tokenizer, side.chat_template, encoder, backend="pytorch")
    pictures = [noise(30, 20, 0), noise(20, 30, 1, channels=4).convert("RGB")]
    chats = [
        [user(image(pictures[0]), text("what is it?"), text("and that?"), image(pictures[1]))],
        [user(text("a"), text("<start_of_image>")), assistant("b"), user(text("c"))],
        [user(text([5, encoder.model.image_token_id, 6]), image(pictures[1]))],
    ]
    return [asyncio.run(processor.get_prompt_input(chat, do_preprocess=True)) for chat in chats]


def test_backend_pytorch_keeps_lmdeploys_own_behaviour(
    tiny_gemma3: Path, side: LMDeploySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = answers(tiny_gemma3, stock_class(), monkeypatch, side)
    ours = answers(tiny_gemma3, adapter.vision_model_class(GEMMA3), monkeypatch, side)
    assert [answer["prompt"] for answer in ours] == [answer["prompt"] for answer in stock]
    assert [answer["input_ids"] for answer in ours] == [answer["input_ids"] for answer in stock]
    for answer, expected in zip(ours, stock, strict=True):
        items, wanted = answer.get("multimodal", []), expected.get("multimodal", [])
        assert [item.keys() for item in items] == [item.keys() for item in wanted]
        for item, one in zip(items, wanted, strict=True):
            assert all(torch.equal(torch.as_tensor(item[key]), torch.as_tensor(one[key])) for key in one)


@pytest.mark.parametrize("backend", [None, "pytorch", "turbomind"])
def test_loading_with_the_language_model_is_lmdeploys(backend: str | None, tiny_gemma3: Path) -> None:
    from lmdeploy.archs import get_model_arch

    config = get_model_arch(str(tiny_gemma3))[1]
    model = adapter.vision_model_class(GEMMA3)(str(tiny_gemma3), with_llm=True, hf_config=config, backend=backend)
    with pytest.raises(NotImplementedError):  # as LMDeploy 0.18's own
        model.build_model()
    assert not model.compiled


def test_prefix_caching_is_turned_off_by_lmdeploy(side: LMDeploySide, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image must never be served from another's cache."""
    from lmdeploy.messages import TurbomindEngineConfig
    from lmdeploy.serve.core import vl_async_engine
    from lmdeploy.vl import engine

    class EngineStartsError(Exception):
        pass

    def start(*_: Any, **__: Any) -> None:
        raise EngineStartsError

    assert side.encoder.model._turbomind_native_vision is False
    monkeypatch.setattr(engine, "ImageEncoder", lambda *_, **__: side.encoder)
    monkeypatch.setattr(vl_async_engine.AsyncEngine, "__init__", start)
    config = TurbomindEngineConfig(enable_prefix_caching=True)
    with pytest.raises(EngineStartsError):
        vl_async_engine.VLAsyncEngine("unused", backend="turbomind", backend_config=config)
    assert config.enable_prefix_caching is False


class TaskChosenError(Exception):
    pass


@pytest.fixture
def _stop_before_an_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise TaskChosenError

    # `lmdeploy.pipeline`, as an attribute, is the function.
    monkeypatch.setattr(importlib.import_module("lmdeploy.pipeline"), "get_task", stop)


@pytest.mark.usefixtures("_stop_before_an_engine_starts")
def test_a_pipeline_refuses_instead_of_falling_back(tiny_gemma3: Path) -> None:
    import lmdeploy

    for config in (None, lmdeploy.TurbomindEngineConfig(tp=1)):
        with pytest.raises(UnsupportedBackendError, match=r"TurboMind cannot run Gemma3For.*PytorchEngineConfig\(\)"):
            lmdeploy.pipeline(str(tiny_gemma3), backend_config=config)


@pytest.mark.usefixtures("_stop_before_an_engine_starts")
def test_a_pipeline_on_the_pytorch_engine_starts(
    tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lmdeploy

    monkeypatch.setenv(BUNDLE_VARIABLE, str(tiny_gemma3_bundle.path))
    with pytest.raises(TaskChosenError):
        lmdeploy.pipeline(str(tiny_gemma3), backend_config=lmdeploy.PytorchEngineConfig())


def test_the_backend_of_other_architectures_is_lmdeploys_choice(tmp_path: Path) -> None:
    from lmdeploy import archs

    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    assert archs.autoget_backend(str(tmp_path)) == archs.autoget_backend.__wrapped__(str(tmp_path))


def test_turbomind_is_taken_once_it_can(tiny_gemma3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmdeploy import archs

    from turbovit.lmdeploy_ext import capability

    monkeypatch.setattr(capability, "language_findings", lambda *_: (capability.Finding("all", "have"),))
    assert archs.autoget_backend(str(tiny_gemma3)) == archs.autoget_backend.__wrapped__(str(tiny_gemma3))
