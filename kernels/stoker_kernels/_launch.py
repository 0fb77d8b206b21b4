"""The one way a kernel is launched: :func:`launch` runs it, interprets it, or only compiles it.

Used by every ``triton.py`` launcher. Beside it, what launchers ask of the device they launch on
(:func:`device_of`) and of the tuning table (:func:`stoker_kernels.tuning.choose`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from stoker_kernels._runtime import BACKEND_VARIABLE, STORAGE_DTYPES, dry_run

Config = dict[str, int]  # constexpr block sizes, and num_warps, num_stages


@dataclass(frozen=True, slots=True)
class Device:
    """What a launcher may ask: the architecture (90 for sm_90) and the number of multiprocessors.

    ``interpreted``: the kernels run in Triton's interpreter, where small blocks make tests loop and
    half-precision arithmetic must be widened first.
    """

    arch: int
    multiprocessors: int
    interpreted: bool = False


def is_interpreted(kernel: Any) -> bool:
    """Whether ``kernel`` was decorated under ``TRITON_INTERPRET=1`` (fixed when its module loaded)."""
    return not isinstance(kernel, JITFunction)


def device_of(kernel: Any, tensor: torch.Tensor) -> Device:
    """The device that ``kernel`` will run on when launched for ``tensor``."""
    run = dry_run()
    if run is not None:
        return run.device
    if tensor.is_cuda:
        return _cuda_device(tensor.device.index)
    return Device(arch=90, multiprocessors=2, interpreted=is_interpreted(kernel))


@lru_cache
def _cuda_device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(properties.major * 10 + properties.minor, properties.multi_processor_count)


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, on: torch.Tensor, **config: int | bool | Any
) -> None:
    """Run ``kernel`` over ``grid`` on the device of ``on``, whichever is current; nothing for an empty grid.

    ``config`` holds constexpr arguments and ``num_warps``, ``num_stages``. During a dry run the
    kernel is compiled for the run's target and not launched.

    Raises ``TypeError`` for a storage dtype that a kernel would silently narrow (float64), and
    ``RuntimeError`` for a CPU tensor and a compiled kernel.
    """
    if on.is_floating_point() and on.dtype not in STORAGE_DTYPES:
        raise TypeError(
            f"Triton kernels take float32, bfloat16 or float16, not {on.dtype}; "
            f"{BACKEND_VARIABLE}=reference runs it in PyTorch"
        )
    run = dry_run()
    if run is not None:
        run.compile(kernel, args, config)
        return
    if 0 in grid:
        return
    if on.is_cuda:
        with torch.cuda.device(on.device):
            kernel[grid](*args, **config)
        return
    if not is_interpreted(kernel):
        raise RuntimeError(
            f"a {on.device.type} tensor needs Triton's interpreter: set TRITON_INTERPRET=1 before "
            f"stoker_kernels is first used, or leave {BACKEND_VARIABLE} at auto"
        )
    kernel[grid](*args, **config)
