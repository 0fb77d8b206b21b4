"""Ahead-of-time compilation: machine code for a GPU, made on any machine, with no GPU.

A *dry run* executes the ops' own Python on ``meta`` tensors, and every launch compiles instead of
running. What is compiled is therefore exactly what the same calls would compile on the GPU later,
and Triton's cache on disk (``TRITON_CACHE_DIR``) then holds it: the first step starts at once.

    with aot.compiling(90) as run:              # sm_90
        model = GPT(config).to("meta")          # or any function of ops
        model(tokens, targets)[1].backward()
    print(len(run.kernels))

The nodelet runs ``python -m stoker_kernels.aot`` before a task that names its kernels; the
code-generation tests read registers, spills and instructions from :attr:`DryRun.kernels`.
"""

from __future__ import annotations

from stoker_kernels.aot.compiling import MULTIPROCESSORS, compiling
from stoker_kernels.runtime.dry_run import DryRun

__all__ = ("MULTIPROCESSORS", "DryRun", "compiling")
