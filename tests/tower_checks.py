"""What the tests of several towers do with checkpoints: reading, changing a copy, and the exact map of tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from turbovit.engines.families import family_from_architecture, load
from turbovit.export.checkpoint import SINGLE, open_checkpoint
from turbovit.export.plan import PRECISIONS
from turbovit.export.to_onnx import onnx_from_tower, save_base_graph
from turbovit.export.tower import Tower, load_tower

T = TypeVar("T", bound=Tower)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def tower_from(tower: type[T], folder: Path) -> T:
    """The tower of a checkpoint."""
    checkpoint = open_checkpoint(folder)
    return load_tower(tower, tower.spec_from_config(checkpoint.config, tower.image_processor(folder)), checkpoint)


def tower_of(folder: Path) -> Tower:
    """As `tower_from`, of the family that the config names."""
    tower: type[Tower] = load(family_from_architecture(open_checkpoint(folder).architecture).tower)
    return tower_from(tower, folder)


def write_base_graph(tower: Tower, path: Path, precision: str) -> None:
    """Export a tower, which is in this precision already, with its weights beside the graph."""
    graph = onnx_from_tower(tower, tower.samples(0)[0], tower.outputs(PRECISIONS[precision]))
    save_base_graph(graph, path, f"{path.stem}.bin")


def changed_copy(source: Path, target: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> Path:
    """A copy of a checkpoint's config and processor files, and of its tensors with a change."""
    for path in source.glob("*config.json"):
        shutil.copy(path, target)
    save_file(dict(change(load_file(source / SINGLE))), target / SINGLE)
    return target


def assert_same_tensors(tower: type[Tower], one: Path, other: Path) -> None:
    """Two checkpoints give the same tower."""
    expected, got = (tower_from(tower, folder).state_dict() for folder in (one, other))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def assert_tensors_become_parameters(tower: type[Tower], spec: Any) -> None:
    """A checkpoint's tensors become the tower's parameters, each once and in its shape."""
    with torch.device("meta"):
        tensors = {name: torch.empty(shape) for name, shape in tower.tensor_shapes(spec).items()}
        expected = {name: tensor.shape for name, tensor in tower(spec).state_dict().items()}
    state = tower.state_from_tensors(spec, tensors)
    assert {name: tensor.shape for name, tensor in state.items()} == expected
