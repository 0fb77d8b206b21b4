"""Peers of the ops with matrix products: PyTorch's own products, with its elementwise or ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stoker_kernels.ops.bias_gelu import bias_gelu
from stoker_kernels.ops.glu import swiglu

Functions = dict[str, Callable[..., Any]]
E4M3_MOST = 448.0


def dense(
    x: Tensor, weight: Tensor, bias: Tensor, approximate: str, residual: Tensor | None = None
) -> Tensor:
    y = F.gelu(F.linear(x, weight, bias), approximate=approximate)
    return y if residual is None else y + residual


def dense_with_ours(
    x: Tensor, weight: Tensor, bias: Tensor, approximate: str, residual: Tensor | None = None
) -> Tensor:
    """Multiply by cuBLAS, then run our bias + GELU: what the fused kernel must beat."""
    y = bias_gelu(x @ weight.t(), bias, approximate=approximate)
    return y if residual is None else y + residual


def glu_dense(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = F.linear(x, weight).chunk(2, -1)
    return F.silu(gate) * up


def glu_dense_with_ours(x: Tensor, weight: Tensor) -> Tensor:
    return swiglu(F.linear(x, weight))


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Loop over the experts, their numbers of tokens read by the host."""
    parts = [
        x[start:end] @ one.t()
        for one, (start, end) in zip(weight, pairwise([0, *ends.tolist()]), strict=True)
    ]
    return torch.cat(parts)


def torch_grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Run PyTorch's grouped product, which takes bf16 alone."""
    out: Tensor = torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return out


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply in 16 bits: what fp8 is to be quicker than."""
    return F.linear(x, weight)


def _by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / E4M3_MOST
    return (x / scale).clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn), scale


class _ScaledMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        a, a_scale = _by_row(x)
        b, b_scale = _by_row(weight)
        out: Tensor = torch._scaled_mm(a, b.t(), a_scale, b_scale.t(), out_dtype=torch.bfloat16)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.t() @ x


def scaled_mm(x: Tensor, weight: Tensor) -> Tensor:
    """Quantise by rows in plain PyTorch and run its fp8 product; the backward stays in 16 bits."""
    out: Tensor = _ScaledMM.apply(x, weight)  # type: ignore[no-untyped-call]
    return out


PEERS: dict[str, Functions] = {
    "fused_dense": {
        "eager": partial(dense, approximate="tanh"),
        "cublas_and_ours": partial(dense_with_ours, approximate="tanh"),
    },
    "fused_dense_residual": {
        "eager": partial(dense, approximate="none"),
        "cublas_and_ours": partial(dense_with_ours, approximate="none"),
    },
    "fused_glu_dense": {"eager": glu_dense, "cublas_and_ours": glu_dense_with_ours},
    "grouped_gemm": {"eager": grouped, "torch_grouped_mm": torch_grouped},
    "fp8_linear": {"eager": linear, "scaled_mm": scaled_mm},
    "fp8_linear_block": {"eager": linear},
}
