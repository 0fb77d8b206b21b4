"""Prefix sums and sorting for torch: opaque ops with fakes, the autograd Function, the public functions."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from stoker_kernels.ops.scan import reference
from stoker_kernels.runtime.backend import Backend, backend_for, check_local, register_op

SUMMED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)
# By the number of bits that the sort looks at; float64 and int64 have none of ours.
SORTED = {
    torch.float32: 32, torch.int32: 32, torch.bfloat16: 16, torch.float16: 16, torch.int16: 16,
    torch.int8: 8, torch.uint8: 8,
}  # fmt: skip
MAX_COLUMNS = 2**31 - 1


def _sum(x: torch.Tensor, reverse: bool) -> torch.Tensor:
    if backend_for(x) is Backend.TRITON:
        from stoker_kernels.ops.scan.triton import sums

        out = torch.empty(x.shape, dtype=reference.sum_dtype(x.dtype), device=x.device)
        return sums.prefix_sum(x.contiguous(), out, reverse)
    return reference.prefix_sum(x, reverse)


def _sum_fake(x: torch.Tensor, reverse: bool) -> torch.Tensor:
    return torch.empty(x.shape, dtype=reference.sum_dtype(x.dtype), device=x.device)


def _sort(x: torch.Tensor, descending: bool) -> torch.Tensor:
    if backend_for(x) is Backend.TRITON:
        from stoker_kernels.ops.scan.triton import sorting

        return sorting.sort_indices(x.contiguous(), SORTED[x.dtype], descending)
    return reference.sort_indices(x, descending)


def _sort_fake(x: torch.Tensor, descending: bool) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.int64, device=x.device)


_SUM = register_op("prefix_sum", "(Tensor x, bool reverse) -> Tensor", _sum, _sum_fake)
_SORT = register_op("sort_indices", "(Tensor x, bool descending) -> Tensor", _sort, _sort_fake)


class _PrefixSumFunction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, reverse: bool) -> torch.Tensor:
        y: torch.Tensor = _SUM(x, reverse)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.reverse = inputs[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _SUM(dy, not ctx.reverse), None


def _rows(name: str, x: torch.Tensor, known: Any) -> torch.Tensor:
    """Return x as (rows, n). Raises ``ValueError`` for what the op does not take."""
    check_local(name, x=x)
    if x.dtype not in known:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in known)
        raise ValueError(f"{name}: x must be one of {names}, got {x.dtype}")
    if x.ndim == 0 or x.shape[-1] > MAX_COLUMNS:
        raise ValueError(
            f"{name}: x must have a last dimension of at most 2^31 - 1, got {tuple(x.shape)}"
        )
    return x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(0, x.shape[-1])


def prefix_sum(x: torch.Tensor, *, reverse: bool = False) -> torch.Tensor:
    """Compute the inclusive sums of x (..., n) along its last dimension, as ``torch.cumsum`` does.

    ``reverse`` sums from the end. x is fp32, bf16 or fp16, summed in fp32 and rounded once, or int32 or
    int64, whose sums are int64; float64 runs in PyTorch alone. On the GPU the order of additions is
    fixed, so results repeat bit for bit. Differentiable once. Raises ``ValueError`` for another dtype.
    """
    y: torch.Tensor = _PrefixSumFunction.apply(_rows("prefix_sum", x, SUMMED), reverse)
    return y.view(x.shape)


def radix_sort(x: torch.Tensor, *, descending: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort x (..., n) along its last dimension: values and indices (int64), as a stable ``torch.sort``.

    Equal values keep their order, also ``descending``; NaN is above all numbers. x is fp32, int32, bf16,
    fp16, int16, int8 or uint8. On the GPU a pass of the sort reads and writes everything for each 4 bits.
    The values are differentiable. Raises ``ValueError`` for another dtype.
    """
    rows = _rows("radix_sort", x, SORTED)
    indices = _SORT(rows.detach(), descending)
    return rows.gather(1, indices).view(x.shape), indices.view(x.shape)
