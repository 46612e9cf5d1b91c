"""What LMDeploy's PyTorch engine can do is read from its files: the installed one, and one that differs."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

import pytest

from turbovit.engines.families import FAMILIES
from turbovit.lmdeploy_ext import pytorch_capability
from turbovit.lmdeploy_ext.pytorch_capability import HOOK, NEEDS, pytorch_findings, pytorch_refusal

QWEN3_VL, LLAMA4 = "Qwen3VLForConditionalGeneration", "Llama4ForConditionalGeneration"


def states(architecture: str) -> dict[str, str]:
    return {finding.what: finding.state for finding in pytorch_findings(architecture)}


@pytest.fixture
def doctored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files that are looked at, which tests can change."""
    installed = pytorch_capability._lmdeploy_folder()
    assert installed is not None
    folder = tmp_path / "lmdeploy"
    shutil.copytree(installed / "pytorch" / "models", folder / "pytorch" / "models")
    shutil.copy(installed / "messages.py", folder)
    monkeypatch.setattr(pytorch_capability, "_lmdeploy_folder", lambda: folder)
    return folder


def change(file: Path, old: str, new: str) -> None:
    source = file.read_text()
    assert old in source
    file.write_text(source.replace(old, new))


def test_every_architecture_of_the_families_has_its_needs() -> None:
    assert set(NEEDS) >= {architecture for family in FAMILIES for architecture in family.architectures}


def test_the_map_that_is_read_is_the_one_that_lmdeploy_uses() -> None:
    folder = pytorch_capability._lmdeploy_folder()
    assert folder is not None
    used = import_module("lmdeploy.pytorch.models.module_map").MODULE_MAP
    assert pytorch_capability._module_map(folder) == {name: path.split(".")[-2] for name, path in used.items()}


@pytest.mark.parametrize("architecture", [name for family in FAMILIES for name in family.architectures])
def test_the_installed_one_runs_all_families(architecture: str) -> None:
    found = states(architecture)
    lacking = {what for what, state in found.items() if state != "have"}
    assert lacking == ({NEEDS[LLAMA4][-1].what} if architecture == LLAMA4 else set())
    assert pytorch_refusal(architecture) is None


def test_a_lost_model_is_seen_and_refused(doctored: Path) -> None:
    change(doctored / "pytorch" / "models" / "module_map.py", f"'{QWEN3_VL}'", "'Another'")
    assert states(QWEN3_VL)[f"a language model for {QWEN3_VL}"] == "missing"
    assert f"it lacks a language model for {QWEN3_VL}" in str(pytorch_refusal(QWEN3_VL))


@pytest.mark.parametrize("file", ["messages.py", "pytorch/models/patch.py"])
def test_a_lost_place_for_our_classes_is_seen_and_refused(file: str, doctored: Path) -> None:
    change(doctored / file, "custom_module_map", "another_map")
    assert states(QWEN3_VL)[HOOK] == "missing"
    assert HOOK in str(pytorch_refusal(QWEN3_VL))


@pytest.mark.parametrize("architecture", NEEDS)
def test_each_need_is_seen_by_its_signs(architecture: str, doctored: Path) -> None:
    modules = pytorch_capability._module_map(doctored)
    for need in NEEDS[architecture]:
        file = doctored / "pytorch" / "models" / f"{modules[need.architecture]}.py"
        original = file.read_text()
        without = original
        for sign in need.signs:
            without = without.replace(sign, "gone")
        file.write_text(without)
        assert states(architecture)[need.what] == "missing"
        for sign in need.signs:
            file.write_text(f"{without}\n{sign} = True\n")
            assert states(architecture)[need.what] == "have"
        file.write_text(original)


def test_without_lmdeploy_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch_capability, "_lmdeploy_folder", lambda: None)
    assert set(states(QWEN3_VL).values()) == {"unknown"}
    assert len(states(QWEN3_VL)) == 2 + len(NEEDS[QWEN3_VL])
