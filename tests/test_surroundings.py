"""Locales that are not UTF-8, and a user without account or home: text is UTF-8 everywhere, and nothing falls over."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import command_child
import pytest
from PIL import Image
from test_imports import ROOT, sources

NAME = "模型 é 🦙"  # the last is in no GBK, none of it in ASCII
UID = 12345  # of nobody
LOCALE_SOURCES = Path("/usr/share/i18n")
Surroundings = tuple[list[str], dict[str, str]]  # what stands before the command, and its environment


@pytest.fixture(scope="module")
def gbk(tmp_path_factory: pytest.TempPathFactory) -> Surroundings:
    if shutil.which("localedef") is None or not (LOCALE_SOURCES / "charmaps" / "GBK.gz").is_file():
        pytest.skip("no localedef, or not its sources (Debian's package `locales`)")
    folder = tmp_path_factory.mktemp("locales")
    subprocess.run(["localedef", "-i", "zh_CN", "-f", "GBK", str(folder / "zh_CN.GBK")], check=True)
    return [], {"LOCPATH": str(folder), "LC_ALL": "zh_CN.GBK"}


@pytest.fixture(scope="module")
def ascii_only() -> Surroundings:
    return [], {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(scope="module")
def nobody() -> Surroundings:
    """A uid without passwd entry, home and name. It may read everything: this interpreter can lie in root's home."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv (util-linux)")
    ids = [f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
    become = ["setpriv", *ids, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    if subprocess.run([*become, sys.executable, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip("another user cannot be given the right to read this interpreter")
    return become, {}


def run(surroundings: Surroundings, arguments: list[str], folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Python in these surroundings, with a temporary folder of its own and no other setting."""
    before, settings = surroundings
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(Path(ROOT).parent),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TMPDIR": str(folder),
    }
    command = [*before, sys.executable, *arguments]
    return subprocess.run(command, env=environment | settings, cwd=folder, capture_output=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "sample"), [("gbk", "tiny_deepseek_vl2"), ("ascii_only", "tiny_qwen3_vl"), ("nobody", "tiny_gemma3")]
)
def test_commands_work_and_all_text_is_utf8(
    where: str, sample: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    surroundings: Surroundings = request.getfixturevalue(where)
    folder = tmp_path / NAME
    model = shutil.copytree(request.getfixturevalue(sample), folder / "model")
    for name in ("config.json", "processor_config.json", "preprocessor_config.json"):
        if (model / name).is_file():
            data = json.loads((model / name).read_text(encoding="utf-8")) | {"remark": NAME}
            (model / name).write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    Image.new("RGB", (60, 40), "red").save(folder / "image.png")
    os.chown(folder, UID if where == "nobody" else -1, -1)
    commands = [
        ["build", "model", "-o", "bundle"],
        ["doctor", str(model)],
        ["serve", str(model)],
        ["encode", "bundle", "image.png", "-o", "features.npz"],
        ["inspect", "bundle"],
        ["doctor", f"nowhere {NAME}"],
    ]
    script = ["-X", "warn_default_encoding", command_child.__file__, json.dumps(commands, ensure_ascii=False)]
    result = run(surroundings, script, folder)
    said = result.stderr.decode(errors="replace")
    assert result.returncode == 0, said
    answer = json.loads(result.stdout.splitlines()[-1])
    assert answer == {"codes": [0, 0, 2, 0, 0, 2], "warnings": []}, said
    assert "Traceback" not in said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    assert "torch sees no CUDA device here" in errors[0]
    assert "there is no folder" in errors[1]


def test_without_a_home_the_store_is_a_temporary_folder(nobody: Surroundings, tmp_path: Path) -> None:
    os.chown(tmp_path, UID, -1)
    show = "import os, turbovit.engines.store as s; print(os.environ['USER'], s.home(), s.home(), sep='\\n')"
    for settings in ({}, {"HOME": "/"}, {"HOME": "/nonexistent"}):
        result = run((nobody[0], settings), ["-c", show], tmp_path)
        assert result.stdout.decode().splitlines() == [f"uid-{UID}", *[str(tmp_path / f"turbovit-{UID}")] * 2]
        warning = result.stderr.decode()
        assert warning.count("set TURBOVIT_HOME to a folder that stays") == 1
    kept = run((nobody[0], {"HOME": str(tmp_path)}), ["-c", show], tmp_path)
    assert kept.stdout.decode().splitlines()[1] == str(tmp_path / ".cache" / "turbovit")


@pytest.mark.parametrize("taken", ["owner", "mode", "file"])
def test_a_temporary_store_that_others_can_write_to_is_refused(
    nobody: Surroundings, tmp_path: Path, taken: str
) -> None:
    os.chown(tmp_path, UID, -1)
    place = tmp_path / f"turbovit-{UID}"
    if taken == "file":
        place.touch()
    else:
        place.mkdir()
        place.chmod(0o777 if taken == "mode" else 0o755)
    os.chown(place, 0 if taken == "owner" else UID, -1)
    result = run(nobody, ["-m", "turbovit", "encode", str(tmp_path / "nothing"), "x.png"], tmp_path)
    build = run(nobody, ["-c", "import turbovit.engines.store as s; s.home()"], tmp_path)
    assert "BuildError" in build.stderr.decode()
    assert "set TURBOVIT_HOME" in build.stderr.decode()
    assert result.returncode == 2


def calls_of_text_mode(tree: ast.AST) -> list[int]:
    """Lines of calls with ``text=True`` or its older name: ``encoding=`` means the same and says which."""
    modes = {"text=True", "universal_newlines=True"}
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if any(ast.unparse(keyword) in modes for keyword in call.keywords)]


def test_no_process_is_talked_to_in_the_locales_encoding() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources()}
    assert {path: calls_of_text_mode(tree) for path, tree in trees.items() if calls_of_text_mode(tree)} == {}


def test_the_check_of_text_modes_sees_them() -> None:
    source = "subprocess.run(a, text=True)\nPopen(b, universal_newlines=True)\nrun(c, encoding='utf-8')"
    assert calls_of_text_mode(ast.parse(source)) == [1, 2]


def test_what_stdout_has_no_character_for_is_escaped(tmp_path: Path) -> None:
    settings = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    print_it = "import sys; from turbovit import cli; sys.argv = ['turbovit', '--help']\n"
    print_it += "try: cli.main()\nexcept SystemExit: print('\\u6a21', '\\udce6')"
    result = run(([], settings), ["-c", print_it], tmp_path)
    assert result.stdout.decode("ascii").splitlines()[-1] == "\\u6a21 \\udce6"
