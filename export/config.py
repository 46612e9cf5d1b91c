"""Reading a checkpoint's JSON files entry by entry: what is there, of the right kind, or an error that names it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

from turbovit.engines.errors import CheckpointError, UnsupportedModelError

CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json (or the image_processor in processor_config.json)"
_STEPS = ("do_resize", "do_rescale", "do_normalize")
_LONGEST = 80
_MEND = "mend it, or download the file again"


class Section:
    """One object of a JSON file.

    Args:
        given: the object.
        file: that it stands in, and `path` where there, ``vision_config.`` or nothing.
        defaults: what the reference takes where an entry is left out.
        null_is_default: whether null counts as left out, as it does in the settings of image processors.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        file: str = CONFIG,
        path: str = "",
        defaults: Mapping[str, Any] | None = None,
        *,
        null_is_default: bool = False,
    ):
        self.given = given
        self.file = file
        self.path = path
        self.defaults = defaults or {}
        self.null_is_default = null_is_default

    def section(self, name: str, defaults: Mapping[str, Any], *, required: bool = True) -> Section:
        """An object in this one; an empty one where it is left out and not `required`.

        Raises:
            CheckpointError: it is missing, or something else.
        """
        if name not in self.given and not required:
            return Section({}, self.file, f"{self.path}{name}.", defaults)
        found = self.value(name, "an object")
        if not isinstance(found, Mapping):
            raise self.refused(name, found, "an object")
        return Section(found, self.file, f"{self.path}{name}.", defaults)

    def value(self, name: str, expected: str) -> Any:
        """An entry of any kind, or its default.

        Raises:
            CheckpointError: it is missing and has no default.
        """
        given = name in self.given and not (self.null_is_default and self.given[name] is None)
        if given:
            return self.given[name]
        if name in self.defaults:
            return self.defaults[name]
        raise CheckpointError(f"{self.file} has no {self.path}{name}, expected {expected}: {_MEND}")

    def integer(self, name: str, least: int = 1) -> int:
        """A whole number of at least `least`.

        Raises:
            CheckpointError: it is missing, or something else.
        """
        expected = f"a whole number of at least {least}"
        found = self.value(name, expected)
        if not isinstance(found, int) or isinstance(found, bool) or found < least:
            raise self.refused(name, found, expected)
        return found

    def renamed_integer(self, name: str, newer: str) -> int:
        """A token id under the name that an entry has in files, or under the `newer` one that transformers gave it."""
        return self.integer(newer if newer in self.given else name, least=0)

    def number(self, name: str, *, positive: bool = True) -> float:
        """A finite number, above zero unless `positive` is off.

        Raises:
            CheckpointError: it is missing, or something else.
        """
        expected = "a number above 0" if positive else "a number"
        found = self.value(name, expected)
        if not _is_number(found) or (positive and found <= 0):
            raise self.refused(name, found, expected)
        return float(found)

    def indexes(self, name: str, below: int) -> tuple[int, ...]:
        """Distinct whole numbers from 0 on.

        Raises:
            CheckpointError: it is missing, or something else.
        """
        expected = f"a list of different whole numbers from 0 to {below - 1}"
        found = self.value(name, expected)
        if (
            not isinstance(found, (list, tuple))
            or not all(isinstance(index, int) and not isinstance(index, bool) for index in found)
            or not set(found) <= set(range(below))
            or len(set(found)) != len(found)
        ):
            raise self.refused(name, found, expected)
        return tuple(found)

    def one_for_all(self, name: str, *, positive: bool = True) -> float:
        """The one number that a setting has for all channels: alone, or in a list.

        Raises:
            CheckpointError: it is something else.
            UnsupportedModelError: the channels differ.
        """
        expected = f"{'numbers above 0' if positive else 'numbers'}, one for each channel"
        found = self.value(name, expected)
        values = found if isinstance(found, (list, tuple)) else [found]
        if not values or not all(_is_number(value) and (value > 0 or not positive) for value in values):
            raise self.refused(name, found, expected)
        if len(set(values)) != 1:
            raise UnsupportedModelError(
                f"{self.file}: {self.path}{name} is {found}, supported: one value for all channels"
            )
        return float(values[0])

    def require(self, supported: Mapping[str, Any]) -> None:
        """Refuse entries that ask for what a tower cannot do.

        Raises:
            CheckpointError: one is missing, or of another kind.
            UnsupportedModelError: one has another value; names the first.
        """
        for name, value in supported.items():
            found = self.value(name, json.dumps(value))
            if found is None or isinstance(found, str) != isinstance(value, str):
                raise self.refused(name, found, json.dumps(value))
            if found != value:
                raise UnsupportedModelError(f"{self.file}: {self.path}{name} is {found!r}, supported: {value!r}")

    def refused(self, name: str, found: Any, expected: str) -> CheckpointError:
        """The error about an entry."""
        text = json.dumps(found, default=str)
        shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
        return CheckpointError(f"{self.file}: {self.path}{name} is {shown}, expected {expected}: {_MEND}")


def settings(preprocessor: Mapping[str, Any], defaults: Mapping[str, Any], file: str = PREPROCESSOR) -> Section:
    """An image processor's settings; null is what its class takes."""
    return Section(preprocessor, file, defaults=defaults, null_is_default=True)


def rope_theta(vision: Section, default: float) -> float:
    """The base of the vision half's rope: newer files have it among ``rope_parameters``.

    Raises:
        CheckpointError: it is no number above 0.
    """
    if vision.given.get("rope_parameters") is not None:
        parameters = vision.section("rope_parameters", {})
        if "rope_theta" in parameters.given:
            return parameters.number("rope_theta")
    return Section(vision.given, vision.file, vision.path, {"rope_theta": default}).number("rope_theta")


def check_steps(preprocessor: Section) -> None:
    """Refuse an image processor that leaves a step out.

    Raises:
        CheckpointError: a step's switch is no boolean.
        UnsupportedModelError: a step is off.
    """
    for step in _STEPS:
        found = preprocessor.given.get(step)
        if found is not None and not isinstance(found, bool):
            raise preprocessor.refused(step, found, "true")
        if found is False:
            raise UnsupportedModelError(f"{preprocessor.file}: do_resize, do_rescale and do_normalize must all be on")


def check_side(preprocessor: Section, side: int) -> None:
    """Refuse an image processor that makes images or tiles of another size than the tower takes.

    Raises:
        CheckpointError: gives both.
    """
    square = {"height": side, "width": side}
    size = preprocessor.given.get("size")
    if size is not None and size != square:
        raise CheckpointError(
            f"{preprocessor.file}: the processor resizes to {size}, the vision tower takes {side}x{side}, which is "
            f"written {json.dumps(square)}: {_MEND}"
        )


def check_edges(preprocessor: Section) -> None:
    """Refuse a size that does not say within which numbers of pixels an image is kept.

    Raises:
        CheckpointError: says what the size is, and how it is written.
    """
    expected = 'least and most pixels of an image, {"shortest_edge": 65536, "longest_edge": 16777216}'
    found = preprocessor.value("size", expected)
    edges = Section(found if isinstance(found, Mapping) else {}, preprocessor.file, "size.")
    try:
        least, most = edges.integer("shortest_edge"), edges.integer("longest_edge")
    except CheckpointError:
        raise preprocessor.refused("size", found, expected) from None
    if least > most:
        raise preprocessor.refused("size", found, expected)


def check_kind(preprocessor: Section, stem: str) -> None:
    """Refuse the settings of another model's image processor.

    Args:
        stem: the name of the processor's class; ``Fast`` may stand behind it.

    Raises:
        CheckpointError: gives both.
    """
    found = preprocessor.given.get("image_processor_type")
    if found not in (None, stem, f"{stem}Fast"):
        raise preprocessor.refused("image_processor_type", found, json.dumps(stem))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
