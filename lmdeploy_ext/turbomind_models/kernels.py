"""Which kernels the installed TurboMind's binary holds, read from the names of its template instances.

Asked for one that it lacks, it ends the process. Seen in the wheel of lmdeploy 0.18.0.
"""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_ROUTER = re.compile(rb"MoeGate(NoAuxTC)?Kernel_[vV]\d+ILi(\d+)ELi(\d+)E")
_REDUCE = re.compile(rb"MoeReduceKernelILi\d+ELi(\d+)E")
_HEADS = re.compile(rb"ProcessKV_v2I\w{1,40}?Li\d+ELi(\d+)E")


@dataclass(frozen=True)
class Kernels:
    """What the binary was compiled for.

    Attributes:
        routers: most experts and most of them a token, where a softmax chooses (`launchMoeGate_V8` takes the smallest
            that holds both).
        biased_routers: experts and how many of them a token, where scores with a correction bias choose; both exactly
            (`invokeMoeGate_NoAuxTC` compares them so).
        sums: how many experts a token may have where their outputs are added.
        head_sizes: of keys in the cache; with MLA that is the latent and the rope together.
    """

    routers: frozenset[tuple[int, int]]
    biased_routers: frozenset[tuple[int, int]]
    sums: frozenset[int]
    head_sizes: frozenset[int]

    def route_by_softmax(self, experts: int, chosen: int) -> bool:
        """Whether a softmax can choose so; rows of logits are read in fours."""
        most = min((row for row in self.routers if experts <= row[0]), default=None)
        fits = any(row[0] == most[0] and chosen <= row[1] for row in self.routers) if most else False
        return fits and experts % 4 == 0


def kernels(folder: Path) -> Kernels | None:
    """Of the extension in ``lmdeploy/turbomind``; None where there is none."""
    files = sorted(folder.glob("_turbomind*.so"))
    return _kernels_as_of(files[0], files[0].stat().st_mtime_ns) if files else None


@cache
def _kernels_as_of(file: Path, _: int) -> Kernels:
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        routers = {found.groups() for found in _ROUTER.finditer(data)}
        sums = {int(found.group(1)) for found in _REDUCE.finditer(data)}
        heads = {int(found.group(1)) for found in _HEADS.finditer(data)}
    by_softmax, with_bias = (
        frozenset((int(most), int(of)) for own, most, of in routers if bool(own) is biased) for biased in (False, True)
    )
    return Kernels(by_softmax, with_bias, frozenset(sums), frozenset(heads))
