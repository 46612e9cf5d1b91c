"""What libraries ask of a process's account, for a uid that has none: containers run as any uid, without passwd."""

from __future__ import annotations

import getpass
import os
from pathlib import Path


def complete_account() -> None:
    """Set ``USER`` and ``HOME`` of this process, and of those that it starts, where nothing says what they are.

    torch names a cache folder by the user when it exports; mmengine, which LMDeploy imports, asks for a home
    directory. Both raise where there is none, whatever they were wanted for.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"uid-{os.getuid()}"
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = "/"  # as Docker does it
