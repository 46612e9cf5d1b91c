"""What importing costs, what it needs, and which way the arrows between the folders point."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

import turbovit

ROOT = Path(turbovit.__file__).parent
PACKAGES = ("engines", "export", "lmdeploy_ext", "benchmarks")
# Folder -> the folders of ours it may never import, and those it may import only inside a function.
NEVER = {
    "engines": {"export", "lmdeploy_ext", "benchmarks", "cli"},
    "export": {"lmdeploy_ext", "benchmarks", "cli"},
    "lmdeploy_ext": {"benchmarks", "cli"},
    "benchmarks": {"cli"},
}
ONLY_LAZILY = {"lmdeploy_ext": {"export"}}
HEAVY = ("torch", "onnxruntime", "transformers", "lmdeploy")
OPTIONAL = ("onnxruntime", "tensorrt", "tensorrt_rtx", "lmdeploy", "polygraphy")


def run(script: str) -> str:
    """What `script` prints in a fresh interpreter."""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def seconds_to_import() -> float:
    script = "from time import perf_counter; start = perf_counter(); import turbovit; print(perf_counter() - start)"
    return float(run(script))


def test_importing_turbovit_takes_under_0_3_seconds() -> None:
    rounds = (median(seconds_to_import() for _ in range(3)) for _ in range(3))  # again where the machine is busy
    assert any(seconds < 0.3 for seconds in rounds)


def test_importing_turbovit_pulls_in_nothing_heavy() -> None:
    loaded = run(f"import sys, turbovit; print([name for name in {HEAVY} if name in sys.modules])")
    assert loaded.strip() == "[]"


def test_the_public_names_are_there() -> None:
    for name in turbovit.__all__:
        assert getattr(turbovit, name) is not None
    with pytest.raises(AttributeError, match=r"no attribute 'bild'; it has .*build"):
        _ = turbovit.bild


def test_every_module_imports_without_the_optional_packages() -> None:
    failures = run(f"""
import importlib, json, pkgutil, sys, traceback
for name in {OPTIONAL}:
    sys.modules[name] = None  # makes its import fail
sys.argv[1:] = ["--help"]  # to import turbovit.__main__ is to run it
import turbovit
failures = {{}}
modules = [module.name for module in pkgutil.walk_packages(turbovit.__path__, "turbovit.", onerror=lambda name: None)]
for name in modules:
    try:
        importlib.import_module(name)
    except BaseException as error:
        if getattr(error, "code", error) != 0:
            failures[name] = traceback.format_exc(limit=-2)
print(json.dumps([len(modules), failures]))
""")
    count, failed = json.loads(failures.splitlines()[-1])
    assert failed == {}
    assert count >= len(sources())


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imported(tree: ast.AST, module: str) -> Iterator[str]:
    """The dotted names that a tree imports; strings such as those of the table of families are no imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def at_module_level(tree: ast.AST) -> ast.Module:
    """The tree without the bodies of its functions, and without what only a type checker reads."""

    class Outside(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.AST) -> None:
            return None

        visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef  # noqa: N815 (ast's names)

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)

    return Outside().visit(tree)


def folders_imported(tree: ast.AST, module: str) -> set[str]:
    """Which of our own folders a tree imports, `cli` counting as one."""
    names = (name.split(".") for name in imported(tree, module))
    return {parts[1] for parts in names if parts[0] == "turbovit" and len(parts) > 1}


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_arrows_point_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    module = ".".join(["turbovit", *path.relative_to(ROOT).with_suffix("").parts])
    tree = ast.parse(path.read_text())
    assert not folders_imported(tree, module) & NEVER[package]
    assert not folders_imported(at_module_level(tree), module) & ONLY_LAZILY.get(package, set())


def test_the_check_of_the_arrows_sees_every_kind_of_import() -> None:
    module = "turbovit.engines.x"
    for line in ("import turbovit.export", "from turbovit import export", "from turbovit.export.plan import Plan"):
        assert folders_imported(ast.parse(line), module) == {"export"}
        assert folders_imported(ast.parse(f"def f():\n    {line}"), module) == {"export"}
        assert folders_imported(at_module_level(ast.parse(f"if True:\n    {line}")), module) == {"export"}
        assert (
            folders_imported(at_module_level(ast.parse(f"class A:\n    def f(self):\n        {line}")), module) == set()
        )
    assert folders_imported(ast.parse("from ..export import plan"), module) == {"export"}
    assert folders_imported(ast.parse("from .. import export"), module) == {"export"}
    assert folders_imported(ast.parse("TOWER = 'turbovit.export.gemma3:Gemma3Tower'"), module) == set()
