"""The update kernels: one launch for every tensor of a step (multi-tensor apply).

A program takes one block of CHUNK elements of one tensor, BLOCK at a time: it looks up the tensor in the
table (``table``), and its step's numbers in ``scalars`` (``scalar_kernels``), which a small launch made
from the hyperparameters and the step tensors just before. All arithmetic is fp32; each value is read
once and written once. The sums of squares leave as one partial per block, to be added in a fixed order.
Bytes per parameter, all fp32: Adam 28, SGD 12 or 20 with momentum, LAMB 24 + 16, LARS 8 + 20,
Adagrad 20, Adadelta 28, RMSprop 20 or 28 with momentum (``square_kernels``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.optim.reference import STEP_BIT
from stoker_kernels.optim.table import COLUMNS

_COLUMNS = tl.constexpr(COLUMNS)
_STEP_BIT = tl.constexpr(STEP_BIT)

# Columns of ``scalars``, fp32, one row per tensor.
SCALARS = tl.constexpr(16)
WRITE = tl.constexpr(0)  # 0 in a step that is skipped
SCALE = tl.constexpr(1)  # of the gradient: sign / grad_scale
L2 = tl.constexpr(2)  # weight decay in the gradient (LAMB: in the direction)
STEP_SIZE = tl.constexpr(3)  # lr, with what multiplies the whole step folded in
STEP = tl.constexpr(4)  # the step number, from 1
SHRINK = tl.constexpr(5)  # Adam, LAMB from here: lr * weight decay, decoupled
ALPHA1 = tl.constexpr(6)
ALPHA2 = tl.constexpr(7)
CORRECTION1 = tl.constexpr(8)  # 1 / (1 - beta1^t)
CORRECTION2 = tl.constexpr(9)  # 1 / sqrt(1 - beta2^t)
EPS = tl.constexpr(10)
MOMENTUM = tl.constexpr(5)  # SGD, LARS from here
ADDED = tl.constexpr(6)  # of the gradient to the buffer
OF_GRAD = tl.constexpr(7)  # of the gradient to the step
OF_BUFFER = tl.constexpr(8)


@triton.jit
def locate(table_ptr, tensor_of_block_ptr, first, ALIGNED: tl.constexpr, CHUNK: tl.constexpr):
    """This program's block, its tensor's number and row, and its elements: start (int64), how many."""
    block = first + tl.program_id(0)
    index = tl.load(tensor_of_block_ptr + block).to(tl.int64)
    row = table_ptr + index * _COLUMNS
    start = (block - tl.load(row + 6)) * CHUNK  # int64: a tensor may pass 2^31 elements
    count = tl.minimum(tl.load(row + 5) - start, CHUNK).to(tl.int32)
    if ALIGNED:  # hints hold only in the function that makes the number
        count = tl.multiple_of(count, 8)
    return block, index, row, start, count


@triton.jit
def address(
    row, column: tl.constexpr, start, TYPE: tl.constexpr, ALIGNED: tl.constexpr,
    BESIDE: tl.constexpr = None,
):  # fmt: skip
    """Element ``start`` of the tensor in ``column``, read 16 bytes at a time.

    Where wider values of type BESIDE are read with it, as many elements as those have in 16 bytes: else
    threads would hold other elements of the one than of the other, and exchange them in shared memory.
    """
    pointer = tl.load(row + column).to(tl.pointer_type(TYPE))
    if ALIGNED:  # numbers from a table carry no divisibility; without it accesses are narrow
        WIDEST: tl.constexpr = TYPE if BESIDE is None else BESIDE
        pointer = tl.multiple_of(pointer, 16 * TYPE.primitive_bitwidth // WIDEST.primitive_bitwidth)
    return pointer + start


@triton.jit
def to_store(s, count, ALIGNED: tl.constexpr):
    """``count``, or 0 in a step that is skipped."""
    count = tl.where(tl.load(s + WRITE) != 0.0, count, 0)
    if ALIGNED:
        count = tl.multiple_of(count, 8)
    return count


@triton.jit
def by_four(x, BLOCK: tl.constexpr):
    """Squares of x (BLOCK,), each four neighbours added in their thread: accumulators cost registers."""
    return tl.sum(tl.reshape(x * x, [BLOCK // 4, 4]), 1)


@triton.jit
def store_parameter(
    ptrs, p, mask, seed, row, step, element, TYPE: tl.constexpr, ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Round p to TYPE and store it: to the nearest, or ROUNDED up or down at random (bf16 alone).

    ``element``, a multiple of 8, is the first lane's place in its tensor. As
    ``reference.round_stochastically``: two elements to a random word.
    """
    if ROUNDED:
        counter = element // 8 + tl.arange(0, BLOCK // 8)  # [BLOCK / 8] int64
        a, b, c, d = tl.randint4x(
            seed + tl.load(row + 7), counter + (step.to(tl.int64) << _STEP_BIT)
        )
        words = tl.join(tl.join(a, c), tl.join(b, d)).to(tl.uint32, bitcast=True)  # order a b c d
        noise = tl.reshape(tl.join(words & 0xFFFF, words >> 16), [BLOCK]).to(tl.int32)
        bits = (p.to(tl.int32, bitcast=True) + noise) & -0x10000
        p = tl.where(p == p, bits.to(tl.float32, bitcast=True), p)
    tl.store(ptrs, p.to(TYPE), mask=mask)


@triton.jit(do_not_specialize=["first", "seed"])
def adam_kernel(
    table_ptr, tensor_of_block_ptr, scalars_ptr, first, square_ptr, seed,
    P_TYPE: tl.constexpr, G_TYPE: tl.constexpr, S_TYPE: tl.constexpr, ALIGNED: tl.constexpr,
    ROUNDED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adam and AdamW."""
    block, index, row, start, count = locate(
        table_ptr, tensor_of_block_ptr, first, ALIGNED, CHUNK
    )  # fmt: skip
    p_ptr = address(row, 0, start, P_TYPE, ALIGNED, S_TYPE)
    g_ptr = address(row, 1, start, G_TYPE, ALIGNED, S_TYPE)
    m_ptr = address(row, 2, start, S_TYPE, ALIGNED)
    v_ptr = address(row, 3, start, S_TYPE, ALIGNED)
    s = scalars_ptr + index * SCALARS
    scale, l2, shrink = tl.load(s + SCALE), tl.load(s + L2), tl.load(s + SHRINK)
    alpha1, alpha2 = tl.load(s + ALPHA1), tl.load(s + ALPHA2)
    step_size, correction, eps = tl.load(s + STEP_SIZE), tl.load(s + CORRECTION2), tl.load(s + EPS)
    stored = to_store(s, count, ALIGNED)
    squares = tl.zeros([BLOCK // 4], dtype=tl.float32)
    for offset in range(0, count, BLOCK):
        lane = offset + tl.arange(0, BLOCK)
        mask = lane < count
        p = tl.load(p_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + lane, mask=mask, other=0.0).to(tl.float32) * scale
        m = tl.load(m_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        squares += by_four(g, BLOCK)
        g += l2 * p
        m += alpha1 * (g - m)
        v += alpha2 * (g * g - v)
        p -= shrink * p  # not p * (1 - shrink): that factor would be rounded alike in every step
        p -= step_size * m / (tl.sqrt(v) * correction + eps)
        write = lane < stored
        tl.store(m_ptr + lane, m.to(S_TYPE), mask=write)
        tl.store(v_ptr + lane, v.to(S_TYPE), mask=write)
        store_parameter(
            p_ptr + lane, p, write, seed, row, tl.load(s + STEP), start + offset,
            P_TYPE, ROUNDED, BLOCK,
        )  # fmt: skip
    tl.store(square_ptr + block, tl.sum(squares, 0))


@triton.jit(do_not_specialize=["first", "seed"])
def sgd_kernel(
    table_ptr, tensor_of_block_ptr, scalars_ptr, first, square_ptr, seed,
    P_TYPE: tl.constexpr, G_TYPE: tl.constexpr, S_TYPE: tl.constexpr, ALIGNED: tl.constexpr,
    ROUNDED: tl.constexpr, HAS_BUFFER: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """SGD, and LARS after its norms: the trust ratio is in ADDED."""
    block, index, row, start, count = locate(
        table_ptr, tensor_of_block_ptr, first, ALIGNED, CHUNK
    )  # fmt: skip
    BESIDE: tl.constexpr = S_TYPE if HAS_BUFFER else P_TYPE
    p_ptr = address(row, 0, start, P_TYPE, ALIGNED, BESIDE)
    g_ptr = address(row, 1, start, G_TYPE, ALIGNED, BESIDE)
    b_ptr = address(row, 2, start, S_TYPE, ALIGNED)
    s = scalars_ptr + index * SCALARS
    scale, l2, step_size = tl.load(s + SCALE), tl.load(s + L2), tl.load(s + STEP_SIZE)
    momentum, added = tl.load(s + MOMENTUM), tl.load(s + ADDED)
    of_grad, of_buffer = tl.load(s + OF_GRAD), tl.load(s + OF_BUFFER)
    stored = to_store(s, count, ALIGNED)
    squares = tl.zeros([BLOCK // 4], dtype=tl.float32)
    for offset in range(0, count, BLOCK):
        lane = offset + tl.arange(0, BLOCK)
        mask = lane < count
        write = lane < stored
        p = tl.load(p_ptr + lane, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + lane, mask=mask, other=0.0).to(tl.float32) * scale
        squares += by_four(g, BLOCK)
        g += l2 * p
        if HAS_BUFFER:
            b = tl.load(b_ptr + lane, mask=mask, other=0.0).to(tl.float32)
            b = momentum * b + added * g
            tl.store(b_ptr + lane, b.to(S_TYPE), mask=write)
            g = of_grad * g + of_buffer * b
        p -= step_size * g
        store_parameter(
            p_ptr + lane, p, write, seed, row, tl.load(s + STEP), start + offset,
            P_TYPE, ROUNDED, BLOCK,
        )  # fmt: skip
    tl.store(square_ptr + block, tl.sum(squares, 0))
