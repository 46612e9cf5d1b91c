"""What `turbovit serve` decides before LMDeploy's server starts, and what it hands to it."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from turbovit.engines.bundle import Bundle
from turbovit.engines.errors import (
    BundleError,
    InputError,
    RuntimeUnavailableError,
    UnsupportedBackendError,
    UnsupportedModelError,
    UsageError,
)
from turbovit.export import build as build_module
from turbovit.lmdeploy_ext import adapter, capability, media_adapter, pytorch_capability, serve
from turbovit.lmdeploy_ext.bundle_choice import BUNDLE_VARIABLE, COMPILED_VISION_VARIABLE
from turbovit.lmdeploy_ext.memory import GpuMemory

ALL_THERE = (capability.Finding("all", "have"),)


class Started:
    """What LMDeploy's server was started with.

    Attributes:
        options: of LMDeploy's command.
        variables: turbovit's environment variables.
        installed: whether turbovit was put in place first.
        lines: what was reported before.
    """

    options: Any = None
    variables: Mapping[str, str]
    installed = False

    def __init__(self) -> None:
        self.lines: list[str] = []


Start = Callable[..., Started]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """Runs `turbovit serve` up to where LMDeploy's own code begins, on a machine with a GPU."""
    monkeypatch.setenv("TURBOVIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(BUNDLE_VARIABLE, "")  # so that what is set later is taken back
    monkeypatch.setenv(COMPILED_VISION_VARIABLE, "")
    monkeypatch.setattr(serve, "gpus", lambda: [GpuMemory("a GPU", 1, 1)])
    monkeypatch.setattr(adapter, "turbomind_problem", lambda: None)

    def run(model: object, *arguments: str, **options: Any) -> Started:
        started = Started()

        def keep(given: Any, prepare: Any) -> None:
            started.options = given
            started.variables = {name: value for name, value in os.environ.items() if name.startswith("TURBOVIT_")}

        monkeypatch.setattr(adapter, "start_server", keep)
        monkeypatch.setattr(serve, "install", lambda: setattr(started, "installed", True))
        serve.serve(str(model), arguments, report=started.lines.append, **options)
        return started

    return run


@pytest.fixture
def able_turbomind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TurboMind that has everything."""
    monkeypatch.setattr(capability, "language_findings", lambda *_: ALL_THERE)


def test_without_a_choice_the_backend_is_the_one_that_can(
    tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, start: Start
) -> None:
    started = start(tiny_gemma3, engines=tiny_gemma3_bundle.path)
    assert started.options.backend == "pytorch"
    assert started.lines[0].startswith("backend: pytorch (the installed LMDeploy's TurboMind cannot run Gemma3For")


@pytest.mark.usefixtures("able_turbomind")
def test_turbomind_comes_first_once_it_can(tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, start: Start) -> None:
    started = start(tiny_gemma3, engines=tiny_gemma3_bundle.path)
    assert started.options.backend == "turbomind"
    assert started.lines[0] == "backend: turbomind"
    assert start(tiny_gemma3, engines=tiny_gemma3_bundle.path, backend="pytorch").options.backend == "pytorch"


@pytest.mark.parametrize("family", ["gemma3", "llama4", "qwen3_vl", "qwen3_vl_moe"])
def test_turbomind_is_refused_with_all_that_it_lacks_and_what_runs(
    family: str, start: Start, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(UnsupportedBackendError) as error:
        start(request.getfixturevalue(f"tiny_{family}"), backend="turbomind")
    architecture = str(error.value).split("cannot run ")[1].split(":")[0]
    lacking = [finding.what for finding in capability.language_findings(architecture) if finding.state == "missing"]
    assert len(lacking) > 2
    for words in (*lacking, "What runs is the vision half", "--backend pytorch"):
        assert words in str(error.value)
    assert error.value.exit_code == 2


def test_a_pytorch_engine_without_the_model_is_refused(
    tiny_gemma3: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytorch_capability, "_module_map", lambda folder: {})
    with pytest.raises(UnsupportedBackendError, match=r"PyTorch engine cannot run Gemma3For.*a language model for"):
        start(tiny_gemma3)


def test_a_machine_without_a_gpu_is_told_before_anything_is_built(
    tiny_gemma3: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "gpus", list)
    monkeypatch.setattr(build_module, "build", None)
    with pytest.raises(RuntimeUnavailableError, match="torch sees no CUDA device here"):
        start(tiny_gemma3, auto_build=True)


@pytest.mark.usefixtures("able_turbomind")
def test_a_turbomind_that_cannot_be_loaded_is_told(
    tiny_gemma3: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "turbomind_problem", lambda: "libcuda.so.1 is missing")
    with pytest.raises(RuntimeUnavailableError, match=r"TurboMind cannot be loaded here: libcuda\.so\.1 is missing"):
        start(tiny_gemma3)


def test_what_does_not_go_together_is_told(tiny_gemma3: Path, tmp_path: Path, start: Start) -> None:
    with pytest.raises(UsageError, match="--no-compiled-vision goes with --backend pytorch"):
        start(tiny_gemma3, backend="turbomind", compiled_vision=False)
    with pytest.raises(UsageError, match="unknown backend 'abacus'; available: turbomind, pytorch"):
        start(tiny_gemma3, backend="abacus")
    with pytest.raises(UsageError, match=r"unrecognized arguments: --nonsense \(.*lmdeploy serve api_server --help"):
        start(tiny_gemma3, "--nonsense")
    with pytest.raises(UsageError, match="--allowed-local-media-path /nowhere is no folder"):
        start(tiny_gemma3, local_media=Path("/nowhere"))
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    with pytest.raises(UnsupportedModelError, match="'LlamaForCausalLM' is not supported"):
        start(tmp_path)


def test_without_lmdeploy_it_is_said_how_to_get_it(
    tiny_gemma3: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "lmdeploy" else found(name))
    with pytest.raises(RuntimeUnavailableError, match=r"needs LMDeploy.*pip install 'turbovit\[lmdeploy\]'"):
        start(tiny_gemma3)


def test_another_lmdeploy_is_told(tiny_gemma3: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmdeploy.serve.openai import launch_server

    monkeypatch.setattr(launch_server, "launch_server", lambda: None)
    with pytest.raises(RuntimeUnavailableError, match=r"needs lmdeploy 0\.18.*launch_server takes \[\]"):
        start(tiny_gemma3)


LINES = [
    "",
    "--server-name 127.0.0.1 --server-port 1234 --tp 2 --session-len 4096 --log-level INFO",
    "--allow-origins http://a http://b --api-keys k1 k2 --ssl --disable_fastapi_docs",
    "--hf-overrides.rope_scaling.factor 2.0 --quant-policy 8 --cache-max-entry-count 0.5",
    "--model-name mine --enable-prefix-caching --allowed-media-domains a.example b.example",
    "--dp 2 --ep 2 --node-rank 0 --role Prefill --vision-max-batch-size 3",
]


@pytest.mark.parametrize("line", LINES)
def test_lmdeploys_options_arrive_as_lmdeploys_own_command_reads_them(
    line: str, tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, start: Start
) -> None:
    from lmdeploy.cli.cli import CLI

    got = vars(start(tiny_gemma3, *shlex.split(line), engines=tiny_gemma3_bundle.path).options)
    adapter.server_parser()
    expected = vars(CLI.parser.parse_args(["serve", "api_server", str(tiny_gemma3), *shlex.split(line)]))
    expected["allowed_media_domains"] = expected["allowed_media_domains"] or []
    expected |= {"backend": "pytorch", "model_name": expected["model_name"] or str(tiny_gemma3)}
    assert got == {name: value for name, value in expected.items() if name != "command"}


@pytest.mark.parametrize("compiled_vision", [True, False])
def test_requests_may_name_the_files_of_one_folder_or_none(
    compiled_vision: bool, tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, tmp_path: Path, start: Start
) -> None:
    from lmdeploy.serve.processors import multimodal

    for folder in (None, tmp_path):
        started = start(
            tiny_gemma3, engines=tiny_gemma3_bundle.path, compiled_vision=compiled_vision, local_media=folder
        )
        assert started.options.allowed_media_domains.folder == folder
    media_adapter.patch_url_loading()  # as install() does, which these tests leave out
    with pytest.raises(InputError, match="names no file in the folder"):
        multimodal.load_from_url("/etc/passwd", None, allowed_media_domains=started.options.allowed_media_domains)


def test_a_bundle_is_taken_by_its_folder_or_found_among_others(
    tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, tiny_llama4_bundle: Bundle, tmp_path: Path, start: Start
) -> None:
    (tmp_path / "engines").mkdir()
    for bundle in (tiny_gemma3_bundle, tiny_llama4_bundle):
        (tmp_path / "engines" / bundle.path.name).symlink_to(bundle.path)
    for engines, expected in (
        (tiny_gemma3_bundle.path, tiny_gemma3_bundle.path),
        (tmp_path / "engines", tmp_path / "engines" / tiny_gemma3_bundle.path.name),
    ):
        started = start(tiny_gemma3, engines=engines)
        assert started.variables[BUNDLE_VARIABLE] == str(expected)
        assert started.variables[COMPILED_VISION_VARIABLE] == "1"
        assert started.installed
        assert started.lines[-1] == f"compiled vision tower: {expected} (onnxruntime fp32)"


def test_a_bundle_that_the_environment_names_is_taken(
    tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BUNDLE_VARIABLE, str(tiny_gemma3_bundle.path))
    assert start(tiny_gemma3).variables[BUNDLE_VARIABLE] == str(tiny_gemma3_bundle.path)


def test_another_models_bundle_is_refused(tiny_gemma3: Path, tiny_llama4_bundle: Bundle, start: Start) -> None:
    with pytest.raises(BundleError, match=r"was built from .*llama4-tiny"):
        start(tiny_gemma3, engines=tiny_llama4_bundle.path)


def test_without_a_bundle_all_ways_out_are_given(tiny_gemma3: Path, tmp_path: Path, start: Start) -> None:
    for engines in (None, tmp_path / "nowhere"):
        with pytest.raises(BundleError) as error:
            start(tiny_gemma3, engines=engines)
        for words in (f"turbovit build {tiny_gemma3}", "--auto-build", "--no-compiled-vision"):
            assert words in str(error.value)


@pytest.mark.usefixtures("able_turbomind")
def test_turbomind_without_a_bundle_cannot_leave_vision_to_lmdeploy(tiny_gemma3: Path, start: Start) -> None:
    with pytest.raises(BundleError) as error:
        start(tiny_gemma3)
    assert "--auto-build" in str(error.value)
    assert "--no-compiled-vision" not in str(error.value)


def test_a_bundle_is_built_where_it_would_be_looked_for(tiny_gemma3: Path, tmp_path: Path, start: Start) -> None:
    built = start(tiny_gemma3, auto_build=True, engines=tmp_path / "engines")
    assert built.variables[BUNDLE_VARIABLE] == str(tmp_path / "engines" / "gemma3-tiny")
    assert any("exporting to ONNX" in line for line in built.lines)
    again = start(tiny_gemma3, auto_build=True, engines=tmp_path / "engines")
    assert again.variables == built.variables
    assert not any("exporting to ONNX" in line for line in again.lines)


def test_a_damaged_bundle_is_refused_before_the_server_starts(
    tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, tmp_path: Path, start: Start
) -> None:
    folder = shutil.copytree(tiny_gemma3_bundle.path, tmp_path / "bundle")
    (folder / "weights.fp32.bin").unlink()
    with pytest.raises(BundleError, match=r"weights\.fp32\.bin, which the manifest names, is missing"):
        start(tiny_gemma3, engines=folder)


@pytest.mark.parametrize("way", ["no compiled vision", "text only"])
def test_no_bundle_is_needed_where_vision_is_lmdeploys_or_left_out(way: str, tiny_gemma3: Path, start: Start) -> None:
    if way == "text only":
        started = start(tiny_gemma3, "--language-model-only")
        assert started.lines[-1] == "vision half: left out"
    else:
        started = start(tiny_gemma3, compiled_vision=False)
        assert started.lines[-1] == "vision half: LMDeploy's own"
        assert not started.installed
        assert started.variables[COMPILED_VISION_VARIABLE] == "0"
    assert started.options.backend == "pytorch"
    assert not started.variables[BUNDLE_VARIABLE]


@pytest.mark.parametrize("kind", ["pytorch", "turbomind"])
def test_lmdeploys_functions_are_back_once_the_server_starts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmdeploy import PytorchEngineConfig, TurbomindEngineConfig
    from lmdeploy.cli.serve import SubCliServe
    from lmdeploy.serve.openai import launch_server

    config = {"pytorch": PytorchEngineConfig(tp=2), "turbomind": TurbomindEngineConfig(tp=2)}[kind]
    calls: list[Any] = []

    def start_many(*args: Any, backend_config: Any) -> None:
        assert launch_server.launch_server is start_many
        calls.append(backend_config)
        raise KeyboardInterrupt

    monkeypatch.setattr(launch_server, "launch_server", start_many)

    def api_server(options: Any) -> None:
        assert launch_server.launch_server is not start_many
        launch_server.launch_server(1, 0, options.model_path, backend_config=config)

    monkeypatch.setattr(SubCliServe, "api_server", api_server)
    options = adapter.server_parser().parse_args(["a model"])
    with pytest.raises(KeyboardInterrupt):
        adapter.start_server(options, lambda model, config: (model, config.tp))
    assert calls == [("a model", 2)]
    assert launch_server.launch_server is start_many
