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
Triton keeps one driver per process, so one dry run at a time, and no launch beside it.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stoker_kernels._runtime import dry_run, set_dry_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    # Without Triton this module still loads: its command has to say what is missing.
    from triton.backends.compiler import GPUTarget  # noqa: TC004

    from stoker_kernels._launch import Device  # noqa: TC004


@dataclass(slots=True)
class DryRun:
    """A compilation under way, and what it has compiled: (kernel's name, Triton's compiled kernel)."""

    device: Device
    kernels: list[tuple[str, Any]] = field(default_factory=list)

    def compile(self, kernel: Any, args: tuple[Any, ...], config: dict[str, Any]) -> None:
        """Compile ``kernel`` for the arguments of a launch. Triton caches what it compiled before."""
        from stoker_kernels._launch import is_interpreted

        if is_interpreted(kernel):
            raise RuntimeError(
                "the kernels were loaded for Triton's interpreter: unset TRITON_INTERPRET and "
                "compile in a process of its own"
            )
        compiled = kernel.warmup(*args, grid=(1,), **config)
        if all(compiled is not known for _, known in self.kernels):
            self.kernels.append((kernel.__name__, compiled))


@dataclass(frozen=True, slots=True)
class _TargetDriver:
    """As much of a Triton driver as compiling asks for."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return f"sm_{self.target.arch}"  # Triton's in-memory caches are keyed by this

    def get_current_stream(self, device: str) -> int:
        return 0


MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
"""Of the usual board of an architecture (A100, H100 and H200, B200)."""


@contextmanager
def compiling(arch: int, multiprocessors: int = 0) -> Iterator[DryRun]:
    """Compile every launch inside for compute capability ``arch`` (80, 90, 100) and run none.

    Tensors inside are on the ``meta`` device. ``multiprocessors`` is the GPU's number, by default that of
    the usual board: it sizes grids, and where work is split among few rows block sizes as well.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from stoker_kernels._launch import Device

    if dry_run() is not None:
        raise RuntimeError("a dry run is under way in this process: end it first")
    count = multiprocessors or MULTIPROCESSORS.get(arch, 132)
    run = DryRun(Device(arch=arch, multiprocessors=count))
    before = driver._active
    driver.set_active(_TargetDriver(GPUTarget("cuda", arch, 32)))
    set_dry_run(run)
    try:
        yield run
    finally:
        set_dry_run(None)
        driver._active = before


if __name__ == "__main__":
    from stoker_kernels._precompile import main

    sys.exit(main())
