"""Grouped products on the GPU: persistent programs over the tiles of all experts.

How many tokens an expert has is known to the device alone. Every program walks the experts, counts their
tiles and takes every P-th: a skewed expert is shared by all programs, an empty one costs a comparison. The
rows behind the last expert's are one more group, of zeros. A tile is summed by one program in a fixed
order, so results repeat bit for bit. The weights' gradient has one program per tile of one expert, which
walks its rows; without rows it stores zeros. Formulas: see ``reference``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from stoker_kernels.ops.gemm import configs
from stoker_kernels.ops.gemm.configs import operand
from stoker_kernels.ops.gemm.tiles import (
    product,
    product_transposed,
    rows_at,
    store_tile,
    tile_at,
)
from stoker_kernels.primitives.tiling import cdiv
from stoker_kernels.runtime.launch import device_of, launch
from stoker_kernels.tuning import Config, choose

if TYPE_CHECKING:
    import torch

    from stoker_kernels.runtime.device import Device

PROGRAMS_PER_SM = 2  # where registers allow; else the second half of the work follows the first
INTERPRETED_PROGRAMS = 3


@triton.jit
def _end_of(ends_ptr, expert, start, rows):
    """End of the rows of ``expert``: not before ``start``, nor past ``rows``."""
    return tl.minimum(tl.maximum(tl.load(ends_ptr + expert).to(tl.int32), start), rows)


@triton.jit(do_not_specialize=["rows"])
def grouped_rows_kernel(
    x_ptr, w_ptr, ends_ptr, out_ptr, stride_x, stride_e, stride_w, rows, experts, columns,
    inner,
    TRANSPOSED: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out (rows, columns); w (E, columns, inner) or, TRANSPOSED, (E, inner, columns)."""
    tiles_n = tl.cdiv(columns, BLOCK_N)
    number = tl.program_id(0)  # of this program's next tile, over all experts
    before = 0  # tiles of the experts so far
    start = 0
    for expert in range(0, experts + 1):
        end = rows
        if expert < experts:
            end = _end_of(ends_ptr, expert, start, rows)
        tiles_m = tl.cdiv(end - start, BLOCK_M)
        while number < before + tiles_m * tiles_n:
            m, n = tile_at(number - before, tiles_m, tiles_n)
            acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            if expert < experts:
                x, of_row = rows_at(x_ptr, start + m * BLOCK_M, end, stride_x, BLOCK_M)
                w = w_ptr + tl.cast(expert, tl.int64) * stride_e
                if TRANSPOSED:
                    acc = product_transposed(
                        x, w + n * BLOCK_N, of_row, stride_w, columns - n * BLOCK_N, inner,
                        EVEN_K, UPCAST, BLOCK_M, BLOCK_N, BLOCK_K,
                    )  # fmt: skip
                else:
                    w, of_column = rows_at(w, n * BLOCK_N, columns, stride_w, BLOCK_N)
                    acc = product(
                        x, w, of_row, of_column, inner, EVEN_K, UPCAST, BLOCK_M, BLOCK_N, BLOCK_K
                    )
            out = out_ptr + tl.cast(start, tl.int64) * columns
            store_tile(out, acc, m, n, end - start, columns, columns, BLOCK_M, BLOCK_N)
            number += tl.num_programs(0)
        before += tiles_m * tiles_n
        start = end


@triton.jit(do_not_specialize=["rows"])
def grouped_weight_kernel(
    dout_ptr, x_ptr, ends_ptr, dw_ptr, stride_dout, stride_x, rows, columns, inner,
    UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dw[e] (columns, inner) = dout[rows of e]^T x[rows of e]; BLOCK_K rows at a time."""
    expert = tl.program_id(1)
    start = 0
    for earlier in range(0, expert):
        start = _end_of(ends_ptr, earlier, start, rows)
    end = _end_of(ends_ptr, expert, start, rows)
    m, n = tile_at(tl.program_id(0), tl.cdiv(columns, BLOCK_M), tl.cdiv(inner, BLOCK_N))
    k = tl.arange(0, BLOCK_K)
    of_dout = m * BLOCK_M + tl.arange(0, BLOCK_M)
    of_x = n * BLOCK_N + tl.arange(0, BLOCK_N)
    dout_ptr += tl.cast(start, tl.int64) * stride_dout
    x_ptr += tl.cast(start, tl.int64) * stride_x
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(start, end, BLOCK_K):
        seen = (k < end - first)[:, None]
        dout_ptrs = dout_ptr + k[:, None] * stride_dout + of_dout[None, :]
        dout = tl.load(dout_ptrs, mask=seen & (of_dout < columns)[None, :], other=0.0)
        x_ptrs = x_ptr + k[:, None] * stride_x + of_x[None, :]
        x = tl.load(x_ptrs, mask=seen & (of_x < inner)[None, :], other=0.0)
        if UPCAST:
            dout, x = dout.to(tl.float32), x.to(tl.float32)
        acc = tl.dot(tl.trans(dout), x, acc, input_precision="ieee")
        dout_ptr += tl.cast(BLOCK_K, tl.int64) * stride_dout
        x_ptr += tl.cast(BLOCK_K, tl.int64) * stride_x
    dw = dw_ptr + tl.cast(expert, tl.int64) * columns * inner
    store_tile(dw, acc, m, n, columns, inner, inner, BLOCK_M, BLOCK_N)


def config_for(
    kernel: str, device: Device, dtype: torch.dtype, columns: int, inner: int, aligned: bool
) -> Config:
    """Return the tuned configuration, or the heuristic."""
    return choose(
        kernel,
        configs.config(dtype.itemsize, device, aligned=aligned),
        lambda: configs.candidates(dtype.itemsize, device, aligned=aligned),
        columns=columns,
        inner=inner,
        dtype=dtype,
    )


def grouped_rows(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """Compute ``reference.grouped_rows`` on the GPU."""
    experts, columns, inner = weight.shape
    x, weight, ends = operand(x), weight.contiguous(), ends.contiguous()
    if transposed:
        columns, inner = inner, columns
    rows = x.shape[0]
    out = x.new_empty((rows, columns))
    if out.numel():
        device = device_of(grouped_rows_kernel, x)
        aligned = inner % configs.ALIGNED == columns % configs.ALIGNED == 0
        config = config_for("grouped_rows", device, x.dtype, columns, inner, aligned)
        programs = PROGRAMS_PER_SM * device.multiprocessors
        most = (cdiv(rows, config["BLOCK_M"]) + experts) * cdiv(columns, config["BLOCK_N"])
        launch(
            grouped_rows_kernel,
            (min(INTERPRETED_PROGRAMS if device.interpreted else programs, most),),
            x, weight, ends, out, x.stride(0), *weight.stride()[:2], rows, experts, columns, inner,
            TRANSPOSED=transposed, EVEN_K=inner % config["BLOCK_K"] == 0,
            UPCAST=_narrow(x, device), on=x, **config,
        )  # fmt: skip
    return out


def grouped_weight(dout: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Compute ``reference.grouped_weight`` on the GPU."""
    (experts,), columns, inner = ends.shape, dout.shape[1], x.shape[1]
    dout, x, ends = operand(dout), operand(x), ends.contiguous()
    dweight = x.new_empty((experts, columns, inner))
    if dweight.numel():
        device = device_of(grouped_weight_kernel, x)
        aligned = inner % configs.ALIGNED == columns % configs.ALIGNED == 0
        config = config_for("grouped_weight", device, x.dtype, columns, inner, aligned)
        tiles = cdiv(columns, config["BLOCK_M"]) * cdiv(inner, config["BLOCK_N"])
        launch(
            grouped_weight_kernel, (tiles, experts),
            dout, x, ends, dweight, dout.stride(0), x.stride(0), x.shape[0], columns, inner,
            UPCAST=_narrow(x, device), on=x, **config,
        )  # fmt: skip
    return dweight


def _narrow(x: torch.Tensor, device: Device) -> bool:
    return device.interpreted and x.dtype.itemsize < 4
