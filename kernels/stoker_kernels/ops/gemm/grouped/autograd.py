"""The grouped products' torch side: opaque ops with fakes, the autograd Function, the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from stoker_kernels.ops.gemm.grouped import reference
from stoker_kernels.runtime.backend import (
    Backend,
    autocast_dtype,
    backend_for,
    check_devices,
    register_op,
)


def _rows(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, transposed: bool
) -> torch.Tensor:
    if backend_for(x) is Backend.TRITON:
        from stoker_kernels.ops.gemm.grouped import triton

        return triton.grouped_rows(x, weight, ends, transposed)
    return reference.grouped_rows(x, weight, ends, transposed)


def _rows_fake(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, transposed: bool
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[2 if transposed else 1]))


def _weight(dout: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if backend_for(x) is Backend.TRITON:
        from stoker_kernels.ops.gemm.grouped import triton

        return triton.grouped_weight(dout, x, ends)
    return reference.grouped_weight(dout, x, ends)


def _weight_fake(dout: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty((ends.shape[0], dout.shape[1], x.shape[1]))


_ROWS = register_op(
    "grouped_rows",
    "(Tensor x, Tensor weight, Tensor ends, bool transposed) -> Tensor",
    _rows,
    _rows_fake,
)
_WEIGHT = register_op(
    "grouped_weight", "(Tensor dout, Tensor x, Tensor ends) -> Tensor", _weight, _weight_fake
)


class _GroupedFunction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _ROWS(x, weight, ends, False)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        dx = _ROWS(dout, weight, ends, True) if ctx.needs_input_grad[0] else None
        dweight = _WEIGHT(dout, x, ends) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


def grouped_gemm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each expert's weight with the tokens that were sent to it: (T, K), (E, N, K) -> (T, N).

    ``x`` holds the tokens sorted by expert; ``ends`` (E,) int32 says where each expert's tokens end (what
    ``torch._grouped_mm`` calls ``offs``: the cumulative sum of the counts). Experts may have no tokens, or
    all. The numbers are read on the device, so the call waits for nothing and a CUDA graph can hold it. Rows
    behind the last expert's are 0 and get no gradient; a weight without tokens gets a gradient of 0. Sums
    are fp32, rounded once to x's dtype, and repeat bit for bit. Differentiable once.
    Raises ``ValueError`` when a shape, dtype or device does not fit, ``TypeError`` for integers.
    """
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight = x.to(dtype), weight.to(dtype)
    check_devices("grouped_gemm", x, weight=weight, ends=ends)
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2] or not weight.shape[2]:
        raise ValueError(
            f"grouped_gemm: weight must be (E, N, K), K >= 1, for x (T, K), "
            f"got {tuple(weight.shape)} for {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise TypeError(f"grouped_gemm: x must be floating point, got {x.dtype}")
    if weight.dtype != x.dtype:
        raise ValueError(f"grouped_gemm: weight must have x's dtype {x.dtype}, got {weight.dtype}")
    if ends.shape != weight.shape[:1] or ends.dtype != torch.int32:
        raise ValueError(
            f"grouped_gemm: ends must be ({weight.shape[0]},) int32, "
            f"got {tuple(ends.shape)} {ends.dtype}"
        )
    out: torch.Tensor = _GroupedFunction.apply(x, weight, ends)
    return out
