"""Fetching what is needed of a checkpoint from the Hugging Face hub, or from its cache where there is no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from turbovit.engines.errors import CheckpointError

# Everything of a checkpoint but its weights: configs, processor and tokenizer files.
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]


def require_hub_id(model: str) -> None:
    """Make sure that a name may be a hub's.

    Raises:
        CheckpointError: it is none.
    """
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(f"there is no folder {model!r}, and it is no hub id (owner/name) either")


def fetch(
    model: str, patterns: Sequence[str], missing: Callable[[Path], str | None], snapshot: Path | None = None
) -> Path:
    """The folder of a snapshot that has the files of `patterns`.

    Args:
        missing: asked where there is no network and the cache, which another program may have filled, lacks some of
            the files: the first one that cannot be done without, or None.
        snapshot: one that was fetched before, to be completed from the same commit; None takes the newest of the main
            branch.

    Raises:
        CheckpointError: the hub cannot be reached, does not have the model, or the cache lacks a file that is needed.
    """
    from huggingface_hub import snapshot_download

    try:
        revision = snapshot.name if snapshot else None
        return Path(snapshot_download(model, allow_patterns=list(patterns), revision=revision))
    except Exception as error:  # the hub's own errors, and whatever its HTTP library lets through
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        # Of IncompleteSnapshotError, which not all versions have, and which none raises for a commit.
        there = getattr(error, "snapshot_path", None) or snapshot
        if there is None:
            raise CheckpointError(
                f"there is no folder {model!r}, and fetching it from the hub failed: {reason}"
            ) from error
        lacking = missing(Path(there))
        if lacking is not None:
            raise CheckpointError(
                f"the cache of {model} lacks {lacking}, and fetching it from the hub failed: {reason} (where there is "
                f"a network: hf download {model} {lacking})"
            ) from error
    return Path(there)
