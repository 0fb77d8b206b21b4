"""The dry run itself: Triton is told of a GPU that is not here, and launches compile for it.

Triton keeps one driver per process, so one dry run at a time, and no launch beside it.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker_kernels.runtime.device import Device
from stoker_kernels.runtime.dry_run import DryRun, dry_run, set_dry_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    # Without Triton this module still loads: the command has to say what is missing.
    from triton.backends.compiler import GPUTarget  # noqa: TC004

MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
"""Of the usual board of an architecture (A100, H100 and H200, B200)."""


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


@contextmanager
def compiling(arch: int, multiprocessors: int = 0) -> Iterator[DryRun]:
    """Compile every launch inside for compute capability ``arch`` (80, 90, 100) and run none.

    Tensors inside are on the ``meta`` device. ``multiprocessors`` is the GPU's number, by default that of
    the usual board: it sizes grids, and where work is split among few rows block sizes as well.
    Raises ``RuntimeError`` while another dry run is under way.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

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
