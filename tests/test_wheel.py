"""The wheel holds one top-level package, and works without the source tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # From a copy: setuptools builds in the source tree, and takes up what an earlier build left there.
    source = tmp_path_factory.mktemp("source") / "turbovit"
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "demo", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=unwanted)
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_only_top_level_is_turbovit(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"turbovit"}
    assert {"turbovit/py.typed", "turbovit/cli.py", "turbovit/engines/bundle.py"} <= set(names)
    sources = {path.relative_to(ROOT).as_posix() for sub in ("export", "engines") for path in (ROOT / sub).glob("*.py")}
    assert {f"turbovit/{name}" for name in sources} <= set(names)


def test_the_installed_wheel_runs_away_from_the_source(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = (
        "import turbovit, turbovit.export.build, turbovit.lmdeploy_ext, sys;"
        "from turbovit.cli import main; sys.argv = ['turbovit', 'sample', 'gemma3', 'model']; main()"
    )
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); {program}"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "model" / "config.json").is_file()
