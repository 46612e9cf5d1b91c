"""LMDeploy's message dicts become dataclasses here, and the rules about messages are applied once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from turbovit.engines.errors import InputError
from turbovit.engines.options import PART, Option, refuse_others

IMAGE_MARKER = "<IMAGE_TOKEN>"  # LMDeploy's documented way to say in a text where an image stands
MEDIA = ("image", "video")
# The types of parts, in requests and once LMDeploy has loaded them, that hold media of a kind.
_MEDIA_KINDS = {
    **dict.fromkeys(("image", "image_url", "image_data"), "image"),
    **dict.fromkeys(("video", "video_url"), "video"),
}
_MEDIA_ROLES = ("user", "tool")  # LMDeploy loads the media of no other role
_ROLES = MappingProxyType({"developer": "system"})  # OpenAI's newer name


@dataclass(frozen=True)
class Text:
    """A text part."""

    text: str


@dataclass(frozen=True)
class TokenIds:
    """A text part that is tokenised already, as LMDeploy's /generate endpoint sends it."""

    ids: list[int]


@dataclass(frozen=True)
class MediaPart:
    """An image or video.

    Attributes:
        kind: ``image`` or ``video``.
        data: what LMDeploy loaded; None before it did.
        label: what it is called in error messages.
        params: what else LMDeploy knows of it, such as a video's metadata.
    """

    kind: str
    data: Any
    label: str
    params: Mapping[str, Any]


Part = Text | TokenIds | MediaPart


@dataclass(frozen=True)
class Turn:
    """One message.

    Attributes:
        role: as chat templates know it, and `sent_role` as the client called it.
        extras: its other entries, such as tool calls.
    """

    role: str
    sent_role: str
    parts: tuple[Part, ...]
    extras: Mapping[str, Any]

    @property
    def text(self) -> str:
        """All text parts, joined with newlines."""
        return "\n".join(part.text for part in self.parts if isinstance(part, Text))


@dataclass(frozen=True)
class Conversation:
    """A request's messages, in order."""

    turns: tuple[Turn, ...]

    @property
    def media(self) -> list[MediaPart]:
        """All images and videos in prompt order."""
        return [part for turn in self.turns for part in turn.parts if isinstance(part, MediaPart)]

    @property
    def has_token_ids(self) -> bool:
        """Whether any text is tokenised already."""
        return any(isinstance(part, TokenIds) for turn in self.turns for part in turn.parts)


def conversation_from_messages(
    messages: Iterable[Mapping[str, Any]], kinds: Sequence[str], options: Sequence[Option]
) -> Conversation:
    """Convert, and check each message.

    Args:
        kinds: of media that the family takes: ``image``, ``video``.
        options: the family's table.

    Raises:
        InputError: a content, role or option that cannot be used; names the message and part.
    """
    turns = tuple(_turn(index, message, kinds, options) for index, message in enumerate(messages))
    if not turns:
        raise InputError("there are no messages")
    return Conversation(turns)


def raw_prompt(conversation: Conversation) -> str | list[int]:
    """The prompt of a request without chat template: all its texts joined, or its token ids.

    Raises:
        InputError: there is no text, or text beside token ids.
    """
    texts = [part for turn in conversation.turns for part in turn.parts if not isinstance(part, MediaPart)]
    if texts and all(isinstance(part, Text) for part in texts):
        return "".join(part.text for part in texts if isinstance(part, Text))
    if len(texts) == 1 and isinstance(texts[0], TokenIds):
        return texts[0].ids
    kinds = ", ".join(type(part).__name__ for part in texts) or "no text"
    raise InputError(f"a raw prompt is text or one list of token ids, got {kinds}")


def with_markers_applied(conversation: Conversation) -> Conversation:
    """Images stand where ``<IMAGE_TOKEN>`` does in messages that have exactly as many markers as images.

    In all other messages the marker is plain text.
    """
    return Conversation(tuple(_with_markers_applied(turn) for turn in conversation.turns))


def refuse_reserved(
    conversation: Conversation, tools: Any, template_options: Mapping[str, Any], reserved: Sequence[str]
) -> None:
    """Refuse placeholder strings in all that a chat template gets: one would take an image's place in the prompt.

    Raises:
        InputError: names the string, and the message and place.
    """
    for index, turn in enumerate(conversation.turns):
        label = f"message {index} ({turn.sent_role}): its"
        _refuse_reserved(turn.sent_role, f"{label} role", reserved)
        for text in (part.text for part in turn.parts if isinstance(part, Text)):
            _refuse_reserved(text, f"{label} text", reserved)
        for name, value in turn.extras.items():
            _refuse_reserved({name: value}, f"{label} {name!r}", reserved)
    _refuse_reserved(tools, "'tools'", reserved)
    for name, value in template_options.items():
        if name == "chat_template":  # it takes the model's place, and what it writes is looked at
            continue
        _refuse_reserved({name: value}, f"the chat template's {name!r}", reserved)


def _refuse_reserved(value: Any, where: str, reserved: Sequence[str]) -> None:
    for text in _strings(value):
        for word in reserved:
            if word in text:
                raise InputError(
                    f"{where} holds {word!r}, which marks an image's place in this model's prompts: remove it from "
                    f"the text"
                )


def _strings(value: Any) -> Iterator[str]:
    """All strings in nested lists and dicts, keys included."""
    waiting = [value]
    while waiting:  # not by recursion: JSON can be nested deeper than Python calls
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, Sequence):
            waiting += one


def _turn(index: int, message: Mapping[str, Any], kinds: Sequence[str], options: Sequence[Option]) -> Turn:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise InputError(f"message {index}: its role is {role!r}, expected a name such as 'user'")
    label = f"message {index} ({role})"
    if content is None or isinstance(content, str):
        parts: list[Part] = [_text(content or "", label)]
    elif isinstance(content, list):
        parts = []
        for part in content:
            parts.append(_part(part, role, label, kinds, options, parts))
    else:
        raise InputError(f"{label}: its content is a {type(content).__name__}, expected text or a list")
    return Turn(_ROLES.get(role, role), role, tuple(parts), _extras(message))


def _extras(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that say nothing: clients send answers back with every entry that they know, and templates take an
    empty list of tool calls for one that is not."""
    named = {key: value for key, value in message.items() if key not in ("role", "content")}
    return {key: value for key, value in named.items() if value is not None and (key != "tool_calls" or value)}


def _part(
    part: Any, role: str, message: str, kinds: Sequence[str], options: Sequence[Option], before: Sequence[Part]
) -> Part:
    given = part.get("type") if isinstance(part, Mapping) else None
    if given == "text":
        _refuse_options(part, ("type", "text"), f"{message}: a text part", options)
    if given == "text" and isinstance(part.get("text"), str):
        return _text(part["text"], message)
    if given == "text" and _are_ids(part.get("text")):
        return TokenIds(part["text"])
    if given == "text":
        raise InputError(f"{message}: a text part holds {type(part.get('text')).__name__}, expected text or token ids")
    kind = _MEDIA_KINDS.get(given, "") if isinstance(given, str) else ""
    if kind not in kinds:
        shown = f"of type {given!r}" if isinstance(part, Mapping) else f"a {type(part).__name__}"
        raise InputError(f"{message}: a part is {shown}, expected a text or an {' or a '.join(kinds)}")
    label = f"{message}, {kind} {sum(isinstance(known, MediaPart) and known.kind == kind for known in before) + 1}"
    if role not in _MEDIA_ROLES:
        raise InputError(f"{label}: only messages of the roles {', '.join(_MEDIA_ROLES)} can hold {kind}s")
    if _is_overwritten(part):
        raise InputError(f"{label}: a second 'type' or 'data' stands beside its source")
    source = part.get(part["type"])
    # Once LMDeploy has loaded it, its data stand beside the type.
    known = ("type", "data", "video_metadata") if source is None else ("type", part["type"])
    _refuse_options(part, known, label, options)
    if isinstance(source, Mapping):
        _refuse_options(source, ("url", "data"), label, options)
    return MediaPart(kind, part.get("data"), label, {k: v for k, v in part.items() if k not in ("type", "data")})


def _is_overwritten(part: Mapping[str, Any]) -> bool:
    """Whether LMDeploy would put entries that a client sent over the media that it loads."""
    source = part.get(part["type"])
    if isinstance(source, Mapping):
        return "type" in source or ("data" in source and bool(source.get("url")))
    return source is not None and "data" in part


def _refuse_options(given: Mapping[str, Any], known: Collection[str], label: str, options: Sequence[Option]) -> None:
    others = [name for name, value in given.items() if name not in known and value is not None]
    refuse_others(others, (PART,), options, label)


def _text(text: str, message: str) -> Text:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a pair, which JSON can hold and no tokenizer takes
        raise InputError(f"{message}: its text holds {text[error.start]!r} at {error.start}, no character") from None
    return Text(text)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(token, int) for token in value)


def _with_markers_applied(turn: Turn) -> Turn:
    images = [part for part in turn.parts if isinstance(part, MediaPart) and part.kind == "image"]
    markers = sum(part.text.count(IMAGE_MARKER) for part in turn.parts if isinstance(part, Text))
    if not images or markers != len(images):
        return turn
    remaining = iter(images)
    parts: list[Part] = []
    for part in turn.parts:
        if isinstance(part, Text):
            for number, piece in enumerate(part.text.split(IMAGE_MARKER)):
                if number:
                    parts.append(next(remaining))
                if piece:
                    parts.append(Text(piece))
        elif not (isinstance(part, MediaPart) and part.kind == "image"):
            parts.append(part)
    return replace(turn, parts=tuple(parts))
