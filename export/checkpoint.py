"""A Hugging Face checkpoint: its config, and its vision tensors alone, streamed from safetensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from turbovit.engines.errors import CheckpointError
from turbovit.engines.families import architecture_from_config
from turbovit.engines.store import cached_digest

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Everything of a checkpoint but its weights: configs, processor and tokenizer files.
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder and config.

    Attributes:
        name: what the user called it: a folder or a hub id.
    """

    name: str
    folder: Path
    config: dict[str, Any]

    @property
    def architecture(self) -> str | None:
        """The config's architecture by the table of families; None where it names none."""
        return architecture_from_config(self.config)

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Tensor name to the safetensors file (in `folder`) that holds it.

        Raises:
            CheckpointError: the folder has no safetensors, or their index or header is damaged.
        """
        return _weight_map(self.folder)

    def vision_names(self, is_vision: Callable[[str], bool]) -> list[str]:
        """The names of the vision tensors, sorted."""
        return sorted(name for name in self.weight_map if is_vision(name))

    def tensors(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Read tensors one at a time, in the order of `names`.

        Raises:
            CheckpointError: a file is missing, cut short or lacks a tensor that the index says it has.
        """
        opened: dict[Path, Any] = {}  # ends with the iteration: an open file keeps its pages in this process's memory
        for name in names:
            yield name, self._read(opened, name, "get_tensor")

    def shapes(self, names: list[str]) -> dict[str, tuple[int, ...]]:
        """The shapes of `names`, from the files' headers alone."""
        opened: dict[Path, Any] = {}
        return {name: tuple(self._read(opened, name, "get_slice").get_shape()) for name in names}

    def tensors_sha256(self, names: list[str]) -> str:
        """Hash over names, dtypes, shapes and bytes of `names`; from the index where the files are unchanged."""

        def compute() -> str:
            digest = hashlib.sha256()
            for name, tensor in self.tensors(names):
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
                digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
            return digest.hexdigest()

        folder = self.folder.resolve()
        files = [folder / file for file in sorted({self.weight_map[name] for name in names})]
        listing = hashlib.sha256("\n".join(names).encode()).hexdigest()
        return cached_digest(f"tensors:{folder}:{listing}", files, compute)

    def _read(self, opened: dict[Path, Any], name: str, method: str) -> Any:
        from safetensors import SafetensorError, safe_open

        path = self.folder / self.weight_map[name]
        try:
            if path not in opened:
                opened[path] = safe_open(path, framework="pt")
            return getattr(opened[path], method)(name)
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.folder} lacks {path.name}, which holds the tensor {name}: download it again"
            ) from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is damaged or cut short (reading {name}: {error}): download it again"
            ) from None


def open_checkpoint(model: str | Path, is_vision: Callable[[str], bool] | None = None) -> Checkpoint:
    """Open a folder, or fetch what is needed of a hub id.

    Args:
        model: a folder, or a hub id such as ``google/gemma-3-4b-it``.
        is_vision: which tensors are wanted; of a hub id only the shards that hold one are downloaded. None
            downloads no weights.

    Raises:
        CheckpointError: no such folder or id, or no config.
    """
    folder = Path(model)
    if not folder.is_dir():
        folder = _download(str(model), is_vision)
    config = read_json(folder / "config.json")
    return Checkpoint(str(model), folder, config)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint.

    Raises:
        CheckpointError: it is missing or no JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}: a Hugging Face checkpoint folder is expected"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a JSON {type(data).__name__}, expected an object")
    return data


def image_processor_config(folder: Path) -> dict[str, Any]:
    """The image processor's settings.

    Raises:
        CheckpointError: the checkpoint has none.
    """
    config = _processor_config(folder, "image_processor", "preprocessor_config.json")
    if config is None:
        raise CheckpointError(
            f"{folder} has no preprocessor_config.json: download the processor files of the model too"
        )
    return config


def video_processor_config(folder: Path) -> dict[str, Any] | None:
    """The video processor's settings; None where the checkpoint has none."""
    return _processor_config(folder, "video_processor", "video_preprocessor_config.json")


def _processor_config(folder: Path, key: str, file: str) -> dict[str, Any] | None:
    """Nested in a newer processor_config.json, else in a file of its own; transformers looks in the same order."""
    if (folder / "processor_config.json").is_file():
        nested = read_json(folder / "processor_config.json").get(key)
        if isinstance(nested, dict):
            return nested
    return read_json(folder / file) if (folder / file).is_file() else None


def _weight_map(folder: Path) -> dict[str, str]:
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{folder / INDEX} has no weight_map of file names: download it again")
        return weight_map
    if not (folder / SINGLE).is_file():
        found = sorted(path.name for path in folder.glob("*.bin")) or "no weights"
        raise CheckpointError(f"{folder} has neither {INDEX} nor {SINGLE} (found {found}): convert it to safetensors")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / SINGLE} is damaged or cut short ({error}): download it again") from None


def _download(model: str, is_vision: Callable[[str], bool] | None) -> Path:
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(f"there is no folder {model!r}, and it is no hub id (owner/name) either")
    folder = _fetch(model, SMALL_FILES)
    if is_vision is None:
        return folder
    shards = {SINGLE}
    if (folder / INDEX).is_file():
        shards = {file for name, file in _weight_map(folder).items() if is_vision(name)}
    return _fetch(model, [*SMALL_FILES, *sorted(shards)])


def _fetch(model: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the hub's own errors, and whatever its HTTP library lets through
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"there is no folder {model!r}, and fetching it from the hub failed: {reason}") from error
