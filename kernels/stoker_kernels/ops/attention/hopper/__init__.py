"""Attention for Hopper alone: TMA loads, warp specialisation, products left outstanding; off until asked for.

``autograd`` asks :func:`chosen` before each call, and runs ``launchers`` instead of the kernels in
``..triton`` where it says so. Neither Gluon nor Triton may be imported here: machines without a Hopper GPU
ask too.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from stoker_kernels.runtime.device import cuda_device
from stoker_kernels.runtime.dry_run import dry_run

if TYPE_CHECKING:
    from stoker_kernels.ops.attention.reference import Options

HOPPER_VARIABLE = "STOKER_KERNELS_HOPPER"
HEAD_DIMS = (64, 128)
_ARCH = 90
_TRITONS = ((3, 6), (3, 7))  # Gluon's names change between versions
_MAX_GRID = 65535  # programs along the grid's second and third dimension
_MAX_INDEX = 2**31  # of a row in the statistics, which the TMA counts in int32


@cache
def _has_gluon() -> bool:
    try:
        return tuple(map(int, version("triton").split(".")[:2])) in _TRITONS
    except PackageNotFoundError:
        return False


def chosen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> bool:
    """Return whether these kernels run a call that goes to the GPU.

    They do where ``STOKER_KERNELS_HOPPER=1`` asks for them, the GPU is an sm_90, Triton is 3.6 or 3.7, and
    :func:`fits` says that they can. Raises ``ValueError`` for another setting than 0 and 1.
    """
    setting = os.environ.get(HOPPER_VARIABLE, "0")
    if setting not in ("0", "1"):
        raise ValueError(f"{HOPPER_VARIABLE}={setting!r}: expected 0 or 1")
    if setting == "0":
        return False
    run = dry_run()
    if run is None and not q.is_cuda:
        return False
    device = cuda_device(q.device.index) if run is None else run.device
    return device.arch == _ARCH and _has_gluon() and fits(q, k, v, options)


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> bool:
    """Return whether the kernels can run the call.

    They take dense (B, H, S, D) tensors in bf16 or fp16 with heads of 64 or 128, causal or full, grouped
    or not, of any lengths but 0, whose rows the TMA can address; no option that shapes the scores.
    """
    if options.packed or options.scored or options.seed is not None:
        return False
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] not in HEAD_DIMS:
        return False
    if v.shape[-1] != q.shape[-1] or 0 in q.shape or 0 in k.shape:
        return False
    batch, heads, rows = q.shape[:3]
    if max(batch, heads) > _MAX_GRID or 2 * batch * heads * (rows + 64) >= _MAX_INDEX:
        return False
    return all(addressable(tensor) for tensor in (q, k, v))


def addressable(tensor: torch.Tensor) -> bool:
    """Return whether a TMA descriptor can name a (B, H, S, D) tensor: 16-byte addresses and strides."""
    strides = [stride * tensor.element_size() for stride in tensor.stride()[:3]]
    aligned = all(stride > 0 and stride % 16 == 0 for stride in strides)
    return tensor.stride(3) == 1 and aligned and tensor.data_ptr() % 16 == 0
