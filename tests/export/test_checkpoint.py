"""Reading checkpoints: whole, sharded, damaged or from the hub; only vision tensors, and their hash."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors
import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors.torch import save_file
from torch import Tensor

from turbovit.engines.errors import CheckpointError
from turbovit.export.checkpoint import INDEX, SINGLE, SMALL_FILES, image_processor_config, open_checkpoint

TENSORS = {
    "vision.b": torch.arange(6.0).reshape(2, 3),
    "text.a": torch.ones(4),
    "vision.a": torch.arange(3, dtype=torch.int32).to(torch.bfloat16),
    "vision.scalar": torch.tensor(2.5),
}
SHARDS = {
    "model-00001-of-00002.safetensors": ["vision.b", "text.a"],
    "model-00002-of-00002.safetensors": ["vision.a", "vision.scalar"],
}


def is_vision(name: str) -> bool:
    return name.startswith("vision.")


def write_config(folder: Path, text: str = '{"architectures": ["Some"]}') -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text)
    return folder


def write_single(folder: Path, tensors: dict[str, Tensor] = TENSORS) -> Path:
    save_file(tensors, write_config(folder) / SINGLE)
    return folder


def write_sharded(folder: Path, shards: dict[str, list[str]] = SHARDS) -> Path:
    write_config(folder)
    for file, names in shards.items():
        (folder / file).parent.mkdir(exist_ok=True)
        save_file({name: TENSORS[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def digest(folder: Path, names: list[str] | None = None) -> str:
    checkpoint = open_checkpoint(folder)
    return checkpoint.tensors_sha256(names or checkpoint.vision_names(is_vision))


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_vision_tensors_are_read_by_name(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    checkpoint = open_checkpoint(write(tmp_path))
    assert checkpoint.architecture == "Some"
    names = checkpoint.vision_names(is_vision)
    assert names == ["vision.a", "vision.b", "vision.scalar"]
    assert checkpoint.shapes(names) == {"vision.a": (3,), "vision.b": (2, 3), "vision.scalar": ()}
    for name, tensor in checkpoint.tensors(names):
        assert tensor.dtype == TENSORS[name].dtype
        assert torch.equal(tensor, TENSORS[name])


def test_shards_of_one_name_in_two_folders_are_two_files(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path, {"one/part.safetensors": ["vision.a"], "two/part.safetensors": ["vision.b"]})
    (_, first), (_, second) = open_checkpoint(folder).tensors(["vision.a", "vision.b"])
    assert torch.equal(first, TENSORS["vision.a"])
    assert torch.equal(second, TENSORS["vision.b"])


def test_the_hash_is_that_of_the_tensors_and_not_of_their_files(tmp_path: Path) -> None:
    assert digest(write_single(tmp_path / "single")) == digest(write_sharded(tmp_path / "sharded"))


@pytest.mark.parametrize(
    "change",
    [
        {"vision.b": TENSORS["vision.b"] + torch.tensor([[0, 0, 0], [0, 0, 1e-6]])},
        {"vision.b": TENSORS["vision.b"].reshape(3, 2)},
        {"vision.b": TENSORS["vision.b"].view(torch.int32)},
        {"vision.c": TENSORS["vision.b"]},
        {"vision.a": TENSORS["vision.a"].float()},
    ],
    ids=["value", "shape", "dtype of the same bytes", "name", "dtype"],
)
def test_the_hash_changes_with_one(tmp_path: Path, change: dict[str, Tensor]) -> None:
    changed = TENSORS | change
    if "vision.c" in change:
        del changed["vision.b"]
    assert digest(write_single(tmp_path / "one")) != digest(write_single(tmp_path / "other", changed))


def test_the_hash_does_not_change_with_text_tensors(tmp_path: Path) -> None:
    changed = TENSORS | {"text.a": torch.zeros(4), "text.b": torch.ones(2)}
    assert digest(write_single(tmp_path / "one")) == digest(write_single(tmp_path / "other", changed))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors read so far."""
    read: list[str] = []
    original = safetensors.safe_open

    class Recording:
        def __init__(self, *arguments: Any, **options: Any):
            self._file = original(*arguments, **options)

        def __enter__(self) -> Any:
            return self._file.__enter__()

        def __exit__(self, *arguments: Any) -> None:
            self._file.__exit__(*arguments)

        def get_slice(self, name: str) -> Any:
            return self._file.get_slice(name)

        def get_tensor(self, name: str) -> Tensor:
            read.append(name)
            return self._file.get_tensor(name)

    monkeypatch.setattr(safetensors, "safe_open", Recording)
    return read


def test_hashing_reads_each_vision_tensor_once_and_no_other(tmp_path: Path, reads: list[str]) -> None:
    digest(write_sharded(tmp_path))
    assert reads == ["vision.a", "vision.b", "vision.scalar"]


def test_shapes_are_read_without_the_tensors(tmp_path: Path, reads: list[str]) -> None:
    checkpoint = open_checkpoint(write_single(tmp_path))
    checkpoint.shapes(checkpoint.vision_names(is_vision))
    assert reads == []


def test_tensors_are_read_one_at_a_time(tmp_path: Path, reads: list[str]) -> None:
    tensors = open_checkpoint(write_single(tmp_path)).tensors(["vision.a", "vision.b"])
    assert reads == []
    next(tensors)
    assert reads == ["vision.a"]


def test_an_unchanged_checkpoint_is_hashed_once(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = digest(write_sharded(tmp_path))
    reads.clear()
    assert digest(tmp_path) == first
    monkeypatch.chdir(tmp_path.parent)
    assert digest(Path(tmp_path.name)) == first  # by a relative path too
    assert reads == []
    assert digest(tmp_path, ["vision.a"]) != first
    assert reads == ["vision.a"]


def test_a_changed_shard_is_hashed_again(tmp_path: Path) -> None:
    before = digest(write_single(tmp_path))
    save_file(TENSORS | {"vision.b": torch.zeros(2, 3)}, tmp_path / SINGLE)
    assert digest(tmp_path) != before


def read_all(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    list(checkpoint.tensors(checkpoint.vision_names(is_vision)))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def delete_shard(folder: Path) -> None:
    (write_sharded(folder) / "model-00002-of-00002.safetensors").unlink()


def cut_shard(folder: Path) -> None:
    cut(write_sharded(folder) / "model-00002-of-00002.safetensors", -2)


def cut_single(folder: Path) -> None:
    cut(write_single(folder) / SINGLE, -2)


def cut_header(folder: Path) -> None:
    cut(write_single(folder) / SINGLE, 20)


def empty_single(folder: Path) -> None:
    cut(write_single(folder) / SINGLE, 0)


def garble_header(folder: Path) -> None:
    data = (write_single(folder) / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[:8] + b"?" * 20 + data[28:])


def claim_a_huge_header(folder: Path) -> None:
    data = (write_single(folder) / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(struct.pack("<Q", 1 << 40) + data[8:])


def index_an_absent_tensor(folder: Path) -> None:
    weight_map = json.loads((write_sharded(folder) / INDEX).read_text())["weight_map"]
    weight_map["vision.c"] = weight_map["vision.b"]
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (delete_shard, "lacks model-00002-of-00002.safetensors, which holds the tensor vision.a: download"),
        (cut_shard, "model-00002-of-00002.safetensors is damaged or cut short .*vision.a.*: download"),
        (cut_single, f"{SINGLE} is damaged or cut short .*: download"),
        (cut_header, f"{SINGLE} is damaged or cut short .*: download"),
        (empty_single, f"{SINGLE} is damaged or cut short .*: download"),
        (garble_header, f"{SINGLE} is damaged or cut short .*: download"),
        (claim_a_huge_header, f"{SINGLE} is damaged or cut short .*: download"),
        (index_an_absent_tensor, "model-00001-of-00002.safetensors is damaged .*reading vision.c"),
    ],
)
def test_damaged_weights_are_an_error_that_names_the_file(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_all(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds a JSON list, expected an object"),
        ("{}", "has no weight_map of file names"),
        ('{"weight_map": ["vision.a"]}', "has no weight_map of file names"),
        ('{"weight_map": {"vision.a": null}}', "has no weight_map of file names"),
    ],
)
def test_a_bad_index_is_an_error_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    (write_sharded(tmp_path) / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=f"{INDEX} {message}"):
        read_all(tmp_path)


def test_pickled_weights_are_an_error_that_names_them(tmp_path: Path) -> None:
    torch.save({}, write_config(tmp_path) / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"\['pytorch_model.bin'\].*convert it to safetensors"):
        read_all(tmp_path)


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"neither {INDEX} nor {SINGLE} .found no weights"):
        read_all(write_config(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no config.json: a Hugging Face checkpoint folder is expected"),
        ("{'a': 1}", "config.json cannot be read as JSON"),
        ("\xff", "config.json cannot be read as JSON"),
        ('"gemma3"', "config.json holds a JSON str, expected an object"),
    ],
)
def test_a_missing_or_invalid_config_is_an_error(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_config_without_architectures_has_none(tmp_path: Path) -> None:
    assert open_checkpoint(write_config(tmp_path, "{}")).architecture is None


def test_image_processor_settings_are_found_in_either_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no preprocessor_config\.json"):
        image_processor_config(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"image_seq_length": 256}')
    with pytest.raises(CheckpointError, match=r"has no preprocessor_config\.json"):
        image_processor_config(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"size": 2}')
    assert image_processor_config(tmp_path) == {"size": 2}
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"size": 1}}')
    assert image_processor_config(tmp_path) == {"size": 1}  # the newer place wins, as in transformers


class Hub:
    """Serves one folder as the snapshot of a hub repository, and records what was asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.asked: list[list[str]] = []

    def snapshot_download(self, model: str, *, allow_patterns: list[str], revision: str | None) -> str:
        assert model == "owner/name"
        assert revision == (self.folder.name if self.asked else None)  # all comes from one commit
        self.asked.append(allow_patterns)
        return str(self.folder)

    @property
    def weights(self) -> list[str]:
        """The weight files asked for."""
        return [name for patterns in self.asked for name in patterns if name.endswith(".safetensors")]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    served = Hub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", served.snapshot_download)
    return served


def test_only_shards_with_vision_tensors_are_downloaded(hub: Hub) -> None:
    write_sharded(hub.folder, {"first.safetensors": ["vision.a"], "second.safetensors": ["text.a"]})
    checkpoint = open_checkpoint("owner/name", is_vision)
    assert hub.weights == [SINGLE, "first.safetensors"]  # the former where there is one besides
    assert all(set(SMALL_FILES) <= set(asked) for asked in hub.asked)
    assert checkpoint.name == "owner/name"
    assert checkpoint.vision_names(is_vision) == ["vision.a"]


def test_a_repository_of_one_file_is_downloaded(hub: Hub) -> None:
    write_single(hub.folder)
    assert open_checkpoint("owner/name", is_vision).vision_names(is_vision) == [
        "vision.a",
        "vision.b",
        "vision.scalar",
    ]
    assert hub.weights == [SINGLE]


def test_no_weights_are_downloaded_for_the_config_alone(hub: Hub) -> None:
    write_single(hub.folder)
    assert open_checkpoint("owner/name").architecture == "Some"
    assert hub.asked == [SMALL_FILES]


def test_a_damaged_index_from_the_hub_is_told_apart_from_the_hub_failing(hub: Hub) -> None:
    (write_sharded(hub.folder) / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match=f"{INDEX} has no weight_map") as caught:
        open_checkpoint("owner/name", is_vision)
    assert "hub failed" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("cannot find\nthe files"),
        HFValidationError("cannot find"),
        OSError("cannot find"),
        RuntimeError("cannot find"),  # the HTTP library's errors have nothing in common with OSError
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_hub_that_fails_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint("owner/name")
    assert str(caught.value) == "there is no folder 'owner/name', and fetching it from the hub failed: cannot find"


def test_an_error_without_text_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise TimeoutError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match="hub failed: TimeoutError"):
        open_checkpoint("owner/name")


def test_the_real_client_without_a_network_gives_one_line() -> None:
    with pytest.raises(CheckpointError, match="fetching it from the hub failed: ") as caught:
        open_checkpoint("owner/name-that-is-not-cached")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["./missing", "/missing/folder", "~/missing", "name", "a/b/c"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_not_asked_for(hub: Hub, name: str) -> None:
    with pytest.raises(CheckpointError, match=r"no folder .* no hub id \(owner/name\) either"):
        open_checkpoint(name)
    assert hub.asked == []
