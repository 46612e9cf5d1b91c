"""Requests for LMDeploy's PyTorch engine with a compiled tower: the reference's ids, and every image's pixels at its
place; everything LMDeploy's own where there is no compiled tower."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_engine_steps import EngineSteps
from turbomind_qwen3_vl import expected_inputs, rope_index, video, write_video
from turbomind_requests import Message, assistant, image, noise, system, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.benchmarks.reference import Reference, chat_from_lmdeploy
from turbovit.engines.errors import InputError
from turbovit.engines.families import family_from_name, load
from turbovit.lmdeploy_ext.bundle_choice import BUNDLE_VARIABLE, COMPILED_VISION_VARIABLE

NAMES = ("gemma3", "llama4", "qwen3_vl", "qwen3_vl_moe")
PLACEHOLDERS = {
    "gemma3": "<start_of_image>",
    "llama4": "<|image|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl_moe": "<|vision_start|><|image_pad|><|vision_end|>",
}
A, B, C = noise(500, 300, 0), noise(90, 120, 1), noise(200, 333, 2)
QUESTION = text("what is it?")
CHATS: dict[str, list[Message]] = {
    "image, then text": [user(image(A), QUESTION)],
    "text, then image": [user(QUESTION, image(B))],
    "image only": [user(image(B))],
    "three images between texts": [user(image(A), text("and"), image(B), text(" or \n"), image(C))],
    "one image twice": [user(image(B), image(B), QUESTION)],
    "images in two turns": [user(image(A), QUESTION), assistant("a dog"), user(text("and here?"), image(C))],
    "system message": [system("Be brief."), user(image(B), QUESTION)],
    "newlines around": [user(text("\n\n a\n"), image(B), text("\n\nb"))],
    "text only": [system("Be brief."), user(QUESTION)],
}


@dataclass(frozen=True)
class Sides:
    name: str
    ours: LMDeploySide
    reference: Any
    checkpoint: Path
    bundle: Path

    def raw_ids(self, prompt: str, pictures: list[Any]) -> list[int]:
        return self.reference.inputs_from_prompt(prompt, pictures)["input_ids"][0].tolist()


def sides_of(request: pytest.FixtureRequest) -> Sides:
    checkpoint = request.getfixturevalue(f"tiny_{request.param}")
    bundle = request.getfixturevalue(f"tiny_{request.param}_bundle").path
    reference: Reference = load(family_from_name(request.param).reference)(checkpoint)
    return Sides(request.param, LMDeploySide(checkpoint, bundle, backend="pytorch"), reference, checkpoint, bundle)


@pytest.fixture(scope="module", params=NAMES)
def sides(request: pytest.FixtureRequest) -> Sides:
    return sides_of(request)


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_vl_moe"])
def qwen3_vl_sides(request: pytest.FixtureRequest) -> Sides:
    return sides_of(request)


def assert_sound(request: dict[str, Any]) -> None:
    """Entries are in prompt order and do not overlap; each spans tokens of its image, and has uint8 pixels."""
    end_before = 0
    for entry in request["multimodal"]:
        (pixels,) = (value for name, value in entry.items() if name.startswith("pixel_values"))
        (token,) = (value for name, value in entry.items() if name.endswith("_token_id"))
        begin, end = place(entry)
        assert end_before <= begin < end <= len(request["input_ids"])
        assert token in request["input_ids"][begin:end]
        assert pixels.dtype == torch.uint8
        assert pixels.untyped_storage().nbytes() == pixels.nbytes  # what is pickled on its way to the engine
        end_before = end


def place(entry: dict[str, Any]) -> tuple[int, int]:
    offset = entry["offset"]
    return offset if isinstance(offset, tuple) else (offset, offset + entry["image_tokens"])


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_has_the_references_ids_and_all_images_at_their_places(name: str, sides: Sides) -> None:
    chat = CHATS[name]
    before = copy.deepcopy(chat)
    request = sides.ours.request(chat)
    inputs = sides.reference.inputs_from_messages(chat_from_lmdeploy(chat))
    assert request["input_ids"] == inputs["input_ids"][0].tolist()
    assert request.keys() == {"prompt", "input_ids"} | ({"multimodal"} if "pixel_values" in inputs else set())
    assert chat == before
    if "pixel_values" in inputs:
        assert_sound(request)
        pixels = torch.cat([entry["pixel_values"] for entry in request["multimodal"]])
        expected = inputs["pixel_values"].float()
        assert pixels.shape == expected.shape
        # Llama 4's processor computes in bfloat16, with 8 bits for the 256 values.
        assert torch.allclose((pixels / 255 - 0.5) / 0.5, expected, atol=0.01 if sides.name == "llama4" else 1e-6)


def test_a_raw_prompt_and_its_ids_unexpanded_and_expanded(sides: Sides) -> None:
    word = PLACEHOLDERS[sides.name]
    prompt, pictures = f"this {word}\nand that {word}", [A, B]
    expected = sides.raw_ids(prompt, pictures)
    unexpanded = sides.reference.processor.tokenizer(prompt)["input_ids"]
    first = sides.ours.request([user(text(prompt), *map(image, pictures))], do_preprocess=False)
    assert first["input_ids"] == expected
    assert_sound(first)
    for ids in (unexpanded, expected):
        for do_preprocess in (False, True):  # ids say what they are
            again = sides.ours.request([user(text(ids), *map(image, pictures))], do_preprocess=do_preprocess)
            assert again["input_ids"] == expected
            assert list(map(place, again["multimodal"])) == list(map(place, first["multimodal"]))


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([user(text("see {word}"), image(A))], "its text holds"),
        ([assistant([image(A)])], "only messages of the roles user, tool can hold images"),
    ],
)
def test_bad_messages_are_refused_and_the_next_request_works(chat: list[Message], message: str, sides: Sides) -> None:
    chat = copy.deepcopy(chat)
    for part in chat[0]["content"]:
        if part["type"] == "text":
            part["text"] = part["text"].format(word=PLACEHOLDERS[sides.name])
    with pytest.raises(InputError, match=message):
        sides.ours.request(chat)
    assert "multimodal" in sides.ours.request(CHATS["image only"])


def test_without_a_compiled_tower_everything_is_lmdeploys_own(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILED_VISION_VARIABLE, "0")
    own = LMDeploySide(sides.checkpoint, sides.bundle, backend="pytorch")
    assert not own.encoder.model.compiled
    request = own.request(CHATS["image, then text"])
    assert all(entry["pixel_values"].is_floating_point() for entry in request["multimodal"])


def test_entries_are_lmdeploys_own_but_for_the_kind_of_pixels(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and shapes; places too, where LMDeploy's prompts are right: it leaves out what frames Gemma 3's images."""
    monkeypatch.setenv(COMPILED_VISION_VARIABLE, "0")
    own = LMDeploySide(sides.checkpoint, sides.bundle, backend="pytorch")
    theirs, ours = own.request(CHATS["image, then text"]), sides.ours.request(CHATS["image, then text"])
    right = sides.name != "gemma3"
    assert (theirs["input_ids"] == ours["input_ids"]) == right
    for stock, entry in zip(theirs["multimodal"], ours["multimodal"], strict=True):
        assert entry.keys() == stock.keys() - {"image_size", "num_crops"}  # which no input processor reads
        assert entry["pixel_values"].shape == stock["pixel_values"].shape
        for key in entry.keys() - {"pixel_values", *(() if right else ["offset"])}:
            equal = torch.equal if isinstance(entry[key], torch.Tensor) else lambda first, second: first == second
            assert equal(entry[key], stock[key]), key


def test_pan_and_scan_crops_are_in_one_entry(
    tiny_gemma3: Path, tiny_gemma3_bundle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from turbovit.benchmarks.reference_gemma3 import Gemma3Reference

    monkeypatch.setenv("TURBOVIT_PAN_AND_SCAN", "1")
    side = LMDeploySide(tiny_gemma3, tiny_gemma3_bundle.path, backend="pytorch")
    chat = [user(image(noise(1200, 400, 5)), QUESTION)]
    inputs = Gemma3Reference(tiny_gemma3).inputs_from_messages(chat_from_lmdeploy(chat), do_pan_and_scan=True)
    request = side.request(chat)
    assert request["input_ids"] == inputs["input_ids"][0].tolist()
    (entry,) = request["multimodal"]
    assert len(entry["pixel_values"]) == len(inputs["pixel_values"]) > 1


def test_videos_have_an_entry_a_temporal_step_and_the_references_positions(
    qwen3_vl_sides: Sides, tmp_path: Path
) -> None:
    """Positions as LMDeploy's own sequence makes them from the entries, for videos and images in one prompt."""
    slow = video(write_video(tmp_path / "slow.mp4", 96, 64, 5, 2, 0))
    fast = video(write_video(tmp_path / "fast.mp4", 64, 128, 8, 30, 1))
    chat = [user(image(A), fast, text("and"), image(B), slow), assistant("a dog"), user(QUESTION, image(B))]
    request = qwen3_vl_sides.ours.request(chat)
    inputs = expected_inputs(qwen3_vl_sides.reference, chat)
    assert request["input_ids"] == inputs["input_ids"][0].tolist()
    assert_sound(request)
    kinds = [entry["modality"].value for entry in request["multimodal"]]
    steps = [int(steps) for steps in inputs["video_grid_thw"][:, 0]]
    assert kinds == ["image", *["video"] * steps[0], "image", *["video"] * steps[1], "image"]
    positions, _ = rope_index(qwen3_vl_sides.reference, inputs)
    engine = EngineSteps(qwen3_vl_sides.checkpoint, qwen3_vl_sides.bundle)
    engine.add(request)
    assert torch.equal(engine.prefill().mrope_pos_ids, positions)


def test_processor_options_reach_qwen3_vls_images(qwen3_vl_sides: Sides) -> None:
    options = {"image": {"min_pixels": 4096, "max_pixels": 65536}}
    chat = CHATS["image, then text"]
    request = qwen3_vl_sides.ours.request(chat, mm_processor_kwargs=options)
    inputs = expected_inputs(qwen3_vl_sides.reference, chat, mm_processor_kwargs=options)
    assert request["input_ids"] == inputs["input_ids"][0].tolist()


def test_the_preprocessor_is_opened_without_an_engine(
    tiny_gemma3: Path, tiny_gemma3_bundle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BUNDLE_VARIABLE, str(tiny_gemma3_bundle.path))
    monkeypatch.setattr("turbovit.lmdeploy_ext.base.open_encoder", lambda *_, **__: pytest.fail("an engine was opened"))
    side = LMDeploySide(tiny_gemma3, tiny_gemma3_bundle.path, backend="pytorch")
    assert side.encoder.model.compiled
    assert side.encoder.model.encoder is None
