"""Softmax on the GPU: a row in one pass while a program can hold it, online beyond that.

A program holds BLOCK_M rows of one (S_q, S_k) matrix. Bytes moved (b per value, n values): forward
2*n*b, backward 3*n*b, for rows of up to ONE_PASS values; longer rows are read twice, the second time
from the L2 cache if they still are there. Causal programs load nothing past the diagonal. The backward
needs no mask: the result is 0 where an element was not kept. Formulas: see ``reference``. bf16 is
widened on load and only rounded on store; nothing is atomic, so results repeat bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from stoker_kernels.primitives.exponential import exp
from stoker_kernels.primitives.tiling import VALUES_PER_THREAD, cdiv, power_of_2, row_tile
from stoker_kernels.runtime.backend import dense_last_dim
from stoker_kernels.runtime.launch import device_of, launch
from stoker_kernels.tuning import Config, choose

if TYPE_CHECKING:
    from stoker_kernels.runtime.device import Device

ONE_PASS = 8192  # columns a program holds at once; at twice that a multiprocessor runs only one
BLOCK_OF_LONG_ROWS = 4096


@triton.jit
def _place(queries, BLOCK_M: tl.constexpr):  # fmt: skip
    """This program's matrix, its queries [M] in that, and its rows [M] int64 in the whole of x."""
    blocks = tl.cdiv(queries, BLOCK_M)
    matrix = tl.program_id(0) // blocks
    query = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    return matrix, query, matrix.to(tl.int64) * queries + query


@triton.jit
def _seen(query, column, queries, keys, CAUSAL: tl.constexpr):  # fmt: skip
    """[M, N] twice: what takes part, up to the diagonal that ends in the last element; what is loaded.

    Loads go on to the next multiple of 16 columns, or 8 neighbours could not share one.
    """
    inside = (query < queries)[:, None] & (column < keys)[None, :]
    if CAUSAL:
        limit = query + (keys - queries) + 1  # [M]
        whole = (tl.maximum(limit, 0) + 15) // 16 * 16
        keep = inside & (column[None, :] < limit[:, None])
        return keep, inside & (column[None, :] < whole[:, None])
    else:
        return inside, inside


@triton.jit
def _end(query, queries, keys, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """Columns before this hold all that the program's queries see."""
    end = keys
    if CAUSAL:
        last = tl.minimum(tl.max(query, 0), queries - 1)
        end = tl.maximum(last + (keys - queries) + 1, 0)
    return end


@triton.jit
def _scores(
    x_rows, mask_rows, stride_mk, query, column, queries, keys, scale,
    HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """x_rows, mask_rows [M] pointers to column 0 -> scaled scores [M, N], -inf if not kept; kept."""
    keep, loaded = _seen(query, column, queries, keys, CAUSAL)
    x = tl.load(x_rows[:, None] + column[None, :], mask=loaded, other=0.0).to(tl.float32)
    if HAS_MASK:
        mask_ptrs = mask_rows[:, None] + column[None, :].to(tl.int64) * stride_mk
        keep &= tl.load(mask_ptrs, mask=loaded, other=0) != 0
    return tl.where(keep, x * scale, float("-inf")), keep


@triton.jit
def _gradients(dy_rows, y_rows, query, column, queries, keys, CAUSAL: tl.constexpr):  # fmt: skip
    """dy and y [M, N] in fp32; past the diagonal dy is 0, whatever is stored there."""
    keep, loaded = _seen(query, column, queries, keys, CAUSAL)
    dy = tl.load(dy_rows[:, None] + column[None, :], mask=loaded, other=0.0).to(tl.float32)
    y = tl.load(y_rows[:, None] + column[None, :], mask=loaded, other=0.0).to(tl.float32)
    return tl.where(keep, dy, 0.0) if CAUSAL else dy, y


@triton.jit
def _inverse(total):  # fmt: skip
    """1 / total, finite for the rows that kept nothing, whose weights are 0; NaN stays."""
    return 1.0 / tl.where(total == 0.0, 1.0, total)


@triton.jit
def _whole_rows(
    x_rows, mask_rows, y_rows, stride_mk, query, queries, keys, scale,
    HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the first WIDTH columns of y, which hold all that these queries see."""
    lane = tl.arange(0, WIDTH)
    s, keep = _scores(
        x_rows, mask_rows, stride_mk, query, lane, queries, keys, scale, HAS_MASK, CAUSAL
    )  # fmt: skip
    largest = tl.max(s, 1)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weight = exp(s - largest[:, None])
    y = tl.where(keep, weight * _inverse(tl.sum(weight, 1))[:, None], 0.0)
    inside = (query < queries)[:, None] & (lane < keys)[None, :]
    tl.store(y_rows[:, None] + lane[None, :], y.to(y_rows.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["heads", "queries"])
def softmax_fwd_kernel(
    x_ptr, mask_ptr, y_ptr, stride_x, stride_mb, stride_mh, stride_mq, stride_mk, heads, queries, keys,
    scale,
    HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LONG: tl.constexpr,
):  # fmt: skip
    matrix, query, row = _place(queries, BLOCK_M)
    x_rows = x_ptr + row * stride_x
    y_rows = y_ptr + row * keys
    batch, head = (matrix // heads).to(tl.int64), (matrix % heads).to(tl.int64)
    mask_rows = mask_ptr + batch * stride_mb + head * stride_mh + query.to(tl.int64) * stride_mq
    lane = tl.arange(0, BLOCK_N)
    if not LONG:
        HALF: tl.constexpr = BLOCK_N // 2
        if CAUSAL and HALF >= 32 and _end(query, queries, keys, CAUSAL, BLOCK_M) <= HALF:
            _whole_rows(
                x_rows, mask_rows, y_rows, stride_mk, query, queries, keys, scale,
                HAS_MASK, CAUSAL, HALF,
            )  # fmt: skip
            column = HALF + tl.arange(0, HALF)
            inside = (query < queries)[:, None] & (column < keys)[None, :]
            zeros = tl.zeros([BLOCK_M, HALF], y_ptr.dtype.element_ty)
            tl.store(y_rows[:, None] + column[None, :], zeros, mask=inside)
        else:
            _whole_rows(
                x_rows, mask_rows, y_rows, stride_mk, query, queries, keys, scale,
                HAS_MASK, CAUSAL, BLOCK_N,
            )  # fmt: skip
    else:
        end = _end(query, queries, keys, CAUSAL, BLOCK_M)
        # Every lane has its own running maximum and sum: no barrier holds up the loads.
        largest = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, end, BLOCK_N):
            column = start + lane
            s, _ = _scores(
                x_rows, mask_rows, stride_mk, query, column, queries, keys, scale, HAS_MASK, CAUSAL
            )  # fmt: skip
            ratio = exp(-tl.abs(s - tl.where(largest == float("-inf"), 0.0, largest)))
            total = tl.where(s > largest, total * ratio + 1.0, total + ratio)
            largest = tl.maximum(largest, s)
        of_row = tl.max(largest, 1)
        of_row = tl.where(of_row == float("-inf"), 0.0, of_row)  # [M]
        inverse = _inverse(tl.sum(total * exp(largest - of_row[:, None]), 1))
        for start in range(0, keys, BLOCK_N):
            column = start + lane
            y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            if start < end:
                s, keep = _scores(
                    x_rows, mask_rows, stride_mk, query, column, queries, keys, scale, HAS_MASK, CAUSAL
                )  # fmt: skip
                weight = exp(s - of_row[:, None])
                y = tl.where(keep, weight * inverse[:, None], 0.0)
            inside = (query < queries)[:, None] & (column < keys)[None, :]
            tl.store(y_rows[:, None] + column[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["queries"])
def softmax_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, stride_dy, stride_y, queries, keys, scale,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    _, query, row = _place(queries, BLOCK_M)
    dy_rows, y_rows, dx_rows = dy_ptr + row * stride_dy, y_ptr + row * stride_y, dx_ptr + row * keys
    lane = tl.arange(0, BLOCK_N)
    if not LONG:
        dy, y = _gradients(dy_rows, y_rows, query, lane, queries, keys, CAUSAL)
        dx = scale * y * (dy - tl.sum(dy * y, 1)[:, None])
        inside = (query < queries)[:, None] & (lane < keys)[None, :]
        tl.store(dx_rows[:, None] + lane[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
    else:
        end = _end(query, queries, keys, CAUSAL, BLOCK_M)
        products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, end, BLOCK_N):
            column = start + lane
            dy, y = _gradients(dy_rows, y_rows, query, column, queries, keys, CAUSAL)
            products += dy * y
        total = tl.sum(products, 1)
        for start in range(0, keys, BLOCK_N):
            column = start + lane
            dy, y = _gradients(dy_rows, y_rows, query, column, queries, keys, CAUSAL)
            dx = scale * y * (dy - total[:, None])
            inside = (query < queries)[:, None] & (column < keys)[None, :]
            tl.store(
                dx_rows[:, None] + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside
            )


def one_pass(keys: int) -> Config:
    """Return whole rows of ``keys`` values at once."""
    return {**row_tile(keys, narrowest=16), "LONG": 0}


def by_blocks(block_n: int) -> Config:
    """Return one row, ``block_n`` values at a time."""
    warps = min(16, max(4, block_n // 256))  # 8 values per thread: each has a maximum and a sum
    return {"BLOCK_M": 1, "BLOCK_N": block_n, "LONG": 1, "num_warps": warps}


def candidates(keys: int) -> list[Config]:
    """Return what an autotuner may try: both ways, more or fewer rows and warps."""
    bases = [by_blocks(block_n) for block_n in (2048, 4096, 8192) if block_n < keys]
    if keys <= 2 * ONE_PASS:
        whole = one_pass(keys)
        bases += [
            {**whole, "BLOCK_M": rows} for rows in {max(1, whole["BLOCK_M"] // 2), whole["BLOCK_M"]}
        ]
    return [
        {**base, "num_warps": warps}
        for base in bases
        for warps in (1, 2, 4, 8, 16)
        if base["BLOCK_M"] * base["BLOCK_N"] // (32 * warps) <= VALUES_PER_THREAD
    ]


def config_for(kernel: str, device: Device, keys: int, queries: int, dtype: torch.dtype) -> Config:
    """Return the tuned configuration or the heuristic, with no more rows to a program than a matrix has."""
    if device.interpreted:  # where programs cost time and tests want loops
        base = one_pass(keys) if keys <= 64 else {**by_blocks(32), "BLOCK_M": 8}
    else:
        base = one_pass(keys) if keys <= ONE_PASS else by_blocks(BLOCK_OF_LONG_ROWS)
        if kernel == "softmax_fwd" and 1024 <= base["BLOCK_N"] <= ONE_PASS and dtype.itemsize == 2:
            # A row to a program and 32 values to a thread: warps wait for each other twice, so few of them.
            base |= {"BLOCK_M": 1, "num_warps": min(4, base["BLOCK_N"] // 1024)}
    config = choose(kernel, base, lambda: candidates(keys), keys=keys, dtype=dtype)
    return {**config, "BLOCK_M": min(config["BLOCK_M"], power_of_2(queries))}


def softmax_fwd(
    x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
) -> torch.Tensor:
    """Compute ``reference.softmax_fwd`` on the GPU."""
    y = x.new_empty(x.shape)
    if not y.numel():
        return y
    keys = x.shape[-1]
    x_rows = dense_last_dim(x.reshape(-1, keys))  # [T, S_k]
    rows = x_rows.shape[0]
    # Without a mask and a diagonal all rows are alike: one tall matrix.
    queries = rows if (mask is None and not causal) or x.ndim == 1 else x.shape[-2]
    heads = x.shape[-3] if x.ndim > 2 else 1
    if mask is None:
        mask, strides = x_rows, (0, 0, 0, 0)
        has_mask = False
    else:
        mask = mask.expand(x.shape).reshape(-1, heads, queries, keys).view(torch.uint8)
        strides, has_mask = mask.stride(), True
    config = config_for("softmax_fwd", device_of(softmax_fwd_kernel, x), keys, queries, x.dtype)
    launch(
        softmax_fwd_kernel, (rows // queries * cdiv(queries, config["BLOCK_M"]),),
        x_rows, mask, y, x_rows.stride(0), *strides, heads, queries, keys, scale,
        HAS_MASK=has_mask, CAUSAL=causal, on=x, **config,
    )  # fmt: skip
    return y


def softmax_bwd(dy: torch.Tensor, y: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """Compute ``reference.softmax_bwd`` on the GPU; past the diagonal of a causal one nothing is read."""
    dx = y.new_empty(y.shape)
    if not dx.numel():
        return dx
    keys = y.shape[-1]
    y_rows = dense_last_dim(y.reshape(-1, keys))  # [T, S_k]
    dy_rows = dense_last_dim(dy.reshape(-1, keys))
    rows = y_rows.shape[0]
    queries = y.shape[-2] if causal else rows
    config = config_for("softmax_bwd", device_of(softmax_bwd_kernel, y), keys, queries, y.dtype)
    launch(
        softmax_bwd_kernel, (rows // queries * cdiv(queries, config["BLOCK_M"]),),
        dy_rows, y_rows, dx, dy_rows.stride(0), y_rows.stride(0), queries, keys, scale,
        CAUSAL=causal, on=y, **config,
    )  # fmt: skip
    return dx
