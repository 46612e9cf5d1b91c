"""A checkpoint without a chat template (a merged LoRA, say) is refused where it starts, and the doctor says so."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from turbomind_requests import assistant, image, noise, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.engines.bundle import Bundle
from turbovit.engines.errors import CheckpointError, InputError
from turbovit.engines.families import FAMILIES
from turbovit.lmdeploy_ext import adapter, install, serve
from turbovit.lmdeploy_ext.bundle_choice import COMPILED_VISION_VARIABLE
from turbovit.lmdeploy_ext.doctor import diagnose
from turbovit.lmdeploy_ext.memory import GpuMemory

A = noise(20, 10, 0)
REASON = r"this checkpoint has no chat template .* run into each other: .*--chat-template"


def without_template(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint as it is saved by those who forget its chat template."""
    shutil.copytree(checkpoint, folder)
    for name in ("chat_template.jinja", "chat_template.json"):
        (folder / name).unlink(missing_ok=True)
    for name in ("tokenizer_config.json", "processor_config.json"):
        if (folder / name).is_file():
            config = json.loads((folder / name).read_text(encoding="utf-8"))
            config.pop("chat_template", None)
            (folder / name).write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module", params=[row.name for row in FAMILIES])
def bare(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint: Path = request.getfixturevalue(f"tiny_{request.param}")
    return without_template(checkpoint, tmp_path_factory.mktemp("bare") / checkpoint.name)


def needs_none(folder: Path) -> bool:
    """DeepSeek-VL2 has its own format, and transformers' processor of Llama 4 brings its template along."""
    return folder.name.startswith(("deepseek_vl2", "llama4"))


def start(folder: Path, *arguments: str, **options: Any) -> None:
    """`turbovit serve` up to where the bundle is looked for."""
    serve.serve(str(folder), arguments, **options)


class BundleReachedError(Exception):
    """The bundle is looked for: the chat template was no obstacle."""


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*_: Any) -> None:
        raise BundleReachedError

    monkeypatch.setattr(serve, "gpus", lambda: [GpuMemory("a GPU", 1, 1)])
    monkeypatch.setattr(adapter, "turbomind_problem", lambda: None)
    monkeypatch.setattr(serve, "_bundle", reached)
    monkeypatch.setattr(adapter, "start_server", reached)
    monkeypatch.setenv(COMPILED_VISION_VARIABLE, "")  # so that what is set later is taken back


@pytest.mark.usefixtures("on_a_gpu")
def test_serving_is_refused_before_a_bundle_is_looked_for(bare: Path) -> None:
    for language_model_only in ((), ("--language-model-only",)):
        if needs_none(bare):
            with pytest.raises(BundleReachedError):
                start(bare, backend="pytorch")
            continue
        with pytest.raises(CheckpointError, match=REASON) as refusal:
            start(bare, *language_model_only, backend="pytorch")
        assert str(bare) in str(refusal.value)
        assert refusal.value.exit_code == 2


@pytest.mark.usefixtures("on_a_gpu")
def test_a_template_that_is_given_is_enough(bare: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleReachedError):
        start(bare, "--chat-template", "vicuna", backend="pytorch")
    file = tmp_path / "template.json"
    file.write_text(json.dumps({"model_name": "mine", "user": "[u]", "eoh": "[/u]"}), encoding="utf-8")
    with pytest.raises(BundleReachedError):
        start(bare, "--chat-template", str(file), backend="pytorch")


@pytest.mark.usefixtures("on_a_gpu")
def test_without_the_compiled_tower_all_is_lmdeploys(bare: Path) -> None:
    with pytest.raises(BundleReachedError):
        start(bare, backend="pytorch", compiled_vision=False)


class EngineReachedError(Exception):
    """The engine is built."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """LMDeploy's AsyncEngine, which pipelines and servers start, up to where it builds its engine."""
    install()
    engine = import_module("lmdeploy.serve.core.async_engine").AsyncEngine

    def reached(*_: Any, **__: Any) -> None:
        raise EngineReachedError

    monkeypatch.setattr(engine, "_build_turbomind", reached)
    monkeypatch.setattr(engine, "_build_pytorch", reached)
    return engine


@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
def test_pipelines_are_refused_before_an_engine_is_built(backend: str, bare: Path, engine: Any) -> None:
    from lmdeploy.model import ChatTemplateConfig

    refused, reason = (EngineReachedError, None) if needs_none(bare) else (CheckpointError, REASON)
    with pytest.raises(refused, match=reason):
        engine(str(bare), backend=backend)
    with pytest.raises(EngineReachedError):
        engine(str(bare), backend=backend, chat_template_config=ChatTemplateConfig("vicuna"))


def test_pipelines_that_leave_the_vision_half_to_lmdeploy_start(
    bare: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMPILED_VISION_VARIABLE, "0")
    with pytest.raises(EngineReachedError):
        engine(str(bare), backend="pytorch")


@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.name)
def test_a_checkpoint_with_its_template_starts(row: Any, engine: Any, request: pytest.FixtureRequest) -> None:
    with pytest.raises(EngineReachedError):
        engine(str(request.getfixturevalue(f"tiny_{row.name}")), backend="pytorch")


def test_the_doctor_lists_it(bare: Path, request: pytest.FixtureRequest) -> None:
    (line,) = [line for line in diagnose(str(bare)) if line.what == "chat template"]
    assert line.section == "model"
    assert line.state == ("have" if needs_none(bare) else "missing")
    assert ("--chat-template" in line.detail) == (line.state == "missing")
    name = request.node.callspec.params["bare"]
    (line,) = [line for line in diagnose(str(request.getfixturevalue(f"tiny_{name}"))) if line.what == "chat template"]
    assert line.state == "have"


def test_the_doctor_does_not_guess_without_a_tokenizer(tiny_gemma3: Path, tmp_path: Path) -> None:
    folder = tmp_path / "no-tokenizer"
    shutil.copytree(tiny_gemma3, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    (line,) = [line for line in diagnose(str(folder)) if line.what == "chat template"]
    assert (line.state, line.detail) == ("unknown", "the files of its tokenizer are not here")


def test_requests_that_come_all_the_same_are_refused(
    tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, tmp_path: Path
) -> None:
    """`load_vision_model` and LMDeploy's own parts are given their template by the caller."""
    folder = without_template(tiny_gemma3, tmp_path / "bare")
    side = LMDeploySide(folder, tiny_gemma3_bundle.path)
    for chat in ([user(text("a")), assistant("b"), user(text("c"))], [user(image(A), text("a"))], "a"):
        with pytest.raises(InputError, match=REASON):
            side.request(chat)
    raw = side.request([user(text("<start_of_image> a"), image(A))], do_preprocess=False)
    assert len(raw["input_embeddings"]) == 1
    ids = side.tokenizer.encode("a", add_bos=True)
    assert side.request([user(text(ids))])["input_ids"] == ids


def test_other_models_start_as_lmdeploy_has_it(tmp_path: Path, engine: Any) -> None:
    from lmdeploy.model import BaseChatTemplate

    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    get_chat_template = import_module("lmdeploy.serve.core.async_engine").get_chat_template
    assert type(get_chat_template(str(tmp_path))) is BaseChatTemplate
