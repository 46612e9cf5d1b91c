"""LMDeploy's real server with a language engine that records: what reaches it over HTTP is what the offline path makes,
which the other tests prove; every bad request is a clear 4xx, and the server lives on.

TurboMind is pretended to have the language models that it lacks; both engines are pretended to have a GPU.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from http_server import Served, assert_same, served
from PIL import Image
from turbomind_qwen3_vl import video, write_video
from turbomind_requests import (
    LOGITS_BOUND,
    Message,
    assistant,
    data_url,
    file_bytes,
    image,
    image_url,
    noise,
    system,
    text,
    user,
)

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.benchmarks.reference import chat_from_lmdeploy
from turbovit.engines.families import FAMILIES, family_from_name, load

A, B = noise(60, 40, 0), noise(33, 70, 1)
QUESTION = text("what is it?")


@dataclass(frozen=True)
class Family:
    """A family's running server, and its offline path over the same checkpoint and bundle."""

    name: str
    backend: str
    checkpoint: Path
    server: Served
    side: LMDeploySide

    @property
    def placeholder(self) -> str:
        return load(family_from_name(self.name).vision_model).placeholders["image"]

    @property
    def reserved(self) -> str:
        return load(family_from_name(self.name).vision_model).reserved[0]


@pytest.fixture(scope="session", params=["turbomind", "pytorch"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session", params=[row.name for row in FAMILIES])
def family(request: pytest.FixtureRequest, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """A server whose requests may read the tests' files."""
    checkpoint = request.getfixturevalue(f"tiny_{request.param}")
    bundle = request.getfixturevalue(f"tiny_{request.param}_bundle")
    side = LMDeploySide(checkpoint, bundle.path, backend)
    with served(checkpoint, bundle, backend, local_media=tmp_path_factory.getbasetemp()) as server:
        yield Family(request.param, backend, checkpoint, server, side)


def as_url(picture: Image.Image) -> dict[str, Any]:
    return image_url(data_url(file_bytes(picture)))


def over_http(messages: list[Message]) -> list[Message]:
    """Messages with their PIL images as data URLs."""
    return [{**message, "content": _over_http(message["content"])} for message in messages]


def _over_http(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [as_url(part["image_data"]["data"]) if part["type"] == "image_data" else part for part in content]


def assert_answers(family: Family, response: Any, expected: dict[str, Any]) -> None:
    request = family.server.answered(response)
    assert_same(request, expected)
    for name in ("input_embeddings", "multimodal", "input_meta"):
        assert (name in request) == (name in expected)


CHATS: dict[str, list[Message]] = {
    "one image": [user(image(A), QUESTION)],
    "images between texts": [user(text("this"), image(A), text("and that"), image(B))],
    "an image alone": [user(image(A))],
    "several turns": [system("Be brief."), user(image(A), QUESTION), assistant("a dog"), user(image(B), text("and?"))],
    "text alone": [user(QUESTION)],
    "a string": [{"role": "user", "content": " what is\nit? "}],
    "text after an image's turn": [user(image(A)), assistant("a dog"), {"role": "user", "content": "and?"}],
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_reaches_the_engine_as_the_offline_path_makes_it(name: str, family: Family) -> None:
    response = family.server.chat(over_http(CHATS[name]))
    assert_answers(family, response, family.side.request(CHATS[name]))


def test_a_chat_over_http_is_the_references(family: Family) -> None:
    """Ids on both backends, and logits where the features are in the request: else they come from the engine."""
    chat = CHATS["images between texts"]
    reference = load(family_from_name(family.name).reference)(family.checkpoint)
    inputs = reference.inputs_from_messages(chat_from_lmdeploy(chat))
    request = family.server.answered(family.server.chat(over_http(chat)))
    assert request["input_ids"] == inputs["input_ids"][0].tolist()
    if family.backend == "turbomind":
        assert reference.compare(request, inputs).logits_error <= LOGITS_BOUND


def test_a_video_is_taken_by_the_families_that_take_one(family: Family, tmp_path: Path) -> None:
    chat = [user(video(write_video(tmp_path / "v.mp4", 96, 64, 5, 2, seed=0)), QUESTION, image(A))]
    response = family.server.chat(over_http(chat))
    if family.name.startswith("qwen3_vl"):
        assert_answers(family, response, family.side.request(chat))
    else:
        assert "a part is of type 'video_url'" in family.server.refused(response)


@pytest.mark.parametrize("form", ["path", "file URL", "image part", "JPEG data URL", "turned by EXIF"])
def test_every_form_of_an_image_is_the_same_image(form: str, family: Family, tmp_path: Path) -> None:
    file = tmp_path / "a picture.png"
    A.save(file)
    picture = A
    part: dict[str, Any] = image_url(str(file))
    if form == "file URL":
        part = image_url(file.as_uri())
    elif form == "image part":
        part = {"type": "image", "image": data_url(file_bytes(A))}
    elif form == "JPEG data URL":
        data = file_bytes(A, "JPEG", quality=90)
        part = image_url(data_url(data, "jpeg"))
        (tmp_path / "a.jpg").write_bytes(data)
        picture = Image.open(tmp_path / "a.jpg")
    elif form == "turned by EXIF":
        exif = Image.Exif()
        exif[0x0112] = 6
        part = image_url(data_url(file_bytes(A, exif=exif)))
        picture = A.transpose(Image.Transpose.ROTATE_270)
    response = family.server.chat([user(part, QUESTION)])
    assert_answers(family, response, family.side.request([user(image(picture), QUESTION)]))


def test_generate_takes_a_raw_prompt_with_and_without_images(family: Family) -> None:
    for prompt, pictures in ((f"a {family.placeholder} b", [A]), (f"{family.placeholder}{family.placeholder}", [A, B])):
        urls = [data_url(file_bytes(picture)) for picture in pictures]
        response = family.server.generate(prompt=prompt, image_data=urls)
        assert_answers(
            family, response, family.side.request([user(text(prompt), *map(image, pictures))], do_preprocess=False)
        )
    response = family.server.generate(prompt="only text")
    assert_answers(family, response, family.side.request("only text", do_preprocess=False))


def test_generate_takes_token_ids_expanded_or_not(family: Family) -> None:
    expected = family.side.request([user(text(f"a {family.placeholder} b"), image(A))], do_preprocess=False)
    short = family.side.tokenizer.encode(f"a {family.placeholder} b", add_bos=True)
    if family.name == "deepseek_vl2":  # its tokenizer adds no BOS, and ids are taken as they are
        short = [expected["input_ids"][0], *short]
    for ids in (short, expected["input_ids"]):
        response = family.server.generate(input_ids=ids, image_data=data_url(file_bytes(A)))
        assert_answers(family, response, {**expected, "prompt": None})


def test_bare_token_ids_are_taken_as_they_are(family: Family) -> None:
    ids = family.side.tokenizer.encode("what is it?", add_bos=True)
    got = family.server.answered(family.server.generate(input_ids=ids))
    assert got["input_ids"] == ids
    assert not got.keys() & {"input_embeddings", "multimodal"}
    # TurboMind gets Qwen3-VL's positions, for text too
    assert ("input_meta" in got) == (family.backend == "turbomind" and family.name.startswith("qwen3_vl"))
    by_chat = family.server.chat([], input_ids=ids)
    assert family.server.answered(by_chat)["input_ids"] == ids


def test_bare_token_ids_without_their_image_are_refused(family: Family) -> None:
    ids = family.side.tokenizer.encode(f"a {family.placeholder} b", add_bos=True)
    assert "image" in family.server.refused(family.server.generate(input_ids=ids))
    expanded = family.side.request([user(text(f"a {family.placeholder} b"), image(A))], do_preprocess=False)
    reason = family.server.refused(family.server.generate(input_ids=expanded["input_ids"]))
    assert ("for 0 images" if family.name == "deepseek_vl2" else "the prompt has runs of") in reason
    assert "the token ids hold -1" in family.server.refused(family.server.generate(input_ids=[-1]))
    assert "the token ids hold 1000000000" in family.server.refused(family.server.generate(input_ids=[10**9]))


def test_streaming(family: Family) -> None:
    chat = CHATS["one image"]
    expected = family.side.request(chat)
    response = family.server.chat(over_http(chat), stream=True)
    assert response.status_code == 200
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    pieces = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1]]
    assert sum(map(bool, pieces)) > 1
    assert_same(family.server.engine.requests[int("".join(pieces))], expected)


def test_a_refused_stream_is_a_4xx(family: Family) -> None:
    reason = family.server.refused(family.server.chat([user(as_url(A), text(family.reserved))], stream=True))
    assert repr(family.reserved) in reason


def huge_png() -> bytes:
    """12000x12000 by its header, with next to nothing behind it."""
    size = struct.pack(">IIBBBBB", 12000, 12000, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", size), (b"IDAT", zlib.compress(b"\0" * 99)), (b"IEND", b""))
    body = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def icon(picture: bytes) -> bytes:
    """An ICO whose directory says 32x32."""
    return b"\0\0\1\0\1\0" + struct.pack("<BBBBHHII", 32, 32, 0, 0, 1, 32, len(picture), 22) + picture


JPEG = file_bytes(noise(200, 200, 2), "JPEG")
BAD: dict[str, tuple[Any, str]] = {
    "a JPEG cut in half": (data_url(JPEG[: len(JPEG) // 2], "jpeg"), "damaged or cut short"),
    "zero bytes": (data_url(b""), "the image is empty"),
    "a huge header": (data_url(huge_png()), "12000"),
    "no base64": ("data:image/png;base64,****", "not base64"),
    "no such file": ("/nowhere/at/all.png", "names no file in the folder"),
    "a number": (5, "image 2"),
    "a device": ("/dev/zero", "names no file in the folder"),
    "a file elsewhere": ("file:///etc/passwd", "names no file in the folder"),
    "an icon of a huge picture": (data_url(icon(huge_png())), "12000x12000 = 144000000 pixels"),
    "no base64 in the URL": ("data:image/png,AAAA", "the data URL is not base64"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_a_4xx_that_names_message_and_image(name: str, family: Family) -> None:
    url, words = BAD[name]
    chat = [user(as_url(A)), assistant("a dog"), user(QUESTION, as_url(A), image_url(url))]
    reason = family.server.refused(family.server.chat(chat))
    assert words in reason
    assert "message 2 (user), image 2" in reason
    good = CHATS["one image"]
    assert_answers(family, family.server.chat(over_http(good)), family.side.request(good))


@pytest.mark.parametrize(("content", "words"), [(b"no picture at all", "no known format"), (b"", "empty")])
def test_a_file_that_is_no_image_is_refused(content: bytes, words: str, family: Family, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_bytes(content)
    reason = family.server.refused(family.server.chat([user(image_url(str(tmp_path / "text.png")))]))
    assert reason.startswith("message 0 (user), image 1: ")
    assert words in reason


def test_too_many_pixels_in_one_request_are_a_4xx(family: Family) -> None:
    large = image_url(data_url(file_bytes(Image.new("1", (9400, 9400)))))
    reason = family.server.refused(family.server.chat([user(*[large] * 3), assistant("yes"), user(*[large] * 5)]))
    assert reason.startswith("message 2 (user), image 2: with this one (9400x9400) the request has 441800000 pixels")
    assert "TURBOVIT_MAX_REQUEST_PIXELS" in reason


def test_a_pipe_is_a_4xx_at_once(family: Family, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reason = family.server.refused(family.server.chat([user(image_url((tmp_path / "pipe").as_uri()))]))
    assert reason == "message 0 (user), image 1: it is a pipe, expected a regular file"


def test_a_png_with_a_large_text_is_its_picture(family: Family) -> None:
    plain = file_bytes(A)
    body = b"zTXt" + b"Comment\0\0" + zlib.compress(bytes(3 << 20))
    text_chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    response = family.server.chat([user(image_url(data_url(plain[:33] + text_chunk + plain[33:])), QUESTION)])
    assert_answers(family, response, family.side.request([user(image(A), QUESTION)]))


def test_bad_messages_are_a_4xx_that_names_them(family: Family) -> None:
    word = family.reserved
    for chat, words in (
        ([user(as_url(A), text(f"a {word}"))], f"message 0 (user): its text holds {word!r}"),
        ([user(text(f"a {word}"))], f"message 0 (user): its text holds {word!r}"),
        ([{"role": "user", "content": word}], f"message 0 (user): its text holds {word!r}"),
        ([system([as_url(A)]), user(QUESTION)], "message 0 (system), image 1: only messages of the roles"),
        ([user(QUESTION), assistant([as_url(A)])], "message 1 (assistant), image 1: only messages of the roles"),
        ([user({"type": "audio_url", "audio_url": {"url": "/a.wav"}})], "'audio_url'"),
    ):
        assert words in family.server.refused(family.server.chat(chat))


def test_reserved_strings_are_refused_in_all_that_a_template_gets(family: Family) -> None:
    """Without `tools`: LMDeploy's server takes them with --tool-call-parser alone."""
    word = family.reserved
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": json.dumps({"at": word})}}
    answered = [user(as_url(A)), {"role": "assistant", "content": "", "tool_calls": [call]}]
    for response, words in (
        (family.server.chat(answered), "message 1 (assistant): its 'tool_calls' holds"),
        (family.server.chat([user(QUESTION), answered[1]]), "message 1 (assistant): its 'tool_calls' holds"),
        (family.server.chat([user(as_url(A)), {"role": word, "content": "x"}]), "its role holds"),
        (family.server.chat([user(as_url(A))], chat_template_kwargs={"a": word}), "the chat template's 'a' holds"),
    ):
        assert f"{words} {word!r}" in family.server.refused(response)


def test_options_are_obeyed_or_refused_with_the_form_that_works(family: Family) -> None:
    chat = [user(image(noise(900, 300, 0)), QUESTION)]
    pan_and_scan = {"mm_processor_kwargs": {"do_pan_and_scan": True}}
    response = family.server.chat(over_http(chat), **pan_and_scan)
    if family.name == "gemma3":
        assert_answers(family, response, family.side.request(chat, **pan_and_scan))
        assert family.side.request(chat, **pan_and_scan)["input_ids"] != family.side.request(chat)["input_ids"]
    else:
        assert "mm_processor_kwargs has 'do_pan_and_scan', which" in family.server.refused(response)
    low = [user({"type": "image_url", "image_url": {**as_url(A)["image_url"], "detail": "low"}}, QUESTION)]
    assert_answers(family, family.server.chat(low), family.side.request([user(image(A), QUESTION)]))
    for response, words in (
        (family.server.chat(over_http(chat), mm_processor_kwargs={"max_pixels": 70000}), "mm_processor_kwargs has"),
        (family.server.chat(over_http(chat), media_io_kwargs={"fps": 1}), "media_io_kwargs has 'fps', which"),
        (
            family.server.chat([user({**as_url(A), "max_pixels": 5})]),
            "message 0 (user), image 1 has 'max_pixels', which",
        ),
    ):
        reason = family.server.refused(response)
        assert words in reason
        assert ("of the request" in reason) == (family.name in ("gemma3", "qwen3_vl", "qwen3_vl_moe"))


def test_a_raw_prompt_with_the_wrong_number_of_images_is_refused(family: Family) -> None:
    url = data_url(file_bytes(A))
    assert "for 1 images" in family.server.refused(family.server.generate(prompt="no place", image_data=url))
    reason = family.server.refused(family.server.generate(prompt=family.placeholder * 2, image_data=url))
    assert "for 1 images" in reason
    assert "for 0 images" in family.server.refused(family.server.generate(prompt=family.placeholder))


def test_requests_at_once_do_not_mix(family: Family) -> None:
    chats = [
        [user(text(f"number {n}"), *(image(noise(40 + 9 * n, 50, n + k)) for k in range(n % 3)))] for n in range(12)
    ]
    bad = [user(as_url(A), text(family.reserved))]
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(family.server.chat, over_http(chat)) for chat in chats]
        refusals = [pool.submit(family.server.chat, bad) for _ in range(3)]
        responses = [answer.result() for answer in answers]
        assert [refusal.result().status_code for refusal in refusals] == [400] * 3
    for chat, response in zip(chats, responses, strict=True):
        assert_answers(family, response, family.side.request(chat))
