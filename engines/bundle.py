"""A bundle: a folder with a manifest, graphs, engines, processor files and reference outputs.

`manifest.json` is the only point of commit: a folder without one is not a bundle, and a file that it does not
name is not part of the bundle. Its last entry is the sha256 of everything before it, so that a changed byte
anywhere is found.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from turbovit.engines.commands import build_command
from turbovit.engines.errors import BundleError
from turbovit.engines.store import file_sha256

SCHEMA = 2
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class TensorSpec:
    """An engine input or output.

    Attributes:
        shape: one entry a dimension: a number, a symbol (``"images"``) or a multiple of one (``"4*merged"``).
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and sha256 of one file of the bundle."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """The checkpoint a bundle was built from.

    Attributes:
        name: the hub id, or the folder's path.
        tensors_sha256: hash over names, dtypes, shapes and bytes of the vision tensors, in order of name.
        config: the sizes that shape the tower, and the image processor's settings.
    """

    name: str
    tensors_sha256: str
    config: dict[str, Any]


@dataclass(frozen=True)
class OutputError:
    """How far one output is from the reference tower's, at worst over all certified shapes.

    Attributes:
        relative_l2: largest ``||got - expected|| / ||expected||`` of any row of the batch.
        worst_cosine: smallest cosine similarity between a token's vector and the reference's.
        max_abs: largest absolute difference.
        finite: whether every value is finite.
    """

    output: str
    relative_l2: float
    worst_cosine: float
    max_abs: float
    finite: bool

    def __str__(self) -> str:
        errors = f"relative L2 {self.relative_l2:.2g}, worst cosine {self.worst_cosine:.7f}"
        return f"{errors}, largest error {self.max_abs:.2g}{'' if self.finite else ', NOT FINITE'}"


@dataclass(frozen=True)
class Certificate:
    """The result of comparing an engine with the float32 reference tower on the same weights.

    Attributes:
        ran_on: runtime, version and device that ran the engine.
        shapes: the input shapes that were run.
        bound: what the verdict is based on, in words.
    """

    ran_on: str
    shapes: tuple[str, ...]
    outputs: tuple[OutputError, ...]
    bound: str
    passed: bool

    @property
    def verdict(self) -> str:
        """``passed`` or ``failed``."""
        return "passed" if self.passed else "failed"


@dataclass(frozen=True)
class Profile:
    """A range of input shapes that a compiled engine was optimised for.

    Attributes:
        ranges: (smallest, optimal, largest) value of every symbol of the inputs' shapes.
    """

    ranges: dict[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Engine:
    """One compiled form of the tower.

    Attributes:
        runtime: ``onnxruntime``, ``tensorrt`` or ``tensorrt_rtx``.
        version: of the runtime that built it.
        precision: ``fp32``, ``fp16`` or ``bf16``.
        attention: the form attention has in the graph (see `turbovit.export.rewrites`).
        file: the graph or engine file.
        architectures: compute capabilities of the GPUs it was compiled for (``"8.9"``); empty where it runs on any
            device.
        profiles: the shapes it was compiled for, in the engine's order; empty where it takes all within the limits.
        fp32_layers: the tower's layers that stay in float32, by path.
        reason: why it has this precision.
        certificate: None where it never ran.
        not_run: why there is no certificate.
        stand_ins: certificates of the same precision by what could run where the engine could not: torch in that
            dtype, or ONNX Runtime. They say what the precision does to the tower, not that this engine is right.
    """

    runtime: str
    version: str
    precision: str
    attention: str
    file: str
    architectures: tuple[str, ...] = ()
    profiles: tuple[Profile, ...] = ()
    fp32_layers: tuple[str, ...] = ()
    reason: str = ""
    certificate: Certificate | None = None
    not_run: str | None = None
    stand_ins: tuple[Certificate, ...] = ()

    @property
    def label(self) -> str:
        """What its graphs and weights are named by."""
        return precision_label(self.precision, self.fp32_layers)

    @property
    def verdict(self) -> str:
        """``passed``, ``failed`` or ``not run``."""
        return "not run" if self.certificate is None else self.certificate.verdict


def precision_label(precision: str, fp32_layers: Sequence[str]) -> str:
    """What the files of a precision are named by: another choice of layers in float32 has other files."""
    if not fp32_layers:
        return precision
    return f"{precision}-{hashlib.sha256(','.join(fp32_layers).encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Manifest:
    """Everything a bundle says about itself.

    Attributes:
        limits: the largest value a symbol of the input shapes may take in one engine run.
        facts: what the family's preprocessor and glue need to know (token counts, ids, sizes).
        reference: file with sample inputs and the float32 reference tower's outputs for them.
        tools: versions of the packages that built it.
        ranges: the largest magnitude of every layer's input and output in the float32 reference tower, on the samples.
    """

    family: str
    architecture: str
    source: Source
    limits: dict[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    facts: dict[str, Any]
    reference: str
    engines: tuple[Engine, ...]
    tools: dict[str, str]
    ranges: dict[str, float] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def identity(self) -> str:
        """sha256 over what makes this bundle another one: tensors, config, facts and limits."""
        parts = [self.family, self.source.tensors_sha256, self.source.config, self.facts, self.limits]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def engine(self, runtime: str, precision: str) -> Engine | None:
        """The engine for `runtime` in `precision`, or None."""
        return next((e for e in self.engines if (e.runtime, e.precision) == (runtime, precision)), None)


_ADAPTER: TypeAdapter[Manifest] = TypeAdapter(Manifest)


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: where it lies and what its manifest says."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """The path of one of the bundle's files."""
        return self.path / name


def text_from_manifest(manifest: Manifest) -> str:
    """The exact text of `manifest.json`, ending with the sha256 of all that stands before it."""
    body = json.dumps(_ADAPTER.dump_python(manifest, mode="json"), indent=2, sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{body[:-2]},\n  "sha256": "{digest}"\n}}\n'


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` in one atomic step: a reader sees the old manifest or the new one."""
    temporary = folder / f".{MANIFEST}.{os.getpid()}"
    temporary.write_text(text_from_manifest(manifest), encoding="utf-8")
    os.replace(temporary, folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest:
    """Read and check `manifest.json` alone, not the files that it names.

    Raises:
        BundleError: missing, not JSON, of another schema, changed since it was written.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes().decode()  # not read_text, which takes a carriage return for a line feed
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(
            f"{folder} is not a turbovit bundle: {MANIFEST} cannot be read ({error}); "
            f"make one with: {build_command('MODEL', folder)}"
        ) from None
    try:
        data = json.loads(text)
        schema = data.get("schema")
    except (json.JSONDecodeError, AttributeError, RecursionError) as error:
        raise BundleError(f"{path} is damaged: {error}; {_rebuild(folder)}") from None
    if schema != SCHEMA:
        raise BundleError(f"{path} has schema {schema!r}, this turbovit reads {SCHEMA}; {_rebuild(folder)}")
    data.pop("sha256", None)
    try:
        manifest = _ADAPTER.validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BundleError(f"{path} is damaged at {where}: {first['msg']}; {_rebuild(folder)}") from None
    if text_from_manifest(manifest) != text:
        raise BundleError(f"{path} was changed after it was written (its sha256 differs); {_rebuild(folder)}")
    return manifest


def open_bundle(folder: str | Path, *, use_hash_cache: bool = True) -> Bundle:
    """Open a bundle and check that every file is there and unchanged.

    Args:
        folder: the bundle's folder.
        use_hash_cache: take a file's sha256 from the store's index where the file was neither written nor replaced
            since it was computed; False hashes every byte again, and has the index believe that instead.

    Raises:
        BundleError: says which files, and of the first what was found and what was expected.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    remedy = _rebuild(folder, manifest.source.name)
    problems: dict[str, str] = {}
    for name, entry in manifest.files.items():  # all of them, so that the index believes none that is damaged
        problem = _problem(folder / name, entry, remedy, use_hash_cache)
        if problem:
            problems[name] = problem
    if problems:
        first, *others = problems
        more = f" (nor are these as they should be: {', '.join(others)})" if others else ""
        raise BundleError(problems[first] + more)
    return Bundle(folder, manifest)


def _problem(path: Path, entry: FileEntry, remedy: str, use_hash_cache: bool) -> str | None:
    """What is wrong with a file, and what to do; None where nothing is."""
    if not path.is_file():
        return f"{path}, which the manifest names, is missing: copy the whole folder, or {remedy}"
    try:
        size = path.stat().st_size
        digest = file_sha256(path, use_cache=use_hash_cache) if size == entry.size else None
    except OSError as error:
        return f"{path} cannot be read: {error}; check its permissions, or {remedy}"
    if digest is None:
        return f"{path} has {size} bytes, its manifest says {entry.size}; {remedy}"
    if digest != entry.sha256:
        return f"{path} is damaged: sha256 {digest[:12]}..., its manifest says {entry.sha256[:12]}...; {remedy}"
    return None


def _rebuild(folder: Path, model: str = "MODEL") -> str:
    return f"delete {folder} and build it again: {build_command(model, folder)}"
