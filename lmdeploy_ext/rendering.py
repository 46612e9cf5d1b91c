"""What a chat template makes of a conversation: each image in its own place, every text there, nothing lost.

A prompt does not say where its placeholders come from: a client can write one, two texts can become one where the
template joins or trims them, and the template can drop an image meanwhile, so that the numbers agree. So the template
runs again over the same conversation with marks in it that nobody can guess: where they come out, what they mark is.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turbovit.engines.errors import InputError
from turbovit.lmdeploy_ext.conversation import Conversation, MediaPart, Part, Text, Turn

Messages = list[dict[str, Any]]
Write = Callable[[Messages, Sequence[Any] | None], str]
Span = tuple[int, int]


@dataclass(frozen=True)
class Form:
    """How a chat template takes contents.

    Attributes:
        placeholders: what stands for an ``image`` and a ``video`` in a prompt before they are expanded.
        reserved: strings that mark an image's place in the family's prompts.
        takes_parts: whether contents may be lists of parts (Hugging Face templates), and not strings alone.
        joins_system_texts: whether the texts of a system message go in as one string.
    """

    placeholders: Mapping[str, str]
    reserved: Sequence[str]
    takes_parts: bool
    joins_system_texts: bool


def rendered(conversation: Conversation, tools: Sequence[Any] | None, write: Write, form: Form) -> str:
    """The prompt of a conversation, with one placeholder an image or video, in the order of the conversation.

    Args:
        write: runs the chat template.

    Raises:
        InputError: the template leaves out a text, an image, a tool or a call of one, or a reserved string comes about
            where texts meet; names the message.
    """
    marks = _Marks()
    marked = _with_texts_marked(conversation, marks)
    marked_tools = _with_names_marked(tools, marks, "'tools'")
    as_data = _written_as_data(marked, marked_tools, write, form, marks)
    prompt = write(messages_from_turns(conversation, form, as_data), tools)
    witness = write(messages_from_turns(marked, form, as_data), marked_tools)
    for place, mark in marks.places.items():
        if mark not in witness:
            raise InputError(f"{place} is nowhere in what the chat template writes: leave it out of the request")
    spans = _media_spans(conversation, tools, write, form, as_data, prompt)
    for begin, end, word in _occurrences(form.reserved, prompt):
        if not any(first <= begin and end <= last for first, last in spans):
            where = marks.place_at(begin, prompt, witness)
            raise InputError(
                f"{where} and what the chat template puts beside it make {word!r}, which marks an image's place "
                f"in this model's prompts: change the text"
            )
    return prompt


def messages_from_turns(conversation: Conversation, form: Form, as_data: Collection[int] = ()) -> Messages:
    """The conversation as a chat template takes it.

    Args:
        as_data: the turns whose lists the template would write out as data; they become strings.
    """
    return [
        {**turn.extras, "role": turn.role, "content": _content(turn, form, index in as_data)}
        for index, turn in enumerate(conversation.turns)
    ]


def _content(turn: Turn, form: Form, as_data: bool) -> str | list[dict[str, str]]:
    """A turn of one text is a string for every template, as stock LMDeploy has it; several are joined by the template
    where it can."""
    has_media = any(isinstance(part, MediaPart) for part in turn.parts)
    joins = as_data or (form.joins_system_texts and turn.role == "system")
    if not has_media and (len(turn.parts) < 2 or joins):
        return turn.text
    if as_data or not form.takes_parts:
        return "".join(
            form.placeholders[part.kind] if isinstance(part, MediaPart) else _text(part) for part in turn.parts
        )
    return [
        {"type": part.kind} if isinstance(part, MediaPart) else {"type": "text", "text": _text(part)}
        for part in turn.parts
    ]


def _text(part: Part) -> str:
    if not isinstance(part, Text):  # a conversation with token ids is a raw prompt, and sees no template
        raise InputError(f"a chat template takes text, got {type(part).__name__}")
    return part.text


def _written_as_data(
    marked: Conversation, tools: Sequence[Any] | None, write: Write, form: Form, marks: _Marks
) -> set[int]:
    """The turns whose lists of parts the template writes out as they are: an entry that no template knows is then in
    the prompt. (Llama 4's does so with tools' answers, and with the message that it puts tools into.)

    Raises:
        InputError: there is an image in one that is no user's.
    """
    messages = messages_from_turns(marked, form)
    unknown = {index: marks.new() for index, message in enumerate(messages) if isinstance(message["content"], list)}
    if not unknown:
        return set()
    for index, entry in unknown.items():
        messages[index]["content"] = [{**part, entry: entry} for part in messages[index]["content"]]
    witness = write(messages, tools)
    found = {index for index, entry in unknown.items() if entry in witness}
    for index in found:
        turn = marked.turns[index]
        for part in turn.parts:
            if isinstance(part, MediaPart) and turn.role != "user":
                raise InputError(
                    f"{part.label}: the chat template writes messages of the role {turn.role} as data, in which "
                    f"no {part.kind} has a place: send it in a user message"
                )
    return found


def _media_spans(
    conversation: Conversation,
    tools: Sequence[Any] | None,
    write: Write,
    form: Form,
    as_data: Collection[int],
    prompt: str,
) -> list[Span]:
    """[begin, end) in `prompt` of what the template writes for each image and video."""
    if not conversation.media:
        return []
    marks = _Marks()
    turns, pairs = [], []
    for turn in conversation.turns:
        parts: list[Part] = []
        for part in turn.parts:
            if isinstance(part, MediaPart):
                before, after = marks.new(), marks.new()
                pairs.append((part, before, after))
                parts += [Text(before), part, Text(after)]
            else:
                parts.append(part)
        turns.append(replace(turn, parts=tuple(parts)))
    witness = write(messages_from_turns(Conversation(tuple(turns)), form, as_data), tools)
    spans: list[Span] = []
    place = 0
    for part, before, after in pairs:
        begin, end = witness.find(before, place), witness.find(after, place)
        written = witness[begin + len(before) : end] if 0 <= begin < end else ""
        placeholder = form.placeholders[part.kind]
        if written.count(placeholder) != 1 or _foreign(form.reserved, written.replace(placeholder, "")):
            raise InputError(
                f"{part.label}: the chat template leaves it out, or writes it elsewhere than it stands: send it "
                f"in another message"
            )
        start = len(marks.without(witness[:begin]))
        spans.append((start, start + len(written)))
        place = end
    if marks.without(witness) != prompt:
        raise InputError(
            "the chat template writes the same conversation in different ways, so that the places of its images "
            "cannot be told: choose another one with --chat-template"
        )
    return spans


def _foreign(reserved: Sequence[str], text: str) -> bool:
    return any(word in text for word in reserved)


def _occurrences(reserved: Sequence[str], text: str) -> Iterable[tuple[int, int, str]]:
    """Where reserved strings stand, also those that overlap."""
    for found in re.finditer(f"(?=({'|'.join(map(re.escape, reserved))}))", text):
        yield *found.span(1), found[1]


class _Marks:
    """Strings that stand for a place: letters and digits alone, so that no template escapes them.

    Attributes:
        places: of a conversation, and the mark that each has.
    """

    def __init__(self) -> None:
        self._stem = f"m{secrets.token_hex(8)}"
        self._count = 0
        self.places: dict[str, str] = {}

    def new(self) -> str:
        """Another mark."""
        self._count += 1
        return f"{self._stem}n{self._count}m"

    def put(self, text: str, place: str) -> str:
        """`text` with a mark behind its last word: templates trim spaces, and look at beginnings."""
        if not text.strip():
            return text
        mark = self.places.setdefault(place, self.new())
        end = len(text.rstrip())
        return f"{text[:end]}{mark}{text[end:]}"

    def without(self, text: str) -> str:
        """`text` as it is without the marks."""
        return re.sub(f"{self._stem}n[0-9]+m", "", text)

    def place_at(self, position: int, prompt: str, witness: str) -> str:
        """The first marked place that ends behind a position of `prompt`."""
        if self.without(witness) == prompt:
            for place, mark in sorted(self.places.items(), key=lambda item: witness.find(item[1])):
                if len(self.without(witness[: witness.find(mark)])) > position:
                    return place
        return "the prompt"


def _with_texts_marked(conversation: Conversation, marks: _Marks) -> Conversation:
    turns = []
    for index, turn in enumerate(conversation.turns):
        label = f"message {index} ({turn.sent_role}): its"
        texts = sum(isinstance(part, Text) for part in turn.parts)
        parts = tuple(
            Text(marks.put(part.text, f"{label} text" if texts == 1 else f"{label} part {number}"))
            if isinstance(part, Text)
            else part
            for number, part in enumerate(turn.parts, 1)
        )
        extras = dict(turn.extras)
        if isinstance(extras.get("tool_calls"), Sequence):
            extras["tool_calls"] = _with_names_marked(extras["tool_calls"], marks, f"{label} 'tool_calls'")
        turns.append(replace(turn, parts=parts, extras=extras))
    return Conversation(tuple(turns))


def _with_names_marked(tools: Any, marks: _Marks, label: str) -> Any:
    """Tools, or calls of tools, with a mark behind the name of each function."""
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        return tools
    return [_with_name_marked(tool, marks, f"{label}, number {number},") for number, tool in enumerate(tools, 1)]


def _with_name_marked(tool: Any, marks: _Marks, label: str) -> Any:
    if not isinstance(tool, Mapping):
        return tool
    if isinstance(tool.get("function"), Mapping):
        return {**tool, "function": _with_name_marked(tool["function"], marks, label)}
    return {**tool, "name": marks.put(tool["name"], label)} if isinstance(tool.get("name"), str) else tool
