"""mm_processor_kwargs: smaller and larger images and videos, for the request that asks for them alone."""

from __future__ import annotations

from typing import Any

import pytest
from turbomind_qwen3_vl import Pair, video, write_video
from turbomind_requests import Message, image, noise, same, text, user

from turbovit.engines.errors import InputError

IMAGES = [
    {"max_pixels": 100_000},
    {"min_pixels": 120_000},
    {"min_pixels": 32 * 32, "max_pixels": 64 * 64},
    {"min_pixels": 1, "max_pixels": 70_000},
    {"min_pixels": 300_000, "max_pixels": 300_000},
]
VIDEOS = [{"max_pixels": 20_000}, {"min_pixels": 100_000}, {"min_pixels": 1, "max_pixels": 8_192}]
KWARGS = [
    *({"image": options} for options in IMAGES),
    *({"video": options} for options in VIDEOS),
    {"image": IMAGES[0], "video": VIDEOS[1]},
]
NONSENSE: list[Any] = [
    {"image": {"max_pixels": 0}},
    {"image": {"max_pixels": -5}},
    {"image": {"max_pixels": "many"}},
    {"image": {"max_pixels": 70_000.0}},
    {"image": {"max_pixels": True}},
    {"image": {"min_pixels": [1]}},
    {"image": {"max_pixels": 10}},  # and at least 65,536
    {"image": {"min_pixels": 90_000, "max_pixels": 80_000}},
    {"image": {"min_pixels": 10**15, "max_pixels": 10**16}},
    {"image": {"maximum_pixels": 70_000}},
    {"image": 70_000},
    {"image": [70_000]},
    {"video": {"max_pixels": -1}},
    {"video": {"min_pixels": 10**15, "max_pixels": 10**16}},
    {"video": "small"},
    [70_000],
]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> list[Message]:
    path = write_video(tmp_path_factory.mktemp("videos") / "a.mp4", 96, 128, 5, 4, 0)
    return [user(image(noise(500, 300, 0)), text("and"), video(path), image(noise(33, 77, 1)))]


def runs(request: dict[str, Any]) -> list[int]:
    return [end - begin for begin, end in request["input_embedding_ranges"]]


@pytest.mark.parametrize("kwargs", KWARGS, ids=str)
def test_a_request_with_limits_is_the_references_and_the_next_one_has_none(
    kwargs: dict[str, Any], chat: list[Message], each_qwen3_vl: Pair
) -> None:
    usual = each_qwen3_vl.side.request(chat)
    limited = each_qwen3_vl.assert_proved(chat, mm_processor_kwargs=kwargs)
    first, *steps, last = runs(limited)
    usual_first, *usual_steps, usual_last = runs(usual)
    assert ((first, last) != (usual_first, usual_last)) == ("image" in kwargs)
    assert (steps != usual_steps) == ("video" in kwargs)
    assert same(each_qwen3_vl.side.request(chat), usual)


@pytest.mark.parametrize("kwargs", NONSENSE, ids=str)
def test_nonsense_is_refused_and_the_next_request_works(kwargs: Any, chat: list[Message], qwen3_vl: Pair) -> None:
    usual = qwen3_vl.side.request(chat)
    with pytest.raises(InputError, match=r"pixels|mm_processor_kwargs"):
        qwen3_vl.side.request(chat, mm_processor_kwargs=kwargs)
    assert same(qwen3_vl.side.request(chat), usual)


@pytest.mark.parametrize("kwargs", [None, {}, {"image": None}, {"image": {}}, {"image": {"max_pixels": None}}])
def test_no_limits_are_those_of_the_processor(kwargs: Any, chat: list[Message], qwen3_vl: Pair) -> None:
    assert same(qwen3_vl.side.request(chat, mm_processor_kwargs=kwargs), qwen3_vl.side.request(chat))


def test_a_limit_above_the_bundles_is_refused_for_an_image_that_needs_it(qwen3_vl: Pair) -> None:
    large, small = noise(6000, 4000, 0), noise(60, 40, 0)
    kwargs = {"image": {"max_pixels": 10**9}}
    with pytest.raises(InputError, match=r"message 0 \(user\), image 2: .*at most 16384"):
        qwen3_vl.side.request([user(image(small), image(large))], mm_processor_kwargs=kwargs)
    assert same(
        qwen3_vl.side.request([user(image(small))], mm_processor_kwargs=kwargs),
        qwen3_vl.side.request([user(image(small))]),
    )


def test_raw_prompts_have_limits_too(qwen3_vl: Pair) -> None:
    prompt, picture = "<|vision_start|><|image_pad|><|vision_end|>", noise(500, 300, 0)
    kwargs = {"image": {"max_pixels": 100_000}}
    request = qwen3_vl.side.request(
        [user(text(prompt), image(picture))], do_preprocess=False, mm_processor_kwargs=kwargs
    )
    size = {"shortest_edge": 65_536, "longest_edge": 100_000}
    qwen3_vl.assert_equal(
        request, qwen3_vl.reference.inputs_from_prompt(prompt, [picture], images_kwargs={"size": size})
    )
