"""What an LMDeploy can do is read from its files: the installed one, one that could do more, and none."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from turbovit.engines.families import FAMILIES
from turbovit.lmdeploy_ext import capability
from turbovit.lmdeploy_ext.capability import NEEDS, Finding, language_findings, turbomind_refusal

GEMMA3 = "Gemma3ForConditionalGeneration"
MODEL, EMBEDDINGS = f"a language model for {GEMMA3}", "features from Python at prompt positions"
ENTRY = "SUPPORTED_ARCHS = dict("


def states(architecture: str = GEMMA3) -> dict[str, str]:
    return {finding.what: finding.state for finding in language_findings(architecture)}


@pytest.fixture
def _no_lmdeploy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    capability._turbomind_folder.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    yield
    capability._turbomind_folder.cache_clear()


def add_model(folder: Path) -> None:
    file = folder / "supported_models.py"
    source = file.read_text()
    assert source.count(ENTRY) == 1
    file.write_text(source.replace(ENTRY, f"{ENTRY}{GEMMA3}='gemma3', "))


def test_every_architecture_of_the_families_has_its_needs() -> None:
    assert set(NEEDS) == {architecture for family in FAMILIES for architecture in family.architectures}


def test_the_installed_one_takes_features_and_lacks_the_language_model() -> None:
    found = states()
    assert found.pop(EMBEDDINGS) == "have"
    assert found == dict.fromkeys([MODEL, *(need.what for need in NEEDS[GEMMA3])], "missing")


def test_the_refusal_names_all_that_is_missing_and_the_way_out() -> None:
    refusal = turbomind_refusal(GEMMA3)
    assert refusal is not None
    for words in (GEMMA3, MODEL, *(need.what for need in NEEDS[GEMMA3]), "PytorchEngineConfig", "--backend pytorch"):
        assert words in refusal
    assert EMBEDDINGS not in refusal


def test_architectures_of_others_are_never_refused() -> None:
    assert turbomind_refusal("LlamaForCausalLM") is None
    assert turbomind_refusal("NeverHeardOf") is None


def test_a_copy_says_what_the_original_says(turbomind_copy: Path) -> None:
    assert states() == {MODEL: "missing", EMBEDDINGS: "have", **{need.what: "missing" for need in NEEDS[GEMMA3]}}


@pytest.mark.parametrize("form", ["a call", "a literal"])
def test_a_language_model_is_seen(form: str, turbomind_copy: Path) -> None:
    if form == "a call":
        add_model(turbomind_copy)
    else:
        (turbomind_copy / "supported_models.py").write_text(f"SUPPORTED_ARCHS = {{'{GEMMA3}': 'gemma3'}}\n")
    assert states()[MODEL] == "have"
    assert (
        states("AnotherForConditionalGeneration")["a language model for AnotherForConditionalGeneration"] == "missing"
    )


def test_each_need_is_seen_by_any_of_its_signs(turbomind_copy: Path) -> None:
    for need in NEEDS[GEMMA3]:
        for number, sign in enumerate(need.signs):
            file = turbomind_copy / "models" / f"new_{number}.py"
            file.write_text(f"{sign} = True\n")
            capability._sources.cache_clear()
            others = [other.what for other in NEEDS[GEMMA3] if other != need]
            assert states()[need.what] == "have"
            assert [states()[what] for what in others] == ["missing"] * len(others)
            file.unlink()
    capability._sources.cache_clear()


def test_nothing_is_refused_once_all_is_there(turbomind_copy: Path) -> None:
    add_model(turbomind_copy)
    signs = [need.signs[0] for need in NEEDS[GEMMA3]]
    (turbomind_copy / "models" / "gemma3.py").write_text("\n".join(f"{sign} = True" for sign in signs))
    assert set(states().values()) == {"have"}
    assert turbomind_refusal(GEMMA3) is None


def test_lost_parameters_for_features_are_seen(turbomind_copy: Path) -> None:
    file = turbomind_copy / "turbomind.py"
    source = file.read_text()
    assert "input_embedding_ranges" in source
    file.write_text(source.replace("input_embedding_ranges", "multimodal_ranges"))
    assert states()[EMBEDDINGS] == "missing"
    assert EMBEDDINGS in str(turbomind_refusal(GEMMA3))


@pytest.mark.usefixtures("_no_lmdeploy")
def test_without_lmdeploy_nothing_is_known_and_turbomind_is_refused() -> None:
    assert set(states().values()) == {"unknown"}
    assert len(states()) == 2 + len(NEEDS[GEMMA3])
    assert turbomind_refusal(GEMMA3) is not None


def test_a_finding_is_plain_data() -> None:
    assert language_findings(GEMMA3)[0] == Finding(MODEL, "missing")
