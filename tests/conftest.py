"""What all tests share: an empty store, no network, and one tiny sample checkpoint and bundle a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from turbovit.engines.bundle import Bundle

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when huggingface_hub is first imported: turbovit is imported below

DATA_VARIABLE = "TURBOVIT_TEST_DATA"


@pytest.fixture(scope="session", autouse=True)
def _own_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No setting of the caller's shell, and no bundle of theirs, has a say in the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TURBOVIT_") and name != DATA_VARIABLE]:
            patch.delenv(name)
        patch.setenv("TURBOVIT_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def data() -> Path:
    """Real configs and golden outputs that are too large or not ours to commit."""
    folder = Path(os.environ.get(DATA_VARIABLE) or Path(__file__).parents[2] / "shared")
    if not folder.is_dir():
        pytest.skip(f"no test data: {folder} does not exist, and {DATA_VARIABLE} names no other folder")
    return folder


@pytest.fixture(scope="session")
def tiny_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sample checkpoint. Never changed: copy it first."""
    return _sample("gemma3", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_gemma3_bundle(tiny_gemma3: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle of `tiny_gemma3`, for at most 8 images a run. Never changed: copy it first."""
    return _bundle_of(tiny_gemma3, tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sample checkpoint. Never changed: copy it first."""
    return _sample("qwen3_vl", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_qwen3_vl_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sample checkpoint with a mixture of experts. Never changed: copy it first."""
    return _sample("qwen3_vl_moe", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_qwen3_vl_bundle(tiny_qwen3_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle of `tiny_qwen3_vl`, with the default limits. Never changed: copy it first."""
    return _bundle_of(tiny_qwen3_vl, tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_qwen3_vl_moe_bundle(tiny_qwen3_vl_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle of `tiny_qwen3_vl_moe`, with the default limits. Never changed: copy it first."""
    return _bundle_of(tiny_qwen3_vl_moe, tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_llama4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sample checkpoint. Never changed: copy it first."""
    return _sample("llama4", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_llama4_bundle(tiny_llama4: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle of `tiny_llama4`, for at most 17 tiles a run. Never changed: copy it first."""
    return _bundle_of(tiny_llama4, tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_deepseek_vl2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sample checkpoint, with plain attention in the language half. Never changed: copy it first."""
    return _sample("deepseek_vl2", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_deepseek_vl2_bundle(tiny_deepseek_vl2: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle of `tiny_deepseek_vl2`, for at most 10 tiles a run. Never changed: copy it first."""
    return _bundle_of(tiny_deepseek_vl2, tmp_path_factory)


@pytest.fixture(scope="session")
def small_deepseek_vl2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sample checkpoint with MLA in the language half. Never changed: copy it first."""
    return _sample("deepseek_vl2", tmp_path_factory, "small")


@pytest.fixture(scope="session")
def small_deepseek_vl2_bundle(small_deepseek_vl2: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle of `small_deepseek_vl2`. Never changed: copy it first."""
    return _bundle_of(small_deepseek_vl2, tmp_path_factory)


def _sample(family: str, factory: pytest.TempPathFactory, size: str = "tiny") -> Path:
    from turbovit.export.samples import write_sample

    folder = factory.mktemp("checkpoints") / f"{family}-{size}"
    write_sample(family, folder, size, 0)
    return folder


def _bundle_of(checkpoint: Path, factory: pytest.TempPathFactory) -> Bundle:
    from turbovit.export.build import build

    return build(checkpoint, factory.mktemp("bundles") / checkpoint.name).bundle
