"""Videos as LMDeploy loads them, dense and MoE: ids, logits, positions and deepstack are the reference's."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from turbomind_qwen3_vl import Pair, frames_from_seed, loaded, video, write_video
from turbomind_requests import Message, assistant, file_bytes, image, noise, system, text, user

from turbovit.lmdeploy_ext.conversation import MediaPart
from turbovit.lmdeploy_ext.media_adapter import video_from_part

A, B = noise(300, 200, 0), noise(123, 457, 1)
QUESTION = text("what is it?")
# width, height, frames, frames per second
FILES = {
    "slow": (96, 64, 5, 2),
    "fast": (64, 128, 8, 30),
    "two frames": (320, 240, 2, 25),
    "three frames": (50, 70, 3, 12.5),
    "long": (32, 48, 40, 10),
    "wide": (400, 16, 4, 24),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("videos")
    return {name: write_video(folder / f"{name}.mp4", *FILES[name], seed) for seed, name in enumerate(FILES)}


def chats(files: dict[str, Path]) -> dict[str, list[Message]]:
    slow, fast = video(files["slow"]), video(files["fast"])
    return {
        **{f"the {name} one": [user(video(path), QUESTION)] for name, path in files.items()},
        "video only": [user(slow)],
        "two videos of different speeds": [user(slow, fast, QUESTION)],
        "the same in the other order": [user(fast, QUESTION, slow)],
        "one video twice": [user(slow, slow)],
        "video, then image": [user(slow, image(A), QUESTION)],
        "image, then video": [user(image(A), slow, QUESTION)],
        "image, video, image, video": [user(image(A), fast, text("and"), image(B), slow)],
        "video in a later turn": [user(image(A), QUESTION), assistant("a dog"), user(fast, text("and here?"))],
        "video in the first turn": [system("Be brief."), user(slow), assistant("a dog"), user(image(B), QUESTION)],
        "video from a tool": [user(QUESTION), {"role": "tool", "content": [text("seen:"), slow, image(A)]}],
        "answer to continue": [user(slow, QUESTION), assistant("it is a")],
    }


@pytest.mark.parametrize("name", chats({name: Path(name) for name in FILES}))
def test_a_chat_with_videos_is_the_references(name: str, files: dict[str, Path], each_qwen3_vl: Pair) -> None:
    each_qwen3_vl.assert_proved(chats(files)[name])


def test_each_video_has_timestamps_of_its_own(files: dict[str, Path], qwen3_vl: Pair) -> None:
    prompt = qwen3_vl.side.request([user(video(files["slow"]), video(files["fast"]))])["prompt"]
    times = [float(piece.rsplit("<", 1)[1]) for piece in prompt.split(" seconds>")[:-1]]
    assert times == [0.2, 1.2, 2.0, 0.0, 0.1, 0.1, 0.2]


def test_five_frames_of_480x320_are_450_tokens_in_three_steps(tmp_path: Path, qwen3_vl: Pair) -> None:
    request = qwen3_vl.assert_proved([user(video(write_video(tmp_path / "a.mp4", 480, 320, 5, 2, 0)))])
    assert [end - begin for begin, end in request["input_embedding_ranges"]] == [150] * 3
    for marker in ("<0.2 seconds>", "<1.2 seconds>", "<2.0 seconds>"):
        assert request["prompt"].count(f"{marker}<|vision_start|><|video_pad|>") == 1


@pytest.mark.parametrize("options", [{"num_frames": 3}, {"num_frames": 4}, {"fps": 2}, {"num_frames": -1}])
def test_the_frames_are_those_that_media_io_kwargs_ask_for(
    options: dict[str, Any], files: dict[str, Path], qwen3_vl: Pair
) -> None:
    chat = [user(video(files["long"]), video(files["slow"]), image(A))]
    request = qwen3_vl.assert_proved(chat, media_io_kwargs={"video": options})
    steps = [-(-len(loaded(str(files[name]), options)[0]) // 2) for name in ("long", "slow")]
    assert len(request["input_embeddings"]) == sum(steps) + 1
    usual = qwen3_vl.side.request(chat)  # and for this request alone
    assert len(usual["input_embeddings"]) == 16 + 3 + 1


def test_all_ways_to_name_a_video_are_one(files: dict[str, Path], qwen3_vl: Pair) -> None:
    path = files["slow"]
    encoded = base64.b64encode(path.read_bytes()).decode()
    expected = qwen3_vl.side.request([user(video(path))])
    for part in (
        {"type": "video", "video": str(path)},
        {"type": "video", "video": {"url": str(path)}},
        {"type": "video_url", "video_url": str(path)},
        video(f"file://{path}"),
        video(f"data:video/mp4;base64,{encoded}"),
    ):
        request = qwen3_vl.side.request([user(part)])
        assert request["input_ids"] == expected["input_ids"]
        assert all(map(torch.equal, request["input_embeddings"], expected["input_embeddings"]))


@pytest.mark.parametrize("options", [{}, {"fps": 5}])
def test_frames_sent_as_jpeg_images_are_a_video(options: dict[str, Any], qwen3_vl: Pair) -> None:
    from PIL import Image

    pictures = [Image.fromarray(frame) for frame in frames_from_seed(96, 64, 5, 0)]
    url = "data:video/jpeg;base64," + ",".join(
        base64.b64encode(file_bytes(picture, "JPEG")).decode() for picture in pictures
    )
    request = qwen3_vl.assert_proved([user(video(url), QUESTION)], media_io_kwargs={"video": options})
    assert ("<1.2 seconds>" in request["prompt"]) == (not options)


def test_the_videos_of_other_models_are_loaded_by_lmdeploy_alone(qwen3_vl: Pair) -> None:
    from lmdeploy.serve.processors import multimodal

    assert qwen3_vl.side.encoder.model.compiled  # so the loaders are replaced
    images = multimodal.ImageMediaIO()
    loader = multimodal.VideoMediaIO(image_io=images, num_frames=7, fps=3)
    assert (loader.image_io, loader.num_frames, loader.kwargs) == (images, 7, {"fps": 3})


def test_concurrent_requests_get_their_own_media(files: dict[str, Path], qwen3_vl: Pair) -> None:
    kinds = [[], [image(A)], [video(files["slow"])], [image(B), video(files["fast"])], [video("/no.mp4")]]
    asked = [user(text(str(number)), *kinds[number % 5]) for number in range(15)]

    async def together() -> list[Any]:
        requests = [qwen3_vl.side.processor.get_prompt_input([one], do_preprocess=True) for one in asked]
        return await asyncio.gather(*requests, return_exceptions=True)

    for number, (answer, message) in enumerate(zip(asyncio.run(together()), asked, strict=True)):
        if number % 5 == 4:
            assert isinstance(answer, ValueError)
            continue
        expected = qwen3_vl.side.request([message])
        assert answer["input_ids"] == expected["input_ids"]
        assert all(map(torch.equal, answer.get("input_embeddings", []), expected.get("input_embeddings", [])))
        levels = zip(answer["input_meta"]["deepstack_embeds"], expected["input_meta"]["deepstack_embeds"], strict=True)
        assert all(torch.equal(one, other) for one, other in levels)


def test_frames_as_tensors_are_those_as_arrays() -> None:
    """What torchvision and torchcodec give LMDeploy; the latter's have their channels first."""
    frames = frames_from_seed(40, 30, 4, 0)
    metadata = {"video_metadata": {"fps": 5.0, "frames_indices": [0, 2, 4, 6]}}
    for data in (frames, torch.from_numpy(frames), torch.from_numpy(frames).permute(0, 3, 1, 2)):
        one = video_from_part(MediaPart("video", data, "video 1", metadata))
        assert np.array_equal(one.frames, frames)
        assert (one.fps, one.frame_indices) == (5.0, (0, 2, 4, 6))


def test_a_video_before_and_after_others_keeps_its_features(files: dict[str, Path], qwen3_vl: Pair) -> None:
    slow, fast = video(files["slow"]), video(files["fast"])
    alone = qwen3_vl.side.request([user(slow)])["input_embeddings"]
    among = qwen3_vl.side.request([user(image(A), slow, fast)])["input_embeddings"]
    for one, other in zip(alone, among[1:4], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
