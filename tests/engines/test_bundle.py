"""A bundle says everything about itself, and nothing in it can change unseen."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turbovit.engines import bundle as bundle_module
from turbovit.engines.bundle import (
    MANIFEST,
    SCHEMA,
    Bundle,
    Certificate,
    Engine,
    FileEntry,
    Manifest,
    OutputError,
    Profile,
    Source,
    TensorSpec,
    open_bundle,
    read_manifest,
    text_from_manifest,
    write_manifest,
)
from turbovit.engines.errors import BundleError

CERTIFICATE = Certificate(
    ran_on="onnxruntime 1.32.0 on cpu",
    shapes=("2 images", "1 image"),
    outputs=(OutputError("features", 1.5e-7, 0.9999999, 2.25e-6, True),),
    bound="fp32: relative L2 of every row <= 1e-05, all finite",
    passed=True,
)
RAN = Engine("onnxruntime", "1.32.0", "fp32", "multihead", "model.onnx", certificate=CERTIFICATE)
NOT_RUN = Engine(
    runtime="tensorrt_rtx",
    version="1.7.1",
    precision="bf16",
    attention="matmul",
    file="tensorrt_rtx.bf16.engine",
    architectures=("8.9", "12.0"),
    profiles=(Profile({"images": (1, 4, 8)}),),
    fp32_layers=("blocks.3.mlp",),
    reason="asked for",
    not_run="no GPU here",
    stand_ins=(CERTIFICATE,),
)
EVERYTHING = Manifest(
    family="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    source=Source("owner/nàme \N{SNOWMAN}", "ab" * 32, {"image": 896, "eps": 1e-6, "names": ["a", None, True]}),
    limits={"images": 8},
    inputs=(TensorSpec("pixels", "uint8", ("images", "4*merged", 3)),),
    outputs=(TensorSpec("features", "float32", ("images", 256)),),
    facts={"tokens_per_crop": 256},
    reference="reference.safetensors",
    engines=(RAN, NOT_RUN),
    tools={"python": "3.11", "torch": "2.12"},
    files={"model.onnx": FileEntry(3, "cd" * 32)},
)


@pytest.fixture
def copy(tiny_gemma3_bundle: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_gemma3_bundle.path, tmp_path / "bundle"))


def flip(path: Path, position: int, *, keep_mtime: bool = False) -> None:
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x01]))
    shift = 0 if keep_mtime else 1
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + shift))


def names_of(bundle: Bundle) -> list[str]:
    return list(bundle.manifest.files)


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_manifest(tmp_path, EVERYTHING)
    assert read_manifest(tmp_path) == EVERYTHING
    assert text_from_manifest(read_manifest(tmp_path)) == (tmp_path / MANIFEST).read_text()
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


def test_the_verdict_of_an_engine_that_never_ran_is_not_run() -> None:
    failed = replace(RAN, certificate=replace(CERTIFICATE, passed=False))
    assert [engine.verdict for engine in (RAN, failed, NOT_RUN)] == ["passed", "failed", "not run"]


def test_engines_are_found_by_runtime_and_precision() -> None:
    assert EVERYTHING.engine("tensorrt_rtx", "bf16") is NOT_RUN
    assert EVERYTHING.engine("tensorrt", "fp32") is None


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"source": replace(EVERYTHING.source, tensors_sha256="00" * 32)}, False),
        ({"source": replace(EVERYTHING.source, config={"image": 448})}, False),
        ({"facts": {"tokens_per_crop": 64}}, False),
        ({"limits": {"images": 4}}, False),
        ({"family": "llama4"}, False),
        ({"source": replace(EVERYTHING.source, name="elsewhere")}, True),
        ({"engines": ()}, True),
        ({"tools": {}}, True),
    ],
    ids=str,
)
def test_the_identity_is_weights_config_facts_and_limits(change: dict[str, Any], same: bool) -> None:
    assert (replace(EVERYTHING, **change).identity == EVERYTHING.identity) is same


def test_every_changed_byte_of_the_manifest_is_found(tmp_path: Path) -> None:
    write_manifest(tmp_path, EVERYTHING)
    path = tmp_path / MANIFEST
    original = path.read_bytes()
    for position, byte in enumerate(original):
        changed = b"\r" if byte == ord("\n") else bytes([byte ^ 0x01])
        path.write_bytes(original[:position] + changed + original[position + 1 :])
        with pytest.raises(BundleError, match="turbovit build"):
            read_manifest(tmp_path)
    path.write_bytes(original)
    read_manifest(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 100, -2, -1])
def test_a_manifest_cut_short_is_found(length: int, tmp_path: Path) -> None:
    write_manifest(tmp_path, EVERYTHING)
    path = tmp_path / MANIFEST
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(BundleError, match=r"manifest\.json.*delete .* and build it again"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("addition", [b" ", b"\n", b"\0", b"{}"])
def test_a_manifest_with_something_behind_it_is_found(addition: bytes, tmp_path: Path) -> None:
    write_manifest(tmp_path, EVERYTHING)
    with (tmp_path / MANIFEST).open("ab") as file:
        file.write(addition)
    with pytest.raises(BundleError):
        read_manifest(tmp_path)


@pytest.mark.parametrize("schema", [0, SCHEMA - 1, SCHEMA + 1, None, str(SCHEMA), True, float(SCHEMA)])
def test_another_schema_is_refused(schema: Any, tmp_path: Path) -> None:
    write_manifest(tmp_path, EVERYTHING)
    data = json.loads((tmp_path / MANIFEST).read_text()) | {"schema": schema}
    (tmp_path / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(BundleError, match="turbovit build"):
        read_manifest(tmp_path)


def test_the_error_for_another_schema_says_found_expected_and_remedy(tmp_path: Path) -> None:
    write_manifest(tmp_path, replace(EVERYTHING, schema=SCHEMA + 1))
    with pytest.raises(BundleError, match=rf"schema {SCHEMA + 1}, this turbovit reads {SCHEMA}; delete .* build it"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"3", b"null", b"{}", b"\xff", b"[" * 100_000, b'{"schema": %d}' % SCHEMA]
)
def test_any_other_file_called_manifest_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(BundleError, match="turbovit build"):
        open_bundle(tmp_path)


@pytest.mark.parametrize("folder", [".", "missing", "file", "file/below"])
def test_what_is_no_bundle_is_refused(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match=r"not a turbovit bundle.*turbovit build MODEL -o"):
        open_bundle(tmp_path / folder)


def test_a_built_bundle_opens_wherever_it_is_moved(copy: Path, tiny_gemma3_bundle: Bundle) -> None:
    for use_hash_cache in (True, False):
        opened = open_bundle(str(copy), use_hash_cache=use_hash_cache)
        assert opened == Bundle(copy, tiny_gemma3_bundle.manifest)


def test_its_manifest_names_every_file(copy: Path, tiny_gemma3_bundle: Bundle) -> None:
    there = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert there == {*names_of(tiny_gemma3_bundle), MANIFEST}


def test_a_flipped_byte_in_any_file_is_found(copy: Path, tiny_gemma3_bundle: Bundle) -> None:
    open_bundle(copy)  # now the index knows every file
    source = re.escape(tiny_gemma3_bundle.manifest.source.name)
    for name in names_of(tiny_gemma3_bundle):
        path = copy / name
        for position in (0, path.stat().st_size // 2, path.stat().st_size - 1):
            flip(path, position)
            with pytest.raises(BundleError, match=rf"{name} is damaged: sha256 .* manifest says .* build {source} -o"):
                open_bundle(copy)
            flip(path, position)
    open_bundle(copy)


def test_a_flipped_byte_under_an_unchanged_mtime_is_found_without_the_index(
    copy: Path, tiny_gemma3_bundle: Bundle
) -> None:
    open_bundle(copy)
    for name in names_of(tiny_gemma3_bundle):
        flip(copy / name, 10, keep_mtime=True)
        with pytest.raises(BundleError, match=f"{name} is damaged"):
            open_bundle(copy, use_hash_cache=False)
        flip(copy / name, 10, keep_mtime=True)


def test_a_missing_file_is_named(copy: Path, tiny_gemma3_bundle: Bundle) -> None:
    for name in names_of(tiny_gemma3_bundle):
        (copy / name).rename(copy.parent / "moved")
        with pytest.raises(BundleError, match=f"{name}.* is missing: copy the whole folder, or delete .* build"):
            open_bundle(copy)
        (copy.parent / "moved").rename(copy / name)


def test_a_graph_moved_without_its_data_file_names_the_file(copy: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in [MANIFEST, *(path.name for path in copy.glob("*.onnx"))]:
        shutil.copy(copy / name, moved / name)
    shutil.copytree(copy / "processor", moved / "processor")
    shutil.copy(copy / "reference.safetensors", moved)
    with pytest.raises(BundleError, match=r"weights\.fp32\.bin"):
        open_bundle(moved)


def test_a_truncated_file_is_found_by_its_size(copy: Path, tiny_gemma3_bundle: Bundle) -> None:
    for name, entry in tiny_gemma3_bundle.manifest.files.items():
        whole = (copy / name).read_bytes()
        (copy / name).write_bytes(whole[:-1])
        with pytest.raises(BundleError, match=f"{name} has {entry.size - 1} bytes, its manifest says {entry.size}; "):
            open_bundle(copy)
        (copy / name).write_bytes(whole)


def test_a_folder_in_place_of_a_file_is_found(copy: Path) -> None:
    (copy / "weights.fp32.bin").unlink()
    (copy / "weights.fp32.bin").mkdir()
    with pytest.raises(BundleError, match=r"weights\.fp32\.bin"):
        open_bundle(copy)


def test_a_file_that_cannot_be_read_is_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: Any) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(bundle_module, "file_sha256", refuse)
    with pytest.raises(BundleError, match=r"cannot be read.*Permission denied"):
        open_bundle(copy)


def test_files_that_the_manifest_does_not_name_are_no_part_of_the_bundle(copy: Path) -> None:
    (copy / "notes.txt").write_text("x")
    (copy / f".{MANIFEST}.123").write_text("{}")
    open_bundle(copy)
