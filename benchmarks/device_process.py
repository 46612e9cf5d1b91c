"""The device check's cases in a process of their own: one that crashes or hangs costs a case, not the results.

A CUDA error sticks to its process, a runtime may take the process along, and a kernel may never end.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from turbovit.benchmarks.device_case import Case
from turbovit.benchmarks.device_cases import Options, buildable, check_case
from turbovit.benchmarks.findings import Begun, CaseEnded, Event, Finding, Findings, State
from turbovit.export.compile_child import end_with
from turbovit.export.to_tensorrt import ending


class _TimeOverError(Exception):
    """The deadline has passed."""


def check_cases(options: Options, cases: Sequence[Case], findings: Findings) -> None:
    """Check all cases, in a new process where one was lost; at the deadline it is ended, whatever it is doing."""
    remaining = list(cases)
    while remaining:
        try:
            with _Worker(options, remaining, first=len(remaining) == len(cases)) as worker:
                remaining = worker.findings_into(findings)
        except _TimeOverError:
            for case in remaining:
                findings.take(Finding(case.name, "all", "begun", "not run", "left out for lack of time", 0.0))
            return


class _Worker:
    """A process that checks cases, from its start to its end."""

    def __init__(self, options: Options, cases: list[Case], first: bool):
        self.deadline = options.deadline
        self.remaining = cases
        self.events, sending = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("spawn")  # CUDA survives no fork
        arguments = (options, list(cases), first, os.getpid(), sending)
        self.process: BaseProcess = context.Process(target=_work, args=arguments)
        self.process.start()
        sending.close()  # so that its end is seen here

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.kill()
        self.process.join()
        self.events.close()

    def findings_into(self, findings: Findings) -> list[Case]:
        """Take in what it finds; the cases that another process has to check.

        Raises:
            _TimeOverError: the deadline came first; the case that it was at is among the findings.
        """
        begun, began = self._nothing_begun(), time.monotonic()

        def cut_off(state: State, reason: str) -> None:
            self.remaining.pop(0)
            detail = f"{reason}; what follows about it is left out"
            findings.take(Finding(begun.case, begun.subject, begun.check, state, detail, time.monotonic() - began))

        while self.remaining:
            if not self.events.poll(max(self.deadline - time.monotonic(), 0)):
                cut_off("not run", "the time was over before it ended")
                raise _TimeOverError
            try:
                event: Event = self.events.recv()
            except EOFError:
                self.process.join()
                if self.process.exitcode:
                    cut_off("failed", f"its process {ending(self.process.exitcode)}")
                return self.remaining
            findings.take(event)
            if isinstance(event, CaseEnded):
                self.remaining.pop(0)
            began = time.monotonic()
            begun = event if isinstance(event, Begun) else self._nothing_begun()
        return []

    def _nothing_begun(self) -> Begun:
        return Begun(self.remaining[0].name if self.remaining else "", "all", "begun")


def _work(options: Options, cases: list[Case], first: bool, parent: int, sending: Connection) -> None:
    """Check cases and send what is found. Ends before the others where the device was spoilt for this process."""
    end_with(parent)
    _quieten()
    if options.device.type == "cuda":
        torch.cuda.set_device(options.device)  # the libraries' own allocations go to the current one
    findings = Findings(sending.send)
    runtimes = buildable(options.device, findings if first else Findings(lambda event: None))
    for case in cases:
        check_case(options, case, runtimes, findings)
        findings.take(CaseEnded(case.name))
        if _is_spoilt(options.device):
            return


def _is_spoilt(device: torch.device) -> bool:
    """Whether nothing runs on the device any more, as after an illegal access."""
    try:
        torch.ones(1, device=device).sum().item()
    except RuntimeError:
        return True
    return False


def _quieten() -> None:
    """Libraries keep their remarks to themselves."""
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
