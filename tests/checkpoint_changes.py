"""Changes to a copy of a sample checkpoint that tests of several files make."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from turbovit.engines.families import family_from_architecture, load
from turbovit.export.checkpoint import open_checkpoint
from turbovit.export.tower import Tower
from turbovit.export.weights import INDEX, SINGLE

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def tower_class(folder: Path) -> type[Tower]:
    tower: type[Tower] = load(family_from_architecture(open_checkpoint(folder).architecture).tower)
    return tower


def vision_names(folder: Path) -> list[str]:
    return open_checkpoint(folder).vision_names(tower_class(folder).is_checkpoint_vision)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> None:
    """Replace the one weight file."""
    tensors = dict(change(load_file(folder / SINGLE)))
    save_file(tensors, folder / "new", {"format": "pt"})
    (folder / "new").rename(folder / SINGLE)


def with_other_vision(folder: Path) -> Callable[[dict[str, Tensor]], Mapping[str, Tensor]]:
    """One value of the first and one of the last vision tensor is another."""
    first, *_, last = vision_names(folder)
    return lambda tensors: tensors | {name: _changed(tensors[name]) for name in (first, last)}


def _changed(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[0] += 1
    return changed


def shard(folder: Path, tensors: Mapping[str, Tensor], index: bool = True) -> None:
    """Write tensors in two shards, by turns, beside what is there."""
    files = {name: SHARDS[number % 2] for number, name in enumerate(sorted(tensors))}
    for file in SHARDS:
        save_file({name: tensors[name] for name in files if files[name] == file}, folder / file, {"format": "pt"})
    if index:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def sharded(folder: Path, index: bool = True) -> None:
    """Put two shards in the place of the one file."""
    shard(folder, load_file(folder / SINGLE), index)
    (folder / SINGLE).unlink()


def as_pointer(path: Path) -> None:
    """What a clone without Git LFS has in a large file's place."""
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4967215360\n")


def as_second_version(folder: Path, target: Path) -> Path:
    """A copy with other vision weights."""
    shutil.copytree(folder, target)
    rewrite(target, with_other_vision(target))
    return target


def same_tower(one: Tower, other: Tower) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())
