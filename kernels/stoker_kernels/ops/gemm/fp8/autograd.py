"""The fp8 linear layer's torch side: opaque ops with fakes, the autograd Function, the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from stoker_kernels.ops.gemm.fp8 import reference
from stoker_kernels.runtime.backend import (
    Backend,
    autocast_dtype,
    backend_for,
    check_devices,
    compute_dtype,
    register_op,
)
from stoker_kernels.runtime.device import cuda_device
from stoker_kernels.runtime.dry_run import dry_run

SCALINGS = ("row", "block")
FIRST_ARCH = 89  # Ada and Hopper have the instructions


def _fwd(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scaling: str
) -> torch.Tensor:
    if backend_for(x) is Backend.TRITON:
        from stoker_kernels.ops.gemm.fp8 import triton

        return triton.fp8_linear_fwd(x, weight, bias, scaling)
    return reference.fp8_linear_fwd(x, weight, bias, scaling)


def _fwd_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scaling: str
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _dx(dy: torch.Tensor, weight: torch.Tensor, scaling: str) -> torch.Tensor:
    if backend_for(dy) is Backend.TRITON:
        from stoker_kernels.ops.gemm.fp8 import triton

        return triton.fp8_linear_dx(dy, weight, scaling)
    return reference.fp8_linear_dx(dy, weight, scaling)


def _dx_fake(dy: torch.Tensor, weight: torch.Tensor, scaling: str) -> torch.Tensor:
    return weight.new_empty((*dy.shape[:-1], weight.shape[1]))


_FWD = register_op(
    "fp8_linear_fwd",
    "(Tensor x, Tensor weight, Tensor? bias, str scaling) -> Tensor",
    _fwd,
    _fwd_fake,
)
_DX = register_op(
    "fp8_linear_dx", "(Tensor dy, Tensor weight, str scaling) -> Tensor", _dx, _dx_fake
)


class _FP8LinearFunction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scaling: str
    ) -> torch.Tensor:
        y: torch.Tensor = _FWD(x, weight, bias, scaling)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, weight, bias, ctx.scaling = inputs
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = _DX(dy, weight, ctx.scaling) if ctx.needs_input_grad[0] else None
        x_rows = x.reshape(-1, x.shape[-1])
        rows = dy.reshape(x_rows.shape[0], dy.shape[-1])
        dweight = rows.t() @ x_rows if ctx.needs_input_grad[1] else None
        dbias = None
        if ctx.has_bias and ctx.needs_input_grad[2]:
            dbias = rows.sum(0, dtype=compute_dtype(dy.dtype)).to(dy.dtype)
        return dx, dweight, dbias, None


def _arch(x: torch.Tensor) -> int | None:
    """Return the architecture that x's kernels run on, None where none runs."""
    run = dry_run()
    if run is not None:
        return run.device.arch
    return cuda_device(x.device.index).arch if x.is_cuda else None


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scaling: str = "row",
    fallback: bool = False,
) -> torch.Tensor:
    """Compute ``x W^T + bias`` by fp8 products: x (..., K), weight (N, K) -> (..., N) in x's dtype.

    Operands are rounded to e4m3, the gradient to e5m2 where it meets the weight; the weight's own gradient
    is PyTorch's product in x's dtype. ``scaling`` says which values share a scale: "row", a token or an
    output channel each, or "block", 128 values of a token and 128 by 128 of the weight, which follows
    outliers more closely. Each call rounds the weight anew. The error bounds are in ``fp8.reference``: some
    4 % of a typical output, by either scaling. On GPUs before sm_89, which cannot multiply fp8, the call
    raises ``RuntimeError``, or with ``fallback`` runs PyTorch's linear layer. The CPU rounds to fp8 and
    multiplies in fp32. Differentiable once.
    Raises ``ValueError`` when a shape, dtype, device or scaling does not fit, ``TypeError`` for integers.
    """
    if scaling not in SCALINGS:
        raise ValueError(f"fp8_linear: scaling must be one of row, block, got {scaling!r}")
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    check_devices("fp8_linear", x, weight=weight, bias=bias)
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1] or not weight.shape[1]:
        raise ValueError(
            f"fp8_linear: weight must be (N, K), K >= 1, for x (..., K), "
            f"got {tuple(weight.shape)} for {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise TypeError(f"fp8_linear: x must be floating point, got {x.dtype}")
    for name, tensor, shape in (("weight", weight, weight.shape), ("bias", bias, weight.shape[:1])):
        if tensor is not None and (tensor.shape != shape or tensor.dtype != x.dtype):
            raise ValueError(
                f"fp8_linear: {name} must be {tuple(shape)} of x's dtype {x.dtype}, "
                f"got {tuple(tensor.shape)} {tensor.dtype}"
            )
    arch = _arch(x)
    if arch is not None and arch < FIRST_ARCH:
        if fallback:
            return torch.nn.functional.linear(x, weight, bias)
        raise RuntimeError(
            f"fp8_linear: this GPU is sm_{arch}, fp8 products need sm_{FIRST_ARCH} or later\n"
            f"pass fallback=True to multiply in {x.dtype} there"
        )
    y: torch.Tensor = _FP8LinearFunction.apply(x, weight, bias, scaling)
    return y
