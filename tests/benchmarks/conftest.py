"""Tiny subjects for the benchmarks' own tests: what they measure is of no interest here, that they measure is."""

from __future__ import annotations

from pathlib import Path

import pytest

from turbovit.benchmarks.subjects import Subject
from turbovit.engines.bundle import Bundle
from turbovit.engines.families import family_from_name


@pytest.fixture(scope="session")
def subjects(
    tiny_gemma3: Path,
    tiny_gemma3_bundle: Bundle,
    tiny_llama4: Path,
    tiny_llama4_bundle: Bundle,
    tiny_qwen3_vl: Path,
    tiny_qwen3_vl_bundle: Bundle,
    tiny_deepseek_vl2: Path,
    tiny_deepseek_vl2_bundle: Bundle,
) -> dict[str, Subject]:
    pairs = {
        "gemma3": (tiny_gemma3, tiny_gemma3_bundle),
        "llama4": (tiny_llama4, tiny_llama4_bundle),
        "qwen3_vl": (tiny_qwen3_vl, tiny_qwen3_vl_bundle),
        "deepseek_vl2": (tiny_deepseek_vl2, tiny_deepseek_vl2_bundle),
    }
    return {name: Subject(family_from_name(name), *pair) for name, pair in pairs.items()}
