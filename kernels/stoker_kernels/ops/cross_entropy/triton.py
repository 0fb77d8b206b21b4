"""Cross-entropy on the GPU: the kernels and how they are launched. Formulas: see ``reference``.

A row is walked in tiles of DEPTH x LANES values: each thread keeps the running maximum and sums of its
own lanes, so the loop has no barrier, and DEPTH values share one rescaling exponential. Full tiles are
read without a mask, which keeps every access 16 bytes wide whatever the vocabulary; the rest of the row
follows LANES at a time. All arithmetic is fp32.

Bytes moved for T rows of V logits of b bytes: forward T*V*b; backward 2*T*V*b into a new buffer, never
over the caller's logits; fused (loss and gradient in place, for chunks that nobody else sees) 3*T*V*b,
of which the second read largely finds the L2 cache. Nothing is read of ignored rows.

A program walks a whole row in the forward, which fills the GPU from about a thousand rows on. With fewer
rows than PROGRAMS_PER_SM programs per multiprocessor the row is split into parts, and a second,
small kernel joins them. A V that is a multiple of 16 keeps rows aligned and accesses 16 bytes wide; other
V are right but slower unless the rows' stride is padded (``linear_cross_entropy`` pads its own).

A class outside [0, V) that is not ``ignore_index`` gives NaN in its row: a kernel cannot raise, and
silence would train on garbage.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stoker_kernels.primitives.exponential import exp
from stoker_kernels.primitives.tiling import cdiv, power_of_2
from stoker_kernels.runtime.backend import dense_last_dim
from stoker_kernels.runtime.launch import device_of, launch
from stoker_kernels.tuning import Config, choose

PROGRAMS_PER_SM = 4
LANES = 2048  # 8 values, one 16-byte load of bf16, for each of 256 threads
DEPTH = 4


@triton.jit
def _add_tile(x, highest, total):
    """Fold x [D, L] into each lane's maximum and sum of exp(x - maximum)."""
    new_highest = tl.maximum(highest, tl.max(x, 0))
    # A lane of -inf alone (a masked vocabulary) must add zero, not exp(-inf + inf).
    shift = tl.where(new_highest == -float("inf"), 0.0, new_highest)
    total = total * exp(highest - shift) + tl.sum(exp(x - shift[None, :]), 0)
    return new_highest, total


@triton.jit
def _statistics(
    x_ptr, begin, end, origin, SMOOTHING: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Of columns begin .. end: the maximum (0 if -inf), sum(exp(x - maximum)), sum(x - origin)."""
    lane = tl.arange(0, LANES)  # [L]
    tile = tl.arange(0, DEPTH)[:, None] * LANES + lane[None, :]  # [D, L]
    highest = tl.full([LANES], -float("inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    away = tl.zeros([LANES], tl.float32)
    full = begin + (end - begin) // (DEPTH * LANES) * (DEPTH * LANES)
    for start in range(begin, full, DEPTH * LANES):
        x = tl.load(x_ptr + start + tile).to(tl.float32)
        highest, total = _add_tile(x, highest, total)
        if SMOOTHING:
            away += tl.sum(x - origin, 0)
    for start in range(full, end, LANES):
        mask = start + lane < end
        x = tl.load(x_ptr + start + lane, mask=mask, other=-float("inf")).to(tl.float32)
        highest, total = _add_tile(x[None, :], highest, total)
        if SMOOTHING:
            away += tl.where(mask, x - origin, 0.0)
    top = tl.max(highest, 0)
    shift = tl.where(top == -float("inf"), 0.0, top)
    return shift, tl.sum(total * exp(highest - shift), 0), tl.sum(away, 0)


@triton.jit
def _origin(x_ptr):
    """The row's first logit (0 if infinite): sums of x - origin keep what sums of x would cancel."""
    first = tl.load(x_ptr).to(tl.float32)
    return tl.where(tl.abs(first) < float("inf"), first, 0.0)


@triton.jit
def _picked(x_ptr, target, vocab):
    """The logit of the row's class, NaN for a class that there is not."""
    in_range = (target >= 0) & (target < vocab)
    return tl.load(x_ptr + target, mask=in_range, other=float("nan")).to(tl.float32)


@triton.jit
def _loss(
    shift, total, away, origin, picked, vocab, label_smoothing, z_loss,
    ignored, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    """The row's loss, log(total) and log-sum-exp, all 0 for an ignored row, of which nothing was summed."""
    log_total = tl.log(tl.where(ignored, 1.0, total))
    lse = shift + log_total
    loss = log_total - (
        picked - shift
    )  # not lse - picked: both may be large where the loss is small
    if SMOOTHING:
        uniform = log_total - (origin - shift) - away / vocab
        loss = (1.0 - label_smoothing) * loss + label_smoothing * uniform
    if Z_LOSS:
        loss += z_loss * lse * lse
    return tl.where(ignored, 0.0, loss), log_total, lse


@triton.jit
def _write_gradient(
    x_ptr, out_ptr, start, vocab, label, ignored, shift, factor, dloss, label_smoothing,
    SMOOTHING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[start : start + BLOCK] = dloss * (exp(x - shift) * factor - the smoothed target).

    ``label`` is the target in 32 bits: comparing int64 columns costs twice the registers.
    """
    column = start + tl.arange(0, BLOCK)
    if ignored:  # nothing is read, so no NaN or infinity can come through
        zero = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
        tl.store(out_ptr + column, zero, mask=column < vocab)
    else:
        wanted = tl.where(column == label, 1.0 - label_smoothing, 0.0)
        if SMOOTHING:
            wanted += label_smoothing / vocab
        if start + BLOCK <= vocab:
            p = exp(tl.load(x_ptr + column).to(tl.float32) - shift) * factor
            tl.store(out_ptr + column, ((p - wanted) * dloss).to(out_ptr.dtype.element_ty))
        else:
            mask = column < vocab
            x = tl.load(x_ptr + column, mask=mask, other=-float("inf")).to(tl.float32)
            grad = (exp(x - shift) * factor - wanted) * dloss
            tl.store(out_ptr + column, grad.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["stride_target", "ignore_index"])
def cross_entropy_fwd_kernel(
    logits_ptr, target_ptr, loss_ptr, statistics_ptr, partial_ptr, stride_logits, stride_target, vocab, span,
    ignore_index, label_smoothing, z_loss,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SPLIT: tl.constexpr,
    DEPTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program (row, part): columns part * span .. + span. SPLIT: leave three partials, else the loss."""
    row = tl.program_id(0).to(tl.int64)  # row * vocab passes 2^31 at 16k x 128k
    target = tl.load(target_ptr + row * stride_target).to(tl.int64)
    x_ptr = logits_ptr + row * stride_logits
    origin = 0.0
    if SMOOTHING:
        origin = _origin(x_ptr)
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, vocab)
    end = tl.where(target == ignore_index, begin, end)  # an ignored row is not read
    shift, total, away = _statistics(x_ptr, begin, end, origin, SMOOTHING, DEPTH, LANES)
    if SPLIT:
        out_ptr = partial_ptr + (row * tl.num_programs(1) + tl.program_id(1)) * 3
        tl.store(out_ptr, shift)
        tl.store(out_ptr + 1, total)
        tl.store(out_ptr + 2, away)
    else:
        picked = _picked(x_ptr, target, vocab)
        loss, log_total, _ = _loss(
            shift, total, away, origin, picked, vocab, label_smoothing, z_loss,
            target == ignore_index, SMOOTHING, Z_LOSS,
        )  # fmt: skip
        tl.store(loss_ptr + row, loss)
        tl.store(statistics_ptr + 2 * row, shift)
        tl.store(statistics_ptr + 2 * row + 1, log_total)


@triton.jit(do_not_specialize=["stride_target", "ignore_index", "parts"])
def cross_entropy_join_kernel(
    logits_ptr, target_ptr, loss_ptr, statistics_ptr, partial_ptr, stride_logits, stride_target, vocab, parts,
    ignore_index, label_smoothing, z_loss,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of one row from the partials of its parts."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row * stride_target).to(tl.int64)
    x_ptr = logits_ptr + row * stride_logits
    part = tl.arange(0, BLOCK)
    mask = part < parts
    in_ptr = partial_ptr + (row * parts + part) * 3
    shifts = tl.load(in_ptr, mask=mask, other=-float("inf"))
    totals = tl.load(in_ptr + 1, mask=mask, other=0.0)
    away = tl.sum(tl.load(in_ptr + 2, mask=mask, other=0.0), 0)
    # A part of -inf alone stands as shift 0, total 0: it must not become the maximum.
    shifts = tl.where(totals == 0.0, -float("inf"), shifts)
    top = tl.max(shifts, 0)
    shift = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(totals * exp(shifts - shift), 0)
    origin = 0.0
    if SMOOTHING:
        origin = _origin(x_ptr)
    picked = _picked(x_ptr, target, vocab)
    loss, log_total, _ = _loss(
        shift, total, away, origin, picked, vocab, label_smoothing, z_loss,
        target == ignore_index, SMOOTHING, Z_LOSS,
    )  # fmt: skip
    tl.store(loss_ptr + row, loss)
    tl.store(statistics_ptr + 2 * row, shift)
    tl.store(statistics_ptr + 2 * row + 1, log_total)


@triton.jit(do_not_specialize=["stride_dloss", "stride_target", "ignore_index"])
def cross_entropy_bwd_kernel(
    dloss_ptr, logits_ptr, target_ptr, statistics_ptr, dlogits_ptr,
    stride_dloss, stride_logits, stride_target, vocab, ignore_index, label_smoothing, z_loss,
    SMOOTHING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, tile): BLOCK columns of the gradient, dlogits (T, V) contiguous."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row * stride_target).to(tl.int64)
    dloss = tl.load(dloss_ptr + row * stride_dloss).to(tl.float32)
    dloss = tl.where((target >= 0) & (target < vocab), dloss, float("nan"))
    shift, log_total = tl.load(statistics_ptr + 2 * row), tl.load(statistics_ptr + 2 * row + 1)
    factor = exp(-log_total) * (1.0 + 2.0 * z_loss * (shift + log_total))
    _write_gradient(
        logits_ptr + row * stride_logits, dlogits_ptr + row * vocab, tl.program_id(1) * BLOCK, vocab,
        target.to(tl.int32), target == ignore_index, shift, factor, dloss, label_smoothing,
        SMOOTHING, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride_dloss", "stride_target", "ignore_index"])
def cross_entropy_fused_kernel(
    dloss_ptr, logits_ptr, target_ptr, loss_ptr, stride_dloss, stride_logits, stride_target, vocab,
    ignore_index, label_smoothing, z_loss,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its loss, and its gradient over its logits."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row * stride_target).to(tl.int64)
    ignored, in_range = target == ignore_index, (target >= 0) & (target < vocab)
    x_ptr = logits_ptr + row * stride_logits
    # Both before the reductions, whose barriers part these reads from the writes below.
    picked = _picked(x_ptr, target, vocab)
    origin = 0.0
    if SMOOTHING:
        origin = _origin(x_ptr)
    end = tl.where(ignored, 0, vocab)
    shift, total, away = _statistics(x_ptr, 0, end, origin, SMOOTHING, DEPTH, LANES)
    loss, _, lse = _loss(
        shift, total, away, origin, picked, vocab, label_smoothing, z_loss,
        ignored, SMOOTHING, Z_LOSS,
    )  # fmt: skip
    tl.store(loss_ptr + row, loss)
    dloss = tl.load(dloss_ptr + row * stride_dloss).to(tl.float32)
    dloss = tl.where(in_range, dloss, float("nan"))
    factor = 1.0 / tl.where(ignored, 1.0, total)
    if Z_LOSS:
        factor *= 1.0 + 2.0 * z_loss * lse
    tiles = tl.cdiv(vocab, BLOCK)
    for i in range(tiles):  # backwards: what was read last is still in the L2 cache
        _write_gradient(
            x_ptr, x_ptr, (tiles - 1 - i) * BLOCK, vocab, target.to(tl.int32), ignored,
            shift, factor, dloss, label_smoothing, SMOOTHING, BLOCK,
        )  # fmt: skip


def walk(vocab: int, smoothing: bool, interpreted: bool) -> Config:
    """Return how a program walks a row; small steps under the interpreter so that tests loop.

    Smoothing keeps a third sum per lane, for which twice the DEPTH would leave no registers.
    """
    if interpreted:
        return {"DEPTH": 2, "LANES": min(32, power_of_2(vocab)), "num_warps": 4}
    lanes = min(LANES, max(64, power_of_2(vocab)))
    return {
        "DEPTH": max(1, min(DEPTH // 2 if smoothing else DEPTH, vocab // lanes)),
        "LANES": lanes,
        "num_warps": max(1, lanes // 256),
    }


def walks(vocab: int) -> list[Config]:
    """Return what an autotuner may try."""
    return [
        {"DEPTH": depth, "LANES": lanes, "num_warps": warps}
        for depth in (1, 2, 4)
        for lanes in (1024, 2048, 4096)
        for warps in (4, 8, 16)
        if lanes <= max(1024, power_of_2(vocab))
        and 4 * 32 * warps <= depth * lanes <= 64 * 32 * warps  # values per thread: 4 to 64
    ]


def walk_back(config: Config) -> Config:
    """Add to ``config`` the columns of the gradient written at a time: fewer, they cost more registers."""
    return {**config, "BLOCK": config["LANES"] * min(2, config["DEPTH"])}


def block(vocab: int, interpreted: bool) -> Config:
    """Return columns of the gradient that a program writes: 16 per thread."""
    size = min(power_of_2(vocab), 64 if interpreted else 4096)
    return {"BLOCK": size, "num_warps": max(1, min(8, size // 512))}


def blocks(vocab: int) -> list[Config]:
    """Return what an autotuner may try."""
    return [
        {"BLOCK": size, "num_warps": warps}
        for size in (1024, 2048, 4096, 8192)
        for warps in (4, 8, 16)
        if size <= max(1024, power_of_2(vocab)) and 8 <= size // (32 * warps) <= 64
    ]


def parts_of(rows: int, vocab: int, step: int, multiprocessors: int) -> tuple[int, int]:
    """Return how many parts each row is split into, and the columns of a part (whole steps)."""
    wanted = cdiv(PROGRAMS_PER_SM * multiprocessors, rows)
    steps = cdiv(vocab, step)
    span = cdiv(steps, min(wanted, steps)) * step
    return cdiv(vocab, span), span


def cross_entropy_fwd(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``reference.cross_entropy_fwd`` on the GPU; the statistics of ignored rows are 0."""
    rows, vocab = logits.shape
    logits = dense_last_dim(logits)
    loss = logits.new_empty((rows,), dtype=torch.float32)
    statistics = logits.new_empty((rows, 2), dtype=torch.float32)
    if not rows:
        return loss, statistics
    device, smoothing = device_of(cross_entropy_fwd_kernel, logits), label_smoothing > 0.0
    config = choose(
        "cross_entropy_fwd", walk(vocab, smoothing, device.interpreted), lambda: walks(vocab),
        vocab=vocab, dtype=logits.dtype, smoothing=smoothing,
    )  # fmt: skip
    step = config["DEPTH"] * config["LANES"]
    parts, span = parts_of(rows, vocab, step, device.multiprocessors)
    partial = logits.new_empty((rows, parts, 3) if parts > 1 else 0, dtype=torch.float32)
    strides = logits.stride(0), target.stride(0)
    flags = {"SMOOTHING": smoothing, "Z_LOSS": z_loss > 0.0}
    launch(
        cross_entropy_fwd_kernel, (rows, parts),
        logits, target, loss, statistics, partial, *strides, vocab, span, ignore_index,
        float(label_smoothing), float(z_loss), SPLIT=parts > 1, on=logits, **flags, **config,
    )  # fmt: skip
    if parts > 1:
        launch(
            cross_entropy_join_kernel, (rows,),
            logits, target, loss, statistics, partial, *strides, vocab, parts, ignore_index,
            float(label_smoothing), float(z_loss), on=logits, **flags,
            BLOCK=power_of_2(parts), num_warps=1,
        )  # fmt: skip
    return loss, statistics


def cross_entropy_bwd(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    statistics: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> torch.Tensor:
    """Compute ``reference.cross_entropy_bwd`` on the GPU."""
    rows, vocab = logits.shape
    logits = dense_last_dim(logits)
    dlogits = logits.new_empty((rows, vocab))
    if rows:
        device = device_of(cross_entropy_bwd_kernel, logits)
        config = choose(
            "cross_entropy_bwd", block(vocab, device.interpreted), lambda: blocks(vocab),
            vocab=vocab, dtype=logits.dtype,
        )  # fmt: skip
        launch(
            cross_entropy_bwd_kernel, (rows, cdiv(vocab, config["BLOCK"])),
            dloss, logits, target, statistics.contiguous(), dlogits,
            dloss.stride(0), logits.stride(0), target.stride(0), vocab, ignore_index,
            float(label_smoothing), float(z_loss),
            SMOOTHING=label_smoothing > 0.0, on=logits, **config,
        )  # fmt: skip
    return dlogits


def cross_entropy_fused_(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> torch.Tensor:
    """Compute ``reference.cross_entropy_fused_``; the logits' last dimension must have stride 1."""
    rows, vocab = logits.shape
    loss = logits.new_empty((rows,), dtype=torch.float32)
    if rows:
        device, smoothing = device_of(cross_entropy_fused_kernel, logits), label_smoothing > 0.0
        config = choose(
            "cross_entropy_fused", walk_back(walk(vocab, smoothing, device.interpreted)),
            lambda: [walk_back(config) for config in walks(vocab)],
            vocab=vocab, dtype=logits.dtype, smoothing=smoothing,
        )  # fmt: skip
        launch(
            cross_entropy_fused_kernel, (rows,),
            dloss, logits, target, loss, dloss.stride(0), logits.stride(0), target.stride(0),
            vocab, ignore_index, float(label_smoothing), float(z_loss),
            SMOOTHING=smoothing, Z_LOSS=z_loss > 0.0, on=logits, **config,
        )  # fmt: skip
    return loss
