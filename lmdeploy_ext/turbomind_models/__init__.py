"""Language halves for LMDeploy's TurboMind that LMDeploy itself lacks, made of its own builders.

They run through the released TurboMind binary with its kernels replaced by CPU ones; never run on a GPU.
"""
