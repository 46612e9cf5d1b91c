"""Reading a checkpoint's config.json and its image processor's settings: what the families have in common."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from turbovit.engines.errors import CheckpointError, UnsupportedModelError

_STEPS = ("do_resize", "do_rescale", "do_normalize")


def full_config(config_class: Any, config: Mapping[str, Any]) -> Any:
    """A transformers config with what released files leave out.

    Raises:
        CheckpointError: transformers does not accept it.
    """
    try:
        return config_class.from_dict(copy.deepcopy(dict(config)))  # it changes the nested ones that it is given
    except Exception as error:  # transformers checks entries in several ways
        raise CheckpointError(f"config.json makes no sense: {' '.join(str(error).split())}") from error


def require_supported(found: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    """Refuse entries of vision_config that ask for what a tower cannot do.

    Raises:
        UnsupportedModelError: names the first one.
    """
    for name, value in supported.items():
        if found[name] != value:
            raise UnsupportedModelError(f"vision_config.{name} is {found[name]!r}, supported: {value!r}")


def one_for_all(preprocessor: Mapping[str, Any], name: str, default: float) -> float:
    """The one value that an image processor's setting has for all channels.

    Raises:
        UnsupportedModelError: it has several.
    """
    given = preprocessor.get(name) or default
    values = set(given if isinstance(given, list) else [given])
    if len(values) != 1:
        raise UnsupportedModelError(f"{name} is {given}, supported: one value for all channels")
    return float(values.pop())


def check_steps(preprocessor: Mapping[str, Any]) -> None:
    """Refuse an image processor that leaves a step out.

    Raises:
        UnsupportedModelError: a step is off.
    """
    if any(preprocessor.get(step) is False for step in _STEPS):
        raise UnsupportedModelError("the processor's do_resize, do_rescale and do_normalize must all be on")


def check_side(preprocessor: Mapping[str, Any], side: int) -> None:
    """Refuse an image processor that makes images or tiles of another size than the tower takes.

    Raises:
        CheckpointError: gives both.
    """
    square = {"height": side, "width": side}
    size = preprocessor.get("size") or square
    if size != square:
        raise CheckpointError(f"the processor resizes to {size}, the vision tower takes {side}x{side}")
