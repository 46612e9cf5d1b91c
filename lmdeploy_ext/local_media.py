"""Which files of this machine requests may name.

Pipelines may name any; a server's requests none, or those in one folder. The rule belongs to a server: it travels with
LMDeploy's list of allowed domains, which goes wherever the server's configuration goes, spawned processes included.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from turbovit.engines.errors import InputError

OPTION = "--allowed-local-media-path"


class AllowedMedia(list):
    """LMDeploy's allowed domains of a server (empty: all), and the folder whose files its requests may name, if any."""

    def __init__(self, domains: Iterable[str], folder: Path | None):
        super().__init__(domains)
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (list(self), self.folder)


def _unpickled(domains: list[str], folder: Path | None) -> AllowedMedia:
    """The rule in a process that serves, where nothing may be in place yet that follows it."""
    from turbovit.lmdeploy_ext.media_adapter import patch_url_loading

    patch_url_loading()
    return AllowedMedia(domains, folder)


def local_path(url: str) -> str | None:
    """The path that a URL names on this machine, as LMDeploy reads it; None for data and what comes over HTTP."""
    parts = urlparse(url)
    if parts.scheme.startswith("http") or parts.scheme == "data":
        return None
    return url2pathname(parts.netloc + parts.path) if parts.scheme == "file" else url


def allowed_path(path: str, allowed: Any) -> str:
    """`path` without links, once it was checked; says of what lies elsewhere not even whether it exists.

    Args:
        allowed: an `AllowedMedia`; anything else allows every path.

    Raises:
        InputError: the rule does not allow it.
    """
    if not isinstance(allowed, AllowedMedia):
        return path
    if allowed.folder is None:
        raise InputError(
            f"it is neither an http nor a data URL, and this server reads no local files: send it as a data URL, or "
            f"start the server with {OPTION} DIR"
        )
    try:
        real, folder = os.path.realpath(path), os.path.realpath(allowed.folder)
        inside = os.path.commonpath((real, folder)) == folder
    except ValueError:  # a NUL byte
        inside = False
    if not inside:
        raise InputError(f"it names no file in the folder that this server may read ({OPTION})")
    return real
