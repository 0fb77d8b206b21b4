"""The one way a kernel is launched: :func:`launch` runs it, interprets it, or only compiles it.

Used by every launcher (``ops/*/triton``, ``optim/triton``). Beside it, what launchers ask of the device they
launch on, :func:`device_of`; the block sizes are :func:`stoker_kernels.tuning.choose`'s.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.jit import JITFunction

from stoker_kernels.runtime.backend import BACKEND_VARIABLE, STORAGE_DTYPES
from stoker_kernels.runtime.device import Device, cuda_device
from stoker_kernels.runtime.dry_run import dry_run


def is_interpreted(kernel: Any) -> bool:
    """Return whether ``kernel`` was decorated under ``TRITON_INTERPRET=1`` (fixed when its module loaded)."""
    return not isinstance(kernel, JITFunction)


def device_of(kernel: Any, tensor: torch.Tensor) -> Device:
    """Return the device that ``kernel`` will run on when launched for ``tensor``."""
    run = dry_run()
    if run is not None:
        return run.device
    if tensor.is_cuda:
        return cuda_device(tensor.device.index)
    return Device(arch=90, multiprocessors=2, interpreted=is_interpreted(kernel))


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, on: torch.Tensor, **config: int | bool | Any
) -> None:
    """Run ``kernel`` over ``grid`` on the device of ``on``, whichever is current; nothing for an empty grid.

    ``config`` holds constexpr arguments and ``num_warps``, ``num_stages``. During a dry run the
    kernel is compiled for the run's target and not launched.

    Raises ``TypeError`` for a storage dtype that a kernel would silently narrow (float64), and
    ``RuntimeError`` for a CPU tensor and a compiled kernel, or an interpreted kernel in a dry run.
    """
    if on.is_floating_point() and on.dtype not in STORAGE_DTYPES:
        raise TypeError(
            f"Triton kernels take float32, bfloat16 or float16, not {on.dtype}; "
            f"{BACKEND_VARIABLE}=reference runs it in PyTorch"
        )
    run = dry_run()
    if run is not None:
        if is_interpreted(kernel):
            raise RuntimeError(
                "the kernels were loaded for Triton's interpreter: unset TRITON_INTERPRET and "
                "compile in a process of its own"
            )
        run.compile(kernel, args, config)
        return
    if 0 in grid:
        return
    if on.is_cuda:
        if on.device.index == torch.cuda.current_device():
            kernel[grid](*args, **config)
            return
        with torch.cuda.device(on.device):
            kernel[grid](*args, **config)
        return
    if not is_interpreted(kernel):
        raise RuntimeError(
            f"a {on.device.type} tensor needs Triton's interpreter: set TRITON_INTERPRET=1 before "
            f"stoker_kernels is first used, or leave {BACKEND_VARIABLE} at auto"
        )
    kernel[grid](*args, **config)
