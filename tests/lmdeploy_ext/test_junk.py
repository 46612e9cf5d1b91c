"""Whatever JSON a client sends as messages, it is answered or refused, and nothing else is raised."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from turbomind_requests import data_url, file_bytes, noise

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.engines.errors import InputError

URL = data_url(file_bytes(noise(5, 4, 0)))
BOI = "<start_of_image>"
TYPES = [
    "text",
    "image",
    "image_url",
    "image_data",
    "video",
    "video_url",
    "audio",
    "time_series_url",
    "image_file",
    "input_text",
    "",
]

scalars = st.one_of(
    *(st.none(), st.booleans(), st.integers(-1, 2000), st.floats(allow_nan=True)),
    st.sampled_from(["", "x", "user", "text", URL, URL[:40], "/nowhere", "http://[x", BOI, "<IMAGE_TOKEN>", "\ud800"]),
)
junk = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["type", "url", "data", "text", "image"]), inner, max_size=3),
    ),
    max_leaves=6,
)
texts = st.sampled_from(["a", "a\n", BOI, "<IMAGE_TOKEN>"])
good_parts = st.one_of(
    st.builds(lambda value: {"type": "text", "text": value}, texts),
    st.just({"type": "image_url", "image_url": {"url": URL}}),
)


def over(kind: str, value: Any) -> dict[str, Any]:
    """An image's URL with entries that LMDeploy would put over its own."""
    return {"url": URL, "type": kind, "text": value}


odd_parts = st.builds(
    lambda kind, value, more: {"type": kind, kind: value, **more},
    st.sampled_from(TYPES),
    st.one_of(junk, st.builds(dict, url=st.just(URL), more=junk), st.builds(over, st.sampled_from(TYPES), junk)),
    st.dictionaries(st.sampled_from(["text", "data", "url"]), junk, max_size=1),
)
contents = st.one_of(
    texts, st.lists(good_parts, max_size=3), st.lists(st.one_of(good_parts, odd_parts), max_size=3), junk
)
orders = [["user"], ["user", "assistant"], ["user", "assistant", "user"], ["system", "user"], ["user", "tool", "user"]]


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, Any]]:
    odd = draw(st.integers(0, 9)) == 0
    roles = draw(st.lists(scalars, max_size=2) if odd else st.sampled_from(orders))
    messages = [{"role": role, "content": draw(contents)} for role in roles]
    return messages if draw(st.integers(0, 9)) else [draw(st.dictionaries(st.just("role"), scalars)), *messages]


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(messages=chats(), do_preprocess=st.booleans())
def test_junk_is_answered_or_refused(
    messages: list[dict[str, Any]], do_preprocess: bool, quick_side: LMDeploySide
) -> None:
    try:
        request = quick_side.request(messages, do_preprocess=do_preprocess)
    except InputError:
        return
    assert len(request.get("input_embeddings", [])) == sum(map(images_in, messages))  # none is dropped


def images_in(message: dict[str, Any]) -> int:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return sum(isinstance(part, dict) and str(part.get("type")).startswith("image") for part in parts)
