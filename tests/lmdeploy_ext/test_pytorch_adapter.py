"""What is touched of LMDeploy's PyTorch engine is as expected, and the module map reaches its workers."""

from __future__ import annotations

import ast
import functools
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from turbovit.lmdeploy_ext import adapter, install
from turbovit.lmdeploy_ext.pytorch_engine import CUSTOM_MODULE_MAP_FILE, has_compiled_vision, models
from turbovit.lmdeploy_ext.pytorch_engine.adapter import PRIVATE_PARTS


def test_the_installed_lmdeploy_is_as_expected_before_and_after_install() -> None:
    assert adapter.check(PRIVATE_PARTS) == []
    install()
    assert adapter.check(PRIVATE_PARTS) == []


@pytest.mark.parametrize("path", [path for path, parameters in PRIVATE_PARTS.items() if parameters])
def test_another_signature_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, names = path.split(":")
    *owners, name = names.split(".")
    owner = functools.reduce(getattr, owners, import_module(module))
    monkeypatch.setattr(owner, name, lambda something_else: None)
    assert [problem for problem in adapter.check(PRIVATE_PARTS) if problem.startswith(f"{path} takes ")]


def test_the_map_is_alone_in_its_folder_and_holds_dotted_names_alone() -> None:
    assert [path.name for path in CUSTOM_MODULE_MAP_FILE.parent.glob("*.*")] == [CUSTOM_MODULE_MAP_FILE.name]
    docstring, assignment = ast.parse(CUSTOM_MODULE_MAP_FILE.read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert isinstance(assignment, ast.Assign)
    module_map = ast.literal_eval(assignment.value)
    assert module_map == {name: f"{models.__name__}.{name}" for name in models.COMPILED_HALVES}


def test_lmdeploy_finds_our_classes_by_the_map() -> None:
    from lmdeploy.pytorch.models.module_map import MODULE_MAP
    from lmdeploy.pytorch.models.patch import _class_from_qualname

    for architecture in models.COMPILED_HALVES:
        found = _class_from_qualname(f"{models.__name__}.{architecture}")
        assert found is models.model_class(architecture)
        assert issubclass(found, _class_from_qualname(MODULE_MAP[architecture]))
    with pytest.raises(AttributeError, match="has no attribute 'Other'; it has Gemma3ForConditionalGeneration"):
        _ = models.Other


def test_the_map_reaches_the_config_that_workers_get() -> None:
    """LMDeploy 0.18 leaves it in its MiscConfig, where nothing that builds a model looks."""
    from lmdeploy.pytorch.config import MiscConfig
    from lmdeploy.pytorch.engine.executor.base import ExecutorBase

    install()
    assert made_executor(ExecutorBase, MiscConfig(custom_module_map="ours")).model_config.custom_module_map == "ours"
    assert made_executor(ExecutorBase, MiscConfig()).model_config.custom_module_map is None


def test_without_us_lmdeploy_loses_the_map() -> None:
    """When this fails, `patch_module_map` can go."""
    from lmdeploy.pytorch.config import MiscConfig
    from lmdeploy.pytorch.engine.executor.base import ExecutorBase

    install()
    own = type("Own", (ExecutorBase,), {"__init__": ExecutorBase.__init__.__wrapped__})
    assert made_executor(own, MiscConfig(custom_module_map="ours")).model_config.custom_module_map is None


def made_executor(kind: type, misc_config: Any) -> Any:
    from lmdeploy.pytorch.config import CacheConfig, DistConfig

    model_config = SimpleNamespace(custom_module_map=None, sliding_window=-1)
    cache_config = CacheConfig(1, 64, num_cpu_blocks=0, num_gpu_blocks=1)
    return kind("model", model_config, cache_config, None, DistConfig(), misc_config)


def test_only_the_entry_in_the_engines_config_decides() -> None:
    from lmdeploy.messages import PytorchEngineConfig, TurbomindEngineConfig

    assert has_compiled_vision(PytorchEngineConfig(custom_module_map=str(CUSTOM_MODULE_MAP_FILE)))
    assert not has_compiled_vision(PytorchEngineConfig(custom_module_map="other.py"))
    assert not has_compiled_vision(PytorchEngineConfig())
    assert not has_compiled_vision(TurbomindEngineConfig())
    assert not has_compiled_vision(None)
