"""Options of requests, at every level: obeyed where the family has them, else refused with the form that works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from turbomind_qwen3_vl import Pair, loaded, video, write_video
from turbomind_requests import Message, data_url, file_bytes, image, image_url, noise, same, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.benchmarks.reference import chat_from_lmdeploy
from turbovit.benchmarks.reference_gemma3 import Gemma3Reference
from turbovit.engines.errors import InputError
from turbovit.engines.gemma3 import PAN_AND_SCAN_VARIABLE
from turbovit.engines.options import ENCODE, LABELS, PART

A = noise(40, 30, 0)
URL = data_url(file_bytes(A))
PIXELS = 'mm_processor_kwargs={"image": {"max_pixels": 1048576}} of the request'
LEAST = 'mm_processor_kwargs={"image": {"min_pixels": 65536}} of the request'
RATE = 'media_io_kwargs={"video": {"fps": 2}} of the request'
CROPS = 'mm_processor_kwargs={"do_pan_and_scan": true} of the request'

# What was silently dropped: options of a request, and the words of the refusal by family; others have none of them.
REQUESTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "flat max_pixels": ({"mm_processor_kwargs": {"max_pixels": 70000}}, {"qwen3_vl": PIXELS}),
    "flat min_pixels": ({"mm_processor_kwargs": {"min_pixels": 70000}}, {"qwen3_vl": LEAST}),
    "images_kwargs": ({"mm_processor_kwargs": {"images_kwargs": {"max_pixels": 70000}}}, {"qwen3_vl": PIXELS}),
    "size": ({"mm_processor_kwargs": {"size": {"longest_edge": 70000}}}, {"qwen3_vl": PIXELS}),
    "size of images": ({"mm_processor_kwargs": {"image": {"size": 5}}}, {"qwen3_vl": PIXELS}),
    "pan and scan by kind": ({"mm_processor_kwargs": {"image": {"do_pan_and_scan": True}}}, {"gemma3": CROPS}),
    "pan and scan's limits": ({"mm_processor_kwargs": {"pan_and_scan_max_num_crops": 2}}, {"gemma3": CROPS}),
    "cropping": (
        {"mm_processor_kwargs": {"cropping": False}},
        {"deepseek_vl2": "encode(..., cropping=False) in Python"},
    ),
    "tiles": ({"mm_processor_kwargs": {"max_patches": 4}}, {}),
    "fps of the processor": ({"mm_processor_kwargs": {"fps": 1}}, {"qwen3_vl": RATE}),
    "fps of videos of the processor": ({"mm_processor_kwargs": {"video": {"fps": 1}}}, {"qwen3_vl": RATE}),
    "flat fps": ({"media_io_kwargs": {"fps": 1}}, {"qwen3_vl": RATE}),
    "fps of images": ({"media_io_kwargs": {"image": {"fps": 1}}}, {"qwen3_vl": RATE}),
    "max_pixels of the loader": ({"media_io_kwargs": {"image": {"max_pixels": 1}}}, {"qwen3_vl": PIXELS}),
    "an image mode": ({"media_io_kwargs": {"image": {"image_mode": "L"}}}, {"qwen3_vl": PIXELS}),
    "a duration": ({"media_io_kwargs": {"video": {"max_duration": 3}}}, {"qwen3_vl": RATE}),
    "sound": ({"media_io_kwargs": {"audio": {"sr": 3}}}, {"qwen3_vl": RATE}),
}
VALUES: dict[str, list[dict[str, Any]]] = {
    "gemma3": [{"mm_processor_kwargs": {"do_pan_and_scan": value}} for value in (1, "true", [True], {"a": 1})],
    "qwen3_vl": [
        *({"media_io_kwargs": {"video": {"fps": value}}} for value in (0, -2, "2", True, float("nan"), float("inf"))),
        *({"media_io_kwargs": {"video": {"num_frames": value}}} for value in (0, -2, 2.0, "2", True)),
        *({"mm_processor_kwargs": {"image": {"max_pixels": value}}} for value in (0, 1.5, "5", True, {"a": 1})),
    ],
    "llama4": [{"mm_processor_kwargs": value} for value in (5, "x", [1])],
    "deepseek_vl2": [{"media_io_kwargs": value} for value in (5, "x", [1])],
}
PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "inside": ({"type": "image_url", "image_url": {"url": URL, "max_pixels": 5}}, "max_pixels"),
    "beside": ({"type": "image_url", "image_url": {"url": URL}, "max_pixels": 5}, "max_pixels"),
    "beside a direct source": ({"type": "image_url", "image_url": URL, "max_pixels": 5}, "max_pixels"),
    "beside a direct image": ({"type": "image", "image": URL, "min_pixels": 5}, "min_pixels"),
    "beside image data": ({"type": "image_data", "image_data": {"data": A}, "resized_height": 280}, "resized_height"),
    "inside image data": (
        {"type": "image_data", "image_data": {"data": A, "do_pan_and_scan": True}},
        "do_pan_and_scan",
    ),
    "of a video": ({"type": "image_url", "image_url": {"url": URL}, "fps": 1}, "fps"),
    "a second image": ({"type": "image_url", "image_url": {"url": URL}, "image": URL}, "image"),
    "a name that is no text": ({"type": "image_url", "image_url": {"url": URL, 5: 1}}, "5"),
    "of a long name": ({"type": "image_url", "image_url": {"url": URL, "x" * 9999: 1}}, "xxx"),
}


def family_of(request: pytest.FixtureRequest) -> str:
    return request.node.callspec.params["each_side"].split()[0]


@pytest.mark.parametrize("name", REQUESTS)
def test_what_a_family_does_not_have_is_refused_with_the_form_that_works(
    name: str, each_side: LMDeploySide, request: pytest.FixtureRequest
) -> None:
    options, forms = REQUESTS[name]
    with pytest.raises(InputError) as refusal:
        each_side.request([user(image(A))], **options)
    ((level, _),) = options.items()
    assert str(refusal.value).startswith(f"{level}")
    assert forms.get(family_of(request), "this model does not have") in str(refusal.value)


def test_values_that_an_option_does_not_take_are_refused(
    each_side: LMDeploySide, request: pytest.FixtureRequest
) -> None:
    for options in VALUES[family_of(request)]:
        with pytest.raises(InputError, match=r"^(mm_processor_kwargs|media_io_kwargs)[^ ]* is .*, expected a?"):
            each_side.request([user(image(A))], **options)


@pytest.mark.parametrize("name", PARTS)
def test_options_of_a_part_are_refused_by_message_and_image(name: str, each_side: LMDeploySide) -> None:
    part, option = PARTS[name]
    with pytest.raises(InputError) as refusal:
        each_side.request([user(text("x")), {"role": "assistant", "content": "y"}, user(image(A), part)])
    assert str(refusal.value).startswith("message 2 (user), image 2 has ")
    assert option in str(refusal.value)
    assert len(str(refusal.value)) < 700
    options = [one for one in each_side.encoder.model.preprocessor.options if one.path[0] not in (PART, ENCODE)]
    known = [one for one in options if one.path[-1] == option]
    assert all(one.form in str(refusal.value) for one in known)


@pytest.mark.parametrize("name", ["image", "image_url", "video_url", "max_pixels"])
def test_a_text_part_with_anything_else_is_refused(name: str, each_side: LMDeploySide) -> None:
    with pytest.raises(InputError, match=rf"message 0 \(user\): a text part has '{name}'"):
        each_side.request([user({**text("x"), name: URL})])


@pytest.mark.parametrize("value", ["auto", "low", "high", None])
def test_labels_and_openais_detail_change_nothing(value: Any, each_side: LMDeploySide) -> None:
    """Clients of OpenAI's interface send `detail` with every image; each model here has one way to see an image."""
    bare = each_side.request([user(image_url(URL), text("x"))])
    names = [option.path[1] for option in LABELS]
    assert names[0] == "detail"
    for name in names:
        for part in (
            {"type": "image_url", "image_url": {"url": URL, name: value}},
            {"type": "image_url", "image_url": {"url": URL}, name: value},
            {"type": "image_url", "image_url": URL, name: value},
        ):
            assert same(each_side.request([user(part, {**text("x"), name: value})]), bare)


def test_nothing_asked_for_is_nothing(each_side: LMDeploySide) -> None:
    chat = [user(image_url(URL), text("x"))]
    for nothing in (None, {}, {"image": None}, {"image": {}, "max_pixels": None}):
        options = {"mm_processor_kwargs": nothing, "media_io_kwargs": nothing}
        assert same(each_side.request(chat, **options), each_side.request(chat))


def test_a_refusal_comes_before_an_image_is_loaded(each_side: LMDeploySide) -> None:
    missing = "/nowhere.png"
    for part, options in (
        (image_url(missing), {"mm_processor_kwargs": {"unknown": 1}}),
        (image_url(missing), {"media_io_kwargs": {"unknown": 1}}),
        ({"type": "image_url", "image_url": {"url": missing, "unknown": 1}}, {}),
        ({"type": "image_url", "image_url": {"url": missing}, "unknown": 1}, {}),
    ):
        with pytest.raises(InputError, match="has 'unknown', which this model does not have"):
            each_side.request([user(part)], **options)


def test_loaded_messages_have_the_same_rules(each_side: LMDeploySide) -> None:
    """As LMDeploy hands them to the vision model, and as the Python API may."""
    model = each_side.encoder.model
    for part in ({"max_pixels": 5}, {"video_metadata": None, "unknown": 1}):
        with pytest.raises(InputError, match=r"message 0 \(user\), image 1 has '(max_pixels|unknown)'"):
            model.preprocess([user({"type": "image", "data": A, **part})])
    assert model.preprocess([user({"type": "image", "data": A, "detail": "low"})])


NAMES = st.sampled_from(
    ["image", "video", "max_pixels", "fps", "do_pan_and_scan", "num_frames", "size", "", "images_kwargs"]
)
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 10**6), st.floats(), NAMES),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(mm_processor_kwargs=JUNK, media_io_kwargs=JUNK)
def test_any_options_are_obeyed_or_refused(
    mm_processor_kwargs: Any, media_io_kwargs: Any, each_side: LMDeploySide
) -> None:
    options = {"mm_processor_kwargs": mm_processor_kwargs, "media_io_kwargs": media_io_kwargs}
    known = {one.path for one in each_side.encoder.model.preprocessor.options if one.effect and one.path[0] != ENCODE}
    try:
        each_side.request([user(image(A))], **options)
    except InputError:
        return
    assert set(asked_for(options)) <= known


def asked_for(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of all values in nested dicts."""
    if not isinstance(value, dict):
        return [] if value is None else [path]
    return [found for name, inner in value.items() for found in asked_for(inner, (*path, name))]


@pytest.mark.parametrize("size", [(900, 300), (300, 900), (1601, 397), (400, 300)])
def test_pan_and_scan_of_one_request_is_the_references(
    size: tuple[int, int], quick_side: LMDeploySide, reference: Gemma3Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = [user(text("look:\n"), image(noise(*size, seed=0)), text("\nwhat is it?"), image(A))]
    usual = quick_side.request(chat)
    for value in (True, False):
        inputs = reference.inputs_from_messages(chat_from_lmdeploy(chat), do_pan_and_scan=value)
        for switch in ("0", "1"):
            monkeypatch.setenv(PAN_AND_SCAN_VARIABLE, switch)
            request = quick_side.request(chat, mm_processor_kwargs={"do_pan_and_scan": value})
            assert request["input_ids"] == inputs["input_ids"][0].tolist()
            assert len(request["input_embeddings"]) == len(inputs["pixel_values"])
    monkeypatch.delenv(PAN_AND_SCAN_VARIABLE)
    assert same(quick_side.request(chat), usual)


def test_pan_and_scan_of_one_request_on_the_pytorch_backend(
    tiny_gemma3: Path, tiny_gemma3_bundle: Any, reference: Gemma3Reference
) -> None:
    side = LMDeploySide(tiny_gemma3, tiny_gemma3_bundle.path, "pytorch")
    chat = [user(image(noise(900, 300, 0)), text("x"))]
    (entry,) = side.request(chat, mm_processor_kwargs={"do_pan_and_scan": True})["multimodal"]
    inputs = reference.inputs_from_messages(chat_from_lmdeploy(chat), do_pan_and_scan=True)
    assert len(entry["pixel_values"]) == len(inputs["pixel_values"]) == 4
    (usual,) = side.request(chat)["multimodal"]
    assert len(usual["pixel_values"]) == 1


@pytest.mark.parametrize(
    "options", [{"fps": 1}, {"fps": 2.5}, {"num_frames": 4}, {"num_frames": 6, "fps": -1}, {"fps": -1}]
)
def test_frames_of_a_video_are_sampled_as_the_loader_is_told(
    options: dict[str, Any], qwen3_vl: Pair, tmp_path: Path
) -> None:
    path = write_video(tmp_path / "a.mp4", 64, 96, 24, 8, 0)
    chat: list[Message] = [user(video(path), text("x"))]
    request = qwen3_vl.side.request(chat, media_io_kwargs={"video": options})
    frames, _ = loaded(str(path), options)
    assert len(request["input_embeddings"]) == -(-len(frames) // 2)
    assert request["input_ids"] != qwen3_vl.side.request(chat)["input_ids"] or len(frames) == 24


@pytest.mark.parametrize("name", ["fps", "num_frames", "max_pixels"])
def test_options_of_a_videos_part_are_refused_with_the_form_that_works(name: str, qwen3_vl: Pair) -> None:
    form = {"fps": RATE, "num_frames": RATE.replace('"fps": 2', '"num_frames": 32'), "max_pixels": PIXELS}[name]
    for part in (
        {"type": "video_url", "video_url": {"url": "/a.mp4", name: 5}},
        {"type": "video_url", "video_url": {"url": "/a.mp4"}, name: 5},
        {"type": "video", "video": "/a.mp4", name: 5},
        {"type": "video_url", "video_url": {"url": "/a.mp4", "video_metadata": {"fps": 1}, name: 5}},
    ):
        with pytest.raises(InputError, match=r"^message 0 \(user\), video 1 has ") as refusal:
            qwen3_vl.side.request([user(part)])
        assert "video_metadata" in str(refusal.value) or form in str(refusal.value)


def test_every_form_of_the_tables_is_taken_where_it_says(each_side: LMDeploySide) -> None:
    model = each_side.encoder.model
    for option in model.preprocessor.options:
        level, *names = option.path
        if level in (PART, ENCODE):
            continue
        form, _, _ = option.form.partition(" of the request")
        assert form.startswith(f"{level}=")
        each_side.request([user(image(A))], **{level: json.loads(form.removeprefix(f"{level}="))})
        assert names
