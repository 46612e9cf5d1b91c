"""Stand-ins for the process that the device check works in: what becomes of a case is in its family's name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from turbovit.benchmarks import device_process
from turbovit.benchmarks.device_case import Case
from turbovit.benchmarks.device_cases import Options
from turbovit.benchmarks.findings import Findings

WORK = device_process._work


def check_case(options: Options, case: Case, runtimes: Sequence[str], findings: Findings) -> None:
    """One check, whose detail is the process that made it."""
    with findings.check(case.name, "subject", "check") as details:
        details.append(str(os.getpid()))
        if case.family == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if case.family == "hangs":
            time.sleep(600)
        if case.family == "fails":
            raise OSError("no space left on device")
    if case.family == "ends":
        os._exit(3)


def work(*arguments: Any) -> None:
    """The real process's function, about cases of the test's making."""
    device_process.check_case = check_case
    device_process._is_spoilt = lambda device: False
    WORK(*arguments)


def spoilt_work(*arguments: Any) -> None:
    """As `work`, on a device that takes nothing more after each case."""
    device_process.check_case = check_case
    device_process._is_spoilt = lambda device: True
    WORK(*arguments)
