"""The child of `rig.Rig`: child.py [--prepare MODULE:FUNCTION]... MODULE:FUNCTION [ARGUMENT]...

Over stand-ins torch, which knows nothing of them, is told of one device; then the functions run in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from turbomind_cpu.rig import STAND_INS

FREE_BYTES = 1 << 31


def tell_torch_of_a_device() -> None:
    """What LMDeploy asks torch before and while it hands weights to the engine, answered for host memory."""
    torch.cuda.device = lambda index: contextlib.nullcontext()
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(name="stand-in", major=8, minor=0)
    torch.cuda.mem_get_info = lambda *_: (FREE_BYTES, FREE_BYTES)
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor


def function_of(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prepare", action="append", default=[])
    parser.add_argument("target")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if STAND_INS in os.environ:
        tell_torch_of_a_device()
    for name in options.prepare:
        function_of(name)()
    function_of(options.target)(*options.arguments)


if __name__ == "__main__":
    status = 0
    try:
        main()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # an engine that is still there aborts in the interpreter's last breath
