"""Softmax's torch side: opaque ops with fakes, the autograd Function, the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from stoker_kernels.ops.softmax import reference
from stoker_kernels.runtime.backend import Backend, backend_for, check_devices, register_op


def _fwd(x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool) -> torch.Tensor:
    if backend_for(x) is Backend.TRITON:
        from stoker_kernels.ops.softmax import triton

        return triton.softmax_fwd(x, mask, scale, causal)
    return reference.softmax_fwd(x.contiguous(), mask, scale, causal)


def _fwd_fake(
    x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _bwd(dy: torch.Tensor, y: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    if backend_for(y) is Backend.TRITON:
        from stoker_kernels.ops.softmax import triton

        return triton.softmax_bwd(dy, y, scale, causal)
    return reference.softmax_bwd(dy.contiguous(), y.contiguous(), scale, causal)


def _bwd_fake(dy: torch.Tensor, y: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    return y.new_empty(y.shape)


_FWD = register_op(
    "softmax_fwd",
    "(Tensor x, Tensor? mask, float scale, bool causal) -> Tensor",
    _fwd,
    _fwd_fake,
)
_BWD = register_op(
    "softmax_bwd",
    "(Tensor dy, Tensor y, float scale, bool causal) -> Tensor",
    _bwd,
    _bwd_fake,
)


class _SoftmaxFunction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
    ) -> torch.Tensor:
        y: torch.Tensor = _FWD(x, mask, scale, causal)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.scale, ctx.causal = inputs[2:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (y,) = ctx.saved_tensors
        return _BWD(dy, y, ctx.scale, ctx.causal), None, None, None


def softmax(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
) -> torch.Tensor:
    """Compute softmax(scale * x) over the last dimension of x (..., S_q, S_k); result in x's dtype.

    ``mask`` is bool, broadcasts to x's shape, and is True where an element takes part, as in
    ``F.scaled_dot_product_attention`` (``nn.MultiheadAttention``'s masks say the opposite). ``causal``
    keeps key k for query q where k <= q + S_k - S_q, as flash attention does: the last query sees every
    key. (SDPA's ``is_causal`` aligns the first query instead; the two agree for S_q = S_k.)
    A row of which nothing is kept is 0 and its gradient is 0, where torch's softmax gives NaN.
    An additive mask is no argument: add it to x, where autograd finds its gradient.

    Arithmetic is fp32 whatever the storage dtype; only the result is kept for the backward.
    Differentiable once. Raises ``ValueError`` for a shape that does not fit and ``TypeError`` for a
    mask that is not bool.
    """
    if x.ndim == 0 or (causal and x.ndim < 2):
        raise ValueError(
            f"softmax: x must be (..., S_k), and (..., S_q, S_k) when causal, got {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise TypeError(f"softmax: x must be floating point, got {x.dtype}")
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(
                f"softmax: mask must be torch.bool, True where an element takes part, got "
                f"{mask.dtype}; add an additive mask to x"
            )
        if mask.ndim > x.ndim or any(
            size not in (1, wanted)
            for size, wanted in zip(mask.shape[::-1], x.shape[::-1], strict=False)
        ):
            raise ValueError(
                f"softmax: mask {tuple(mask.shape)} does not broadcast to x {tuple(x.shape)}"
            )
    check_devices("softmax", x, mask=mask)
    y: torch.Tensor = _SoftmaxFunction.apply(x, mask, scale, causal)
    return y
