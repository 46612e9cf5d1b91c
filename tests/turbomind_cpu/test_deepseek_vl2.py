"""DeepSeek-VL2 on the released TurboMind, over stand-ins for CUDA: its answers are transformers', by every entry."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from turbomind_cpu.deepseek_vl2_widths import LAYERS
from turbomind_cpu.rig import Rig

from turbovit.benchmarks.turbomind_answers import CHUNK, LANGUAGES, conversations
from turbovit.export.sample_deepseek_vl2 import _language_shapes
from turbovit.lmdeploy_ext.turbomind_models.limits import dtype_on, dtype_problem, language_config

SPECIAL = {"a stop token", "beside a cancelled request", "features reach the engine"}
IN_CHUNKS = f"adjacent images, in chunks of {CHUNK}"
CAPABILITIES = ((7, 5), (8, 0), (8, 9), (9, 0), (12, 0))
RELEASED = ("deepseek-vl2-tiny", "deepseek-vl2-small", "deepseek-vl2")


def child(rig: Rig, target: str, *arguments: str, **options: Any) -> str:
    done = rig.run(target, *arguments, **options)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_answers_are_the_references(language: str, rig: Rig, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    target = "turbovit.benchmarks.turbomind_answers:command"
    said = child(rig, target, "--language", language, "--json", str(results))
    cases = json.loads(results.read_text())[language]
    assert {case["name"] for case in cases} == {*conversations(), *SPECIAL, IN_CHUNKS}
    assert [case["name"] for case in cases if not case["passed"]] == []
    assert {case["name"]: len(case["tokens"]) for case in cases if case["name"] in conversations()} == dict.fromkeys(
        conversations(), 6
    )
    assert f"{language}, three images: passed; 1271 tokens in, " in said


@pytest.fixture(scope="module")
def entries(cpu_rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("entries")
    child(cpu_rig, "turbomind_cpu.deepseek_vl2_entries:main", str(folder), str(folder / "results.json"))
    return json.loads((folder / "results.json").read_text())


@pytest.mark.slow
def test_a_pipeline_is_on_turbomind_and_answers_as_the_reference(entries: dict[str, Any]) -> None:
    found = entries["pipeline"]
    assert (found["engine"], found["dtype"]) == ("TurboMind", "bfloat16")
    assert {name: case["passed"] for name, case in found["cases"].items()} == dict.fromkeys(found["cases"], True)
    assert len(found["cases"]) == 3


@pytest.mark.slow
def test_prefix_caching_is_off_though_it_was_asked_for(entries: dict[str, Any]) -> None:
    """Its blocks are known by token ids, which are the same for every image."""
    assert entries["pipeline"]["prefix caching"] is False


@pytest.mark.slow
def test_the_server_answers_and_streams_what_the_pipeline_does(entries: dict[str, Any]) -> None:
    found = entries["server"]
    assert "error" not in found
    assert found["lines"][0] == "backend: turbomind"
    for name, case in entries["pipeline"]["cases"].items():
        # LMDeploy holds back a character whose last bytes have not come.
        assert found[name]["text"] == found[name]["streamed"] == case["decoded"].rstrip("\N{REPLACEMENT CHARACTER}")
        assert found[name]["pieces"] > 1


@pytest.mark.slow
def test_starts_that_cannot_work_raise_and_later_ones_do(entries: dict[str, Any]) -> None:
    found = entries["failed starts"]
    assert found["pipeline"].startswith("ValueError: the installed LMDeploy's TurboMind cannot run DeepseekVLV2")
    assert found["engine"] == "ValueError: TurboMind cannot run this DeepSeek-VL2: its n_group is 8, expected None or 1"
    assert "ValueError" in found["quantised"]
    assert "would be read as awq" in found["quantised"]
    assert found["tensor missing"] == "KeyError: 'language.model.norm.weight'"
    assert found["V2-Lite"].startswith("ValueError: turbovit's language half for TurboMind is DeepSeek-VL2's")
    assert found["V2-Lite's backend"] == "pytorch"
    assert found["saved again's backend"] == "turbomind"


@pytest.fixture(scope="module")
def widths(
    cpu_rig: Rig, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[tuple[int, int]], dict[str, Any]]:
    """By compute capability: the wheel's plans, and what became of the released models' tensors."""
    folder = tmp_path_factory.mktemp("widths")
    (folder / "models.json").write_text(json.dumps({name: released(data, name) for name in RELEASED}))

    @cache
    def of(capability: tuple[int, int]) -> dict[str, Any]:
        number = "".join(map(str, capability))
        results = folder / f"{number}.json"
        files = str(folder / "models.json"), str(results)
        child(cpu_rig, "turbomind_cpu.deepseek_vl2_widths:main", *files, environment={"TURBOMIND_CPU_SM": number})
        return json.loads(results.read_text())

    return of


def released(data: Path, name: str) -> dict[str, Any]:
    """A released config cut to a few layers, and the shapes of its language half's tensors."""
    config = json.loads((data / "realdata/deepseek_vl2" / name / "config.json").read_text())
    config["language_config"]["num_hidden_layers"] = LAYERS
    shapes = _language_shapes(language_config(config).to_dict())
    index = data / "realdata/deepseek_vl2" / name / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"]
        deep = tuple(f"language.model.layers.{layer}." for layer in range(LAYERS, 30))
        assert {one for one in names if one.startswith("language.") and not one.startswith(deep)} == set(shapes)
        shapes |= {one: (1,) for one in names if not one.startswith("language.")}
    return {"config": config, "shapes": shapes}


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_plans_are_found_or_refused_as_the_limits_say(
    capability: tuple[int, int], widths: Callable[[tuple[int, int]], dict[str, Any]]
) -> None:
    found = widths(capability)
    for dtype, plan in found["plans"].items():
        assert all(plan.values()) == (dtype_problem(dtype, capability) is None)
        for built in found[dtype].values():
            assert ("raised" in built) != all(plan.values())
            assert not plan["dense"] or "raised" not in built or "no kernels for experts" in built["raised"]
    chosen = dtype_on(capability, "auto", "bfloat16")
    assert all(found["plans"][chosen].values())


@pytest.mark.slow
def test_every_tensor_of_a_released_model_is_consumed_once(
    widths: Callable[[tuple[int, int]], dict[str, Any]],
) -> None:
    """A second time would find it gone; what is left is the vision half's."""
    found = widths((8, 0))["bfloat16"]
    vision = ("vision.", "projector.", "image_newline", "view_seperator")
    for name in RELEASED:
        assert [one for one in found[name]["left"] if not one.startswith(vision)] == []
    tiny, small, largest = (found[name] for name in RELEASED)
    assert tiny["attention"] == {"w_qkv": [1280, 3 * 1280], "wo": [1280, 1280]}
    for model, hidden, heads in ((small, 2048, 16), (largest, 2560, 32)):
        projections = {"q_proj": [hidden, heads * 576], "kv_a_proj": [hidden, 576], "wo": [heads * 576, hidden]}
        assert model["attention"] == {**projections, "kv_a_layernorm": [512]}
    assert [model["experts"] for model in (tiny, small, largest)] == [64, 64, 72]
    assert [model["bias"] for model in (tiny, small, largest)] == [[], [], [72]]
