"""Images are bound one to one in all that a chat template writes, and nothing of a conversation is lost.

What transformers' `apply_chat_template` writes decides. Stock LMDeploy's prompt is a second reference where every
content is one text. `DIFFERENCES` lists where the two differ, and stock LMDeploy's is taken.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from turbomind_requests import Message, assistant, image, noise, system, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.engines.errors import InputError
from turbovit.engines.families import FamilyRow, distinct_families, load
from turbovit.lmdeploy_ext.conversation import conversation_from_messages
from turbovit.lmdeploy_ext.rendering import Form, rendered

A, B = noise(20, 10, 0), noise(10, 20, 1)
TOOL = {"type": "function", "function": {"name": "look", "description": "it looks", "parameters": {}}}


def call(name: str = "look", **arguments: Any) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def tool(content: Any) -> Message:
    return {"role": "tool", "tool_call_id": "1", "content": content}


def model_of(side: LMDeploySide) -> Any:
    return side.encoder.model


def has_own_format(side: LMDeploySide) -> bool:
    return model_of(side).has_own_format


def transformers_prompt(side: LMDeploySide, messages: Sequence[Message], tools: Any = None) -> str:
    """Images as ``{"type": "image"}``, and all else as it is sent."""

    def parts(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return [part if part["type"] == "text" else {"type": "image"} for part in content]

    chat = [{**message, "content": parts(message["content"])} for message in messages]
    return side.chat_template.tokenizer.apply_chat_template(
        chat, tools=tools, tokenize=False, add_generation_prompt=True
    )


def stock_prompt(side: LMDeploySide, messages: Sequence[Message], tools: Any = None) -> str:
    """What LMDeploy itself makes of messages without images."""
    from lmdeploy.serve.processors import MultimodalProcessor

    merged = [MultimodalProcessor.merge_message_content(message) for message in messages]
    return side.chat_template.messages2prompt(merged, tools=tools)


def unexpanded(side: LMDeploySide, messages: Sequence[Message], tools: Any = None, **options: Any) -> str:
    """The prompt before its images are put in."""
    model = model_of(side)
    return model._prompt(model._conversation(messages), side.chat_template, tools, options)


PLACES: dict[str, tuple[Any, str]] = {
    "a text": (lambda word: ([user(image(A), text(f"a {word}"))], {}), "message 0 (user): its text"),
    "a string": (lambda word: ([{"role": "user", "content": word}], {}), "message 0 (user): its text"),
    "a system message": (lambda word: ([system(word), user(image(A))], {}), "message 0 (system): its text"),
    "a tool's answer": (lambda word: ([user(image(A)), call(), tool(word)], {}), "message 2 (tool): its text"),
    "a call's name": (lambda word: ([user(image(A)), call(word)], {}), "message 1 (assistant): its 'tool_calls'"),
    "an argument": (lambda word: ([user(text("x")), call(at=word)], {}), "message 1 (assistant): its 'tool_calls'"),
    "an argument's name": (
        lambda word: ([user(text("x")), call(**{word: 1})], {}),
        "message 1 (assistant): its 'tool_calls'",
    ),
    "an argument deep inside": (
        lambda word: ([user(image(A)), call(at=[{"b": [1, {"c": word}]}])], {}),
        "message 1 (assistant): its 'tool_calls'",
    ),
    "a call's id": (
        lambda word: ([user(text("x")), {**assistant("y"), "tool_calls": [{"id": word, "function": {}}]}], {}),
        "message 1 (assistant): its 'tool_calls'",
    ),
    "the id of an answer": (
        lambda word: ([user(text("x")), call(), {**tool("y"), "tool_call_id": word}], {}),
        "message 2 (tool): its 'tool_call_id'",
    ),
    "a role": (lambda word: ([user(image(A)), {"role": word, "content": "x"}], {}), "its role"),
    "a name": (lambda word: ([{**user(image(A)), "name": word}], {}), "message 0 (user): its 'name'"),
    "reasoning": (
        lambda word: ([user(text("x")), {**assistant("y"), "reasoning_content": word}, user(image(A))], {}),
        "message 1 (assistant): its 'reasoning_content'",
    ),
    "tools": (
        lambda word: (
            [user(image(A))],
            {"tools": [{**TOOL, "function": {**TOOL["function"], "description": f"a {word}"}}]},
        ),
        "'tools'",
    ),
    "tools of a text": (lambda word: ([user(text("x"))], {"tools": [{"name": word}]}), "'tools'"),
    "template options": (
        lambda word: ([user(image(A))], {"chat_template_kwargs": {"date_string": word}}),
        "the chat template's 'date_string'",
    ),
    "template options of a text": (
        lambda word: ([user(text("x"))], {"chat_template_kwargs": {"a": [word]}}),
        "the chat template's 'a'",
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_reserved_strings_are_refused_in_all_that_a_template_gets(place: str, each_side: LMDeploySide) -> None:
    make, where = PLACES[place]
    for word in model_of(each_side).reserved:
        chat, options = make(word)
        with pytest.raises(InputError) as refusal:
            each_side.request(chat, **options)
        assert f"{where} holds {word!r}" in str(refusal.value)


@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_reserved_strings_that_come_about_by_joining_are_refused(blank: str, each_side: LMDeploySide) -> None:
    """Nothing is refused where the template keeps the texts apart."""
    for word in model_of(each_side).reserved:
        for cut in range(1, len(word)):
            chat = [user(image(A), text(f"a{word[:cut]}{blank}"), text(f"{blank}{word[cut:]}b"), image(B))]
            joined = has_own_format(each_side) or word in transformers_prompt(
                each_side, [user(*chat[0]["content"][1:3])]
            )
            if joined and not (blank and has_own_format(each_side)):
                with pytest.raises(InputError, match=r"message 0 \(user\): its part 2 and what the chat template"):
                    each_side.request(chat)
            else:
                assert len(each_side.request(chat)["input_embeddings"]) > 1


def test_a_word_that_the_template_itself_completes_is_refused(qwen3_vl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Completing:
        def messages2prompt(self, messages: Any, **_: Any) -> str:
            return "".join(f"<|{message['content']}_pad|>" for message in messages)

    monkeypatch.setattr(qwen3_vl.side.processor, "chat_template", Completing())
    with pytest.raises(
        InputError, match=r"message 1 \(user\): its text and what the chat template puts beside it make"
    ):
        qwen3_vl.side.request([user(text("a")), user(text("image"))])


def test_an_image_that_is_dropped_while_a_placeholder_comes_about_is_refused(llama4: Any) -> None:
    """The numbers agree: one image, one placeholder."""
    for words in (("<|im", "age|>"), ("<|image", "|>")):
        chat = [user(*map(text, words)), call(), tool([image(A)])]
        with pytest.raises(InputError, match=r"message 2 \(tool\), image 1"):
            llama4.side.request(chat)


def _written(messages: Any, placeholder: str) -> list[str]:
    """Each text, and the placeholder for each image, in order."""
    contents = [message["content"] for message in messages]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [text(content)])]
    return [part.get("text", placeholder) for part in parts]


def _texts_first(messages: Any, placeholder: str) -> str:
    return "".join(sorted(_written(messages, placeholder), key=lambda one: one == placeholder))


def _backwards(messages: Any, placeholder: str) -> str:
    return "".join(_written(messages, placeholder)[::-1])


def _twice(messages: Any, placeholder: str) -> str:
    return "".join(_written(messages, placeholder * 2))


def _last_message_alone(messages: Any, placeholder: str) -> str:
    return "".join(_written(messages[-1:], placeholder))


def _first_image_alone(messages: Any, placeholder: str) -> str:
    return "".join([*_written(messages[:1], placeholder), *_written(messages[1:], "")])


def _half_a_word(messages: Any, placeholder: str) -> str:
    return "".join(_written(messages, placeholder[1:]))


def _by_length(messages: Any, placeholder: str) -> str:
    prompt = "".join(_written(messages, placeholder))
    return f"{len(prompt)} {prompt}"


def _one_more(messages: Any, placeholder: str) -> str:
    return "".join([placeholder, *_written(messages, placeholder)])


ELSEWHERE = r"message 0 \(user\), image 1: the chat template leaves it out, or writes it elsewhere"
UNFAITHFUL: dict[str, tuple[Any, str]] = {
    "images behind all texts": (_texts_first, ELSEWHERE),
    "all of it backwards": (_backwards, ELSEWHERE),
    "every image twice": (_twice, ELSEWHERE),
    "half of a placeholder": (_half_a_word, ELSEWHERE),
    "the last message alone": (_last_message_alone, r"message 0 \(user\): its text is nowhere in what"),
    "the first image alone": (_first_image_alone, r"message 1 \(user\), image 1: the chat template leaves it out"),
    "what depends on lengths": (_by_length, "the chat template writes the same conversation in different ways"),
    "an image too many": (_one_more, r"message 0 \(user\): its text and what the chat template puts beside it make"),
}


@pytest.mark.parametrize("name", UNFAITHFUL)
@pytest.mark.parametrize("row", distinct_families(), ids=lambda row: row.name)
def test_templates_that_move_or_drop_images_are_refused(row: FamilyRow, name: str) -> None:
    write, reason = UNFAITHFUL[name]
    model = load(row.vision_model)
    chat = conversation_from_messages([user(image(A), text("first")), user(image(B), text("second"))], ("image",), ())
    form = Form(model.placeholders, model.reserved, takes_parts=True, joins_system_texts=True)
    placeholder = model.placeholders["image"]
    faithful = rendered(chat, None, lambda messages, tools: "".join(_written(messages, placeholder)), form)
    assert faithful == f"{placeholder}first{placeholder}second"
    with pytest.raises(InputError, match=reason):
        rendered(chat, None, lambda messages, tools: write(messages, placeholder), form)


SPLIT = st.sampled_from(
    ["a", " b ", "\n", "", "<", "|>", "image", "vision_start", "_pad", "<start_of_", "<|", "age>", "<im"]
)
PART = st.one_of(st.builds(text, SPLIT), st.builds(lambda: image(A)))
USER = st.lists(PART, max_size=5).map(lambda parts: user(*parts))
ANSWER = st.one_of(SPLIT.map(assistant), st.lists(SPLIT.map(text), max_size=3).map(assistant))


@st.composite
def chats(draw: st.DrawFn) -> list[Message]:
    turns = [draw(USER), *(one for _ in range(draw(st.integers(0, 2))) for one in (draw(ANSWER), draw(USER)))]
    return [system(draw(SPLIT)), *turns] if draw(st.booleans()) else turns


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(chat=chats())
def test_any_chat_is_transformers_or_refused(chat: list[Message], each_side: LMDeploySide) -> None:
    """And a prompt that is answered has each image's placeholder between the texts that stand beside it."""
    model = model_of(each_side)
    try:
        prompt = unexpanded(each_side, chat)
    except InputError as refusal:
        if not re.match(r"message \d+ |the chat template", str(refusal)):
            raise
        return
    if has_own_format(each_side):
        text_of = "".join(segment.text for segment in prompt.segments)
    else:
        assert prompt == transformers_prompt(each_side, chat)
        text_of = prompt
    parts = [part for turn in chat if isinstance(turn["content"], list) for part in turn["content"]]
    images = sum(part["type"] != "text" for part in parts)
    words = re.compile("|".join(map(re.escape, model.reserved)))
    assert words.findall(text_of) == words.findall(model.placeholders["image"]) * images


ONE_TEXT: dict[str, tuple[list[Message], Any]] = {
    "a question": ([user(text(" what\nis it? "))], None),
    "turns": ([system("Be brief."), user(text("a")), assistant([text("b")]), user(text("c"))], None),
    "system in a list": ([system([text("Be brief.")]), user(text("a"))], None),
    "an empty turn": ([user(text(""))], None),
    "tools": ([user(text(" a "))], [TOOL]),
    "tools and system": ([system([text("Be brief.")]), user(text("a")), assistant("b"), user(text("c"))], [TOOL]),
    "a tool's answer": ([user(text("a")), call(at="b"), tool([text('c "d"')])], None),
    "tools and their answer": (
        [user(text("a")), call(at="b"), tool([text("c")]), assistant("d"), user(text("e"))],
        [TOOL],
    ),
}
# Where the prompt of a family is not transformers' for the same messages, and why it is then stock LMDeploy's.
DIFFERENCES = {
    ("llama4", "a tool's answer"): "the template writes lists of parts as JSON",
    ("llama4", "tools and their answer"): "the same",
    ("llama4 released", "tools"): "the template writes the list of the first message's parts out",
    ("llama4 released", "tools and system"): "the same",
    ("llama4 released", "a tool's answer"): "the template writes lists of parts as JSON",
    ("llama4 released", "tools and their answer"): "both",
}
# What the template has no words for; the rest of the family's chats is compared.
REFUSED = {"gemma3": {name for name in ONE_TEXT if "tool" in name}}


@pytest.mark.parametrize("name", ONE_TEXT)
def test_turns_of_one_text_are_stock_lmdeploys_and_transformers(
    name: str, each_side: LMDeploySide, request: pytest.FixtureRequest
) -> None:
    side = request.node.callspec.params["each_side"]
    chat, tools = ONE_TEXT[name]
    if has_own_format(each_side):
        pytest.skip("stock LMDeploy has not the model's format: the family's tests compare with the original's")
    if name in REFUSED.get(side.split()[0], ()):
        with pytest.raises(InputError, match=r"'tools', number 1, is nowhere|the chat template does not take this"):
            each_side.request(chat, tools=tools)
        return
    prompt = each_side.request(chat, tools=tools)["prompt"]
    assert prompt == stock_prompt(each_side, chat, tools)
    assert (prompt != transformers_prompt(each_side, chat, tools)) == ((side, name) in DIFFERENCES)


def test_several_texts_are_joined_as_transformers_joins_them_and_not_as_stock_lmdeploy(each_side: LMDeploySide) -> None:
    if has_own_format(each_side):
        pytest.skip("stock LMDeploy has not the model's format: the family's tests compare with the original's")
    chat = [user(text("a"), text("b")), assistant([text("c"), text("d")]), user(text("e"))]
    prompt = each_side.request(chat)["prompt"]
    assert prompt == transformers_prompt(each_side, chat)
    assert "ab" in prompt
    assert "a\nb" in stock_prompt(each_side, chat)


def test_several_texts_that_the_template_would_write_out_are_joined_as_stock_lmdeploy_does(
    released_llama4: Any,
) -> None:
    for chat, tools in (
        ([user(text("a"), text("b"))], [TOOL]),
        ([user(text("x")), call(), tool([text("a"), text("b")]), user(text("c"), text("d"))], None),
    ):
        prompt = released_llama4.side.request(chat, tools=tools)["prompt"]
        assert "'type'" not in prompt
        assert '"type": "text"' not in prompt
        if tools:
            assert prompt == stock_prompt(released_llama4.side, chat, tools)
        else:  # what can be joined by the template is
            assert '"a\\nb"' in prompt
            assert "cd<|eot|>" in prompt


@pytest.mark.parametrize("fixture", ["llama4", "released_llama4"])
def test_llama4_answers_tools_and_an_image_in_the_first_message(fixture: str, request: pytest.FixtureRequest) -> None:
    """As if the image's placeholder were part of the text that the template puts behind the tools."""
    pair = request.getfixturevalue(fixture)
    for parts in ([image(A), text("what?")], [text("this "), image(A), text(" or "), image(B)], [image(A)]):
        string = "".join(part.get("text", "<|image|>") for part in parts)
        expected = transformers_prompt(pair.side, [{"role": "user", "content": string}], [TOOL])
        assert unexpanded(pair.side, [user(*parts)], [TOOL]) == expected
        bare = expected.removeprefix("<|begin_of_text|>")  # the tokenizer adds it
        inputs = pair.reference.inputs_from_prompt(bare, [A, B][: string.count("<|image|>")])
        assert pair.side.request([user(*parts)], tools=[TOOL])["input_ids"] == inputs["input_ids"][0].tolist()


def test_a_tool_answers_with_an_image_where_the_template_has_a_place_for_it(each_side: LMDeploySide) -> None:
    chat = [user(text("look")), call(), tool([text("here"), image(A)])]
    if model_of(each_side).placeholders["image"] == "<|vision_start|><|image_pad|><|vision_end|>":
        assert unexpanded(each_side, chat) == transformers_prompt(each_side, chat)
    else:
        with pytest.raises(
            InputError, match=r"message 2 \(tool\), image 1|message 1 \(assistant\)|the chat template does"
        ):
            each_side.request(chat)


def test_developer_is_system(each_side: LMDeploySide) -> None:
    chat = [user(image(A), text("x"))]
    developer = each_side.request([{"role": "developer", "content": "Be brief."}, *chat])
    assert developer["input_ids"] == each_side.request([system("Be brief."), *chat])["input_ids"]


@pytest.mark.parametrize("role", ["critic", "function", "system"])
def test_a_message_that_the_template_drops_is_refused(role: str, qwen3_vl: Any, released_qwen3_vl: Any) -> None:
    for side in (qwen3_vl.side, released_qwen3_vl.side):
        for parts in ([text("a")], [image(A), text("a")]):
            with pytest.raises(
                InputError, match=rf"message 1 \({role}\): its text is nowhere in what the chat template"
            ):
                side.request([user(*parts), {"role": role, "content": "x"}, user(text("b"))])


def test_a_system_message_alone_is_not_lost(each_side: LMDeploySide) -> None:
    try:
        prompt = each_side.request([system("Be brief.")])["prompt"]
    except InputError:
        return
    assert "Be brief." in prompt


def test_tools_that_the_template_drops_are_refused(released_side: LMDeploySide) -> None:
    for parts in ([text("a")], [image(A), text("a")]):
        with pytest.raises(InputError, match="'tools', number 1, is nowhere in what the chat template writes"):
            released_side.request([user(*parts)], tools=[TOOL])
    with pytest.raises(InputError, match=r"message 1 \(assistant\): its 'tool_calls', number 1, is nowhere"):
        released_side.request([user(text("a")), call(), user(text("b"))])


def test_an_answer_sent_back_with_every_entry_of_openais_is_that_answer(each_side: LMDeploySide) -> None:
    nothing = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls", "name"))
    for extras in (nothing, {**nothing, "tool_calls": []}):
        chat = [user(image(A), text("a")), {**assistant("b"), **extras}, user(text("c"))]
        bare = [chat[0], assistant("b"), chat[2]]
        assert each_side.request(chat)["input_ids"] == each_side.request(bare)["input_ids"]


def test_a_template_of_the_client_is_looked_at_too(qwen3_vl: Any) -> None:
    one = "{% if p.type == 'image' %}<|image_pad|>{% else %}{{ p.text }}{% endif %}"
    good = f"{{% for p in messages[0].content %}}{one}{{% endfor %}}"
    vision = good.replace("<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>")
    chat = [user(text("a"), image(A), text("b"))]
    answered = qwen3_vl.side.request(chat, chat_template_kwargs={"chat_template": vision})
    assert answered["prompt"].startswith("a<|vision_start|><|image_pad|>")
    for bad in (good, "<|image_pad|>" + vision, vision + "<|vision_end|>"):
        with pytest.raises(InputError, match=r"leaves it out|and what the chat template"):
            qwen3_vl.side.request(chat, chat_template_kwargs={"chat_template": bad})
