"""Language halves for LMDeploy's TurboMind that LMDeploy itself lacks, made of its own builders."""

from __future__ import annotations

# What may be said of them, everywhere.
NEVER_RUN = "runs through the released TurboMind binary with its kernels replaced by CPU ones; never run on a GPU"
