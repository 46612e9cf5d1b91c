"""The rig, compiled once a run, and tiny checkpoints of what stock TurboMind supports."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from turbomind_cpu.build import skip, skip_reason
from turbomind_cpu.checkpoints import MODELS, write
from turbomind_cpu.reference import Reference
from turbomind_cpu.rig import Rig

# Set, children find the machine's own driver and GPU, with nothing loaded before them.
REAL_DRIVER = "TURBOMIND_REAL_DRIVER"


@pytest.fixture(scope="session")
def cpu_rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """A rig over stand-ins for CUDA."""
    reason = skip_reason()
    if reason:
        skip(reason)
    return Rig.on_cpu(tmp_path_factory.mktemp("stand-ins"))


@pytest.fixture(scope="session")
def rig(request: pytest.FixtureRequest) -> Rig:
    """A rig over stand-ins for CUDA or, with TURBOMIND_REAL_DRIVER=1, over the machine's own."""
    return Rig() if os.environ.get(REAL_DRIVER) == "1" else request.getfixturevalue("cpu_rig")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of `MODELS`, written when it is first asked for."""
    return cache(lambda name: write(MODELS[name], tmp_path_factory.mktemp("models") / name))


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], Reference]:
    """transformers over the same folder."""
    return cache(lambda name: Reference(checkpoint(name)))
