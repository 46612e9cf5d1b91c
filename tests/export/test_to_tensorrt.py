"""The compiler's child process, with the real TensorRT-RTX: what it writes, and every way it can fail."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from turbovit.engines.bundle import Profile, TensorSpec
from turbovit.engines.errors import BuildError
from turbovit.export import to_tensorrt
from turbovit.export.targets import library_version
from turbovit.export.to_tensorrt import CompilerRefusedError, engine_from_onnx

pytest.importorskip("tensorrt_rtx")
pytest.importorskip("polygraphy")

INPUTS = (TensorSpec("x", "float32", ("rows", 4)),)
PROFILES = (Profile({"rows": (1, 1, 1)}), Profile({"rows": (1, 5, 17)}))
Compile = Callable[..., list[str]]


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    return write_graph(tmp_path / "model.fp32.matmul.onnx", "Relu")


def write_graph(path: Path, op: str, domain: str = "") -> Path:
    """x [rows, 4] through one node called ``the_node``."""
    node = helper.make_node(op, ["x"], ["y"], name="the_node", domain=domain)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 4]) for name in "xy")
    opsets = [helper.make_opsetid("", 23), *([helper.make_opsetid(domain, 1)] if domain else [])]
    onnx.save(helper.make_model(helper.make_graph([node], "graph", [x], [y]), opset_imports=opsets), path)
    return path


@pytest.fixture
def compiled(tmp_path: Path) -> Compile:
    """Compiles a graph to ``engine`` in the test's folder; the lines that the compiler reported."""

    def run(graph: Path, architectures: tuple[str, ...] = ("8.9", "12.0"), runtime: str = "tensorrt_rtx") -> list[str]:
        steps: list[str] = []
        version = library_version(runtime)
        engine_from_onnx(runtime, version, graph, tmp_path / "engine", INPUTS, PROFILES, architectures, steps.append)
        return steps

    return run


def nothing_is_left(folder: Path) -> bool:
    return sorted(path.suffix for path in folder.iterdir() if path.is_file()) in ([], [".onnx"])


def test_the_engine_is_for_the_gpus_and_the_shapes_asked_for(graph: Path, compiled: Compile, tmp_path: Path) -> None:
    steps = compiled(graph)
    engine = (tmp_path / "engine").read_bytes()
    if library_version("tensorrt_rtx").startswith("1.7."):  # where this layout of the header was seen
        assert engine[24:26] == bytes([1, 7])
        assert struct.unpack("<I", engine[32:36]) == (0b001000 | 0b010000,)  # 8.9 and 12.0 of 7.5, 8.0, 8.6, 8.9, ..
    for rows in (1, 5, 17):
        assert struct.pack("<2q", rows, 4) in engine
    assert steps[0] == "parsing the graph"
    assert steps[-2] == "writing the engine"
    assert len(steps) > 4  # the library's own phases between
    assert steps[-1].startswith("done, peak memory 0.")


def test_the_same_graph_gives_the_same_bytes(graph: Path, compiled: Compile, tmp_path: Path) -> None:
    compiled(graph)
    first = (tmp_path / "engine").read_bytes()
    compiled(graph)
    assert (tmp_path / "engine").read_bytes() == first
    compiled(graph, ("8.6",))
    assert (tmp_path / "engine").read_bytes() != first


def test_a_node_that_does_not_parse_is_named_with_its_op(compiled: Compile, tmp_path: Path) -> None:
    graph = write_graph(tmp_path / "model.onnx", "NoSuchOp", "org.example")
    with pytest.raises(CompilerRefusedError) as caught:
        compiled(graph)
    text = str(caught.value)
    assert text.startswith("tensorrt_rtx cannot compile model.onnx: ")
    assert "the_node" in text
    assert "NoSuchOp" in text
    assert "\n" not in text
    assert nothing_is_left(tmp_path)


def test_a_graph_that_is_none_is_refused_in_the_librarys_words(compiled: Compile, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(CompilerRefusedError, match=r"cannot compile model\.onnx: .*(parse|Parse|deserialize)"):
        compiled(tmp_path / "model.onnx")
    assert nothing_is_left(tmp_path)


def test_an_engine_that_cannot_be_made_is_told_in_the_librarys_words(tmp_path: Path, compiled: Compile) -> None:
    node = helper.make_node("Relu", ["x"], ["y"], name="the_node")
    x, y = (helper.make_tensor_value_info(name, TensorProto.BFLOAT16, ["rows", 4]) for name in "xy")
    onnx.save(
        helper.make_model(helper.make_graph([node], "graph", [x], [y]), opset_imports=[helper.make_opsetid("", 23)]),
        tmp_path / "model.onnx",
    )
    with pytest.raises(CompilerRefusedError, match=r"IBuilder::buildSerializedNetwork: Error .*sm75"):
        compiled(tmp_path / "model.onnx", ("7.5",))
    assert nothing_is_left(tmp_path)


STUCK_CHILD = """
import json, os, pathlib, sys, time
job = json.load(sys.stdin)
print("the last words", file=sys.stderr, flush=True)
pathlib.Path(job["engine"]).write_text("half an engine")
pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
print(json.dumps({"step": "stuck"}), flush=True)
time.sleep(60)
"""


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The child says a word and then does nothing; the file gets its process id."""
    folder = tmp_path / "child"
    folder.mkdir()
    (folder / "stuck_child.py").write_text(STUCK_CHILD)
    monkeypatch.setattr(to_tensorrt.compile_child, "__name__", "stuck_child")
    monkeypatch.syspath_prepend(str(folder))
    return folder / "pid"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def compile_until_stuck(graph: Path, at_step: Callable[[], None]) -> None:
    def report(step: str) -> None:
        if step == "stuck":
            at_step()

    engine_from_onnx("tensorrt_rtx", "1", graph, graph.with_name("engine"), INPUTS, PROFILES, ("8.9",), report)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, r"it was ended by SIGKILL \(the system does that where memory runs out\); the last words"),
        (signal.SIGSEGV, "it was ended by SIGSEGV; the last words"),
    ],
)
def test_a_child_that_dies_is_an_error_with_its_last_words(
    graph: Path, stuck: Path, number: signal.Signals, message: str
) -> None:
    with pytest.raises(BuildError, match=rf"cannot compile model\.fp32\.matmul\.onnx: {message}") as caught:
        compile_until_stuck(graph, lambda: os.kill(int(stuck.read_text()), number))
    assert not isinstance(caught.value, CompilerRefusedError)  # another form of the graph would do no better
    assert not graph.with_name("engine").exists()


def test_ctrl_c_ends_the_child_and_leaves_nothing(graph: Path, stuck: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_until_stuck(graph, interrupt)
    assert not alive(int(stuck.read_text()))
    assert not graph.with_name("engine").exists()


def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    script = f"""
import os, subprocess, sys, time
code = "import os, time; from turbovit.export.compile_child import end_with; end_with({{}});"
code += "open({str(tmp_path / "pid")!r}, 'w').write(str(os.getpid())); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", code.format(os.getpid())])
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script]) as parent:
        pid = _content(tmp_path / "pid")
        parent.kill()
    deadline = time.monotonic() + 10
    while alive(pid) and not _is_zombie(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid) or _is_zombie(pid)


def _content(path: Path) -> int:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.05)
    raise AssertionError(f"{path} was not written")


def _is_zombie(pid: int) -> bool:
    """Dead, but whoever adopted it has not asked for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return False


def test_a_full_disk_is_no_refusal(graph: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this machine has no /dev/full")
    engine = graph.with_name("engine")
    engine.symlink_to("/dev/full")
    with pytest.raises(BuildError, match="No space left on device") as caught:
        engine_from_onnx("tensorrt_rtx", "1", graph, engine, INPUTS, PROFILES, ("8.9",), lambda step: None)
    assert not isinstance(caught.value, CompilerRefusedError)
    assert not engine.is_symlink()


def test_modules_of_the_present_folder_do_not_stand_in_for_others(
    graph: Path, compiled: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "polygraphy.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    compiled(graph)
    assert (tmp_path / "engine").exists()


def test_only_tensorrt_has_a_timing_cache_and_it_is_replaced_in_one_step(tmp_path: Path, store: Path) -> None:
    kept = store.parent / "timing" / "tensorrt-11.4-sm8.9.cache"
    with to_tensorrt._timing_cache("tensorrt_rtx", "1.7", ("8.9",)) as working:
        assert working is None
    with to_tensorrt._timing_cache("tensorrt", "11.4", ("8.9",)) as working:
        assert working is not None
        assert not working.exists()
        working.write_text("one")
    assert kept.read_text() == "one"
    with pytest.raises(KeyboardInterrupt):
        interrupted_while_caching("one")
    assert kept.read_text() == "one"
    assert {path.name for path in kept.parent.iterdir()} == {kept.name, f"{kept.name}.lock"}


def interrupted_while_caching(expected: str) -> None:
    with to_tensorrt._timing_cache("tensorrt", "11.4", ("8.9",)) as working:
        assert working is not None
        assert working.read_text() == expected
        working.write_text("half wri")
        raise KeyboardInterrupt


def test_a_timing_cache_goes_through_the_library(
    graph: Path, compiled: Compile, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-RTX takes and gives one, though it does nothing with it: so the way through polygraphy is run."""
    original = to_tensorrt._timing_cache
    monkeypatch.setattr(to_tensorrt, "_timing_cache", lambda runtime, *rest: original("tensorrt", *rest))
    for _ in range(2):  # without one, and with the one that the first build left
        compiled(graph)
        (cache,) = (store.parent / "timing").glob("*.cache")
        assert cache.stat().st_size > 0
