"""What the export tests share: an empty store for each test, and graphs that are exported once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from turbovit.engines.families import FAMILIES

if TYPE_CHECKING:
    from turbovit.engines.bundle import Bundle


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that holds this test's bundles by default; nothing is in it yet."""
    monkeypatch.setenv("TURBOVIT_HOME", str(tmp_path / "home"))
    return tmp_path / "home/bundles"


@pytest.fixture
def copied(tiny_gemma3_bundle: Bundle, tmp_path: Path) -> Bundle:
    """A copy of the shared bundle, to be changed."""
    from turbovit.engines.bundle import Bundle

    shutil.copytree(tiny_gemma3_bundle.path, tmp_path / "copied")
    return Bundle(tmp_path / "copied", tiny_gemma3_bundle.manifest)


@pytest.fixture(scope="session")
def every_precision(tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The shared bundle with engines in float16 and bfloat16 added, one after the other. Never changed."""
    from turbovit.export.build import build

    folder = tmp_path_factory.mktemp("bundles") / "every-precision"
    shutil.copytree(tiny_gemma3_bundle.path, folder)
    build(tiny_gemma3, folder, precision="fp16")
    return build(tiny_gemma3, folder, precision="bf16").bundle


@pytest.fixture
def quick_export(every_precision: Bundle, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Builds take graphs of the tiny sample that were exported before; the list tells which were asked for."""
    import onnx_ir as ir

    from turbovit.export import build
    from turbovit.export.plan import PRECISIONS

    names = {dtype: precision for precision, dtype in PRECISIONS.items()}
    asked: list[str] = []

    def exported(tower: object, sample: object, outputs: tuple) -> ir.Model:
        precision = names[outputs[0].dtype]
        asked.append(precision)
        return ir.load(every_precision.file(f"model.{precision}.attention.onnx"))

    monkeypatch.setattr(build, "onnx_from_tower", exported)
    return asked


@pytest.fixture
def changed_model(tiny_gemma3: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes a copy of the tiny sample, with changes in its JSON files or one of its tensors."""
    import json

    from safetensors.torch import load_file, save_file

    def change(tensor: str | None = None, **files: dict[str, object]) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(tiny_gemma3, folder)
        if tensor is not None:
            tensors = load_file(folder / "model.safetensors")
            tensors[tensor].view(-1)[0] += 1
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        for name, entries in files.items():
            path = folder / f"{name}.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | entries))
        return folder

    return change


@pytest.fixture(params=[row.name for row in FAMILIES])
def any_checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the tiny sample of each family, to be changed."""
    return shutil.copytree(request.getfixturevalue(f"tiny_{request.param}"), tmp_path / request.param)
