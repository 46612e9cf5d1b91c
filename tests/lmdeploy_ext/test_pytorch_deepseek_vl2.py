"""DeepSeek-VL2 in LMDeploy's PyTorch engine: its own model there has another tower than the original, so features are
compared with the reference's, and it loads beside LMDeploy 0.18 at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from turbomind_requests import Message, assistant, image, noise, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.benchmarks.reference import chat_from_lmdeploy
from turbovit.engines.families import FAMILIES

if not any(row.name == "deepseek_vl2" for row in FAMILIES):
    pytest.skip("the table of families has no DeepSeek-VL2", allow_module_level=True)

from pytorch_engine_steps import EngineSteps

SMALL, WIDE, TALL = noise(120, 90, 0), noise(700, 300, 1), noise(300, 700, 2)
QUESTION = text("what is it?")
CHATS: dict[str, list[Message]] = {
    "two images": [user(image(WIDE), QUESTION, image(SMALL))],
    "two images side by side": [user(image(WIDE), image(TALL))],
    "text only": [user(QUESTION)],
    "three images, none cut": [user(image(SMALL), image(WIDE)), assistant("a dog"), user(image(TALL), QUESTION)],
}


@pytest.fixture(scope="module")
def side(tiny_deepseek_vl2: Path, tiny_deepseek_vl2_bundle: Any) -> LMDeploySide:
    return LMDeploySide(tiny_deepseek_vl2, tiny_deepseek_vl2_bundle.path, backend="pytorch")


@pytest.fixture(scope="module")
def reference(tiny_deepseek_vl2: Path) -> Any:
    from turbovit.benchmarks.reference_deepseek_vl2 import DeepseekVL2Reference

    return DeepseekVL2Reference(tiny_deepseek_vl2)


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_has_the_references_ids_and_an_entry_an_image(name: str, side: LMDeploySide, reference: Any) -> None:
    request = side.request(CHATS[name])
    inputs = reference.inputs_from_messages(chat_from_lmdeploy(CHATS[name]))
    assert request["input_ids"] == inputs["input_ids"][0].tolist()
    entries = request.get("multimodal", [])
    assert [list(entry["images_spatial_crop"]) for entry in entries] == inputs["images_spatial_crop"].tolist()
    for entry in entries:
        place = slice(entry["offset"], entry["offset"] + entry["image_tokens"])
        assert set(request["input_ids"][place]) == {entry["image_token_id"]}


def test_a_batch_of_all_gets_the_references_embeddings(
    side: LMDeploySide, reference: Any, tiny_deepseek_vl2: Path, tiny_deepseek_vl2_bundle: Any
) -> None:
    engine = EngineSteps(tiny_deepseek_vl2, tiny_deepseek_vl2_bundle.path)
    assert engine.not_loaded == []
    names = [name.split(".")[0] for name, _ in engine.model.named_parameters()]
    assert set(names) == {"language"}
    requests = [side.request(chat) for chat in CHATS.values()]
    for request in requests:
        engine.add(request)
    inputs = engine.prefill()
    given = engine.language_inputs(inputs)["inputs_embeds"][0]
    rows = torch.cat([embeddings(reference, chat) for chat in CHATS.values()])
    assert given.shape == rows.shape
    assert float((given - rows).norm() / rows.norm()) <= 1e-5


def test_a_batch_without_images_is_lmdeploys_own(
    side: LMDeploySide, tiny_deepseek_vl2: Path, tiny_deepseek_vl2_bundle: Any
) -> None:
    engine = EngineSteps(tiny_deepseek_vl2, tiny_deepseek_vl2_bundle.path)
    engine.add(side.request(CHATS["text only"]))
    made = engine.model_inputs(engine.prefill())
    assert made["pixel_values"] is None
    assert made["image_mask"] is None


@torch.inference_mode()
def embeddings(reference: Any, chat: list[Message]) -> torch.Tensor:
    """The reference's [tokens, hidden], images in place."""
    inputs = reference.inputs_from_messages(chat_from_lmdeploy(chat))
    result = reference.language.get_input_embeddings()(inputs["input_ids"][0])
    if len(inputs["pixels"]):
        result[inputs["images_seq_mask"]] = torch.cat(reference.image_embeddings(inputs))
    return result
