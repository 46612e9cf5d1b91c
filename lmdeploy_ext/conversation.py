"""LMDeploy's message dicts become dataclasses here, and the rules about messages are applied once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turbovit.engines.errors import InputError

IMAGE_MARKER = "<IMAGE_TOKEN>"  # LMDeploy's documented way to say in a text where an image stands
_IMAGE_KINDS = ("image", "image_url", "image_data")  # all LMDeploy loads; loaded ones are of the first kind
_IMAGE_ROLES = ("user", "tool")  # LMDeploy loads the images of no other role


@dataclass(frozen=True)
class Text:
    """A text part."""

    text: str


@dataclass(frozen=True)
class TokenIds:
    """A text part that is tokenised already, as LMDeploy's /generate endpoint sends it."""

    ids: list[int]


@dataclass(frozen=True)
class ImagePart:
    """An image part, and what it is called in error messages."""

    data: Any
    label: str


Part = Text | TokenIds | ImagePart


@dataclass(frozen=True)
class Turn:
    """One message.

    Attributes:
        plain: whether its content was a string and not a list of parts.
        extras: its other entries, such as tool calls.
    """

    role: str
    parts: tuple[Part, ...]
    plain: bool
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
    def images(self) -> list[ImagePart]:
        """All images in prompt order."""
        return [part for turn in self.turns for part in turn.parts if isinstance(part, ImagePart)]

    @property
    def has_token_ids(self) -> bool:
        """Whether any text is tokenised already."""
        return any(isinstance(part, TokenIds) for turn in self.turns for part in turn.parts)


def conversation_from_messages(messages: Iterable[Mapping[str, Any]]) -> Conversation:
    """Convert, and check what does not depend on the family.

    Raises:
        InputError: a content or role that cannot be used; names the message and part.
    """
    turns = tuple(_turn(index, message) for index, message in enumerate(messages))
    if not turns:
        raise InputError("there are no messages")
    return Conversation(turns)


def raw_prompt(conversation: Conversation) -> str | list[int]:
    """The prompt of a request without chat template: all its texts joined, or its token ids.

    Raises:
        InputError: there is no text, or text beside token ids.
    """
    texts = [part for turn in conversation.turns for part in turn.parts if not isinstance(part, ImagePart)]
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


def refuse_reserved(conversation: Conversation, reserved: Sequence[str]) -> None:
    """Refuse a text that holds a placeholder string: it would take an image's place in the prompt.

    Raises:
        InputError: names the string and the message.
    """
    for index, turn in enumerate(conversation.turns):
        for text in (part.text for part in turn.parts if isinstance(part, Text)):
            for word in reserved:
                if word in text:
                    raise InputError(
                        f"message {index} ({turn.role}): its text holds {word!r}, which marks an image's place in "
                        f"this model's prompts: remove it from the text"
                    )


def _turn(index: int, message: Mapping[str, Any]) -> Turn:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise InputError(f"message {index}: its role is {role!r}, expected a name such as 'user'")
    extras = {key: value for key, value in message.items() if key not in ("role", "content")}
    if content is None or isinstance(content, str):
        return Turn(role, (_text(content or "", f"message {index} ({role})"),), plain=True, extras=extras)
    if not isinstance(content, list):
        raise InputError(
            f"message {index} ({role}): its content is a {type(content).__name__}, expected text or a list"
        )
    parts: list[Part] = []
    for part in content:
        number = sum(isinstance(known, ImagePart) for known in parts) + 1
        parts.append(_part(part, role, f"message {index} ({role})", number))
    return Turn(role, tuple(parts), plain=False, extras=extras)


def _part(part: Any, role: str, message: str, number: int) -> Part:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return _text(part["text"], message)
    if kind == "text" and _are_ids(part.get("text")):
        return TokenIds(part["text"])
    if kind in _IMAGE_KINDS:
        if role not in _IMAGE_ROLES:
            raise InputError(
                f"{message}, image {number}: only messages of the roles {', '.join(_IMAGE_ROLES)} can hold images"
            )
        if _is_overwritten(part, kind):
            raise InputError(f"{message}, image {number}: a second 'type' or 'data' stands beside its source")
        return ImagePart(part.get("data"), f"{message}, image {number}")
    if kind == "text":
        raise InputError(f"{message}: a text part holds {type(part.get('text')).__name__}, expected text or token ids")
    shown = f"of type {kind!r}" if isinstance(part, Mapping) else f"a {type(part).__name__}"
    raise InputError(f"{message}: a part is {shown}, expected a text or an image")


def _is_overwritten(part: Mapping[str, Any], kind: str) -> bool:
    """Whether LMDeploy would put entries that a client sent over the image that it loads."""
    source = part.get(kind)
    if isinstance(source, Mapping):
        return "type" in source or ("data" in source and bool(source.get("url")))
    return source is not None and "data" in part


def _text(text: str, message: str) -> Text:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a pair, which JSON can hold and no tokenizer takes
        raise InputError(f"{message}: its text holds {text[error.start]!r} at {error.start}, no character") from None
    return Text(text)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(token, int) for token in value)


def _with_markers_applied(turn: Turn) -> Turn:
    images = [part for part in turn.parts if isinstance(part, ImagePart)]
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
    return replace(turn, parts=tuple(parts))
