"""Checks of the options that shape attention's scores, for the public functions in ``autograd``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

import torch

from stoker_kernels.runtime.backend import check_devices, check_local

if TYPE_CHECKING:
    from stoker_kernels.ops.attention.reference import Options

MAX_WINDOW = 2**31  # columns are int32 in the kernels
_Number = TypeVar("_Number", int, float)


def given(what: str, value: _Number | None) -> _Number:
    """Return ``value``, 0 for None. Raises ``ValueError`` for a given 0: it would hide nothing or all."""
    if value == 0:
        raise ValueError(f"{what} is 0: pass None to leave it out")
    return 0 if value is None else value


def check_scores(name: str, q: torch.Tensor, options: Options) -> None:
    """Check window, softcap, ALiBi, biases, the prefix and the block mask against each other and q."""
    if not 0 <= options.window < MAX_WINDOW:
        raise ValueError(
            f"{name}: window must be 1 to 2^31 - 1 columns, or None for all, got {options.window}"
        )
    if not 0.0 <= options.softcap < math.inf:
        raise ValueError(
            f"{name}: softcap must be positive and finite, or None, got {options.softcap}"
        )
    slopes = options.alibi_slopes
    if slopes is not None:
        if slopes.shape != q.shape[1:2] or slopes.dtype != torch.float32:
            raise ValueError(
                f"{name}: alibi_slopes must be ({q.shape[1]},) float32, one per query head, got "
                f"{tuple(slopes.shape)} {slopes.dtype}"
            )
        if slopes.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: alibi_slopes get no gradient: pass alibi_slopes.detach()")
    prefix = options.prefix_lengths
    if prefix is not None:
        batch = q.shape[0] if options.cu_seqlens_q is None else len(options.cu_seqlens_q) - 1
        if prefix.shape != (batch,) or prefix.dtype != torch.int32:
            raise ValueError(
                f"{name}: prefix_lengths must be ({batch},) int32, one per sequence, got "
                f"{tuple(prefix.shape)} {prefix.dtype}"
            )
        if not options.causal or options.window:
            raise ValueError(f"{name}: prefix_lengths needs causal=True, and no window")
    if options.bias is not None:
        if options.relative_table is not None:
            raise ValueError(f"{name}: give one of bias and relative_bias, not both")
        if options.kv_indices is not None:
            raise ValueError(f"{name}: bias and block_mask do not go together: give relative_bias")
    check_local(
        name, bias=options.bias, relative_bias=options.relative_table, prefix_lengths=prefix
    )
    check_devices(
        name, q, alibi_slopes=slopes, bias=options.bias, relative_bias=options.relative_table,
        relative_buckets=options.relative_buckets, prefix_lengths=prefix,
        block_mask=options.kv_indices,
    )  # fmt: skip


def expanded_bias(name: str, bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return bias as (1 or B, 1 or H, S_q, S_k): rows and columns broadcast, missing dimensions in front.

    Raises ``ValueError`` for a shape that does not fit, ``TypeError`` for a mask of bool.
    """
    if not bias.is_floating_point():
        raise TypeError(
            f"{name}: bias must be floating point, got {bias.dtype}\n"
            "a mask of real tokens goes to flash_attention_padded, blocks to block_mask"
        )
    (batch, heads, rows, _), columns = q.shape, k.shape[2]
    sizes = (1,) * (4 - bias.ndim) + tuple(bias.shape)
    fits = len(sizes) == 4 and all(
        size in (1, most) for size, most in zip(sizes, (batch, heads, rows, columns), strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name}: bias must broadcast to {(batch, heads, rows, columns)}, got {tuple(bias.shape)}"
        )
    return bias.view(sizes).expand(*sizes[:2], rows, columns)
