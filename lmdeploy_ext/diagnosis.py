"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass

from turbovit.lmdeploy_ext.capability import State


@dataclass(frozen=True)
class Diagnosis:
    """Something that is needed, and whether it is here.

    Attributes:
        section: what it belongs to.
        command: what closes the gap, or what can be done with it; empty where no command does.
    """

    section: str
    what: str
    state: State
    detail: str = ""
    command: str = ""
