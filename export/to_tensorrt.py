"""From an ONNX graph to an engine file of TensorRT or TensorRT-RTX, compiled in a child process."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

from filelock import FileLock

from turbovit.engines.bundle import Profile, TensorSpec
from turbovit.engines.errors import BuildError
from turbovit.engines.store import home
from turbovit.export import compile_child
from turbovit.export.compile_child import CompileJob
from turbovit.export.profiles import shapes_from_profile

logger = logging.getLogger("turbovit")

LAST_LINES = 3  # of what a process said, in an error


class CompilerRefusedError(BuildError):
    """The compiler came to its end and does not take the graph: another form of it may do."""


def engine_from_onnx(
    runtime: str,
    version: str,
    graph: Path,
    engine: Path,
    inputs: Sequence[TensorSpec],
    profiles: Sequence[Profile],
    architectures: Sequence[str],
    report: Callable[[str], None],
) -> None:
    """Compile `graph` and write `engine`. Whatever ends this otherwise leaves no file and no process.

    Args:
        runtime: ``tensorrt`` or ``tensorrt_rtx``, and `version` the installed one.
        inputs: the graph's, with symbolic shapes.
        architectures: compute capabilities; for ``tensorrt`` that of the GPU that is here.
        report: called with a line as the compiler goes on.

    Raises:
        CompilerRefusedError: the graph does not parse (with the node), or no engine can be made of it; in the
            library's own words.
        BuildError: the compiler crashed or was killed, or the engine cannot be written.
    """
    with _timing_cache(runtime, version, architectures) as cache:
        job = CompileJob(
            runtime=runtime,
            graph=str(graph.absolute()),
            engine=str(engine.absolute()),
            profiles=[
                {name: [list(shape) for shape in shapes] for name, shapes in shapes_from_profile(one, inputs).items()}
                for one in profiles
            ],
            architectures=list(architectures),
            timing_cache=str(cache) if cache else None,
            parent=os.getpid(),
        )
        try:
            _run(job, report)
        except BaseException:
            engine.unlink(missing_ok=True)
            raise


def _run(job: CompileJob, report: Callable[[str], None]) -> None:
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log, _child(log) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: its log says why
            child.stdin.write(json.dumps(asdict(job)))
            child.stdin.close()
        last = {}
        for line in child.stdout:
            last = json.loads(line)
            if "step" in last:
                report(last["step"])
        status = child.wait()
        if "done" not in last or status:
            log.seek(0)
            kind = CompilerRefusedError if last.get("refused") else BuildError
            reason = _reason(status, last.get("error"), log.read())
            raise kind(f"{job.runtime} cannot compile {Path(job.graph).name}: {reason}")


@contextlib.contextmanager
def _child(log: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """The process, in a session of its own: Ctrl-C reaches this process alone, and this one ends the child."""
    # From the root, as `-m` would let modules of the present folder stand in for the library's.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-m", compile_child.__name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        encoding="utf-8",
        cwd="/",
        env=environment,
        start_new_session=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def _reason(status: int, error: str | None, log: str) -> str:
    """Why it failed: the errors that the library logged, else what was raised, else its last words."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    logged = [line.removeprefix("[E]").strip() for line in lines if line.startswith("[E]")]
    ended = [f"it {ending(status)}", *(logged or lines[-LAST_LINES:])]
    words = ended if error is None else logged or [error]
    return "; ".join(dict.fromkeys(re.sub(r"\s+", " ", word) for word in words))


def ending(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"ended with status {status}"
    words = f"was ended by {signal.Signals(-status).name}"
    return f"{words} (the system does that where memory runs out)" if status == -signal.SIGKILL else words


@contextlib.contextmanager
def _timing_cache(runtime: str, version: str, architectures: Sequence[str]) -> Iterator[Path | None]:
    """A working copy of the store's timing cache; takes its place, in one step, if the block ends well.

    TensorRT-RTX has none: its kernels are made, and kept in a cache of the runtime's, where the engine runs. One
    build at a time uses a cache, as two that time kernels on one GPU would disturb each other; where it cannot be
    locked there is none.
    """
    if runtime != "tensorrt":
        yield None
        return
    kept = home() / "timing" / f"{runtime}-{version}-sm{'-'.join(architectures)}.cache"
    working = kept.with_name(f".{kept.name}.{os.getpid()}")
    lock = FileLock(f"{kept}.lock")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # the latter is older filelock's, where there are no locks
        logger.warning("compiling without the timing cache in %s, which cannot be locked: %s", kept.parent, error)
        yield None
        return
    try:
        if kept.exists():
            shutil.copyfile(kept, working)
        yield working
        if working.exists():
            os.replace(working, kept)
    finally:
        working.unlink(missing_ok=True)
        lock.release()
