"""Synthetic Qwen3-VL checkpoints, dense and mixture of experts: taken by transformers and LMDeploy as released ones."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from turbovit.export import sample_qwen3_vl
from turbovit.export.sample_qwen3_vl import write_moe_sample, write_sample

WRITERS: dict[str, Callable[[Path, str, int], None]] = {"dense": write_sample, "moe": write_moe_sample}
RELEASED = {"dense": "Qwen3-VL-8B-Instruct", "moe": "Qwen3-VL-30B-A3B-Instruct"}
WEIGHTS = "model.safetensors"
VISION = "<|vision_start|><|{}_pad|><|vision_end|>"

IMAGE = {"type": "image"}
QUESTION = {"type": "text", "text": " what is it? \n"}
CALLS = [
    {"function": {"name": "look", "arguments": {"at": "the dög", "deep": [1, True]}}},
    {"name": "stop", "arguments": '{"now": 1}'},
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "user", "content": " hello\n"}],
    "system": [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": [IMAGE, QUESTION]}],
    "parts": [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, IMAGE, {"text": "brief."}]},
        {"role": "user", "content": [{"text": "a "}, {"image": "x"}, QUESTION, {"image_url": {"url": "y"}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, IMAGE, {"type": "text", "text": " dog"}]},
        {"role": "user", "content": [{"type": "video"}, {"type": "other"}, IMAGE, {"video": "z"}, QUESTION]},
    ],
    "calls": [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "Well.", "tool_calls": CALLS},
        {"role": "tool", "content": "a"},
        {"role": "tool", "content": [QUESTION, IMAGE, {"type": "video"}]},
        {"role": "assistant", "content": "", "tool_calls": CALLS[:1]},
        {"role": "tool", "content": "b"},
    ],
    "odd": [
        {"role": "tool", "content": "a"},
        {"role": "system", "content": "late"},
        {"role": "developer", "content": "unknown"},
        {"role": "assistant", "content": "b", "tool_calls": None},
        {"role": "user", "content": []},
    ],
}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a sample must load without the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module", params=WRITERS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def sample(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(f"qwen3-vl-{kind}")
    WRITERS[kind](folder, "tiny", 0)
    return folder


@pytest.fixture(scope="module")
def released(data: Path) -> Path:
    folder = data / "realdata" / "qwen3_vl"
    if not folder.is_dir():
        pytest.skip(f"no released files: {folder} does not exist")
    return folder


@pytest.fixture(scope="module")
def processor(sample: Path) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(sample)


@pytest.fixture(scope="module")
def model(sample: Path) -> Any:
    import transformers

    config = json.loads((sample / "config.json").read_text())
    model_class = getattr(transformers, config["architectures"][0])
    loaded, report = model_class.from_pretrained(sample, output_loading_info=True)
    assert not any(report.values())
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}
    return loaded.eval()


def _image(seed: int) -> Image.Image:
    # Blocks rather than noise: resized, they still differ from one seed to the next.
    colours = np.random.default_rng(seed).integers(0, 256, (6, 4, 3), dtype=np.uint8)
    return Image.fromarray(colours.repeat(50, 0).repeat(50, 1))


def _image_inputs(processor: Any, *images: Image.Image) -> dict[str, Tensor]:
    parts = [{"type": "image", "image": image} for image in images]
    turn = {"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return dict(processor.apply_chat_template([turn], add_generation_prompt=True, **options))


def _video_inputs(processor: Any, frames: np.ndarray) -> dict[str, Tensor]:
    turns = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "what is it?"}]}]
    count = len(frames)
    metadata = {"fps": 2.0, "total_num_frames": count, "frames_indices": list(range(count)), "duration": count / 2}
    return dict(
        processor(
            text=[processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)],
            videos=[frames],
            video_metadata=[metadata],
            do_sample_frames=False,
            return_tensors="pt",
        )
    )


def _logits(model: Any, inputs: Mapping[str, Tensor], **changes: Tensor) -> Tensor:
    with torch.no_grad():
        logits = model(**{**inputs, **changes}).logits[0, -1]
    assert torch.isfinite(logits).all()
    return logits


def _inputs(processor: Any, what: str) -> dict[str, Tensor]:
    if what == "video":
        frames = np.stack([np.asarray(_image(seed)) for seed in range(5)])
        return _video_inputs(processor, frames)
    return _image_inputs(processor, *map(_image, range(2 if what == "images" else 1)))


def test_the_seed_decides_the_weights_and_nothing_else(kind: str, sample: Path, tmp_path: Path) -> None:
    for name, seed in {"same": 0, "other": 1}.items():
        (tmp_path / name).mkdir()
        WRITERS[kind](tmp_path / name, "tiny", seed)
    for path in sample.iterdir():
        assert path.read_bytes() == (tmp_path / "same" / path.name).read_bytes(), path.name
        assert (path.read_bytes() == (tmp_path / "other" / path.name).read_bytes()) == (path.name != WEIGHTS)


@pytest.mark.parametrize("size", ["tiny", "small", "full"])
def test_the_geometry_is_the_real_one_at_every_size(
    kind: str, size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded: list[bool] = []
    monkeypatch.setattr(sample_qwen3_vl, "save_tensors", lambda *_, **options: sharded.append(options["sharded"]))
    WRITERS[kind](tmp_path, size, 0)
    assert sharded == [size == "full"]
    config, image, video = (
        json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("config", "preprocessor_config", "video_preprocessor_config")
    )
    vision, text = config["vision_config"], config["text_config"]
    assert (vision["patch_size"], vision["temporal_patch_size"], vision["spatial_merge_size"]) == (16, 2, 2)
    assert vision["num_position_embeddings"] == 48**2
    assert vision["out_hidden_size"] == text["hidden_size"]
    levels = vision["deepstack_visual_indexes"]
    assert levels == sorted(set(levels))
    assert levels[-1] < vision["depth"]
    assert len(levels) <= text["num_hidden_layers"]
    section = text["rope_scaling"]["mrope_section"]
    assert sum(section) == text["head_dim"] // 2
    assert 3 * max(section[1:]) <= text["head_dim"] // 2  # interleaved: height and width have every third
    for processor in (image, video):
        assert (processor["patch_size"], processor["temporal_patch_size"], processor["merge_size"]) == (16, 2, 2)
        assert processor["image_mean"] == processor["image_std"] == [0.5] * 3
    assert image["size"] == {"longest_edge": 16777216, "shortest_edge": 65536}
    if kind == "moe":  # else transformers could not tell which way round the experts stand
        assert text["hidden_size"] not in (text["moe_intermediate_size"], 2 * text["moe_intermediate_size"])


def test_the_full_size_has_the_released_vision_tensors(kind: str, released: Path) -> None:
    config = _full_config(kind)
    shapes = sample_qwen3_vl._shapes(config)
    vision = {name: list(shape) for name, shape in shapes.items() if name.startswith("model.visual.")}
    assert vision == json.loads((released / RELEASED[kind] / "vision_tensors.shapes.json").read_text())
    theirs = json.loads((released / RELEASED[kind] / "config.json").read_text())
    same = {key: value for key, value in theirs["vision_config"].items() if key != "initializer_range"}
    assert config["vision_config"] == same
    assert config["text_config"].keys() - theirs["text_config"].keys() == set()


def test_the_names_are_the_released_ones(released: Path) -> None:
    index = json.loads((released / RELEASED["dense"] / "model.safetensors.index.json").read_text())
    ours = sample_qwen3_vl._shapes(_full_config("dense"))

    def kinds(names: Mapping[str, object]) -> set[str]:
        return {re.sub(r"\.\d+\.", ".N.", name) for name in names}

    assert kinds(ours) == kinds(index["weight_map"])


@pytest.mark.parametrize("name", ["preprocessor_config", "video_preprocessor_config"])
def test_the_processor_files_are_the_released_ones(name: str, sample: Path, released: Path) -> None:
    theirs = json.loads((released / RELEASED["dense"] / f"{name}.json").read_text())
    assert json.loads((sample / f"{name}.json").read_text()) == theirs


def test_tensors_stand_as_in_the_released_files(kind: str, sample: Path, model: Any) -> None:
    tensors = load_file(sample / WEIGHTS)
    assert tensors["model.visual.patch_embed.proj.weight"].shape == (64, 3, 2, 16, 16)
    assert tensors["model.visual.pos_embed.weight"].shape == (2304, 64)
    assert tensors["model.visual.deepstack_merger_list.2.linear_fc2.weight"].shape == (64, 256)
    state = model.state_dict()
    assert tensors.keys() == state.keys()
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor.mT if ".experts." in name else tensor), name
    if kind == "moe":
        experts = "model.language_model.layers.3.mlp.experts."
        assert tensors[f"{experts}gate_up_proj"].shape == (4, 64, 96)
        assert tensors[f"{experts}down_proj"].shape == (4, 48, 64)


def test_features_and_levels_tell_images_and_places_apart(model: Any, processor: Any) -> None:
    inputs = _image_inputs(processor, _image(0), _image(1))
    assert inputs["image_grid_thw"].tolist() == [[1, 20, 14]] * 2
    with torch.no_grad():
        output = model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
    outputs = [output.pooler_output, *output.deepstack_features]
    assert len(outputs) == 4
    for features in outputs:
        first, second = features.chunk(2)
        assert 0.3 < first.std() < 2
        assert (first - second).norm() > 0.3 * first.norm()
        assert (first - first.mean(0)).norm() > 0.1 * first.norm()


def test_attention_reaches_far_and_knows_directions(
    model: Any, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = _inputs(processor, "image")
    tower, rope = model.model.visual, model.model.visual.rotary_pos_emb
    pixels, grid = inputs["pixel_values"], inputs["image_grid_thw"]
    elsewhere = pixels.clone()
    elsewhere[:16] *= -1
    with torch.no_grad():
        right = tower(pixels, grid_thw=grid).pooler_output
        moved = tower(elsewhere, grid_thw=grid).pooler_output
        forward = rope.forward
        monkeypatch.setattr(rope, "forward", lambda x, position_ids: forward(x, position_ids.flip(-1)))
        swapped = tower(pixels, grid_thw=grid).pooler_output
    assert (moved - right)[-1].norm() > 0.05 * right[-1].norm()
    # Beyond what a bfloat16 certificate lets pass.
    assert torch.cosine_similarity(swapped, right, dim=-1).min() < 0.98


def test_logits_depend_on_the_images_and_their_order(model: Any, processor: Any) -> None:
    first, second = _image(0), _image(1)
    alone = [_logits(model, _image_inputs(processor, image)) for image in (first, second)]
    assert (alone[0] - alone[1]).abs().max() > 0.1
    both = [_logits(model, _image_inputs(processor, *images)) for images in ((first, second), (second, first))]
    assert (both[0] - both[1]).abs().max() > 0.1


def test_logits_depend_on_the_frames_of_a_video(model: Any, processor: Any) -> None:
    frames = np.stack([np.asarray(_image(seed)) for seed in range(5)])
    inputs = _video_inputs(processor, frames)
    assert inputs["video_grid_thw"].tolist() == [[3, 18, 12]]
    assert (inputs["input_ids"] == model.config.video_token_id).sum() == 3 * 54
    times = re.findall(r"<\d\.\d seconds>", processor.tokenizer.decode(inputs["input_ids"][0]))
    assert times == ["<0.2 seconds>", "<1.2 seconds>", "<2.0 seconds>"]
    change = _logits(model, inputs) - _logits(model, _video_inputs(processor, frames[::-1].copy()))
    assert change.abs().max() > 0.05


@pytest.mark.parametrize("what", ["image", "images", "video"])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_logits_depend_on_every_deepstack_level(
    what: str, level: int, model: Any, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = _inputs(processor, what)
    right = _logits(model, inputs)
    merger = model.model.visual.deepstack_merger_list[level]
    forward = merger.forward
    monkeypatch.setattr(merger, "forward", lambda x: forward(x) * 0)
    assert (_logits(model, inputs) - right).abs().max() > 0.05


@pytest.mark.parametrize("what", ["image", "images", "video"])
def test_logits_depend_on_three_dimensional_positions(what: str, model: Any, processor: Any) -> None:
    inputs = _inputs(processor, what)
    counted = torch.arange(inputs["input_ids"].shape[1]).expand(3, 1, -1)
    change = _logits(model, inputs) - _logits(model, inputs, position_ids=counted)
    assert change.abs().max() > 0.05


def test_config_and_tokenizer_agree_on_the_ids(sample: Path, processor: Any) -> None:
    config, generation = (json.loads((sample / f"{name}.json").read_text()) for name in ("config", "generation_config"))
    tokenizer, text = processor.tokenizer, config["text_config"]
    tokens = {
        name: f"<|{name.removesuffix('_token_id')}|>" for name in ("vision_start_token_id", "vision_end_token_id")
    }
    tokens |= {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    for name, token in tokens.items():
        assert config[name] == tokenizer.convert_tokens_to_ids(token) == getattr(processor, name)
    assert tokenizer.bos_token is None
    assert tokenizer.eos_token_id == text["eos_token_id"] == generation["eos_token_id"][0]
    assert tokenizer.pad_token_id == text["bos_token_id"] == generation["eos_token_id"][1]
    assert tokenizer.convert_ids_to_tokens(generation["eos_token_id"]) == ["<|im_end|>", "<|endoftext|>"]
    assert len(tokenizer) <= text["vocab_size"]


def test_the_added_tokens_are_the_released_ones(sample: Path, released: Path) -> None:
    def added(folder: Path) -> list[dict[str, Any]]:
        entries = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        return [{key: value for key, value in entry.items() if key != "id"} for entry in entries]

    assert added(sample) == added(released / RELEASED["dense"])


@pytest.mark.parametrize(
    "text", ["the dog  and\n\nthe cat's", "naïve 日本語 🙂\t\r\n", " a" * 3 + " " * 40, "\n" * 40, ""]
)
def test_text_comes_back_as_it_went_in(text: str, processor: Any) -> None:
    ids = processor.tokenizer(text)["input_ids"]
    assert processor.tokenizer.decode(ids, skip_special_tokens=True) == text


def test_marks_runs_and_added_tokens_are_tokens(processor: Any) -> None:
    tokenize = processor.tokenizer.tokenize
    assert tokenize("<|im_start|>user\n\nthe dog.\n\n") == ["<|im_start|>", "user", "ĊĊ", "the", "Ġdog", ".ĊĊ"]
    assert tokenize("12 <think>\n    ") == ["1", "2", "Ġ", "<think>", "Ċ", "ĠĠĠĠ"]
    assert tokenize("e\u0301") == tokenize("é") != tokenize("e")


def test_text_is_cut_as_by_the_released_tokenizer(sample: Path, released: Path) -> None:
    from tokenizers import Tokenizer

    text = "Hello, it's 12 o'clock!\n\n  e\u0301te\u0301 -- <0.2 seconds>\t日本語\r\n?.\n x  \n"
    ours, theirs = (Tokenizer.from_file(str(at / "tokenizer.json")) for at in (sample, released / RELEASED["dense"]))
    pieces = [
        tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))
        for tokenizer in (ours, theirs)
    ]
    assert pieces[0] == pieces[1]


@pytest.mark.parametrize("turns", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("numbered", [True, False])
def test_the_chat_template_does_what_the_released_one_does(
    turns: list[dict[str, Any]], prompt: bool, numbered: bool, processor: Any, released: Path
) -> None:
    theirs = json.loads((released / RELEASED["dense"] / "chat_template.json").read_text())["chat_template"]
    render, options = processor.tokenizer.apply_chat_template, {"tokenize": False, "add_vision_id": numbered}
    expected = render(turns, chat_template=theirs, add_generation_prompt=prompt, **options)
    assert render(turns, add_generation_prompt=prompt, **options) == expected
    # Tools: the words that introduce them are ours.
    tools = [{"type": "function", "function": {"name": "look", "description": "Löok."}}] * 2
    expected = render(turns, tools=tools, chat_template=theirs, **options)
    with_tools = render(turns, tools=tools, **options)
    assert with_tools.partition("<|im_end|>")[2] == expected.partition("<|im_end|>")[2]
    assert with_tools.partition("# Tools")[0] == expected.partition("# Tools")[0]
    listed = re.compile(r"<tools>\n.*\n</tools>", re.DOTALL)
    assert listed.findall(with_tools) == listed.findall(expected)


def test_the_chat_template_writes_qwen_turns(processor: Any) -> None:
    image, video = VISION.format("image"), VISION.format("video")
    turns = [CONVERSATIONS["system"][0], *CONVERSATIONS["parts"][1:]]
    expected = (
        f"<|im_start|>system\nBe brief. <|im_end|>\n<|im_start|>user\na {image} what is it? \n{image}<|im_end|>\n"
        f"<|im_start|>assistant\na dog<|im_end|>\n<|im_start|>user\n{video}{image}{video} what is it? \n<|im_end|>\n"
    )
    for renderer in (processor, processor.tokenizer):
        assert renderer.apply_chat_template(turns, tokenize=False) == expected
        prompted = renderer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert prompted == expected + "<|im_start|>assistant\n"
    numbered = processor.tokenizer.apply_chat_template(turns, tokenize=False, add_vision_id=True)
    assert re.findall(r"(?:Picture|Video) \d: ", numbered) == [
        "Picture 1: ",
        "Picture 2: ",
        "Video 1: ",
        "Picture 3: ",
        "Video 2: ",
    ]


def test_lmdeploy_takes_the_folder(kind: str, sample: Path, processor: Any) -> None:
    pytest.importorskip("lmdeploy", reason="LMDeploy is not installed")
    from lmdeploy.archs import get_model_arch
    from lmdeploy.model import HFChatTemplate, get_chat_template
    from lmdeploy.tokenizer import Tokenizer

    architecture, config = get_model_arch(str(sample))
    assert architecture == f"Qwen3VL{'Moe' if kind == 'moe' else ''}ForConditionalGeneration"
    assert config.text_config.dtype == torch.float32
    template = get_chat_template(str(sample))
    assert isinstance(template, HFChatTemplate)
    assert template.stop_words == ["<|im_end|>"]
    prompt = template.messages2prompt(CONVERSATIONS["system"])
    image = VISION.format("image")
    assert prompt == (
        f"<|im_start|>system\nBe brief. <|im_end|>\n<|im_start|>user\n{image} what is it? \n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tokenizer = Tokenizer(str(sample))
    assert tokenizer.encode(prompt) == processor.tokenizer(prompt)["input_ids"]
    assert tokenizer.decode(tokenizer.encode(prompt), skip_special_tokens=False) == prompt
    assert tokenizer.eos_token_id == config.text_config.eos_token_id


def _full_config(kind: str) -> dict[str, Any]:
    if kind == "moe":
        return sample_qwen3_vl._moe_config(sample_qwen3_vl._MOE_SIZES["full"], sample_qwen3_vl._tokenizer())
    return sample_qwen3_vl._config(sample_qwen3_vl._SIZES["full"], sample_qwen3_vl._tokenizer())
