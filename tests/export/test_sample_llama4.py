"""Synthetic Llama 4 checkpoints: taken by transformers, LMDeploy and our own tower as released ones."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from turbovit.export import sample_llama4
from turbovit.export.checkpoint import image_processor_config, open_checkpoint
from turbovit.export.llama4 import Llama4Tower
from turbovit.export.sample_llama4 import write_sample
from turbovit.export.tower import load_tower

WEIGHTS = "model.safetensors"
IMAGE_IDS = {
    "boi_token_index": "<|image_start|>",
    "eoi_token_index": "<|image_end|>",
    "image_token_index": "<|patch|>",
}

IMAGE = {"type": "image"}
QUESTION = {"type": "text", "text": " what is it? \n"}
CALLS = [
    {"function": {"name": "look", "arguments": {"at": "the dög", "deep": [1, True]}}},
    {"function": {"name": "stop", "arguments": '{"now": 1}'}},
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "user", "content": " hello\n"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": [IMAGE, QUESTION]}],
    "parts": [
        {"role": "system", "content": [{"type": "text", "text": " Be brief.\n"}, IMAGE]},
        {"role": "user", "content": [{"type": "text", "text": "a "}, IMAGE, QUESTION, IMAGE, {"type": "other"}]},
        {"role": "assistant", "content": [{"type": "text", "text": " a dog "}]},
        {"role": "user", "content": "\n\nand  here?"},
    ],
    "calls": [
        {"role": "user", "content": " look "},
        {"role": "assistant", "content": "Well.", "tool_calls": CALLS},
        {"role": "tool", "content": "a"},
        {"role": "ipython", "content": {"seen": ["dög", 2]}},
        {"role": "assistant", "content": [QUESTION, IMAGE], "tool_calls": CALLS[:1]},
        {"role": "tool", "content": 3},
    ],
    "odd": [
        {"role": "developer", "content": "unknown"},
        {"role": "system", "content": " late "},
        {"role": "assistant", "content": "b", "tool_calls": []},
        {"role": "user", "content": []},
    ],
}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a sample must load without the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama4")
    write_sample(folder, "tiny", 0)
    return folder


@pytest.fixture(scope="module")
def released(data: Path) -> Path:
    folder = data / "realdata/llama4/Llama-4-Scout-17B-16E-Instruct"
    if not folder.is_dir():
        pytest.skip(f"no released files: {folder} does not exist")
    return folder


@pytest.fixture(scope="module")
def processor(sample: Path) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(sample)


@pytest.fixture(scope="module")
def model(sample: Path) -> Any:
    from transformers import Llama4ForConditionalGeneration

    loaded, report = Llama4ForConditionalGeneration.from_pretrained(sample, output_loading_info=True)
    assert not any(report.values())
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}
    return loaded.eval()


def _image(seed: int, side: int = 672) -> Image.Image:
    # Blocks rather than noise: resized, they still differ from one seed to the next.
    colours = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(colours.repeat(side // 6, 0).repeat(side // 6, 1))


def _inputs(processor: Any, *images: Image.Image) -> dict[str, Tensor]:
    parts = [{"type": "image", "image": image} for image in images]
    turn = {"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return dict(processor.apply_chat_template([turn], add_generation_prompt=True, **options))


def _features(model: Any, pixels: Tensor) -> Tensor:
    """[tiles, 144, hidden of the text half]"""
    with torch.no_grad():
        features = model.get_image_features(pixels.float(), return_dict=True).last_hidden_state
        return model.multi_modal_projector(features.flatten(0, 1)).unflatten(0, (-1, 144))


def _logits(model: Any, ids: Tensor, features: Tensor) -> Tensor:
    """The model's parts put together: its own forward raises with the transformers of today."""
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(ids)
        mask = (ids == model.config.image_token_id)[..., None]
        assert mask.sum() == features.shape[:-1].numel()
        logits = model.language_model(inputs_embeds=embeddings.masked_scatter(mask, features)).logits[0, -1]
    assert torch.isfinite(logits).all()
    return logits


def _change(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


def test_the_seed_decides_the_weights_and_nothing_else(sample: Path, tmp_path: Path) -> None:
    for name, seed in {"same": 0, "other": 1}.items():
        (tmp_path / name).mkdir()
        write_sample(tmp_path / name, "tiny", seed)
    for path in sample.iterdir():
        assert path.read_bytes() == (tmp_path / "same" / path.name).read_bytes(), path.name
        assert (path.read_bytes() == (tmp_path / "other" / path.name).read_bytes()) == (path.name != WEIGHTS)


@pytest.mark.parametrize("size", ["tiny", "small", "full"])
def test_the_geometry_is_the_real_one_at_every_size(size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded: list[bool] = []
    monkeypatch.setattr(sample_llama4, "save_tensors", lambda *_, **options: sharded.append(options["sharded"]))
    write_sample(tmp_path, size, 0)
    assert sharded == [size == "full"]
    config = json.loads((tmp_path / "config.json").read_text())
    spec = Llama4Tower.spec_from_config(config, image_processor_config(tmp_path))
    assert (spec.image, spec.patch, spec.grid**2, spec.tokens) == (336, 14, 576, 144)
    assert spec.out == config["text_config"]["hidden_size"]
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())["max_patches"] == 16
    text = config["text_config"]
    assert text["no_rope_layers"] == [1] * (text["num_hidden_layers"] - 1) + [0]


def test_the_full_size_has_the_released_vision_tensors(released: Path) -> None:
    config = sample_llama4._config(sample_llama4._SIZES["full"], sample_llama4._tokenizer())
    shapes = sample_llama4._shapes(config)
    vision = {name: list(shape) for name, shape in shapes.items() if Llama4Tower.is_vision(name)}
    assert vision == json.loads((released / "vision_tensors.shapes.json").read_text())
    theirs = json.loads((released / "config.json").read_text())
    defaults = ("attention_dropout", "initializer_range", "projector_dropout")
    same = {key: value for key, value in theirs["vision_config"].items() if key not in defaults}
    assert config["vision_config"] == same
    assert config["text_config"].keys() - theirs["text_config"].keys() == {"no_rope_layers"}
    assert config["text_config"]["hidden_size"] == theirs["text_config"]["hidden_size"]
    assert config.keys() == theirs.keys() - {"transformers_version"}


@pytest.mark.parametrize("name", ["preprocessor_config", "processor_config"])
def test_the_processor_files_are_the_released_ones(name: str, sample: Path, released: Path) -> None:
    theirs = json.loads((released / f"{name}.json").read_text())
    assert json.loads((sample / f"{name}.json").read_text()) == theirs


def test_the_tokenizer_config_is_of_the_released_kind(sample: Path, released: Path) -> None:
    ours, theirs = (json.loads((at / "tokenizer_config.json").read_text()) for at in (sample, released))
    for config in (ours, theirs):
        del config["added_tokens_decoder"], config["chat_template"]
    assert ours == theirs


def test_tensors_stand_as_in_the_released_files(sample: Path, model: Any) -> None:
    tensors, state = load_file(sample / WEIGHTS), model.state_dict()
    assert tensors.keys() == state.keys()
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor), name
    feed_forward = "language_model.model.layers.3.feed_forward."
    assert tensors[f"{feed_forward}experts.gate_up_proj"].shape == (4, 64, 192)
    assert tensors[f"{feed_forward}experts.down_proj"].shape == (4, 96, 64)
    assert tensors[f"{feed_forward}router.weight"].shape == (4, 64)
    assert tensors[f"{feed_forward}shared_expert.down_proj.weight"].shape == (64, 96)


def test_our_tower_takes_it_and_agrees(sample: Path, model: Any, processor: Any) -> None:
    checkpoint = open_checkpoint(sample)
    spec = Llama4Tower.spec_from_config(checkpoint.config, image_processor_config(sample))
    tower = load_tower(Llama4Tower, spec, checkpoint)
    image = _image(0, side=336)
    expected = _features(model, _inputs(processor, image)["pixel_values"])
    with torch.no_grad():
        features = tower(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None])
    assert (features - expected).norm() < 1e-5 * expected.norm()  # float32, another order of sums


def test_features_tell_images_and_places_apart(model: Any, processor: Any) -> None:
    first, second = (_features(model, _inputs(processor, _image(seed, 336))["pixel_values"])[0] for seed in (0, 1))
    assert 0.5 < first.std() < 2
    assert (first - second).norm() > 0.3 * first.norm()
    assert (first - first.mean(0)).norm() > 0.1 * first.norm()


def test_features_depend_on_the_directions_of_rope(model: Any, processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = _inputs(processor, _image(0, 336))["pixel_values"]
    right = _features(model, pixels)
    rotary = model.vision_model.rotary_embedding
    columns, rows = rotary.freqs_ci.chunk(2, dim=-1)
    monkeypatch.setattr(rotary, "forward", lambda _: torch.cat([rows, columns], dim=-1))
    # Beyond what a bfloat16 certificate lets pass.
    assert torch.cosine_similarity(_features(model, pixels), right, dim=-1).min() < 0.98


def test_logits_depend_on_the_images_and_on_every_tile(model: Any, processor: Any) -> None:
    inputs, others = (_inputs(processor, _image(seed)) for seed in (0, 1))
    ids = inputs["input_ids"]
    assert inputs["pixel_values"].shape == (5, 3, 336, 336)
    assert torch.equal(ids, others["input_ids"])
    start = ids[0].tolist().index(model.config.boi_token_id)
    assert ids[0, start : start + 727].tolist().count(model.config.image_token_id) == 720
    assert ids[0, start + 726] == model.config.eoi_token_id
    features, other = (_features(model, one["pixel_values"]) for one in (inputs, others))
    right = _logits(model, ids, features)
    assert _change(_logits(model, ids, other), right) > 0.1
    for tile in range(5):
        mixed = features.clone()
        mixed[tile] = other[tile]
        assert _change(_logits(model, ids, mixed), right) > 0.02, tile


def test_logits_depend_on_chunks_and_routing(model: Any, processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs(processor, _image(0))
    features = _features(model, inputs["pixel_values"])
    right = _logits(model, inputs["input_ids"], features)
    text = model.language_model.config
    assert text.layer_types == ["chunked_attention"] * 3 + ["full_attention"]
    with monkeypatch.context() as patch:
        patch.setattr(text, "attention_chunk_size", 8192)
        assert _change(_logits(model, inputs["input_ids"], features), right) > 0.1
    router = model.language_model.model.layers[0].feed_forward.router
    forward = router.forward
    monkeypatch.setattr(router, "forward", lambda x: tuple(scores.roll(1, -1) for scores in forward(x)))
    assert _change(_logits(model, inputs["input_ids"], features), right) > 0.1


def test_config_and_tokenizer_agree_on_the_ids(sample: Path, processor: Any) -> None:
    config, generation = (json.loads((sample / f"{name}.json").read_text()) for name in ("config", "generation_config"))
    tokenizer, text = processor.tokenizer, config["text_config"]
    for name, token in IMAGE_IDS.items():
        assert config[name] == tokenizer.convert_tokens_to_ids(token)
    assert tokenizer.convert_ids_to_tokens(text["eos_token_id"]) == ["<|end_of_text|>", "<|eom|>", "<|eot|>"]
    assert tokenizer.eos_token_id == text["eos_token_id"][-1]
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (text["bos_token_id"], text["pad_token_id"])
    assert generation == {name: text[name] for name in generation}
    assert len(tokenizer) <= text["vocab_size"]


def test_added_tokens_stand_as_in_the_release(sample: Path, released: Path) -> None:
    def added(folder: Path) -> list[dict[str, Any]]:
        entries = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        return [entry | {"id": entry["id"] - entries[0]["id"]} for entry in entries]

    ours = added(sample)
    assert ours[-1]["content"] == "<|patch|>"
    assert ours == added(released)[: len(ours)]


def test_the_tokenizer_is_built_as_the_released_one(sample: Path, released: Path) -> None:
    ours, theirs = (json.loads((at / "tokenizer.json").read_text()) for at in (sample, released))

    def ids_aside(part: Any) -> Any:
        return json.loads(re.sub(r'"ids": \[\d+\]', '"ids": []', json.dumps(part)))

    assert ids_aside(ours["post_processor"]) == ids_aside(theirs["post_processor"])
    assert ours["normalizer"] == theirs["normalizer"]
    assert ours["pre_tokenizer"] == theirs["pre_tokenizer"]
    assert ours["decoder"] == theirs["decoder"]


@pytest.mark.parametrize(
    "text", ["the dog  and\n\nthe cat's", "naïve 日本語 🙂\t\r\n", " a" * 3 + " " * 40, "\n" * 40, ""]
)
def test_text_comes_back_as_it_went_in(text: str, processor: Any) -> None:
    ids = processor.tokenizer(text)["input_ids"]
    assert ids.count(processor.tokenizer.bos_token_id) == 1
    assert ids[0] == processor.tokenizer.bos_token_id
    assert processor.tokenizer.decode(ids, skip_special_tokens=True) == text


def test_marks_runs_and_added_tokens_are_tokens(processor: Any) -> None:
    tokenize = processor.tokenizer.tokenize
    assert tokenize("<|image|>user\n\nthe dog.\n\n") == ["<|image|>", "user", "ĊĊ", "the", "Ġdog", ".ĊĊ"]
    assert tokenize("<|header_end|>\n\n\n a") == ["<|header_end|>", "ĊĊĊ", "Ġa"]


@pytest.mark.parametrize("turns", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_the_chat_template_does_what_the_released_one_does(
    turns: list[dict[str, Any]], prompt: bool, processor: Any, released: Path
) -> None:
    theirs = (released / "chat_template.jinja").read_text()
    render = processor.tokenizer.apply_chat_template
    expected = render(turns, chat_template=theirs, tokenize=False, add_generation_prompt=prompt)
    assert render(turns, tokenize=False, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("name", ["plain", "calls"])  # the released one writes a list of parts as Python does
def test_tools_stand_where_the_released_template_has_them(name: str, processor: Any, released: Path) -> None:
    theirs = (released / "chat_template.jinja").read_text()
    tools = [{"type": "function", "function": {"name": "look", "description": "Löok."}}] * 2

    def rendered(turns: list[dict[str, Any]], **options: Any) -> str:
        # Up to the first tool, the words are ours.
        text = processor.tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, **options)
        return re.sub(r"(user<\|header_end\|>\n\n)[^<]*?\n\n\{\n", r"\1{\n", text, count=1)

    for turns in (CONVERSATIONS[name], [CONVERSATIONS["system"][0], *CONVERSATIONS[name]]):
        assert rendered(turns) == rendered(turns, chat_template=theirs)


def test_the_chat_template_writes_llama4_turns(processor: Any) -> None:
    def turn(role: str, text: str) -> str:
        return f"<|header_start|>{role}<|header_end|>\n\n{text}<|eot|>"

    expected = "<|begin_of_text|>" + turn("system", "Be brief.") + turn("user", "a <|image|> what is it? \n<|image|>")
    expected += turn("assistant", " a dog ") + turn("user", "\n\nand  here?")
    for renderer in (processor, processor.tokenizer):
        assert renderer.apply_chat_template(CONVERSATIONS["parts"], tokenize=False) == expected
        prompted = renderer.apply_chat_template(CONVERSATIONS["parts"], tokenize=False, add_generation_prompt=True)
        assert prompted == expected + "<|header_start|>assistant<|header_end|>\n\n"


def test_lmdeploy_takes_the_folder(sample: Path, processor: Any) -> None:
    pytest.importorskip("lmdeploy", reason="LMDeploy is not installed")
    from lmdeploy.archs import get_model_arch
    from lmdeploy.model import HFChatTemplate, get_chat_template
    from lmdeploy.tokenizer import Tokenizer

    architecture, config = get_model_arch(str(sample))
    assert architecture == "Llama4ForConditionalGeneration"
    assert config.text_config.dtype == torch.float32
    template = get_chat_template(str(sample))
    assert isinstance(template, HFChatTemplate)
    prompt = template.messages2prompt(CONVERSATIONS["system"])
    assert prompt == processor.apply_chat_template(CONVERSATIONS["system"], tokenize=False, add_generation_prompt=True)
    tokenizer = Tokenizer(str(sample))
    ids = tokenizer.encode(prompt)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids == processor.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt
    assert tokenizer.eos_token_id in config.text_config.eos_token_id
