"""Parts that the kernels with matrix products share: the order of tiles, the product that fills one, stores.

Operands are (rows, inner) and (columns, inner), as a linear layer's input and weight are, the inner
dimension dense; their rows and columns past the end are read as the last ones, and never stored: no mask in
the loop, and nothing that was not written takes part. An operand may also come transposed, (inner,
columns), without a copy: its columns past the end are masked, so its loads stay 16 bytes wide.
A tile's address is int64 and one number; within the tile int32 is enough, and takes half the registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(8)


@triton.jit
def tile_at(number, tiles_m, tiles_n):
    """Tile ``number`` of a (tiles_m, tiles_n) grid: GROUP rows of tiles first: operands stay in L2."""
    width = GROUP * tiles_n
    first = number // width * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    inside = number % width
    return first + inside % height, inside // height


@triton.jit
def rows_at(ptr, start, rows, stride, BLOCK: tl.constexpr):
    """Address of row ``start``, and offsets [BLOCK] from there; rows past ``rows`` have the last one's."""
    row = tl.minimum(tl.arange(0, BLOCK), rows - 1 - start)
    return ptr + tl.cast(start, tl.int64) * stride, row * stride


@triton.jit
def load_tile(ptrs, k, remaining, EVEN_K: tl.constexpr, UPCAST: tl.constexpr):
    """One tile [rows, K] of an operand; ``k`` [K] counts from the tile's start, ``remaining`` to the end."""
    if EVEN_K:  # noqa: SIM108
        tile = tl.load(ptrs)
    else:
        tile = tl.load(ptrs, mask=(k < remaining)[None, :], other=0.0)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def product(
    a_ptr, b_ptr, of_row, of_column, inner,
    EVEN_K: tl.constexpr, UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The rows of a at offsets of_row [M] times those of b at of_column [N] -> [M, N] fp32."""
    k = tl.arange(0, BLOCK_K)
    a_offsets = of_row[:, None] + k[None, :]
    b_offsets = of_column[:, None] + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, inner, BLOCK_K):
        a = load_tile(a_ptr + a_offsets, k, inner - start, EVEN_K, UPCAST)
        b = load_tile(b_ptr + b_offsets, k, inner - start, EVEN_K, UPCAST)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        a_ptr += BLOCK_K
        b_ptr += BLOCK_K
    return acc


@triton.jit
def product_transposed(
    a_ptr, b_ptr, of_row, stride_b, columns, inner,
    EVEN_K: tl.constexpr, UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The rows of a at offsets of_row [M] times b (inner, columns), its columns 0 .. N -> [M, N] fp32."""
    k, column = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    a_offsets = of_row[:, None] + k[None, :]
    b_offsets = k[:, None] * stride_b + column[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, inner, BLOCK_K):
        a = load_tile(a_ptr + a_offsets, k, inner - start, EVEN_K, UPCAST)
        seen = (column < columns)[None, :]
        if not EVEN_K:
            seen = seen & (k < inner - start)[:, None]
        b = tl.load(b_ptr + b_offsets, mask=seen, other=0.0)
        if UPCAST:
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptr += BLOCK_K
        b_ptr += tl.cast(BLOCK_K, tl.int64) * stride_b
    return acc


@triton.jit
def store_tile(
    ptr, tile, m, n, rows, columns, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Round tile [M, N] once and store it as tile (m, n) of a (rows, columns) array."""
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    mask = (row < rows - m * BLOCK_M)[:, None] & (column < columns - n * BLOCK_N)[None, :]
    ptr += tl.cast(m * BLOCK_M, tl.int64) * stride + n * BLOCK_N
    tl.store(
        ptr + row[:, None] * stride + column[None, :], tile.to(ptr.dtype.element_ty), mask=mask
    )


@triton.jit
def add_tile(ptr, tile, m, n, rows, columns, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Add tile (m, n) of a (rows, columns) array to tile [M, N] fp32."""
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    mask = (row < rows - m * BLOCK_M)[:, None] & (column < columns - n * BLOCK_N)[None, :]
    ptr += tl.cast(m * BLOCK_M, tl.int64) * stride + n * BLOCK_N
    more = tl.load(ptr + row[:, None] * stride + column[None, :], mask=mask, other=0.0)
    return tile + more.to(tl.float32)


@triton.jit
def add_row(ptr, tile, n, columns, BLOCK_N: tl.constexpr):
    """Add block ``n`` of a row (columns,) to every row of tile [M, N] fp32."""
    column = n * BLOCK_N + tl.arange(0, BLOCK_N)
    return tile + tl.load(ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
