"""Sparse messages' torch side: opaque ops with fakes, and the public functions."""

from __future__ import annotations

import torch

from stoker_kernels.ops.sparsify import reference
from stoker_kernels.runtime.backend import Backend, backend_for, compute_dtype, register_op

LIMIT = 2**31 - 1  # indices are int32


def _topk(
    gradient: torch.Tensor,
    memory: torch.Tensor,
    velocity: torch.Tensor | None,
    scale: torch.Tensor | None,
    momentum: float,
    masking: bool,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    if backend_for(gradient) is Backend.TRITON:
        from stoker_kernels.ops.sparsify import triton

        return triton.topk(gradient.contiguous(), memory, velocity, scale, momentum, masking, k)
    return reference.topk(gradient, memory, velocity, scale, momentum, masking, k)


def _topk_fake(
    gradient: torch.Tensor,
    memory: torch.Tensor,
    velocity: torch.Tensor | None,
    scale: torch.Tensor | None,
    momentum: float,
    masking: bool,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return memory.new_empty(k), memory.new_empty(k, dtype=torch.int32)


def _above(
    memory: torch.Tensor, threshold: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if backend_for(memory) is Backend.TRITON:
        from stoker_kernels.ops.sparsify import triton

        return triton.above(memory, threshold, capacity)
    return reference.above(memory, threshold, capacity)


def _above_fake(
    memory: torch.Tensor, threshold: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return memory.new_empty(capacity), memory.new_empty(capacity, dtype=torch.int32)


_TOPK = register_op(
    "sparsify_topk",
    "(Tensor gradient, Tensor(a!) memory, Tensor(b!)? velocity, Tensor? scale, float momentum, "
    "bool masking, int k) -> (Tensor, Tensor)",
    _topk,
    _topk_fake,
)
_ABOVE = register_op(
    "sparsify_above",
    "(Tensor(a!) memory, Tensor threshold, int capacity) -> (Tensor, Tensor)",
    _above,
    _above_fake,
)


def _check_buffer(what: str, buffer: torch.Tensor, n: int, dtype: torch.dtype) -> None:
    if buffer.shape != (n,) or buffer.dtype != dtype or not buffer.is_contiguous():
        raise ValueError(
            f"{what} must be contiguous, of shape ({n},) and {dtype}, "
            f"got {tuple(buffer.shape)} {buffer.dtype}"
        )


def _check_count(what: str, k: int, n: int) -> None:
    if n > LIMIT:
        raise ValueError(f"{what}: at most {LIMIT} values have int32 indices, got {n}: split them")
    if not 1 <= k <= n:
        raise ValueError(f"{what} must be between 1 and the {n} values there are, got {k}")


@torch.no_grad()
def topk_compress(
    gradient: torch.Tensor,
    memory: torch.Tensor,
    k: int,
    *,
    velocity: torch.Tensor | None = None,
    momentum: float = 0.0,
    masking: bool = True,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``scale * gradient`` to ``memory`` and take its k largest values out: (values, indices).

    ``gradient`` has n values of any shape. ``memory`` (n,), contiguous, fp32 (fp64 for fp64
    gradients), starts as zeros and is updated in place; so is ``velocity`` (n,), which accumulates with
    ``momentum`` before the memory does and forgets what was sent unless ``masking`` is off.
    ``scale`` (1,) of memory's dtype stands for local clipping. Exactly k distinct indices come back, as
    int32: of the largest to within 1/16 (see ``reference``). Raises ``ValueError`` for what does not fit.
    """
    n = gradient.numel()
    wanted = compute_dtype(gradient.dtype)
    _check_buffer("topk_compress: memory", memory, n, wanted)
    if velocity is not None:
        _check_buffer("topk_compress: velocity", velocity, n, wanted)
    elif momentum:
        raise ValueError("topk_compress: momentum needs a velocity (n,)")
    if scale is not None:
        _check_buffer("topk_compress: scale", scale, 1, wanted)
    _check_count("topk_compress: k", k, n)
    return _TOPK(gradient.reshape(-1), memory, velocity, scale, momentum, masking, k)


@torch.no_grad()
def above_compress(
    memory: torch.Tensor, threshold: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take values of magnitude >= ``threshold`` (1,) out of ``memory`` (n,): (values, indices).

    Both have ``capacity`` places, filled by index; those left over hold value 0 at index 0. ``memory`` is
    contiguous, fp32 or fp64, and updated in place; comparison is in fp32.
    """
    _check_buffer("above_compress: memory", memory, memory.numel(), compute_dtype(memory.dtype))
    _check_buffer("above_compress: threshold", threshold, 1, memory.dtype)
    _check_count("above_compress: capacity", capacity, memory.numel())
    return _ABOVE(memory, threshold, capacity)
