"""Rotary position embedding on the GPU: one kernel, both layouts, both directions.

A program holds BLOCK_S tokens of one batch entry by BLOCK_H heads, and loads each token's angles once for
its heads. Any strides of batch, token and head serve, so (B, S, H, D) and (B, H, S, D) cost the same.
Bytes moved (b per value, T tokens): 2*T*H*D*b each way; the tables stay in cache.
The arithmetic is fp32: values are widened on load and only rounded on store. Formulas: see ``reference``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from stoker_kernels.ops.rotary.reference import output_for
from stoker_kernels.primitives.tiling import cdiv, power_of_2
from stoker_kernels.runtime.backend import dense_last_dim
from stoker_kernels.runtime.launch import launch
from stoker_kernels.tuning import Config, choose

if TYPE_CHECKING:
    import torch

VALUES = 4096  # a program's share: 32 per thread at 4 warps


@triton.jit
def _positions(
    token, batch, valid, position_ptr, cu_seqlens_ptr, offsets_ptr,
    stride_position, sequences, steps, offset,
):  # fmt: skip
    """token [S] -> its position [S]; see ``reference.positions_of``."""
    if position_ptr is not None:
        at = position_ptr + batch.to(tl.int64) * stride_position + token
        position = tl.load(at, mask=valid, other=0)
    elif cu_seqlens_ptr is not None:
        low = tl.zeros_like(token)  # bounds at or before the token: low <= their number <= high
        high = tl.zeros_like(token) + sequences + 1
        for _ in range(steps):
            middle = (low + high) // 2
            bound = tl.load(cu_seqlens_ptr + middle, mask=middle <= sequences, other=0)
            before = (middle <= sequences) & (bound <= token)
            low = tl.where(before, middle + 1, low)
            high = tl.where(before, high, middle)
        inside = (low >= 1) & (low <= sequences)
        sequence = low - 1
        position = token - tl.load(cu_seqlens_ptr + sequence, mask=inside, other=0)
        if offsets_ptr is not None:
            position = position + tl.load(offsets_ptr + sequence, mask=inside, other=0)
        else:
            position = position + offset
        position = tl.where(inside, position, 0)
    elif offsets_ptr is not None:
        position = token + tl.load(offsets_ptr + batch)
    else:
        position = token + offset
    return position


@triton.jit(do_not_specialize=["tokens", "sequences", "steps", "offset", "table_rows"])
def rotary_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, position_ptr, cu_seqlens_ptr, offsets_ptr,
    x_batch, x_token, x_head, y_batch, y_token, y_head, stride_cos, stride_sin, stride_position,
    tokens, heads, sequences, steps, offset, table_rows, sign,
    HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    head_blocks = tl.cdiv(heads, BLOCK_H)
    token_blocks = tl.cdiv(tokens, BLOCK_S)
    program = tl.program_id(0)
    batch = program // (head_blocks * token_blocks)
    token = program // head_blocks % token_blocks * BLOCK_S + tl.arange(0, BLOCK_S)  # [S]
    head = program % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)  # [H]
    # int64: each stride times its index may pass 2^31.
    batch64, token64, head64 = batch.to(tl.int64), token.to(tl.int64), head.to(tl.int64)
    x_rows = batch64 * x_batch + token64[:, None] * x_token + head64[None, :] * x_head  # [S, H]
    y_rows = batch64 * y_batch + token64[:, None] * y_token + head64[None, :] * y_head
    x_ptrs, y_ptrs = (x_ptr + x_rows)[:, :, None], (y_ptr + y_rows)[:, :, None]  # [S, H, 1]
    rows = ((token < tokens)[:, None] & (head < heads)[None, :])[:, :, None]
    pair = tl.arange(0, BLOCK_HALF)  # [C]
    pairs = pair < HALF
    mask = rows & pairs[None, None, :]
    both = tl.arange(0, 2 * BLOCK_HALF)
    both_mask = rows & (both < 2 * HALF)[None, None, :]

    if INTERLEAVED:
        x = tl.load(x_ptrs + both[None, None, :], mask=both_mask, other=0.0)
        a, b = tl.split(tl.reshape(x, [BLOCK_S, BLOCK_H, BLOCK_HALF, 2]))  # [S, H, C]
    else:
        a = tl.load(x_ptrs + pair[None, None, :], mask=mask, other=0.0)
        b = tl.load(x_ptrs + HALF + pair[None, None, :], mask=mask, other=0.0)

    position = _positions(
        token, batch, token < tokens, position_ptr, cu_seqlens_ptr, offsets_ptr,
        stride_position, sequences, steps, offset,
    )  # fmt: skip
    known = ((position >= 0) & (position < table_rows))[:, None] & pairs[None, :]
    row = position.to(tl.int64)[:, None]
    nan = float(
        "nan"
    )  # nothing beyond the tables is read, and nobody takes the result for an angle
    c = tl.load(cos_ptr + row * stride_cos + pair[None, :], mask=known, other=nan)  # [S, C]
    s = tl.load(sin_ptr + row * stride_sin + pair[None, :], mask=known, other=nan)
    c, s = c.to(tl.float32)[:, None, :], s.to(tl.float32)[:, None, :] * sign
    a, b = a.to(tl.float32), b.to(tl.float32)
    y_a = (a * c - b * s).to(y_ptr.dtype.element_ty)
    y_b = (b * c + a * s).to(y_ptr.dtype.element_ty)

    if INTERLEAVED:
        y = tl.reshape(tl.join(y_a, y_b), [BLOCK_S, BLOCK_H, 2 * BLOCK_HALF])
        tl.store(y_ptrs + both[None, None, :], y, mask=both_mask)
    else:
        tl.store(y_ptrs + pair[None, None, :], y_a, mask=mask)
        tl.store(y_ptrs + HALF + pair[None, None, :], y_b, mask=mask)
    if REST:
        rest = tl.arange(0, BLOCK_REST)
        rest_mask = rows & (rest < REST)[None, None, :]
        x = tl.load(x_ptrs + 2 * HALF + rest[None, None, :], mask=rest_mask, other=0.0)
        tl.store(y_ptrs + 2 * HALF + rest[None, None, :], x, mask=rest_mask)


def tile(tokens: int, heads: int, heads_together: bool, width: int, values: int = VALUES) -> Config:
    """Return BLOCK_S tokens by BLOCK_H heads of ``width`` values, ``values`` in all.

    ``heads_together``: the heads of a token are neighbours in memory, else the tokens of a head are;
    then a few heads share the angles of a run of tokens.
    """
    places = max(1, values // power_of_2(width))
    block_h = min(power_of_2(heads), places if heads_together else max(1, places // 8))
    while block_h > 1 and cdiv(heads, block_h) * block_h * 8 > heads * 9:
        block_h //= 2  # at most one lane in eight idle
    block_s = min(power_of_2(tokens), places // block_h)
    used = block_s * block_h * power_of_2(width)
    return {
        "BLOCK_S": block_s,
        "BLOCK_H": block_h,
        "num_warps": min(8, max(1, used // 1024)),
    }


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
    """Compute ``reference.rotary`` on the GPU."""
    y = output_for(x)
    if not y.numel():
        return y
    x, cos, sin = dense_last_dim(x), dense_last_dim(cos), dense_last_dim(sin)
    batch, tokens, heads, dim = x.shape
    half = cos.shape[1]
    rest = dim - 2 * half
    sequences = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    positions = None if positions is None else dense_last_dim(positions.view(-1, tokens))
    together = x.stride(2) <= x.stride(1)

    def candidates() -> list[Config]:
        return [
            {**tile(tokens, heads, together, dim, values), "num_warps": warps}
            for values in (VALUES // 2, VALUES, VALUES * 2)
            for warps in (2, 4, 8)
        ]

    config = choose(
        "rotary", tile(tokens, heads, together, dim), candidates,
        tokens=min(power_of_2(tokens), 64), heads=heads, together=int(together), dim=dim,
        interleaved=int(interleaved), dtype=x.dtype,
    )  # fmt: skip
    blocks = cdiv(tokens, config["BLOCK_S"]) * cdiv(heads, config["BLOCK_H"])
    launch(
        rotary_kernel, (batch * blocks,),
        x, y, cos, sin, positions,
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        None if offsets is None else offsets.contiguous(),
        *x.stride()[:3], *y.stride()[:3], cos.stride(0), sin.stride(0),
        0 if positions is None or positions.shape[0] == 1 else positions.stride(0),
        tokens, heads, sequences, (sequences + 1).bit_length(), offset, cos.shape[0],
        -1.0 if backward else 1.0,
        HALF=half, REST=rest, INTERLEAVED=interleaved,
        BLOCK_HALF=power_of_2(half), BLOCK_REST=power_of_2(max(rest, 1)),
        on=x, **config,
    )  # fmt: skip
    return y
