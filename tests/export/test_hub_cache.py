"""A hub cache that another program filled, and no network: what is needed is enough. Run with the real client."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from checkpoint_changes import SHARDS, sharded
from huggingface_hub import constants
from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache
from safetensors.torch import load_file

from turbovit.engines.errors import CheckpointError
from turbovit.export.plan import plan_build
from turbovit.export.weights import INDEX, SINGLE

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOBODYS = ("vocab.txt", "tokenizer.model", "original/params.json", "README.md")

Cached = Callable[..., Path]


@pytest.fixture
def cached(any_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cached:
    """Makes a cache of `any_checkpoint` as ``owner/name``, with links to blobs, but for `without` and `NOBODYS`."""

    def make(*without: str, listed: bool = True) -> Path:
        folder = tmp_path / "hub/models--owner--name"
        snapshot, blobs = folder / "snapshots" / COMMIT, folder / "blobs"
        for path in (snapshot, blobs, folder / "refs"):
            path.mkdir(parents=True)
        (folder / "refs/main").write_text(COMMIT)
        entries = {name: TreeCacheEntry(1, "0" * 40) for name in NOBODYS}
        for number, path in enumerate(sorted(any_checkpoint.iterdir())):
            entries[path.name] = TreeCacheEntry(path.stat().st_size, f"{number:040x}")
            if path.name not in without:
                os.link(path, blobs / f"{number:040x}")
                (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
        if listed:
            write_tree_cache(str(folder), COMMIT, entries)
        return snapshot

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE", {})
    return make


def source(model: str | Path):
    return plan_build(model, "auto", ["onnxruntime"], {}).manifest.source


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "no listing"])
def test_files_that_nobody_needs_may_be_missing(cached: Cached, any_checkpoint: Path, listed: bool) -> None:
    snapshot = cached(listed=listed)
    if listed:  # or else this test tests nothing
        with pytest.raises(huggingface_hub.errors.LocalEntryNotFoundError) as error:
            huggingface_hub.snapshot_download("owner/name", allow_patterns=["*.txt"])
        assert error.value.snapshot_path == str(snapshot)
    found, expected = source("owner/name"), source(any_checkpoint)
    assert found.name == "owner/name"
    assert (found.tensors_sha256, found.config) == (expected.tensors_sha256, expected.config)


def test_shards_are_read_from_the_cache(cached: Cached, any_checkpoint: Path) -> None:
    expected = source(any_checkpoint)
    sharded(any_checkpoint)
    cached()
    assert source("owner/name").tensors_sha256 == expected.tensors_sha256


def test_shards_without_an_index_are_read_from_the_cache(cached: Cached, any_checkpoint: Path) -> None:
    expected = source(any_checkpoint)
    sharded(any_checkpoint, index=False)
    cached()
    assert source("owner/name").tensors_sha256 == expected.tensors_sha256


@pytest.mark.parametrize("missing", ["config.json", SINGLE])
def test_the_first_file_that_is_needed_is_named(cached: Cached, missing: str) -> None:
    cached(missing)
    with pytest.raises(CheckpointError, match=f"of owner/name lacks {missing}, .*: hf download owner/name {missing}"):
        source("owner/name")


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "no listing"])
def test_a_missing_shard_is_named(cached: Cached, any_checkpoint: Path, listed: bool) -> None:
    sharded(any_checkpoint)
    cached(SHARDS[1], listed=listed)
    with pytest.raises(CheckpointError, match=f"lacks {SHARDS[1]}"):
        source("owner/name")


def test_an_index_without_its_shards_does_not_matter_beside_the_single_file(
    cached: Cached, any_checkpoint: Path
) -> None:
    expected = source(any_checkpoint)
    weight_map = dict.fromkeys(load_file(any_checkpoint / SINGLE), "gone.safetensors")
    (any_checkpoint / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    cached()
    assert source("owner/name").tensors_sha256 == expected.tensors_sha256
