"""In a process of its own: how many bytes a request takes at its peak.

python media_child.py CHECKPOINT BUNDLE KIND COUNT SMALL LARGE: KIND is image or video; the request names the file LARGE
COUNT times, after one that names SMALL and brings in all that has to be loaded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch


def status(entry: str) -> int:
    """Bytes of an entry of this process's status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{entry}:"))


def main(checkpoint: str, bundle: str, kind: str, count: str, *files: str) -> None:
    from turbovit.benchmarks.lmdeploy_side import LMDeploySide
    from turbovit.engines.encoder import Encoder
    from turbovit.engines.preprocessor import Encoded, Pixels

    side = LMDeploySide(Path(checkpoint), Path(bundle))

    def encode_pixels(self: Encoder, items: list[Pixels], max_batch: int | None = None) -> list[Encoded]:
        import torch

        rows = [torch.zeros(sum(item.runs), 8) for item in items]
        return [Encoded(row, item.runs, (), item.grid, item.timestamps) for row, item in zip(rows, items, strict=True)]

    def growth(file: str) -> int:
        part: dict[str, Any] = {"type": f"{kind}_url", f"{kind}_url": {"url": file}}
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is what is held now
        before = status("VmRSS")
        side.request([{"role": "user", "content": [part] * int(count)}])
        return status("VmHWM") - before

    with patch.object(Encoder, "encode_pixels", encode_pixels):
        print([growth(file) for file in files][-1])


if __name__ == "__main__":
    main(*sys.argv[1:])
