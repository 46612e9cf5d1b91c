"""What TurboMind lacks for Qwen3-VL is read from its files, said in one line and refused at the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from turbovit.engines.errors import UnsupportedBackendError
from turbovit.lmdeploy_ext import install
from turbovit.lmdeploy_ext.capability import language_findings, turbomind_refusal
from turbovit.lmdeploy_ext.doctor import diagnose

ARCHITECTURES = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
EMBEDDINGS = "features from Python at prompt positions"
MROPE, DEEPSTACK = "three-axis rope positions (mrope) from Python", "deepstack levels from Python"
LAST = "input_embedding_ranges=None"  # of the parameters of prepare_inputs
DOCSTRING = '\n        """Convert inputs format."""'

each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def states(architecture: str) -> dict[str, str]:
    return {finding.what: finding.state for finding in language_findings(architecture)}


def change(file: Path, old: str, new: str) -> None:
    source = file.read_text()
    assert source.count(old) == 1
    file.write_text(source.replace(old, new))


def take(folder: Path, parameters: str, body: str = "") -> None:
    """Let ``prepare_inputs`` have more parameters, and statements at its beginning."""
    change(folder / "turbomind.py", f"{LAST}):{DOCSTRING}", f"{LAST}, {parameters}):{DOCSTRING}{body}")


@each_architecture
def test_the_installed_one_takes_features_and_nothing_else(architecture: str) -> None:
    assert states(architecture) == {
        f"a language model for {architecture}": "missing",
        EMBEDDINGS: "have",
        MROPE: "missing",
        DEEPSTACK: "missing",
    }


@each_architecture
def test_the_refusal_is_one_line_and_names_all_that_is_missing(architecture: str) -> None:
    refusal = turbomind_refusal(architecture)
    assert refusal is not None
    assert "\n" not in refusal
    for words in (f"cannot run {architecture}", f"a language model for {architecture}", MROPE, DEEPSTACK):
        assert words in refusal
    assert EMBEDDINGS not in refusal


@each_architecture
@pytest.mark.parametrize(
    "parameters",
    [
        "mrope_position_ids=None, mrope_position_delta=None, deepstack_embeds=None",
        "*, deepstack_embeds=None, mrope_position_ids=None",
    ],
)
def test_parameters_for_them_are_seen(parameters: str, architecture: str, turbomind_copy: Path) -> None:
    take(turbomind_copy, parameters)
    found = states(architecture)
    assert (found[EMBEDDINGS], found[MROPE], found[DEEPSTACK]) == ("have", "have", "have")
    refusal = turbomind_refusal(architecture)
    assert refusal is not None  # there is still no language model
    assert MROPE not in refusal


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        ("input_meta['mrope_position_ids']", ("have", "missing")),
        ("input_meta.get('deepstack_embeds')", ("missing", "have")),
        ("input_meta", ("missing", "missing")),
        ("input_meta['mrope_position_ids'], input_meta['deepstack_embeds']", ("have", "have")),
    ],
)
def test_of_a_meta_dict_it_counts_what_is_read(read: str, expected: tuple[str, str], turbomind_copy: Path) -> None:
    take(turbomind_copy, "input_meta=None", f"\n        meta = {read}")
    found = states(ARCHITECTURES[0])
    assert (found[MROPE], found[DEEPSTACK]) == expected


def test_the_names_elsewhere_in_the_engine_do_not_count(turbomind_copy: Path) -> None:
    file = turbomind_copy / "turbomind.py"
    file.write_text(file.read_text() + "\n\ndef other(mrope_position_ids, deepstack_embeds):\n    pass\n")
    assert states(ARCHITECTURES[0])[MROPE] == states(ARCHITECTURES[0])[DEEPSTACK] == "missing"


def test_an_engine_that_has_everything_is_not_refused(turbomind_copy: Path) -> None:
    take(turbomind_copy, "mrope_position_ids=None, deepstack_embeds=None")
    added = ", ".join(f"{architecture}='qwen3-vl'" for architecture in ARCHITECTURES)
    change(turbomind_copy / "supported_models.py", "SUPPORTED_ARCHS = dict(", f"SUPPORTED_ARCHS = dict({added}, ")
    for architecture in ARCHITECTURES:
        assert set(states(architecture).values()) == {"have"}
        assert turbomind_refusal(architecture) is None


@pytest.mark.parametrize("sample", ["tiny_qwen3_vl", "tiny_qwen3_vl_moe"])
def test_a_pipeline_refuses_at_the_start(sample: str, request: pytest.FixtureRequest) -> None:
    import lmdeploy

    install()
    for config in (None, lmdeploy.TurbomindEngineConfig(tp=1)):
        with pytest.raises(UnsupportedBackendError, match=r"cannot run Qwen3VL.*mrope.*deepstack.*PytorchEngineConfig"):
            lmdeploy.pipeline(str(request.getfixturevalue(sample)), backend_config=config)


@pytest.mark.parametrize("sample", ["tiny_qwen3_vl", "tiny_qwen3_vl_moe"])
def test_the_doctor_says_so(sample: str, request: pytest.FixtureRequest) -> None:
    report = diagnose(str(request.getfixturevalue(sample)))
    lines = {line.what: line for line in report if line.section == "TurboMind language half"}
    assert lines[EMBEDDINGS].state == "have"
    assert lines[MROPE].state == lines[DEEPSTACK].state == "missing"
    (verdict,) = (line for what, line in lines.items() if what.endswith("end to end"))
    assert verdict.state == "missing"
    assert f"it lacks a language model for {verdict.what.split()[0]}; {MROPE}; {DEEPSTACK};" in verdict.detail
