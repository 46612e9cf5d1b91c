"""Which chat template a request goes through, and what the template is told."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import pytest
from turbomind_requests import assistant, image, noise, same, system, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.engines.errors import InputError

A = noise(20, 10, 0)
TOOLS = [{"type": "function", "function": {"name": "look"}}]


class RecordingTemplate:
    """A template of its own kind, so one that takes strings."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, dict[str, Any]]] = []

    def messages2prompt(self, messages: Any, **options: Any) -> str:
        self.told.append((messages, options))
        calls = [message.get("tool_calls") for message in messages]
        return "".join(message["content"] for message in messages) + json.dumps([options.get("tools"), calls])


@pytest.mark.parametrize("parts", [[text("a"), text("b")], [text("a"), image(A)]])
def test_a_template_is_told_tools_options_and_what_else_a_message_has(
    parts: list[dict[str, Any]], quick_side: LMDeploySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = RecordingTemplate()
    monkeypatch.setattr(quick_side.processor, "chat_template", template)
    messages = [{**user(*parts), "name": "me"}, {"role": "assistant", "content": None, "tool_calls": TOOLS}]
    quick_side.request(messages, tools=TOOLS, chat_template_kwargs={"enable_thinking": False})
    content = "ab" if parts[1]["type"] == "text" else "a<start_of_image>"
    told = [
        {"role": "user", "content": content, "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": TOOLS},
    ]
    assert (told, {"tools": TOOLS, "enable_thinking": False}) in template.told
    assert all(options["enable_thinking"] is False for _, options in template.told)


def test_a_reasoning_effort_reaches_the_template_of_a_text_only_request(
    quick_side: LMDeploySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = RecordingTemplate()
    monkeypatch.setattr(quick_side.processor, "chat_template", template)
    quick_side.request("a", reasoning_effort="low")
    quick_side.request("a", reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
    quick_side.request("a", chat_template_kwargs={"reasoning_effort": "high"})
    efforts = [options.get("reasoning_effort") for _, options in template.told]
    assert [effort for effort, _ in groupby(efforts)] == ["low", "high"]
    assert efforts.count("low") == 2 * efforts.count("high")


def test_an_adapter_named_after_a_template_of_lmdeploys_is_that_template(quick_side: LMDeploySide) -> None:
    request = quick_side.request([system("Be brief."), user(text("a"))], adapter_name="vicuna")
    assert request["prompt"] == "Be brief. USER: a ASSISTANT:"
    assert quick_side.request("a", adapter_name="mine") == quick_side.request("a")


def test_a_template_of_lmdeploys_own_gets_strings(quick_side: LMDeploySide, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmdeploy.model import MODELS, BaseChatTemplate

    messages = [system([text("Be"), text("brief.")]), user(text("a "), image(A), text(" b")), assistant("c")]
    boi = "<start_of_image>"
    for template, prompt in (
        (MODELS.get("vicuna")(), f"Be\nbrief. USER: a {boi} b ASSISTANT: c"),
        # What LMDeploy makes of a user's JSON file.
        (BaseChatTemplate(user="[u]", eoh="[/u]", assistant="[a]", eoa="[/a]"), f"Be\nbrief.[u]a {boi} b[/u][a]c"),
    ):
        monkeypatch.setattr(quick_side.processor, "chat_template", template)
        by_hand = quick_side.request([user(text(prompt), image(A))], do_preprocess=False)
        assert same(quick_side.request(messages), by_hand)


@pytest.mark.parametrize(
    "options",
    [{"chat_template_kwargs": {"tokenize": True}}, {"chat_template_kwargs": {"messages": 5}}, {"tools": [5]}],
)
@pytest.mark.parametrize("parts", [[text("a")], [text("a"), image(A)]])
def test_options_that_no_template_takes_are_refused(
    parts: list[dict[str, Any]], options: dict[str, Any], quick_side: LMDeploySide
) -> None:
    with pytest.raises(InputError, match="the chat template does not take this conversation: "):
        quick_side.request([user(*parts)], **options)


def test_no_bos_is_added_only_to_be_removed_again(quick_side: LMDeploySide, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDeploy's tokenizer warns of two and removes one: every request of a template with BOS would be logged."""
    warnings: list[str] = []
    monkeypatch.setattr(quick_side.tokenizer.logger, "warning", warnings.append)
    for messages in ("a", [user(text("a"), image(A))]):
        assert quick_side.request(messages)["input_ids"][0] == quick_side.tokenizer.bos_token_id
    assert warnings == []
