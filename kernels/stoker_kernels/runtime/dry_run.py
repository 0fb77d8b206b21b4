"""The ahead-of-time compilation under way in this process: its target, and what it has compiled.

The state lies below all that asks for it: :mod:`~stoker_kernels.runtime.backend` (ops run their launchers on
``meta`` tensors during a dry run) and :mod:`~stoker_kernels.runtime.launch` (launches compile and run
nothing). :mod:`stoker_kernels.aot` alone begins and ends one. Imports neither torch nor triton.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stoker_kernels.runtime.device import Device

_active: DryRun | None = None  # process-wide, as Triton's driver is


@dataclass(slots=True)
class DryRun:
    """A compilation under way, and what it has compiled: (kernel's name, Triton's compiled kernel)."""

    device: Device
    kernels: list[tuple[str, Any]] = field(default_factory=list)

    def compile(self, kernel: Any, args: tuple[Any, ...], config: dict[str, Any]) -> None:
        """Compile ``kernel`` for the arguments of a launch. Triton caches what it compiled before."""
        compiled = kernel.warmup(*args, grid=(1,), **config)
        if all(compiled is not known for _, known in self.kernels):
            self.kernels.append((kernel.__name__, compiled))


def dry_run() -> DryRun | None:
    """Return the dry run under way, or None."""
    return _active


def set_dry_run(run: DryRun | None) -> None:
    """Begin a dry run, or end it with None."""
    global _active
    _active = run
