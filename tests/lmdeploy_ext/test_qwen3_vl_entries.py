"""The double entry: as LMDeploy's new-style models, step by step as its others, and as its own on backend pytorch."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from turbomind_qwen3_vl import Pair, expected_inputs, loaded, video, write_video
from turbomind_requests import Message, assistant, image, noise, same, text, user

from turbovit.engines.families import FAMILIES
from turbovit.lmdeploy_ext import adapter

A, B = noise(300, 200, 0), noise(123, 457, 1)
ROW = next(row for row in FAMILIES if row.name == "qwen3_vl")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("videos") / "a.mp4", 96, 64, 5, 2, 0)


def chats(clip: Path) -> dict[str, list[Message]]:
    return {
        "an image": [user(image(A), text("what is it?"))],
        "two images": [user(image(A), text("or"), image(B))],
        "a video": [user(video(clip))],
        "image, video, image": [user(image(A), video(clip), text("?")), assistant("a dog"), user(image(B))],
    }


NAMES = chats(Path())


def as_loaded(chat: list[Message]) -> list[Message]:
    """The messages that LMDeploy hands to a vision model."""

    def part(one: Any) -> Any:
        if one["type"] == "image_data":
            return {"type": "image", "data": one["image_data"]["data"]}
        if one["type"] == "video_url":
            frames, metadata = loaded(one["video_url"]["url"], {})
            return {"type": "video", "data": frames, "video_metadata": metadata}
        return one

    return [
        {**one, "content": one["content"] if isinstance(one["content"], str) else list(map(part, one["content"]))}
        for one in chat
    ]


def same_meta(first: dict[str, Any], second: dict[str, Any]) -> bool:
    one, other = first["input_meta"], second["input_meta"]
    return (
        one.keys() == other.keys()
        and torch.equal(one["mrope_position_ids"], other["mrope_position_ids"])
        and one["mrope_position_delta"] == other["mrope_position_delta"]
        and all(map(torch.equal, one["deepstack_embeds"], other["deepstack_embeds"]))
    )


def test_lmdeploy_takes_it_as_new_style_and_not_as_native(each_qwen3_vl: Pair) -> None:
    encoder = each_qwen3_vl.side.encoder
    assert encoder._uses_new_preprocess is True
    assert encoder.model._turbomind_native_vision is False


@pytest.mark.parametrize("name", NAMES)
def test_the_steps_one_by_one_give_the_same_request(name: str, clip: Path, qwen3_vl: Pair) -> None:
    chat, side = chats(clip)[name], qwen3_vl.side
    expected = side.request(chat)
    messages = side.encoder.model.preprocess(as_loaded(chat))
    messages = side.encoder.model.forward(messages, 3)
    request = side.encoder.model.to_turbomind(messages, side.chat_template, side.tokenizer)
    assert request.keys() == expected.keys()
    assert request["prompt"] == expected["prompt"]
    assert request["input_embedding_ranges"] == expected["input_embedding_ranges"]
    assert request["input_ids"] == expected["input_ids"]
    for one, other in zip(request["input_embeddings"], expected["input_embeddings"], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert torch.equal(request["input_meta"]["mrope_position_ids"], expected["input_meta"]["mrope_position_ids"])
    qwen3_vl.assert_equal(request, expected_inputs(qwen3_vl.reference, chat))


@pytest.mark.parametrize("name", NAMES)
def test_lmdeploys_own_steps_give_the_same_request(name: str, clip: Path, qwen3_vl: Pair) -> None:
    """`ImageEncoder`'s calls for models that are not new-style."""
    chat, side = chats(clip)[name], qwen3_vl.side

    async def steps() -> dict[str, Any]:
        messages = await side.encoder.preprocess(as_loaded(chat))
        messages = await side.encoder.async_infer(messages)
        return await side.encoder.wrap_for_turbomind(messages, side.chat_template, side.tokenizer)

    request, expected = asyncio.run(steps()), side.request(chat)
    assert same(request, expected)
    assert same_meta(request, expected)


def test_there_is_one_entry_an_image_and_one_a_temporal_step_of_a_video(clip: Path, qwen3_vl: Pair) -> None:
    model, chat = qwen3_vl.side.encoder.model, chats(clip)["image, video, image"]
    given = as_loaded(chat)
    messages = model.preprocess(copy.copy(given))
    assert messages[:-1] == given
    ranges = qwen3_vl.side.request(chat)["input_embedding_ranges"]
    lengths = [end - begin for begin, end in ranges]
    assert len(lengths) == 1 + 3 + 1
    assert messages[-1]["role"] == "preprocess"
    entries = messages[-1]["content"]
    assert [entry["image_tokens"] for entry in entries] == lengths
    assert [tuple(entry["pixels"].shape) for entry in entries] == [(1, 4 * tokens, 1536) for tokens in lengths]

    messages = model.forward(messages)
    assert [message["role"] for message in messages[-2:]] == ["preprocess", "forward"]
    embeddings = qwen3_vl.side.request(chat)["input_embeddings"]
    for features, expected in zip(messages[-1]["content"], embeddings, strict=True):
        torch.testing.assert_close(features, expected, rtol=0, atol=1e-5)


def test_entries_are_those_of_lmdeploys_own_class(clip: Path, qwen3_vl: Pair) -> None:
    """As many, in the same order, with the same grids as its request for the PyTorch engine has items."""
    chat = chats(clip)["image, video, image"]
    items = request_on_pytorch(chat, qwen3_vl, stock_class())["multimodal"]
    entries = qwen3_vl.side.encoder.model.preprocess(as_loaded(chat))[-1]["content"]
    pixels = [item.get("pixel_values", item.get("pixel_values_videos")) for item in items]
    assert [len(one) for one in pixels] == [entry["pixels"].shape[1] for entry in entries]
    for one, entry in zip(pixels, entries, strict=True):  # theirs are normalised
        torch.testing.assert_close(one, (entry["pixels"][0].float() / 255 - 0.5) / 0.5, rtol=0, atol=1e-6)


def test_no_request_has_a_multimodal_key(clip: Path, qwen3_vl: Pair) -> None:
    for chat in [*chats(clip).values(), [user(text("a"))]]:
        assert "multimodal" not in qwen3_vl.side.request(chat)


def stock_class() -> Any:
    from lmdeploy.vl.model.base import VISION_MODELS

    return VISION_MODELS.get(ROW.registry_name).__bases__[1]


def request_on_pytorch(chat: list[Message], pair: Pair, model_class: Any, **options: Any) -> dict[str, Any]:
    """What a MultimodalProcessor for backend pytorch makes of a chat with this vision class."""
    from lmdeploy.serve.processors import MultimodalProcessor
    from lmdeploy.vl.engine import ImageEncoder
    from lmdeploy.vl.model.base import VISION_MODELS

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VISION_MODELS._module_dict, ROW.registry_name, model_class)
        encoder = ImageEncoder(pair.side.encoder.model.model_path, "pytorch")
    assert type(encoder.model) is model_class
    processor = MultimodalProcessor(pair.side.tokenizer, pair.side.chat_template, encoder, backend="pytorch")
    return asyncio.run(processor.get_prompt_input(chat, do_preprocess=True, **options))


@pytest.mark.parametrize(
    "options",
    [{}, {"mm_processor_kwargs": {"image": {"max_pixels": 70_000}}, "media_io_kwargs": {"video": {"num_frames": 4}}}],
)
def test_backend_pytorch_keeps_lmdeploys_own_behaviour(options: dict[str, Any], clip: Path, qwen3_vl: Pair) -> None:
    reserved = [user(text("<|image_pad|>"), text("b"))]  # refused on turbomind alone
    for chat in [*chats(clip).values(), reserved]:
        stock = request_on_pytorch(chat, qwen3_vl, stock_class(), **options)
        ours = request_on_pytorch(chat, qwen3_vl, adapter.vision_model_class(ROW), **options)
        assert ours.keys() == stock.keys()
        assert ours["input_ids"] == stock["input_ids"]
        for item, expected in zip(ours.get("multimodal", []), stock.get("multimodal", []), strict=True):
            assert item.keys() == expected.keys()
            assert all(
                torch.equal(item[key], value) if isinstance(value, torch.Tensor) else item[key] == value
                for key, value in expected.items()
            )
