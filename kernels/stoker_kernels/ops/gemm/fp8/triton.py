"""fp8 products on the GPU: two kernels that quantise, one that multiplies and scales.

Quantised operands are (rows, inner), the inner dimension padded with zeros to whole blocks of 128: every
load is 16 bytes wide, and both operands lie as the matrix units want 8-bit values, inner dimension dense; a
transposed weight is read once and written so. Hopper's units keep some 14 bits of a sum of fp8 products,
so each 128 of them are added to an fp32 accumulator outside, by block also with their scales.
Formulas and error bounds: see ``reference``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from stoker_kernels.ops.gemm import configs
from stoker_kernels.ops.gemm.fp8.reference import BLOCK, FORWARD, GRADIENT, SMALLEST
from stoker_kernels.ops.gemm.tiles import add_row, rows_at, store_tile, tile_at
from stoker_kernels.primitives.tiling import cdiv
from stoker_kernels.runtime.launch import device_of, launch
from stoker_kernels.tuning import choose

if TYPE_CHECKING:
    from stoker_kernels.runtime.device import Device
    from stoker_kernels.tuning import Config

WARPS = 4
ROW_CONFIG: Config = {"BLOCK_R": 4, "BLOCK_C": 512, "num_warps": WARPS}
TRANSPOSED_CONFIG: Config = {"BLOCK_R": 32, "BLOCK_C": 64, "num_warps": WARPS}


@triton.jit
def _quantized(x, largest, LIMIT: tl.constexpr):
    # A NaN stays one: clamped as usual it would be -LIMIT, and the result finite.
    return tl.clamp(x * (LIMIT / largest), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit  # rows may be what lies together: then their number says how wide a load may be
def quantize_rows_kernel(
    x_ptr, q_ptr, scale_ptr, stride_r, stride_c, rows, columns, padded,
    LIMIT: tl.constexpr, SMALLEST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """x (rows, columns) of any strides -> q (rows, padded), scale (rows,): read twice, the cache helps."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    row = first + tl.arange(0, BLOCK_R)  # [R] int64
    lane = tl.arange(0, BLOCK_C)  # [C]
    largest = tl.full([BLOCK_R, BLOCK_C], SMALLEST, dtype=tl.float32)
    for start in range(0, columns, BLOCK_C):
        column = (start + lane).to(tl.int64)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(
            x_ptr + row[:, None] * stride_r + column[None, :] * stride_c, mask=mask, other=0.0
        )
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    most = tl.max(largest, 1)  # [R]
    tl.store(scale_ptr + row, most / LIMIT, mask=row < rows)
    for start in range(0, padded, BLOCK_C):
        column = (start + lane).to(tl.int64)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(
            x_ptr + row[:, None] * stride_r + column[None, :] * stride_c, mask=mask, other=0.0
        )
        q = _quantized(x.to(tl.float32), most[:, None], LIMIT).to(q_ptr.dtype.element_ty)
        inside = (row < rows)[:, None] & (column < padded)[None, :]
        tl.store(q_ptr + row[:, None] * padded + column[None, :], q, mask=inside)


@triton.jit  # rows may be what lies together: then their number says how wide a load may be
def quantize_blocks_kernel(
    x_ptr, q_ptr, scale_ptr, stride_r, stride_c, rows, columns, padded,
    LIMIT: tl.constexpr, SMALLEST: tl.constexpr, PER_ROW: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """x (rows, columns) of any strides -> q (rows, padded), and scale by block of BLOCK_C columns.

    scale is (blocks, rows) with PER_ROW, else (blocks of BLOCK_R rows, blocks).
    """
    down, across = tl.program_id(0), tl.program_id(1)
    row = down.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # [R] int64
    column = across.to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)  # [C]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_r + column[None, :] * stride_c, mask=mask, other=0.0)
    x = x.to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(x), 1), SMALLEST)  # [R]
    if PER_ROW:
        tl.store(scale_ptr + across.to(tl.int64) * rows + row, most / LIMIT, mask=row < rows)
        q = _quantized(x, most[:, None], LIMIT)
    else:
        highest = tl.max(most, 0)
        tl.store(scale_ptr + down * tl.num_programs(1) + across, highest / LIMIT)
        q = _quantized(x, highest, LIMIT)
    q_ptrs = q_ptr + row[:, None] * padded + column[None, :]
    tl.store(q_ptrs, q.to(q_ptr.dtype.element_ty), mask=(row < rows)[:, None])


@triton.jit(do_not_specialize=["rows"])
def fp8_gemm_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, bias_ptr, out_ptr, rows, columns, inner,
    BY_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out (rows, columns) of a (rows, inner), b (columns, inner); a block's BLOCK_N columns share a scale."""
    m, n = tile_at(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N))
    a_ptr, of_row = rows_at(a_ptr, m * BLOCK_M, rows, inner, BLOCK_M)
    b_ptr, of_column = rows_at(b_ptr, n * BLOCK_N, columns, inner, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    row = tl.minimum(m * BLOCK_M + tl.arange(0, BLOCK_M), rows - 1)  # [M]
    if BY_BLOCK:
        a_scale_ptr += row
        b_scale_ptr += n * BLOCK_N // BLOCK_K * (inner // BLOCK_K)
        for _ in range(0, inner, BLOCK_K):
            a = tl.load(a_ptr + of_row[:, None] + k[None, :])
            b = tl.load(b_ptr + of_column[:, None] + k[None, :])
            part = tl.dot(a, tl.trans(b))
            acc += part * (tl.load(a_scale_ptr) * tl.load(b_scale_ptr))[:, None]
            a_ptr += BLOCK_K
            b_ptr += BLOCK_K
            a_scale_ptr += rows
            b_scale_ptr += 1
    else:
        for _ in range(0, inner, BLOCK_K):
            a = tl.load(a_ptr + of_row[:, None] + k[None, :])
            b = tl.load(b_ptr + of_column[:, None] + k[None, :])
            acc = tl.dot(a, tl.trans(b), acc, max_num_imprecise_acc=BLOCK_K)
            a_ptr += BLOCK_K
            b_ptr += BLOCK_K
        column = tl.minimum(n * BLOCK_N + tl.arange(0, BLOCK_N), columns - 1)
        acc *= tl.load(a_scale_ptr + row)[:, None] * tl.load(b_scale_ptr + column)[None, :]
    if HAS_BIAS:
        acc = add_row(bias_ptr, acc, n, columns, BLOCK_N)
    store_tile(out_ptr, acc, m, n, rows, columns, columns, BLOCK_M, BLOCK_N)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x (R, C) by rows -> q (R, C padded to 128s), scale (R,) fp32."""
    rows, columns = x.shape
    padded = cdiv(columns, BLOCK) * BLOCK
    q, scale = x.new_empty((rows, padded), dtype=dtype), x.new_empty(rows, dtype=torch.float32)
    config = ROW_CONFIG if x.stride(1) == 1 else TRANSPOSED_CONFIG
    launch(
        quantize_rows_kernel, (cdiv(rows, config["BLOCK_R"]),),
        x, q, scale, *x.stride(), rows, columns, padded,
        LIMIT=torch.finfo(dtype).max, SMALLEST=SMALLEST, on=x, **config,
    )  # fmt: skip
    return q, scale


def quantize_blocks(
    x: torch.Tensor, dtype: torch.dtype, per_row: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x (R, C) by 1 x 128 -> scale (C / 128, R), or by 128 x 128 -> scale (R / 128, C / 128)."""
    rows, columns = x.shape
    blocks = cdiv(columns, BLOCK)
    q = x.new_empty((rows, blocks * BLOCK), dtype=dtype)
    shape = (blocks, rows) if per_row else (cdiv(rows, BLOCK), blocks)
    scale = x.new_empty(shape, dtype=torch.float32)
    height = 16 if per_row else BLOCK
    launch(
        quantize_blocks_kernel, (cdiv(rows, height), blocks),
        x, q, scale, *x.stride(), rows, columns, blocks * BLOCK,
        LIMIT=torch.finfo(dtype).max, SMALLEST=SMALLEST, PER_ROW=per_row, BLOCK_R=height, BLOCK_C=BLOCK,
        num_warps=WARPS if per_row else 2 * WARPS, on=x,
    )  # fmt: skip
    return q, scale


def gemm_config(device: Device, columns: int, inner: int, by_block: bool) -> Config:
    """Return the tuned configuration, or the heuristic; BLOCK_K is that of a scale."""
    base = configs.fp8_config(device)
    return choose(
        "fp8_gemm",
        base,
        lambda: configs.fp8_candidates(device),
        columns=columns,
        inner=inner,
        by_block=by_block,
    )


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: str,
    dtype: torch.dtype,
    out: torch.Tensor,
) -> torch.Tensor:
    """Fill out (..., N) with a (R, C), of ``dtype``, times b (N, C) of e4m3."""
    if not out.numel():
        return out
    if scaling == "block":
        a_q, a_scale = quantize_blocks(a, dtype, per_row=True)
        b_q, b_scale = quantize_blocks(b, FORWARD, per_row=False)
    else:
        a_q, a_scale = quantize_rows(a, dtype)
        b_q, b_scale = quantize_rows(b, FORWARD)
    rows, columns, inner = a.shape[0], b.shape[0], a_q.shape[1]
    device = device_of(fp8_gemm_kernel, a)
    config = gemm_config(device, columns, inner, scaling == "block")
    launch(
        fp8_gemm_kernel, (cdiv(rows, config["BLOCK_M"]) * cdiv(columns, config["BLOCK_N"]),),
        a_q, b_q, a_scale, b_scale, a_scale if bias is None else bias.contiguous(), out,
        rows, columns, inner,
        BY_BLOCK=scaling == "block", HAS_BIAS=bias is not None, on=out, **config,
    )  # fmt: skip
    return out


def fp8_linear_fwd(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scaling: str
) -> torch.Tensor:
    """Compute ``reference.fp8_linear_fwd`` on the GPU."""
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return _product(x.reshape(-1, x.shape[-1]), weight, bias, scaling, FORWARD, out)


def fp8_linear_dx(dy: torch.Tensor, weight: torch.Tensor, scaling: str) -> torch.Tensor:
    """Compute ``reference.fp8_linear_dx`` on the GPU."""
    out = weight.new_empty((*dy.shape[:-1], weight.shape[1]))
    if not dy.numel():  # no outputs
        return out.zero_()
    return _product(dy.reshape(-1, dy.shape[-1]), weight.t(), None, scaling, GRADIENT, out)
