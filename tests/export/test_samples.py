"""Synthetic checkpoints: written whole or not at all, and taken by transformers and by our own tower."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jinja2.exceptions import TemplateError
from PIL import Image
from safetensors import SafetensorError

from turbovit.engines.errors import BuildError, UnsupportedModelError
from turbovit.export import samples
from turbovit.export.checkpoint import INDEX, SINGLE, image_processor_config, open_checkpoint
from turbovit.export.gemma3 import Gemma3Tower
from turbovit.export.samples import random_tensor, save_tensors, write_sample
from turbovit.export.tower import load_tower

RELEASED = Path(__file__).parents[2].parent / "shared/realdata/gemma3/gemma-3-27b-it"

IMAGE_TURN = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " what is it? \n"}]}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " hello\n"}],
    [{"role": "system", "content": "Be brief. "}, IMAGE_TURN],
    [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, {"role": "user", "content": "\n\na"}],
    [IMAGE_TURN, {"role": "assistant", "content": " a dog "}, {"role": "user", "content": "and\n\nhere?"}],
    [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "image"}, {"type": "image"}]}],
]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples") / "gemma3"
    write_sample("gemma3", folder)
    return folder


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a sample must load without the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def processor(sample: Path) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(sample)


def _images() -> list[Image.Image]:
    noise = np.random.default_rng(0).integers(0, 256, (300, 200, 3), dtype=np.uint8)
    ramp = np.broadcast_to(np.linspace(0, 255, 200, dtype=np.uint8)[None, :, None], (300, 200, 3))
    return [Image.fromarray(noise), Image.fromarray(np.ascontiguousarray(ramp))]


def test_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="unknown family 'gemma9'; available: gemma3"):
        write_sample("gemma9", tmp_path / "x")
    with pytest.raises(UnsupportedModelError, match="unknown sample size 'huge'; available: tiny, small, full"):
        write_sample("gemma3", tmp_path / "x", "huge")  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


def test_touches_nothing_that_stands_there(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    for taken in (tmp_path, mine):
        with pytest.raises(BuildError, match="exists and is not empty"):
            write_sample("gemma3", taken)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert mine.read_text() == "mine"


def test_takes_an_empty_folder_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    write_sample("gemma3", folder)
    assert (folder / SINGLE).is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), BuildError),
        (SafetensorError("Error while serializing: No space left on device"), BuildError),
        (KeyboardInterrupt("No space left on device"), KeyboardInterrupt),
    ],
)
def test_a_failure_half_way_leaves_nothing(
    failure: BaseException, raised: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(folder: Path, size: str, seed: int) -> None:
        (folder / "config.json").write_text("{}")
        raise failure

    def load(path: str) -> Callable[[Path, str, int], None]:
        return write

    monkeypatch.setattr(samples, "load", load)
    with pytest.raises(raised, match="No space left on device"):
        write_sample("gemma3", tmp_path / "x")
    assert not any(tmp_path.iterdir())


def test_the_seed_decides_the_weights_and_nothing_else(sample: Path, tmp_path: Path) -> None:
    write_sample("gemma3", tmp_path / "same")
    write_sample("gemma3", tmp_path / "other", seed=1)
    for path in sample.iterdir():
        assert path.read_bytes() == (tmp_path / "same" / path.name).read_bytes(), path.name
        assert (path.read_bytes() == (tmp_path / "other" / path.name).read_bytes()) == (path.name != SINGLE)


def test_random_tensors_have_the_scale_asked_for() -> None:
    matrix = random_tensor("a", (200, 100, 4), seed=0)
    assert matrix.std().item() == pytest.approx(0.05, rel=0.02)
    assert matrix.mean().item() == pytest.approx(0, abs=1e-3)
    vector = random_tensor("a", (100_000,), seed=0, mean=1, std=0.2)
    assert vector.std().item() == pytest.approx(0.2, rel=0.02)
    assert vector.mean().item() == pytest.approx(1, rel=0.01)
    assert not torch.equal(matrix, random_tensor("b", (200, 100, 4), seed=0))


def test_shards_hold_every_tensor_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "SHARD_BYTES", 100)
    shapes = {"a": (20,), "b": (3, 3), "c": (40,), "d": (2,)}  # c alone is over the limit
    save_tensors(tmp_path, shapes, lambda name, shape: random_tensor(name, shape, 0), sharded=True)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * 71
    assert sorted(index["weight_map"].values()) == [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    (tmp_path / "config.json").write_text("{}")
    for name, tensor in open_checkpoint(tmp_path).tensors(list(shapes)):
        assert torch.equal(tensor, random_tensor(name, shapes[name], 0))


def test_the_tower_tells_images_and_places_apart(sample: Path) -> None:
    checkpoint = open_checkpoint(sample)
    spec = Gemma3Tower.spec_from_config(checkpoint.config, image_processor_config(sample))
    assert (spec.image, spec.grid**2, spec.tokens) == (896, 4096, 256)
    tower = load_tower(Gemma3Tower, spec, checkpoint)
    pixels = np.stack([np.asarray(image.resize((896, 896))) for image in _images()])
    first, second = tower(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous())
    assert 0.5 < first.std() < 2
    assert (first - second).norm() > 0.3 * first.norm()
    assert (first - first.mean(0)).norm() > 0.1 * first.norm()


def test_transformers_loads_it_and_its_logits_depend_on_the_image(sample: Path, processor: Any) -> None:
    from transformers import Gemma3ForConditionalGeneration

    model, report = Gemma3ForConditionalGeneration.from_pretrained(sample, output_loading_info=True)
    assert not any(report.values())
    assert model.config.text_config.layer_types == ["sliding_attention", "full_attention"]
    logits = []
    for image in _images():
        part = {"type": "image", "image": image}
        turn = {"role": "user", "content": [part, {"type": "text", "text": "what is it?"}]}
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        inputs = processor.apply_chat_template([turn], add_generation_prompt=True, **options)
        assert (inputs["input_ids"] == model.config.image_token_id).sum() == 256
        with torch.no_grad():
            logits.append(model(**inputs).logits[0, -1])
    assert torch.isfinite(torch.stack(logits)).all()
    assert (logits[0] - logits[1]).abs().max() > 0.1


def test_config_and_tokenizer_agree_on_the_ids(sample: Path, processor: Any) -> None:
    config, tokenizer = open_checkpoint(sample).config, processor.tokenizer
    assert tokenizer.boi_token_id == config["boi_token_index"]
    assert tokenizer.eoi_token_id == config["eoi_token_index"]
    assert tokenizer.image_token_id == config["image_token_index"] == tokenizer.vocab_size
    assert tokenizer.convert_ids_to_tokens(config["eos_token_id"]) == ["<eos>", "<end_of_turn>"]
    assert tokenizer.image_token_id < config["text_config"]["vocab_size"]


@pytest.mark.parametrize(
    "text", ["the dog  and\n\nthe cat", "naïve 日本語 🙂\t\r\n", " a" * 3 + " " * 40, "\n" * 40, ""]
)
def test_text_comes_back_as_it_went_in(text: str, processor: Any) -> None:
    ids = processor.tokenizer(text)["input_ids"]
    assert ids[0] == processor.tokenizer.bos_token_id
    assert processor.tokenizer.decode(ids, skip_special_tokens=True) == text


def test_newlines_and_spaces_in_a_row_are_one_token(processor: Any) -> None:
    ids = processor.tokenizer("\n\n" + "\nthe dog   is<start_of_image>\n" + "\n\n", add_special_tokens=False)
    tokens = processor.tokenizer.convert_ids_to_tokens(ids["input_ids"])
    assert tokens == ["\n\n\n", "the", "▁dog", "▁▁▁", "is", "<start_of_image>", "\n\n\n"]


def test_the_chat_template_writes_gemma_turns(processor: Any) -> None:
    turns = [CONVERSATIONS[1][0], *CONVERSATIONS[3]]
    expected = (
        "<bos><start_of_turn>user\nBe brief. \n\n<start_of_image>what is it?<end_of_turn>\n"
        "<start_of_turn>model\na dog<end_of_turn>\n<start_of_turn>user\nand\n\nhere?<end_of_turn>\n"
    )
    for renderer in (processor, processor.tokenizer):
        assert renderer.apply_chat_template(turns, tokenize=False) == expected
        prompted = renderer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert prompted == expected + "<start_of_turn>model\n"


@pytest.mark.parametrize(
    "turns", [[{"role": "assistant", "content": "a"}], CONVERSATIONS[0] * 2, [{"role": "user", "content": 3}]]
)
def test_the_chat_template_refuses_other_turns(turns: list[dict[str, Any]], processor: Any) -> None:
    with pytest.raises(TemplateError, match=r"must take turns|neither a string nor a list"):
        processor.tokenizer.apply_chat_template(turns, tokenize=False)


@pytest.mark.skipif(not RELEASED.is_dir(), reason="needs the released chat template, which cannot be included")
@pytest.mark.parametrize("turns", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_the_chat_template_does_what_the_released_one_does(
    turns: list[dict[str, Any]], prompt: bool, processor: Any
) -> None:
    released = json.loads((RELEASED / "chat_template.json").read_text())["chat_template"]
    render = processor.tokenizer.apply_chat_template
    theirs = render(turns, chat_template=released, tokenize=False, add_generation_prompt=prompt)
    assert render(turns, tokenize=False, add_generation_prompt=prompt) == theirs


@pytest.mark.parametrize(("family", "levels"), [("gemma3", None), ("llama4", None), ("qwen3_vl", [0, 1])])
def test_a_sample_can_have_fewer_layers(family: str, levels: list[int] | None, tmp_path: Path) -> None:
    """Two of Qwen3-VL's four: its levels 0, 1 and 2 keep their share of the depth."""
    write_sample(family, tmp_path / "x", "tiny", 0, layers=2)
    vision = json.loads((tmp_path / "x" / "config.json").read_text())["vision_config"]
    assert vision.get("num_hidden_layers", vision.get("depth")) == 2
    assert vision.get("deepstack_visual_indexes") == levels
    with pytest.raises(UnsupportedModelError, match="0 layers"):
        write_sample(family, tmp_path / "y", "tiny", 0, layers=0)
