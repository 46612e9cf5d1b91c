"""What is hashed is what was loaded, whatever happens to the checkpoint in between; equal times are no identity."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_changes import as_second_version, rewrite, same_tower, with_other_vision
from tower_checks import tower_of

from turbovit.engines import store as store_module
from turbovit.engines.bundle import Bundle, Engine
from turbovit.engines.encoder import TORCH_ENGINE
from turbovit.engines.errors import CheckpointError
from turbovit.export import build as build_module
from turbovit.export.build import build
from turbovit.export.checkpoint import Checkpoint, open_checkpoint
from turbovit.export.plan import Plan, find_bundle, plan_build
from turbovit.export.torch_runner import TorchRunner
from turbovit.export.tower import Tower, load_tower
from turbovit.export.weights import SINGLE

CHANGED = "the checkpoint changed while it was read"


def planned(folder: Path) -> Plan:
    return plan_build(folder, "auto", ["onnxruntime"], {})


def identity(folder: Path) -> str:
    return planned(folder).manifest.identity


def loaded(plan: Plan) -> Tower:
    return load_tower(plan.tower, plan.spec, plan.checkpoint)


@pytest.fixture
def second(any_checkpoint: Path, tmp_path: Path) -> Path:
    """The same model with two other values in its vision weights."""
    return as_second_version(any_checkpoint, tmp_path / "second")


def put(source: Path, target: Path) -> None:
    """Replace a file in one step."""
    shutil.copy(source, target.with_name("new"))
    os.replace(target.with_name("new"), target)


def during_reading(monkeypatch: pytest.MonkeyPatch, then: Callable[[], Any]) -> None:
    """Have `then` done once, after the second tensor that is read from now on."""
    original, count = Checkpoint._read, iter(range(1, 1 << 30))

    def read(self: Checkpoint, opened: dict[str, Any], name: str, method: str) -> Any:
        result = original(self, opened, name, method)
        if method == "get_tensor" and next(count) == 2:
            then()
        return result

    monkeypatch.setattr(Checkpoint, "_read", read)


@pytest.mark.parametrize("when", ["never", "while it is hashed", "before it loads", "while it loads"])
def test_a_link_that_moves_is_refused(
    any_checkpoint: Path, second: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Until then all is read of the folder that it led to at first; a folder above may be the link."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / any_checkpoint.name).symlink_to(any_checkpoint)
    (tmp_path / "latest").symlink_to(tmp_path / "runs")
    latest = tmp_path / "latest" / any_checkpoint.name
    expected = identity(any_checkpoint)

    def move() -> None:
        latest.unlink()
        latest.symlink_to(second)

    shutil.rmtree(tmp_path / "home")  # so that it is read, not known
    if when == "while it is hashed":
        during_reading(monkeypatch, move)
    plan = planned(latest)
    assert plan.manifest.source.name == str(any_checkpoint)
    assert plan.manifest.identity == expected
    if when == "before it loads":
        move()
    if when == "while it loads":
        during_reading(monkeypatch, move)
    moved = f"{CHANGED}: {latest} led to {any_checkpoint}, and leads to {second} now"
    if when == "never":
        assert same_tower(loaded(plan), tower_of(any_checkpoint))
    else:
        with pytest.raises(CheckpointError, match=moved):
            loaded(plan)
        assert identity(latest) == identity(second) != expected


def test_a_link_that_moves_after_the_weights_were_read_leaves_no_bundle(
    tiny_gemma3: Path, store: Path, tmp_path: Path
) -> None:
    latest, second = tmp_path / "latest", as_second_version(tiny_gemma3, tmp_path / "second")
    latest.symlink_to(tiny_gemma3)

    def overtake(step: str) -> None:
        if step == "hashing the files":
            latest.unlink()
            latest.symlink_to(second)

    with pytest.raises(CheckpointError, match=f"{CHANGED}: {latest} led to {tiny_gemma3}"):
        build(latest, report=overtake)
    assert [path for path in store.iterdir() if path.suffix != ".lock"] == []


def test_weights_behind_a_link_are_those_that_were_hashed(any_checkpoint: Path, second: Path, tmp_path: Path) -> None:
    expected = tower_of(any_checkpoint)
    blob = tmp_path / "blob"
    (any_checkpoint / SINGLE).rename(blob)
    (any_checkpoint / SINGLE).symlink_to(blob)
    plan = planned(any_checkpoint)
    (any_checkpoint / SINGLE).unlink()
    (any_checkpoint / SINGLE).symlink_to(second / SINGLE)
    assert same_tower(loaded(plan), expected)
    assert identity(any_checkpoint) == identity(second)


@pytest.mark.parametrize("when", ["before", "while"])
def test_weights_that_are_replaced_after_hashing_are_refused(
    any_checkpoint: Path, second: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    plan = planned(any_checkpoint)

    def overwrite() -> None:
        (any_checkpoint / SINGLE).write_bytes((second / SINGLE).read_bytes())  # the open file itself, not its name

    if when == "before":
        put(second / SINGLE, any_checkpoint / SINGLE)
    else:
        during_reading(monkeypatch, overwrite)
    with pytest.raises(CheckpointError, match=f"{CHANGED}: the vision weights in {any_checkpoint} have sha256 "):
        loaded(plan)
    assert identity(any_checkpoint) == identity(second)
    assert same_tower(loaded(planned(any_checkpoint)), tower_of(second))


def test_weights_that_are_replaced_while_they_are_hashed_are_not_believed(
    any_checkpoint: Path, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    during_reading(monkeypatch, lambda: (any_checkpoint / SINGLE).write_bytes((second / SINGLE).read_bytes()))
    mixed = planned(any_checkpoint)
    with pytest.raises(CheckpointError, match=CHANGED):
        loaded(mixed)
    assert identity(any_checkpoint) == identity(second)


def test_a_tower_does_not_change_with_the_file_that_it_came_from(any_checkpoint: Path, second: Path) -> None:
    tower, again = tower_of(any_checkpoint), tower_of(any_checkpoint)
    (any_checkpoint / SINGLE).write_bytes((second / SINGLE).read_bytes())
    assert same_tower(tower, again)
    assert not same_tower(tower, tower_of(any_checkpoint))


def test_a_build_that_is_overtaken_leaves_nothing(any_checkpoint: Path, second: Path, store: Path) -> None:
    def overtake(step: str) -> None:
        if step == "loading the vision weights":
            put(second / SINGLE, any_checkpoint / SINGLE)

    with pytest.raises(CheckpointError, match=CHANGED):
        build(any_checkpoint, report=overtake)
    assert [path for path in store.iterdir() if path.suffix != ".lock"] == []


def note_in_processor_files(checkpoint: Path) -> None:
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (checkpoint / name).is_file():
            text = json.loads((checkpoint / name).read_text(encoding="utf-8"))
            (checkpoint / name).write_text(json.dumps(text | {"note": "another"}), encoding="utf-8")


def test_processor_files_that_are_replaced_after_planning_are_refused(
    any_checkpoint: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = build_module._copy_processor_files

    def overtaken(source: Path, target: Path) -> None:
        note_in_processor_files(any_checkpoint)
        copy(source, target)

    monkeypatch.setattr(build_module, "_copy_processor_files", overtaken)
    with pytest.raises(CheckpointError, match=f"{CHANGED}: the processor files in {any_checkpoint}"):
        build(any_checkpoint)
    assert [path for path in store.iterdir() if path.suffix != ".lock"] == []


def test_processor_files_that_are_replaced_later_have_no_say(any_checkpoint: Path, store: Path) -> None:
    expected = identity(any_checkpoint)

    def overtake(step: str) -> None:
        if step == "loading the vision weights":
            note_in_processor_files(any_checkpoint)

    bundle = build(any_checkpoint, report=overtake).bundle
    assert bundle.manifest.identity == expected != identity(any_checkpoint)
    assert not any("note" in path.read_text(encoding="utf-8") for path in (bundle.path / "processor").iterdir())


def test_a_second_version_under_the_same_name_size_and_times_is_another(any_checkpoint: Path, second: Path) -> None:
    """As in a Nix store, or a reproducible image."""
    for folder in (any_checkpoint, second):
        os.utime(folder / SINGLE, (1, 1))
    first, other = identity(any_checkpoint), identity(second)
    assert (any_checkpoint / SINGLE).stat().st_size == (second / SINGLE).stat().st_size
    os.replace(second / SINGLE, any_checkpoint / SINGLE)
    assert (any_checkpoint / SINGLE).stat().st_mtime == 1
    assert identity(any_checkpoint) == other != first


def test_the_old_bundle_is_not_found_for_the_second_version(
    tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, store: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_gemma3, tmp_path / "model")
    shutil.copytree(tiny_gemma3_bundle.path, store / "there")
    os.utime(folder / SINGLE, (1, 1))
    assert find_bundle(folder) == store / "there"
    rewrite(folder, with_other_vision(folder))
    os.utime(folder / SINGLE, (1, 1))
    assert find_bundle(folder) is None


def test_weights_that_rot_are_not_loaded_and_not_believed_again(
    any_checkpoint: Path, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rotten = identity(any_checkpoint), identity(second)
    known = store_module._fingerprint(any_checkpoint / SINGLE)
    monkeypatch.setattr(store_module, "_fingerprint", lambda path: known)  # nothing is written, as far as anyone sees
    put(second / SINGLE, any_checkpoint / SINGLE)
    plan = planned(any_checkpoint)
    assert plan.manifest.identity == before
    with pytest.raises(CheckpointError, match=f"{CHANGED}.*run this again"):
        loaded(plan)
    assert identity(any_checkpoint) == rotten


def test_the_torch_runner_loads_what_it_compared(
    tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from turbovit.export import torch_runner

    folder = shutil.copytree(tiny_gemma3, tmp_path / "model")
    other = as_second_version(folder, tmp_path / "second")
    source = replace(tiny_gemma3_bundle.manifest.source, name=str(folder))
    bundle = Bundle(tiny_gemma3_bundle.path, replace(tiny_gemma3_bundle.manifest, source=source))
    original = torch_runner.source_from_checkpoint

    def compared(*arguments: Any) -> Any:
        found = original(*arguments)
        put(other / SINGLE, folder / SINGLE)
        return found

    monkeypatch.setattr(torch_runner, "source_from_checkpoint", compared)
    engine: Engine = TORCH_ENGINE
    with pytest.raises(CheckpointError, match=CHANGED):
        TorchRunner.open(bundle, engine, torch.device("cpu"))


def test_the_name_is_the_folder_without_links(tiny_gemma3: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tiny_gemma3)
    assert open_checkpoint(tmp_path / "link").name == str(tiny_gemma3.resolve())
