"""Options of requests and of `Encoder.encode`: which a family obeys, at which level, and the form that works."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turbovit.engines.errors import InputError

ENCODE, PART = "encode", "part"
_LONGEST = 60  # characters of a client's value in a message


@dataclass(frozen=True)
class Kind:
    """What values an option takes.

    Attributes:
        expected: in words.
        accepts: whether a value is one.
    """

    expected: str
    accepts: Callable[[Any], bool]


SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
PIXELS = Kind("a positive whole number of pixels", lambda value: type(value) is int and value > 0)
COUNT = Kind("a positive whole number, or -1 for all", lambda value: type(value) is int and (value > 0 or value == -1))
RATE = Kind(
    "a positive number a second, or -1 for that of the file",
    lambda value: type(value) in (int, float) and (0 < value < math.inf or value == -1),
)
ANYTHING = Kind("anything", lambda value: True)


@dataclass(frozen=True)
class Option:
    """One row of a family's table.

    Attributes:
        path: its level, and the names that lead to it: ``mm_processor_kwargs`` or ``media_io_kwargs`` of a request,
            ``part`` (beside or inside an image's or video's source, or beside a text), or ``encode`` (in Python).
        example: a value, for messages.
        kind: of its values.
        effect: False for what clients send as a matter of course, and is taken without changing anything.
    """

    path: tuple[str, ...]
    example: Any
    kind: Kind = ANYTHING
    effect: bool = True

    @property
    def form(self) -> str:
        """How it is written where it works."""
        level, *names = self.path
        if level == ENCODE:
            return f"encode(..., {names[0]}={self.example!r}) in Python"
        value = self.example
        for name in reversed(names):
            value = {name: value}
        return f"{level}={json.dumps(value)} of the request"


# Names of a part, and hints to other servers: no image and no answer depends on them. `detail` is OpenAI's; every
# model here has one way to see an image.
LABELS = tuple(
    Option((PART, name), "", effect=False) for name in ("detail", "id", "uuid", "cache_control", "annotations")
)


def check_options(given: Mapping[str, Any], options: Sequence[Option]) -> None:
    """Refuse options that the family does not have, and values that they do not take.

    Args:
        given: by level, as they were sent; None and an empty dict ask for nothing.
        options: the family's table.

    Raises:
        InputError: names the option, and the form that works here.
    """
    for level, value in given.items():
        _check((level,), value, options)


def refuse_others(names: Collection[Any], path: tuple[str, ...], options: Sequence[Option], where: str) -> None:
    """Refuse names that the table does not have under `path`.

    Args:
        where: the names stand, for the message.

    Raises:
        InputError: names the first one, and the form that works here.
    """
    known = _below(path, options)
    for name in names:
        if name not in known:
            raise InputError(f"{where} has {_shown(name)}, {_remedy(name, path, options)}")


def value_at(given: Any, *names: str) -> Any:
    """A value in nested dicts; None where it is not there."""
    for name in names:
        given = given.get(name) if isinstance(given, Mapping) else None
    return given


def _check(path: tuple[str, ...], value: Any, options: Sequence[Option]) -> None:
    if value is None:
        return
    leaf = next((option for option in options if option.path == path), None)
    if leaf is not None:
        if not leaf.kind.accepts(value):
            raise InputError(f"{_place(path)} is {_shown(value)}, expected {leaf.kind.expected}")
        return
    if not isinstance(value, Mapping):
        known = ", ".join(_below(path, options)) or "nothing"
        raise InputError(f"{_place(path)} is {_shown(value)}, expected a dict of {known}")
    asked = {name: inner for name, inner in value.items() if inner is not None and inner != {}}
    refuse_others(asked, path, options, _place(path))
    for name, inner in asked.items():
        _check((*path, name), inner, options)


def _below(path: tuple[str, ...], options: Sequence[Option]) -> list[str]:
    depth = len(path)
    return list(dict.fromkeys(one.path[depth] for one in options if one.path[:depth] == path and len(one.path) > depth))


def _remedy(name: Any, path: tuple[str, ...], options: Sequence[Option]) -> str:
    """What to write instead: the option of that name where it works, else all that there are."""
    with_effect = [option for option in options if option.effect]
    in_python = path[0] == ENCODE
    near = [option for option in with_effect if (option.path[0] == ENCODE) == in_python]
    meant = [option.form for option in near or with_effect if option.path[-1] == name]
    if meant:
        return f"which does nothing there: use {' or '.join(meant)}"
    if near:
        return f"which this model does not have; it has {'; '.join(option.form for option in near)}"
    return "which this model does not have; it has no options"


def _place(path: tuple[str, ...]) -> str:
    return path[0] + "".join(f"[{name!r}]" for name in path[1:])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
