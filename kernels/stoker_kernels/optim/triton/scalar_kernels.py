"""The small launches around an update: the numbers of the step before, the sums of squares after.

One row of ``scalars`` per tensor, since each counts its own steps. Bias corrections come from the step
tensor in fp32: 1 - beta^t = -expm1(t log(beta)), with log(beta) rounded once from fp64; their relative
error stays below 1e-6 at any step number (tested), where 1 - beta ** t loses four digits at t = 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.optim.hyper import AdamHyper, SGDHyper, SquareHyper
from stoker_kernels.optim.triton.kernels import (
    _COLUMNS,
    ADDED,
    ALPHA1,
    ALPHA2,
    CORRECTION1,
    CORRECTION2,
    EPS,
    L2,
    MOMENTUM,
    OF_BUFFER,
    OF_GRAD,
    SCALARS,
    SCALE,
    SHRINK,
    STEP,
    STEP_SIZE,
    WRITE,
)

_ADAM, _SGD = AdamHyper._fields.index, SGDHyper._fields.index
_SQUARE = SquareHyper._fields.index
H_LR, H_DECAY, H_SIGN, H_EPS = (
    tl.constexpr(_ADAM(name)) for name in ("lr", "weight_decay", "sign", "eps")
)  # the same places in all
H_ALPHA1, H_ALPHA2 = tl.constexpr(_ADAM("alpha1")), tl.constexpr(_ADAM("alpha2"))
H_LOG1, H_LOG2 = tl.constexpr(_ADAM("log_beta1")), tl.constexpr(_ADAM("log_beta2"))
H_DECOUPLED, H_LAMB_ADAPT = tl.constexpr(_ADAM("decoupled")), tl.constexpr(_ADAM("adapt"))
H_LOW, H_HIGH = tl.constexpr(_ADAM("low")), tl.constexpr(_ADAM("high"))
H_MOMENTUM, H_ADDED = tl.constexpr(_SGD("momentum")), tl.constexpr(_SGD("added"))
H_NESTEROV, H_TRUST = tl.constexpr(_SGD("nesterov")), tl.constexpr(_SGD("trust"))
H_LARS_ADAPT = tl.constexpr(_SGD("adapt"))
H_SQUARE_ADDED, H_LR_DECAY = tl.constexpr(_SQUARE("added")), tl.constexpr(_SQUARE("lr_decay"))
H_SQUARE_MOMENTUM = tl.constexpr(_SQUARE("momentum"))

# Rules, and what reduce_kernel is to do.
SUMS_ONLY = tl.constexpr(0)
ADAM = tl.constexpr(1)
SGD = tl.constexpr(2)
LAMB = tl.constexpr(3)
LARS = tl.constexpr(4)
ADAGRAD = tl.constexpr(5)
ADADELTA = tl.constexpr(6)
RMSPROP = tl.constexpr(7)


@triton.jit
def one_minus_exp(x):
    """1 - exp(x) for x <= 0 (n,), without cancellation near 0."""
    # Taylor's series of expm1 to x^9; at x = -0.5 the rest is 3e-10 of the sum.
    near = tl.maximum(x, -0.5)
    series = near / 9.0
    series = (series + 1.0) * near / 8.0
    series = (series + 1.0) * near / 7.0
    series = (series + 1.0) * near / 6.0
    series = (series + 1.0) * near / 5.0
    series = (series + 1.0) * near / 4.0
    series = (series + 1.0) * near / 3.0
    series = (series + 1.0) * near / 2.0
    series = -(series + 1.0) * near
    return tl.where(x > -0.5, series, 1.0 - tl.exp(x))


@triton.jit(do_not_specialize=["tensors"])
def scalars_kernel(
    table_ptr, hyper_ptr, scale_ptr, found_inf_ptr, scalars_ptr, tensors,
    RULE: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr = True,
):  # fmt: skip
    """Fill the tensors' rows and advance their step numbers, if COUNTED; BLOCK tensors to a program."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < tensors
    step_address = tl.load(table_ptr + index * _COLUMNS + 4, mask=mask, other=0)
    step_ptr = step_address.to(tl.pointer_type(tl.float32))
    write = 1.0
    if found_inf_ptr is not None:
        write = tl.where(tl.load(found_inf_ptr) != 0.0, 0.0, 1.0)
    scale = tl.load(hyper_ptr + H_SIGN)
    if scale_ptr is not None:
        scale /= tl.load(scale_ptr)
    before = tl.load(step_ptr, mask=mask, other=0.0)
    step = before + 1.0
    if COUNTED:
        tl.store(step_ptr, before + write, mask=mask)
    lr, decay = tl.load(hyper_ptr + H_LR), tl.load(hyper_ptr + H_DECAY)
    zero = tl.zeros([BLOCK], dtype=tl.float32)
    s = scalars_ptr + index * SCALARS
    tl.store(s + WRITE, zero + write, mask=mask)
    tl.store(s + SCALE, zero + scale, mask=mask)
    tl.store(s + STEP, step, mask=mask)
    if (RULE == ADAM) | (RULE == LAMB):
        decoupled = tl.load(hyper_ptr + H_DECOUPLED)
        correction1 = 1.0 / one_minus_exp(step * tl.load(hyper_ptr + H_LOG1))
        correction2 = 1.0 / tl.sqrt(one_minus_exp(step * tl.load(hyper_ptr + H_LOG2)))
        if RULE == ADAM:
            tl.store(s + STEP_SIZE, lr * correction1, mask=mask)
            tl.store(s + L2, zero + decay * (1.0 - decoupled), mask=mask)
            tl.store(s + SHRINK, zero + lr * decay * decoupled, mask=mask)
        else:
            tl.store(s + STEP_SIZE, zero + lr, mask=mask)
            tl.store(s + L2, zero + decay, mask=mask)
        tl.store(s + ALPHA1, zero + tl.load(hyper_ptr + H_ALPHA1), mask=mask)
        tl.store(s + ALPHA2, zero + tl.load(hyper_ptr + H_ALPHA2), mask=mask)
        tl.store(s + CORRECTION1, correction1, mask=mask)
        tl.store(s + CORRECTION2, correction2, mask=mask)
        tl.store(s + EPS, zero + tl.load(hyper_ptr + H_EPS), mask=mask)
    elif (RULE == ADAGRAD) | (RULE == ADADELTA) | (RULE == RMSPROP):
        decayed = lr / (1.0 + before * tl.load(hyper_ptr + H_LR_DECAY))  # 0 but for Adagrad
        tl.store(s + STEP_SIZE, decayed, mask=mask)
        tl.store(s + L2, zero + decay, mask=mask)
        tl.store(s + MOMENTUM, zero + tl.load(hyper_ptr + H_SQUARE_MOMENTUM), mask=mask)
        tl.store(s + ADDED, zero + tl.load(hyper_ptr + H_SQUARE_ADDED), mask=mask)
        tl.store(s + EPS, zero + tl.load(hyper_ptr + H_EPS), mask=mask)
    else:
        momentum = tl.load(hyper_ptr + H_MOMENTUM)
        nesterov = tl.load(hyper_ptr + H_NESTEROV)
        added = tl.load(hyper_ptr + H_ADDED)
        tl.store(s + L2, zero + decay, mask=mask)
        tl.store(s + MOMENTUM, zero + momentum, mask=mask)
        tl.store(s + OF_GRAD, zero + nesterov, mask=mask)
        tl.store(s + OF_BUFFER, zero + tl.where(nesterov != 0.0, momentum, 1.0), mask=mask)
        if RULE == SGD:
            tl.store(s + STEP_SIZE, zero + lr, mask=mask)
            tl.store(s + ADDED, tl.where(step == 1.0, 1.0, added), mask=mask)
        else:  # the buffer holds the step itself
            tl.store(s + STEP_SIZE, zero + 1.0, mask=mask)


@triton.jit
def total(partial_ptr, first, count, WIDTH: tl.constexpr):
    """The sum of a tensor's partials, always added in the same order."""
    lane = tl.arange(0, WIDTH)
    sums = tl.zeros([WIDTH], dtype=tl.float32)
    for start in range(0, count, WIDTH):
        place = start + lane
        sums += tl.load(partial_ptr + first + place, mask=place < count, other=0.0)
    return tl.sum(sums, 0)


@triton.jit
def set_ratio(hyper_ptr, s, g_square, p_square, u_square, RULE: tl.constexpr):
    """Put a tensor's trust ratio among its scalars ``s``. LARS takes no ``u_square``."""
    p_norm, g_norm, u_norm = tl.sqrt(p_square), tl.sqrt(g_square), tl.sqrt(u_square)
    if RULE == LAMB:
        adapts = (p_norm > 0.0) & (u_norm > 0.0) & (tl.load(hyper_ptr + H_LAMB_ADAPT) != 0.0)
        bounded = tl.maximum(p_norm, tl.load(hyper_ptr + H_LOW))
        bounded = tl.minimum(bounded, tl.load(hyper_ptr + H_HIGH))
        ratio = tl.where(adapts, bounded, 1.0) / tl.where(adapts, u_norm, 1.0)
        tl.store(s + STEP_SIZE, ratio * tl.load(hyper_ptr + H_LR))
    else:
        adapts = (p_norm > 0.0) & (g_norm > 0.0) & (tl.load(hyper_ptr + H_LARS_ADAPT) != 0.0)
        above = tl.load(hyper_ptr + H_TRUST) * p_norm
        below = g_norm + tl.load(hyper_ptr + H_DECAY) * p_norm + tl.load(hyper_ptr + H_EPS)
        ratio = tl.where(adapts, above, 1.0) / tl.where(adapts, below, 1.0)
        tl.store(s + ADDED, ratio * tl.load(hyper_ptr + H_LR))


@triton.jit(do_not_specialize=["blocks"])
def reduce_kernel(
    table_ptr, hyper_ptr, partial_ptr, scalars_ptr, square_sum_ptr, blocks,
    RULE: tl.constexpr, KINDS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """square_sum (KINDS, T) of one tensor from its blocks' partials; its trust ratio for LAMB and LARS."""
    index = tl.program_id(0)
    row = table_ptr + index * _COLUMNS
    count = tl.cdiv(tl.load(row + 5), CHUNK).to(tl.int32)
    first = tl.load(row + 6)
    g_square = total(partial_ptr, first, count, WIDTH)
    tl.store(square_sum_ptr + index, g_square)
    for kind in tl.static_range(1, KINDS):
        square = total(partial_ptr + kind * blocks, first, count, WIDTH)
        tl.store(square_sum_ptr + kind * tl.num_programs(0) + index, square)
    if (RULE == LAMB) | (RULE == LARS):
        p_square = total(partial_ptr + blocks, first, count, WIDTH)
        u_square = p_square
        if RULE == LAMB:
            u_square = total(partial_ptr + 2 * blocks, first, count, WIDTH)
        set_ratio(hyper_ptr, scalars_ptr + index * SCALARS, g_square, p_square, u_square, RULE)


@triton.jit
def ratio_kernel(hyper_ptr, square_ptr, scalars_ptr, RULE: tl.constexpr):
    """One tensor's trust ratio from squares (2 or 3, T) that were summed over its shards."""
    index = tl.program_id(0)
    tensors = tl.num_programs(0)
    p_square = tl.load(square_ptr + tensors + index)
    u_square = p_square
    if RULE == LAMB:
        u_square = tl.load(square_ptr + 2 * tensors + index)
    g_square = tl.load(square_ptr + index)
    set_ratio(hyper_ptr, scalars_ptr + index * SCALARS, g_square, p_square, u_square, RULE)
