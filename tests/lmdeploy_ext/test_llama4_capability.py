"""What TurboMind lacks for Llama 4 is said and refused at the start; on backend pytorch LMDeploy's class stays."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from turbomind_llama4 import SMALL, TALL
from turbomind_requests import image, text, user

from turbovit.engines.errors import UnsupportedBackendError
from turbovit.engines.families import family_from_name
from turbovit.lmdeploy_ext import adapter, install
from turbovit.lmdeploy_ext.capability import language_findings, turbomind_refusal

ARCHITECTURE = "Llama4ForConditionalGeneration"
MISSING = (
    f"a language model for {ARCHITECTURE}",
    "attention in chunks",
    "layers without rope",
    "experts whose input is scaled by the router",
)
EMBEDDINGS = "features from Python at prompt positions"


def test_the_installed_one_takes_features_and_lacks_the_language_model() -> None:
    states = {finding.what: finding.state for finding in language_findings(ARCHITECTURE)}
    assert states == {EMBEDDINGS: "have", **dict.fromkeys(MISSING, "missing")}


def test_the_refusal_is_one_line_and_names_all_that_is_missing() -> None:
    refusal = turbomind_refusal(ARCHITECTURE)
    assert refusal is not None
    assert "\n" not in refusal
    for words in (f"cannot run {ARCHITECTURE}", *MISSING, "PytorchEngineConfig"):
        assert words in refusal
    assert EMBEDDINGS not in refusal


def test_a_pipeline_refuses_at_the_start(tiny_llama4: Path) -> None:
    import lmdeploy

    install()
    for config in (None, lmdeploy.TurbomindEngineConfig(tp=1)):
        with pytest.raises(UnsupportedBackendError, match=r"cannot run Llama4.*in chunks.*PytorchEngineConfig"):
            lmdeploy.pipeline(str(tiny_llama4), backend_config=config)


def test_the_class_stands_in_the_place_of_lmdeploys(tiny_llama4: Path) -> None:
    from lmdeploy.archs import get_model_arch
    from lmdeploy.vl.model.base import VISION_MODELS

    install()
    config = get_model_arch(str(tiny_llama4))[1]
    ours = adapter.vision_model_class(family_from_name("llama4"))
    assert [module for module in VISION_MODELS.module_dict.values() if module.match(config)] == [ours]
    assert ours._turbomind_native_vision is False  # LMDeploy then turns prefix caching off


def answers(checkpoint: Path, model_class: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a MultimodalProcessor for backend pytorch makes of some chats with this vision class."""
    from lmdeploy.model import get_chat_template
    from lmdeploy.serve.processors import MultimodalProcessor
    from lmdeploy.tokenizer import Tokenizer
    from lmdeploy.vl.engine import ImageEncoder
    from lmdeploy.vl.model.base import VISION_MODELS

    monkeypatch.setitem(VISION_MODELS._module_dict, "LLama4VisionModel", model_class)
    encoder = ImageEncoder(str(checkpoint), "pytorch")
    assert type(encoder.model) is model_class
    tokenizer, template = Tokenizer(str(checkpoint)), get_chat_template(str(checkpoint))
    processor = MultimodalProcessor(tokenizer, template, encoder, backend="pytorch")
    chats = [
        [user(text("what is it?"), image(TALL))],
        [user(image(SMALL), text("this"), image(TALL))],
        [user(text("a <|patch|>"))],
    ]
    return [asyncio.run(processor.get_prompt_input(chat, do_preprocess=True)) for chat in chats]


def test_backend_pytorch_keeps_lmdeploys_own_behaviour(tiny_llama4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    ours = adapter.vision_model_class(family_from_name("llama4"))
    (stock,) = (base for base in ours.__bases__ if base.__module__.startswith("lmdeploy."))
    expected, found = (answers(tiny_llama4, model, monkeypatch) for model in (stock, ours))
    assert [len(answer.get("multimodal", [])) for answer in expected] == [1, 2, 0]
    for answer, wanted in zip(found, expected, strict=True):
        assert (answer["prompt"], answer["input_ids"]) == (wanted["prompt"], wanted["input_ids"])
        for item, one in zip(answer.get("multimodal", []), wanted.get("multimodal", []), strict=True):
            assert item.keys() == one.keys()
            assert all(torch.equal(torch.as_tensor(item[key]), torch.as_tensor(one[key])) for key in one)
