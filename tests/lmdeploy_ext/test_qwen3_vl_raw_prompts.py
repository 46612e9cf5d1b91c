"""Requests without chat template: text or token ids whose placeholders are the images' and videos' places."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from turbomind_qwen3_vl import Pair, loaded, video, write_video
from turbomind_requests import Message, image, noise, same, text, user

from turbovit.engines.errors import InputError

START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
I, V = f"{START}{IMAGE}{END}", f"{START}{VIDEO}{END}"  # noqa: E741
A, B = noise(256, 256, 0), noise(123, 457, 1)  # A, and each step of "square", has 64 tokens
FILES = {"slow": (96, 64, 5, 2), "square": (256, 256, 4, 4), "one step": (256, 256, 2, 4)}

# A prompt, and the images and videos beside it in the order of their parts.
PROMPTS: dict[str, tuple[str, list[Any]]] = {
    "one image": (f"{I} what is it?", [A]),
    "an image, nothing else": (I, [A]),
    "two images": (f"this {I} and that {I}", [A, B]),
    "two images side by side": (f"{I}{I}", [A, B]),
    "a bare placeholder": (f"look: {IMAGE}.", [A]),
    "bare placeholders with a letter between": (f"{IMAGE}x{IMAGE}", [A, A]),
    "a turn by hand": (f"<|im_start|>user\n{I}what is it?<|im_end|>\n<|im_start|>assistant\n", [A]),
    "a marker that is text": (f"<IMAGE_TOKEN> {I}", [A]),
    "one video": (f"{V} what is it?", ["slow"]),
    "a bare video": (f"look:{VIDEO}.", ["slow"]),
    "a bare video behind a space": (f"look {VIDEO} and", ["slow"]),
    "a bare video behind a question": (f"what?{VIDEO}", ["slow"]),
    "a bare video behind what merges with its time": (f"a <<{VIDEO} < {VIDEO}", ["slow", "square"]),
    "two videos": (f"{V}{V}", ["slow", "square"]),
    "image, then video": (f"{I}{V} what?", [A, "slow"]),
    "video, then image": (f"{V} and {I} what?", ["slow", A]),
    "video, then image, parts in the other order": (f"{V} and {I} what?", [A, "slow"]),
    "equal lengths, parts in the other order": (f"{V} and {I} what?", [A, "one step"]),
    "equal lengths, several, parts in another order": (f"{V}{I}{V}{I}", [A, A.rotate(90), "one step", "square"]),
    "four in turn": (f"{I}a{V}b{I}c{V}", [A, "slow", B, "square"]),
    "no letters": (f"\n\n{I}\n {V}\n\n🙂日本\t", [B, "slow"]),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("videos")
    return {name: write_video(folder / f"{name}.mp4", *FILES[name], seed) for seed, name in enumerate(FILES)}


def raw(prompt: Any, media: list[Any], files: Mapping[str, Path]) -> list[Message]:
    """As LMDeploy's /generate endpoint puts it."""
    return [user(text(prompt), *(video(files[one]) if isinstance(one, str) else image(one) for one in media))]


def inputs_of(name: str, pair: Pair, files: Mapping[str, Path]) -> Mapping[str, torch.Tensor]:
    prompt, media = PROMPTS[name]
    videos = [loaded(str(files[one]), {}) for one in media if isinstance(one, str)]
    return pair.reference.inputs_from_prompt(prompt, [one for one in media if not isinstance(one, str)], videos)


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_is_the_references(name: str, each_qwen3_vl: Pair, files: dict[str, Path]) -> None:
    request = each_qwen3_vl.side.request(raw(*PROMPTS[name], files), do_preprocess=False)
    each_qwen3_vl.assert_equal(request, inputs_of(name, each_qwen3_vl, files))


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("do_preprocess", [False, True])  # ids say what they are
@pytest.mark.parametrize("form", ["unexpanded", "expanded"])
def test_ids_are_the_references(
    form: str, do_preprocess: bool, name: str, qwen3_vl: Pair, files: dict[str, Path]
) -> None:
    prompt, media = PROMPTS[name]
    inputs = inputs_of(name, qwen3_vl, files)
    expanded = inputs["input_ids"][0].tolist()
    ids = qwen3_vl.reference.processor.tokenizer(prompt)["input_ids"] if form == "unexpanded" else expanded
    request = qwen3_vl.side.request(raw(ids, media, files), do_preprocess=do_preprocess)
    qwen3_vl.assert_equal(request, inputs)


def test_texts_are_joined_into_one_prompt(qwen3_vl: Pair, files: dict[str, Path]) -> None:
    joined = qwen3_vl.side.request(raw(f"a {I} b", [A], files), do_preprocess=False)
    parts = [user(text("a "), image(A)), {"role": "assistant", "content": f"{I} "}, user(text("b"))]
    assert same(joined, qwen3_vl.side.request(parts, do_preprocess=False))


@pytest.mark.parametrize("ids", [[100, 101], [5]])
def test_ids_without_images_stay_as_they_are(ids: list[int], qwen3_vl: Pair) -> None:
    request = qwen3_vl.side.request([user(text(ids))], do_preprocess=False)
    assert request["input_ids"] == ids
    assert request["input_meta"]["mrope_position_delta"] == 0
    assert "input_embeddings" not in request


WRONG: dict[str, tuple[str, list[Any]]] = {
    "no placeholder": ("what is it?", [A]),
    "one too many": (f"{I}{I}", [A]),
    "one too few": (I, [A, B]),
    "an image's for a video": (I, ["slow"]),
    "a video's for an image": (V, [A]),
    "as many, of the wrong kinds": (f"{I}{I}", [A, "slow"]),
    "one without anything beside it": (I, []),
    "a video's without anything beside it": (V, []),
    "two side by side without separators": (f"{START}{IMAGE}{IMAGE}{END}", [A, A]),
    "an image and its neighbour": (f"{I} {IMAGE}{IMAGE}", [A, B, A]),
    "two of each without separators": (f"{IMAGE}{IMAGE}{VIDEO}", [A, B, "slow"]),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("form", ["text", "ids"])
def test_placeholders_that_are_not_those_of_the_media_are_refused(
    form: str, name: str, qwen3_vl: Pair, files: dict[str, Path]
) -> None:
    prompt, media = WRONG[name]
    given = prompt if form == "text" else qwen3_vl.reference.processor.tokenizer(prompt)["input_ids"]
    with pytest.raises(InputError, match=r"the prompt has (\d x '|runs of )"):
        qwen3_vl.side.request(raw(given, media, files), do_preprocess=False)
    chat = raw(I, [A], files)
    qwen3_vl.assert_equal(
        qwen3_vl.side.request(chat, do_preprocess=False), qwen3_vl.reference.inputs_from_prompt(I, [A])
    )


def test_expanded_ids_that_are_not_those_of_the_media_are_refused(qwen3_vl: Pair, files: dict[str, Path]) -> None:
    model = qwen3_vl.side.encoder.model
    pads = {kind: model.encoder.manifest.facts[f"{kind}_token_id"] for kind in ("image", "video")}
    between = [5, 6]
    bad: list[tuple[list[int], list[Any]]] = [
        ([], [A]),
        (between, [A, "slow"]),
        ([*[pads["image"]] * 64, *between], [A, "slow"]),
        ([pads["image"]] * 63, [A]),
        ([pads["image"]] * 65, [A]),
        ([pads["image"]] * 128, [A, A]),
        ([pads["video"]] * 64, [A]),
        ([pads["image"]] * 64, ["one step"]),
        ([*[pads["video"]] * 64, *between, *[pads["video"]] * 64, *between, *[pads["image"]] * 64], [A, "one step"]),
        # An image between the steps of a video, all of them with 64 tokens.
        ([*[pads["video"]] * 64, *between, *[pads["image"]] * 64, *between, *[pads["video"]] * 64], [A, "square"]),
    ]
    for ids, media in bad:
        with pytest.raises(InputError, match="the prompt has runs of"):
            qwen3_vl.side.request(raw(ids, media, files), do_preprocess=False)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_ids_without_an_embedding_are_refused(token: int, qwen3_vl: Pair, files: dict[str, Path]) -> None:
    for media in ([], [A]):
        with pytest.raises(InputError, match=f"the token ids hold {token}, the tokenizer has 0 to"):
            qwen3_vl.side.request(raw([5, token], media, files), do_preprocess=False)
