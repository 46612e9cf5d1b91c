"""Run something on the released TurboMind over stand-ins for CUDA: run.py FOLDER MODULE:FUNCTION [ARGUMENT]...

The stand-ins are compiled into FOLDER. Ends as what was run ends, or with 3 and a line that says why nothing can be.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # of this script's folder is nothing imported

from turbomind_cpu.build import skip_reason  # noqa: E402
from turbomind_cpu.rig import Rig  # noqa: E402

CANNOT = 3


def main() -> int:
    folder, target, *arguments = sys.argv[1:]
    reason = skip_reason()
    if reason:
        print(reason)
        return CANNOT
    Path(folder).mkdir(parents=True, exist_ok=True)
    done = Rig.on_cpu(Path(folder)).run(target, *arguments)
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
