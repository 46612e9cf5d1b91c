"""Each touch of LMDeploy's private parts is checked, and a change in any of them is named."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest

from turbovit.engines.errors import RuntimeUnavailableError
from turbovit.lmdeploy_ext import adapter, install, media_adapter, plugin
from turbovit.lmdeploy_ext.adapter import PRIVATE_PARTS, SERVER_PARTS

PARTS = PRIVATE_PARTS | SERVER_PARTS | media_adapter.PRIVATE_PARTS


def owner_and_name(path: str) -> tuple[Any, str]:
    module, names = path.split(":")
    *owners, name = names.split(".")
    owner = import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    return owner, name


def test_the_installed_lmdeploy_is_as_expected_before_and_after_install() -> None:
    assert adapter.check(PARTS) == []
    install()
    assert adapter.check(PARTS) == []


@pytest.mark.parametrize("path", [path for path in PARTS if PARTS[path]])
def test_another_signature_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = owner_and_name(path)
    monkeypatch.setattr(owner, name, lambda something_else: None)
    problems = [problem for problem in adapter.check(PARTS) if problem.startswith(path)]
    assert len(problems) == 1
    assert str(list(PARTS[path])) in problems[0]


@pytest.mark.parametrize("path", [path for path in PARTS if "." not in path.split(":")[1]])
def test_a_function_that_is_gone_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(*owner_and_name(path))
    assert [problem for problem in adapter.check(PARTS) if problem.startswith(f"{path} is gone")]


def test_a_class_or_module_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(import_module("lmdeploy.model"), "HFChatTemplate")
    monkeypatch.setitem(sys.modules, "lmdeploy.vl.engine", None)
    assert [problem.split(" is gone")[0] for problem in adapter.check()] == [
        "lmdeploy.vl.engine:_raise_exception_on_finish",
        "lmdeploy.vl.engine:ImageEncoder.preprocess",
        "lmdeploy.vl.engine:ImageEncoder._is_new_preprocess_api",
        "lmdeploy.model:HFChatTemplate.messages2prompt",
    ]


def test_install_changes_nothing_in_an_lmdeploy_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmdeploy import archs

    monkeypatch.setattr(plugin, "_installed", False)
    monkeypatch.setattr(archs, "autoget_backend", changed := lambda path: "turbomind")
    with pytest.raises(RuntimeUnavailableError, match=r"needs lmdeploy 0\.18 .*archs:autoget_backend takes \['path'\]"):
        install()
    assert archs.autoget_backend is changed
    assert not plugin._installed
