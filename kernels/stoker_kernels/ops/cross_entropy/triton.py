"""Cross-entropy on the GPU: how its kernels are launched.

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

from stoker_kernels._launch import device_of, launch
from stoker_kernels._runtime import dense_last_dim
from stoker_kernels.ops.cross_entropy.kernels import (
    cross_entropy_bwd_kernel,
    cross_entropy_fused_kernel,
    cross_entropy_fwd_kernel,
    cross_entropy_join_kernel,
)
from stoker_kernels.tuning import Config, choose

PROGRAMS_PER_SM = 4
LANES = 2048  # 8 values, one 16-byte load of bf16, for each of 256 threads
DEPTH = 4


def walk(vocab: int, smoothing: bool, interpreted: bool) -> Config:
    """How a program walks a row; small steps under the interpreter so that tests loop.

    Smoothing keeps a third sum per lane, for which twice the DEPTH would leave no registers.
    """
    if interpreted:
        return {"DEPTH": 2, "LANES": min(32, triton.next_power_of_2(vocab)), "num_warps": 4}
    lanes = min(LANES, max(64, triton.next_power_of_2(vocab)))
    return {
        "DEPTH": max(1, min(DEPTH // 2 if smoothing else DEPTH, vocab // lanes)),
        "LANES": lanes,
        "num_warps": max(1, lanes // 256),
    }


def walks(vocab: int) -> list[Config]:
    """What an autotuner may try."""
    return [
        {"DEPTH": depth, "LANES": lanes, "num_warps": warps}
        for depth in (1, 2, 4)
        for lanes in (1024, 2048, 4096)
        for warps in (4, 8, 16)
        if lanes <= max(1024, triton.next_power_of_2(vocab))
        and 4 * 32 * warps <= depth * lanes <= 64 * 32 * warps  # values per thread: 4 to 64
    ]


def walk_back(config: Config) -> Config:
    """``config`` and the columns of the gradient written at a time: fewer, they cost more registers."""
    return {**config, "BLOCK": config["LANES"] * min(2, config["DEPTH"])}


def block(vocab: int, interpreted: bool) -> Config:
    """Columns of the gradient that a program writes: 16 per thread."""
    size = min(triton.next_power_of_2(vocab), 64 if interpreted else 4096)
    return {"BLOCK": size, "num_warps": max(1, min(8, size // 512))}


def blocks(vocab: int) -> list[Config]:
    """What an autotuner may try."""
    return [
        {"BLOCK": size, "num_warps": warps}
        for size in (1024, 2048, 4096, 8192)
        for warps in (4, 8, 16)
        if size <= max(1024, triton.next_power_of_2(vocab)) and 8 <= size // (32 * warps) <= 64
    ]


def parts_of(rows: int, vocab: int, step: int, multiprocessors: int) -> tuple[int, int]:
    """How many parts each row is split into, and the columns of a part (whole steps)."""
    wanted = triton.cdiv(PROGRAMS_PER_SM * multiprocessors, rows)
    steps = triton.cdiv(vocab, step)
    span = triton.cdiv(steps, min(wanted, steps)) * step
    return triton.cdiv(vocab, span), span


def cross_entropy_fwd(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``reference.cross_entropy_fwd``; the statistics of ignored rows are 0."""
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
            BLOCK=triton.next_power_of_2(parts), num_warps=1,
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
    """As ``reference.cross_entropy_bwd``."""
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
            cross_entropy_bwd_kernel, (rows, triton.cdiv(vocab, config["BLOCK"])),
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
    """As ``reference.cross_entropy_fused_``; the logits' last dimension must have stride 1."""
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
