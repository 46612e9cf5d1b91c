"""Which files of a folder hold a checkpoint's weights, by the rules of the loaders that read the other half.

transformers (`_get_resolved_checkpoint_files`) and LMDeploy's PyTorch engine (`ModelWeightLoader`) read
``model.safetensors`` and look at an index only where there is none; LMDeploy's TurboMind (`create_checkpoint`) reads
the index first. `save_pretrained` leaves the index of the shards that it replaced, so that a folder may have both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from turbovit.engines.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SERIES = "model-*-of-*.safetensors"  # shards, as `save_pretrained` names them

_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_ADAPTER = "adapter_config.json"
_POINTER = b"version https://git-lfs.github.com/spec/v1"
_POINTER_SIZE = 1024  # no pointer is larger
# What a vision half or the language half beside it cannot do without, and Git LFS may hold.
_NEEDED_FILES = ("*config.json", "tokenizer*", "chat_template*", INDEX)


def weight_maps(folder: Path) -> dict[str, dict[str, str]]:
    """Every set of weights in `folder`: what stands for it, and its tensors' names and the file that holds each.

    The first is the one to read. A second one, that of the index, is there where the folder has both; whether its files
    are there too is not looked at.

    Raises:
        CheckpointError: there is none, or a file that says what is in it is damaged.
    """
    maps: dict[str, dict[str, str]] = {}
    if (folder / SINGLE).is_file():
        maps[SINGLE] = _map_from_headers(folder, [SINGLE])
    if (folder / INDEX).is_file():
        if not maps:
            return {INDEX: _map_from_index(folder)}
        with suppress(CheckpointError):  # who reads the single file never sees the index
            maps[INDEX] = _map_from_index(folder)
    return maps or {SERIES: _map_from_headers(folder, _files_without_index(folder))}


def vision_files(weight_map: Mapping[str, str], is_vision: Callable[[str], bool]) -> list[str]:
    """The files that hold vision tensors, sorted."""
    return sorted({file for name, file in weight_map.items() if is_vision(name)})


def missing_weights(folder: Path, is_vision: Callable[[str], bool]) -> str | None:
    """The first file that the vision weights lack to be read, or None."""
    if (folder / SINGLE).is_file():
        return None
    if not (folder / INDEX).is_file():
        return None if any(folder.glob(SERIES)) else SINGLE
    files = vision_files(_map_from_index(folder), is_vision)
    return next((file for file in files if not (folder / file).is_file()), None)


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
        raise CheckpointError(_pointer(path) or f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a JSON {type(data).__name__}, expected an object")
    return data


def require_files(folder: Path) -> None:
    """Make sure that a folder is a checkpoint's: it has a config, and no small file is a Git LFS pointer.

    Raises:
        CheckpointError: it is something else; says what, and what to do.
    """
    if not (folder / "config.json").is_file():
        reason = _something_else(folder) or f"{folder} has no config.json: a Hugging Face checkpoint folder is expected"
        raise CheckpointError(reason)
    for pattern in _NEEDED_FILES:
        for path in sorted(folder.glob(pattern)):
            pointer = _pointer(path)
            if pointer:
                raise CheckpointError(pointer)


def damaged(path: Path, error: Exception, doing: str = "") -> CheckpointError:
    """The error where a safetensors file cannot be read; `doing` says what for."""
    return CheckpointError(
        _pointer(path) or f"{path} is damaged or cut short ({doing}{error}): download it again",
    )


def _map_from_index(folder: Path) -> dict[str, str]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX} has no weight_map of file names: download it again")
    return weight_map


def _map_from_headers(folder: Path, files: Iterable[str]) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    found: dict[str, str] = {}
    for name in files:
        try:
            with safe_open(folder / name, framework="pt") as file:
                tensors = file.keys()
        except (SafetensorError, OSError) as error:
            raise damaged(folder / name, error) from None
        twice = next((tensor for tensor in tensors if tensor in found), None)
        if twice is not None:
            raise CheckpointError(
                f"{folder} has no {INDEX}, and both {found[twice]} and {name} hold the tensor {twice}: delete the "
                f"files that are not the model's"
            )
        found |= dict.fromkeys(tensors, name)
    return found


def _files_without_index(folder: Path) -> list[str]:
    """As TurboMind takes them: ``model*.safetensors``, or else all but a LoRA adapter's."""
    named = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_"))
    files = [name for name in named if name.startswith("model")] or named
    if not files:
        weights = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind)) or "no weights"
        raise CheckpointError(
            _something_else(folder)
            or f"{folder} has neither {INDEX} nor {SINGLE} (found {weights}): convert it to safetensors (load it with "
            f"transformers, then save_pretrained)"
        )
    numbered = [match for match in map(_NUMBERED.fullmatch, files) if match]
    for stem, total in sorted({(match[1], match[3]) for match in numbered}):
        series = (f"{stem}-{number:0{len(total)}d}-of-{total}.safetensors" for number in range(1, int(total) + 1))
        missing = [name for name in series if name not in files]
        if missing:
            raise CheckpointError(
                f"{folder} has no {INDEX}, and of its series of {int(total)} files it lacks {', '.join(missing)}: "
                f"download what is missing"
            )
    return files


def _something_else(folder: Path) -> str | None:
    """What a folder without a model's weights or config is, where it is something that is known."""
    if (folder / _ADAPTER).is_file():
        base = read_json(folder / _ADAPTER).get("base_model_name_or_path") or "its base model"
        return (
            f"{folder} holds a LoRA adapter ({_ADAPTER}) and no model: merge it into {base} first (peft's "
            f"merge_and_unload), save that with its processor and tokenizer files, and build from there"
        )
    gguf = sorted(path.name for path in folder.glob("*.gguf"))
    if gguf:
        return f"{folder} holds GGUF files ({', '.join(gguf)}): the original checkpoint, in safetensors, is expected"
    return None


def _pointer(path: Path) -> str | None:
    """What to say of a file that is a Git LFS pointer; None where it is none."""
    with suppress(OSError):
        if path.stat().st_size <= _POINTER_SIZE and path.read_bytes().startswith(_POINTER):
            return f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in {path.parent}"
    return None
