"""Imports every module and runs commands of `turbovit`; what of it read or wrote text in the locale's encoding.

Takes the commands as JSON; its last line of output is JSON: exit codes, and the EncodingWarnings from our files. To be
run with ``-X warn_default_encoding``.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import traceback
import warnings
from typing import Any

import turbovit

ROOT = turbovit.__path__[0]
found: list[str] = []


def record(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
    if issubclass(category, EncodingWarning) and filename.startswith(ROOT):
        found.append(f"{filename}:{lineno}: {message}")


def run(arguments: list[str]) -> int | str:
    from turbovit import cli

    sys.argv = ["turbovit", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        return traceback.format_exc()
    return 0


def main() -> None:
    assert sys.flags.warn_default_encoding
    warnings.simplefilter("always", EncodingWarning)
    warnings.simplefilter = lambda *_, **__: None  # the command line's own filter would come before this one
    warnings.showwarning = record
    codes = [run(command) for command in json.loads(sys.argv[1])]
    for module in pkgutil.walk_packages(turbovit.__path__, "turbovit."):
        if not module.name.endswith(("__main__", "_child")):  # importing the first is to run it
            importlib.import_module(module.name)
    seen = list(found)
    warnings.warn_explicit("what shows that they are seen", EncodingWarning, f"{ROOT}/probe.py", 1)
    assert len(found) == len(seen) + 1
    print(json.dumps({"codes": codes, "warnings": seen}))


if __name__ == "__main__":
    main()
