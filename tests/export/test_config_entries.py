"""Every entry of a checkpoint's JSON files that a tower reads: of another kind, it is refused by file and name."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from turbovit.engines.errors import CheckpointError, UnsupportedModelError
from turbovit.engines.families import architecture_from_config, distinct_families, family_from_name, load
from turbovit.export.plan import plan_build
from turbovit.export.tower import Tower

FAMILIES = [row.name for row in distinct_families()]
LEFT_OUT = object()
Path_ = tuple[str, ...]
# What may be null: newer transformers write it so where an older entry says it.
MAY_BE_NULL = {"rope_parameters"}
MAY_BE_NEGATIVE = {"image_mean"}
MAY_BE_EMPTY = {"deepstack_visual_indexes"}


class Recorded(dict):  # type: ignore[type-arg]
    """An object that remembers which of its entries, and of those below, were asked for."""

    def __init__(self, entries: dict[str, Any], read: set[Path_], path: Path_ = ()):
        below = {n: Recorded(v, read, (*path, n)) if isinstance(v, dict) else v for n, v in entries.items()}
        super().__init__(below)
        self.read, self.path = read, path

    def __getitem__(self, name: str) -> Any:
        self.read.add((*self.path, name))
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add((*self.path, name))
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.read.add((*self.path, str(name)))
        return super().__contains__(name)


class Files:
    """What a family's tower reads of its tiny sample: config.json, and the image processor's settings."""

    def __init__(self, family: str, folder: Path):
        self.tower: type[Tower] = load(family_from_name(family).tower)
        self.parts = [json.loads((folder / "config.json").read_text()), self.tower.image_processor(folder)]

    def understood(self, parts: Sequence[dict[str, Any]]) -> Any:
        spec = self.tower.spec_from_config(*parts)
        return spec, self.tower.facts(_Described(spec), parts[0])  # type: ignore[arg-type]

    def read(self) -> Iterator[tuple[int, Path_]]:
        for number in range(2):
            read: set[Path_] = set()
            parts = list(self.parts)
            parts[number] = Recorded(parts[number], read)
            self.understood(parts)
            yield from ((number, path) for path in sorted(read))

    def changed(self, number: int, path: Path_, value: Any) -> list[dict[str, Any]]:
        parts = copy.deepcopy(self.parts)
        *above, name = path
        place = parts[number]
        for part in above:
            place = place[part]
        if value is LEFT_OUT:
            place.pop(name, None)
        else:
            place[name] = value
        return parts


class _Described:
    """A tower without its modules: its facts need the spec alone."""

    def __init__(self, spec: Any):
        self.spec = spec


@pytest.fixture(params=FAMILIES)
def files(request: pytest.FixtureRequest) -> Files:
    return Files(request.param, request.getfixturevalue(f"tiny_{request.param}"))


def test_what_is_read_is_known_to_this_test(files: Files) -> None:
    read = [path[-1] for _, path in files.read()]
    assert len(read) > 12
    assert {"vision_config", "image_mean", "image_std"} <= set(read)


@pytest.mark.parametrize("value", [None, "text", -7, []], ids=str)
def test_an_entry_of_another_kind_is_refused_by_file_and_name(files: Files, value: Any) -> None:
    for number, path in files.read():
        may_be = (
            (value is None and (number == 1 or path[-1] in MAY_BE_NULL))
            or (value == -7 and path[-1] in MAY_BE_NEGATIVE)
            or (value == [] and path[-1] in MAY_BE_EMPTY)
        )
        if may_be:
            continue
        with pytest.raises((CheckpointError, UnsupportedModelError)) as raised:
            files.understood(files.changed(number, path, value))
        message = str(raised.value)
        assert path[-1] in message or (path[-1] == "size" and "resizes to" in message), (path, message)
        assert ("config.json" if number == 0 else "processor") in message, (path, message)


@pytest.mark.parametrize("value", [None, LEFT_OUT, {}], ids=["null", "left out", "{}"])
def test_an_entry_that_is_not_there_has_its_default_or_is_named(files: Files, value: Any) -> None:
    for number, path in files.read():
        message = refusal(files, files.changed(number, path, value))
        assert any(words in message for words in (path[-1], "makes no sense", "the vision tower")) or not message, path


def refusal(files: Files, parts: Sequence[dict[str, Any]]) -> str:
    """Why they are not taken; empty where they are."""
    try:
        files.understood(parts)
    except (CheckpointError, UnsupportedModelError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_vision_half_builds_whatever_the_language_half_says(
    family: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    whole = request.getfixturevalue(f"tiny_{family}")
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    config = json.loads((folder / "config.json").read_text())
    half = "language_config" if family == "deepseek_vl2" else "text_config"
    kept = {name: config[half][name] for name in ("hidden_size", "architectures") if name in config[half]}
    config[half] = dict.fromkeys(config[half], "nonsense") | kept
    (folder / "config.json").write_text(json.dumps(config))
    if family != "deepseek_vl2":
        from transformers import AutoConfig

        with pytest.raises(Exception, match=r"nonsense|str|expected|not"):
            AutoConfig.from_pretrained(folder)
    plans = [plan_build(checkpoint, "fp32", (), {}) for checkpoint in (whole, folder)]
    assert plans[0].manifest.identity == plans[1].manifest.identity


def test_the_language_half_of_llama_guard_lacks_its_moe_layers(tiny_llama4: Path) -> None:
    """As its released config.json: transformers stops at it."""
    from transformers import Llama4Config

    config = json.loads((tiny_llama4 / "config.json").read_text())
    tower = Files("llama4", tiny_llama4)
    config["text_config"]["interleave_moe_layer_step"] = 0
    with pytest.raises(Exception, match=r"range\(\) arg 3 must not be zero|zero"):
        Llama4Config.from_dict(copy.deepcopy(config))
    assert tower.understood([config, tower.parts[1]]) == tower.understood(tower.parts)


@pytest.mark.parametrize("named", [None, "Gemma3ForConditionalGeneration", 7, [], [None], [7], {"a": "b"}], ids=str)
def test_architectures_of_another_kind_name_none(named: Any) -> None:
    assert architecture_from_config({"architectures": named}) is None
    config = {"architectures": named, "vision_config": {}, "language_config": {"architectures": named}}
    assert architecture_from_config(config) is None
