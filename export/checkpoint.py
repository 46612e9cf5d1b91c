"""A Hugging Face checkpoint: its config, and its vision tensors alone, streamed from safetensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from turbovit.engines.errors import CheckpointError
from turbovit.engines.families import architecture_from_config
from turbovit.engines.store import cached_digest, forget_digest
from turbovit.export.hub import SMALL_FILES, fetch, require_hub_id
from turbovit.export.weights import (
    INDEX,
    SERIES,
    SINGLE,
    damaged,
    missing_weights,
    read_json,
    require_files,
    vision_files,
    weight_maps,
)

Naming = Callable[[str], str]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder and config.

    What is loaded is what was hashed: tensors that have been hashed are compared when they are read again.

    Attributes:
        name: a hub id, or the folder's path.
        folder: without symbolic links, so that all that is read comes from one folder.
        reads: what stands for the set of weights to read, of `weight_maps`; None for the first.
        opened_as: the path that led to the folder; None for a hub id.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    reads: str | None = None
    opened_as: Path | None = None
    _stated: dict[str, str] = field(init=False, default_factory=dict, repr=False, compare=False)

    @property
    def architecture(self) -> str | None:
        """The config's architecture by the table of families; None where it names none."""
        return architecture_from_config(self.config)

    @cached_property
    def _weight_maps(self) -> dict[str, dict[str, str]]:
        return weight_maps(self.folder)

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Tensor name to the safetensors file (in `folder`) that holds it.

        Raises:
            CheckpointError: the folder has no safetensors, or their index or header is damaged.
        """
        return self._weight_maps[self.reads or next(iter(self._weight_maps))]

    @cached_property
    def _paths(self) -> dict[str, Path]:
        return {file: (self.folder / file).resolve() for file in set(self.weight_map.values())}

    def with_weights(self, is_vision: Callable[[str], bool]) -> Checkpoint:
        """The checkpoint with its vision weights there: those of a hub id are fetched now, of the same commit.

        Raises:
            CheckpointError: they cannot be had.
        """
        if self.name == str(self.folder):
            return self

        def missing(folder: Path) -> str | None:
            return missing_weights(folder, is_vision)

        shards = [SINGLE]
        if (self.folder / INDEX).is_file():
            shards += vision_files(weight_maps(self.folder).get(INDEX, {}), is_vision)
        fetch(self.name, [*SMALL_FILES, *shards], missing, self.folder)
        if not any((self.folder / file).is_file() for file in (SINGLE, INDEX)):
            fetch(self.name, [*SMALL_FILES, SERIES], missing, self.folder)
        return self

    def require_unmoved(self) -> None:
        """Make sure that the path that was opened still leads to this folder.

        Raises:
            CheckpointError: a link on its way leads elsewhere by now.
        """
        if self.opened_as is not None and self.opened_as.resolve() != self.folder:
            raise CheckpointError(
                f"the checkpoint changed while it was read: {self.opened_as} led to {self.folder}, and leads to "
                f"{self.opened_as.resolve()} now; leave it alone, and run this again, or name the folder that is meant"
            )

    def second_set(self, is_vision: Callable[[str], bool]) -> Checkpoint | None:
        """The same folder, read by the index, where it has a single file too and the index's files are there."""
        if self.reads is not None or len(self._weight_maps) == 1:
            return None
        files = vision_files(self._weight_maps[INDEX], is_vision)
        whole = files != [SINGLE] and all((self.folder / file).is_file() for file in files)
        return replace(self, reads=INDEX) if whole else None

    def vision_names(self, is_vision: Callable[[str], bool]) -> list[str]:
        """The names of the vision tensors, sorted."""
        return sorted(name for name in self.weight_map if is_vision(name))

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Read tensors one at a time, in the order of `names`, each into memory of its own.

        Raises:
            CheckpointError: a file is missing, cut short or lacks a tensor that the index says it has.
        """
        opened: dict[str, Any] = {}
        for name in names:
            yield name, self._read(opened, name, "get_tensor")

    def shapes(self, names: list[str]) -> dict[str, tuple[int, ...]]:
        """The shapes of `names`, from the files' headers alone."""
        opened: dict[str, Any] = {}
        return {name: tuple(self._read(opened, name, "get_slice").get_shape()) for name in names}

    def tensors_sha256(self, names: list[str], called: Naming = str) -> str:
        """Hash over names, dtypes, shapes and bytes of tensors; from the index where the files are unchanged.

        Args:
            names: as they stand in the files.
            called: the names that are hashed, and by which the tensors are put in order.
        """

        def compute() -> str:
            digest = hashlib.sha256()
            for _ in self._hashed(names, called, digest):
                pass
            return digest.hexdigest()

        key = self._key(names, called)
        files = [self._paths[file] for file in sorted({self.weight_map[name] for name in names})]
        try:
            self._stated[key] = cached_digest(key, files, compute)
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be read: {error}") from None
        return self._stated[key]

    def hashed_tensors(self, names: list[str], called: Naming = str) -> Iterator[tuple[str, torch.Tensor]]:
        """As `tensors`, in the order and by the names of `tensors_sha256`.

        Raises:
            CheckpointError: at the end, where the bytes were not those that `tensors_sha256` gave the hash of; or as
                `require_unmoved`.
        """
        digest = hashlib.sha256()
        yield from self._hashed(names, called, digest)
        self.require_unmoved()
        key, found = self._key(names, called), digest.hexdigest()
        expected = self._stated.setdefault(key, found)
        if found != expected:
            forget_digest(key)
            raise CheckpointError(
                f"the checkpoint changed while it was read: the vision weights in {self.folder} have sha256 "
                f"{found[:12]}..., expected {expected[:12]}...; leave it alone, and run this again"
            )

    def _hashed(self, names: list[str], called: Naming, digest: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors(sorted(names, key=called)):
            digest.update(f"{called(name)} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
            yield called(name), tensor

    def _key(self, names: list[str], called: Naming) -> str:
        listing = "\n".join(f"{name} {called(name)} {self.weight_map[name]}" for name in names)
        return f"tensors:{self.folder}:{hashlib.sha256(listing.encode()).hexdigest()}"

    def _read(self, opened: dict[str, Any], name: str, method: str) -> Any:
        from safetensors import SafetensorError, safe_open

        file = self.weight_map[name]
        try:
            if file not in opened:
                # Not mapped: what is read does not change any more, and takes its memory once.
                opened[file] = safe_open(self._paths[file], framework="pt", backend="pread")
            return getattr(opened[file], method)(name)
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.folder} lacks {file}, which holds the tensor {name}: download it again"
            ) from None
        except (SafetensorError, OSError) as error:
            raise damaged(self.folder / file, error, f"reading {name}: ") from None


def open_checkpoint(model: str | Path, is_vision: Callable[[str], bool] | None = None) -> Checkpoint:
    """Open a folder, or fetch what is needed of a hub id.

    Args:
        model: a folder, or a hub id such as ``google/gemma-3-4b-it``.
        is_vision: which tensors are wanted; of a hub id only the shards that hold one are downloaded. None
            downloads no weights.

    Raises:
        CheckpointError: no such folder or id, or no config.
    """
    folder, opened_as = Path(model), None
    if folder.is_dir():
        opened_as, folder = folder.absolute(), folder.resolve()
        name = str(folder)
    else:
        name = str(model)
        require_hub_id(name)
        folder = fetch(name, SMALL_FILES, _missing_config).resolve()
    require_files(folder)
    checkpoint = Checkpoint(name, folder, read_json(folder / "config.json"), opened_as=opened_as)
    return checkpoint.with_weights(is_vision) if is_vision else checkpoint


def _missing_config(folder: Path) -> str | None:
    return None if (folder / "config.json").is_file() else "config.json"


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
