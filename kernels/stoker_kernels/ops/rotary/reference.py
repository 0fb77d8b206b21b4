"""Rotary position embedding in PyTorch: the specification, and the CPU implementation.

Formulas (Su et al., arXiv 2104.09864). At position p, pair i of a head's first R values turns by the angle
p * base^(-2i/R), whose cosine c and sine s are row p, column i of the tables, in fp32 (fp64 for fp64):
    y_a = x_a c - x_b s,   y_b = x_b c + x_a s
    half-split (LLaMA, GPT-NeoX):  a = i,   b = i + R/2
    interleaved (GPT-J, RoFormer): a = 2i,  b = 2i + 1
Values R .. D of a head are copied. The backward turns back: dx is the gradient under -s.

Positions: given ones; else p = s + offset in a batch; else, in a packed row of sequences bounded by
``cu_seqlens``, p = t - (start of t's sequence) + offset. The offset is one number or one per sequence.
A row of no sequence (past the last bound) has position 0. A position outside the tables gives NaN.
"""

from __future__ import annotations

import torch

from stoker_kernels.runtime.backend import compute_dtype


def positions_of(
    x: torch.Tensor,
    positions: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    offsets: torch.Tensor | None,
    offset: int,
) -> torch.Tensor:
    """Return the position of every row of x (B, S, H, D): (B, S) int64, or (1, S) where all B are alike."""
    if positions is not None:
        return positions.long().view(-1, x.shape[1])
    row = torch.arange(x.shape[1], device=x.device)
    if cu_seqlens is None:
        return row[None] + (offset if offsets is None else offsets.long()[:, None])
    bounds = cu_seqlens.long()
    sequence = torch.searchsorted(bounds, row, right=True) - 1  # the last that starts at or before
    inside = (sequence >= 0) & (sequence < len(bounds) - 1)
    sequence = sequence.where(inside, 0)
    shift = offset if offsets is None else offsets.long()[sequence]
    return (row - bounds[sequence] + shift).where(inside, 0)[None]


def output_for(x: torch.Tensor) -> torch.Tensor:
    """Make an output for x (B, S, H, D) in x's own memory order, if that is BSHD or BHSD; else in BSHD."""
    swapped = x.transpose(1, 2)
    if swapped.is_contiguous() and not x.is_contiguous():
        return x.new_empty(swapped.shape).transpose(1, 2)
    return x.new_empty(x.shape)


def rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    offsets: torch.Tensor | None,
    offset: int,
    interleaved: bool,
    backward: bool,
) -> torch.Tensor:
    """Map x (B, S, H, D), tables (P, R/2) -> y (B, S, H, D). Packed: B = 1, S = rows of all sequences."""
    wide, half = compute_dtype(x.dtype), cos.shape[1]
    out = output_for(x)
    if not out.numel():
        return out
    position = positions_of(x, positions, cu_seqlens, offsets, offset)
    known = ((position >= 0) & (position < len(cos)))[..., None, None]
    row = position.clamp(0, len(cos) - 1)
    c = cos.to(wide)[row][:, :, None].where(known, torch.nan)  # (B, S, 1, R/2)
    s = sin.to(wide)[row][:, :, None].where(known, torch.nan)
    s = -s if backward else s
    turned = x[..., : 2 * half]
    a, b = (
        (turned[..., ::2], turned[..., 1::2])
        if interleaved
        else (turned[..., :half], turned[..., half:])
    )
    a, b = a.to(wide), b.to(wide)
    pair = a * c - b * s, b * c + a * s
    if interleaved:
        out[..., : 2 * half] = torch.stack(pair, -1).flatten(-2)
    else:
        out[..., :half], out[..., half : 2 * half] = pair
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
