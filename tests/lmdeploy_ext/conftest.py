"""LMDeploy's request path and the reference over the tiny sample, each loaded once a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from turbovit.benchmarks.lmdeploy_side import LMDeploySide
    from turbovit.benchmarks.reference_gemma3 import Gemma3Reference
    from turbovit.engines.bundle import Bundle

pytest.importorskip("lmdeploy", reason="LMDeploy is not installed")


@pytest.fixture(scope="session")
def side(tiny_gemma3: Path, tiny_gemma3_bundle: Bundle) -> LMDeploySide:
    from turbovit.benchmarks.lmdeploy_side import LMDeploySide

    return LMDeploySide(tiny_gemma3, tiny_gemma3_bundle.path)


@pytest.fixture(scope="session")
def reference(tiny_gemma3: Path) -> Gemma3Reference:
    from turbovit.benchmarks.reference_gemma3 import Gemma3Reference

    return Gemma3Reference(tiny_gemma3)


@pytest.fixture(autouse=True)
def _no_noise(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A refusal is the caller's: the event loop must not report it as well."""
    caplog.set_level(logging.WARNING, "asyncio")
    yield
    assert [record for record in caplog.records if record.name == "asyncio"] == []
