"""Cross-entropy on the GPU: an online log-sum-exp forward and a tile-parallel backward.

Bytes moved for T rows of V logits of b bytes: forward T*V*b, backward 2*T*V*b. The gradient goes to a
new buffer, never over the caller's logits. Formulas: see ``reference``. A class outside [0, V) that is
not ``ignore_index`` gives NaN in its row: a kernel cannot raise, and silence would train on garbage.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stoker_kernels._launch import is_interpreted, launch
from stoker_kernels._runtime import dense_last_dim


@triton.jit
def cross_entropy_fwd_kernel(
    logits_ptr, target_ptr, loss_ptr, lse_ptr, stride_logits, stride_target, vocab, ignore_index,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * vocab passes 2^31 at 16k x 128k
    target = tl.load(target_ptr + row * stride_target).to(tl.int64)
    x_ptr = logits_ptr + row * stride_logits
    highest = -float("inf")
    total = 0.0
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
        new_highest = tl.maximum(highest, tl.max(x, 0))
        # A chunk of -inf logits (a masked vocabulary) must add zero, not exp(-inf + inf).
        shift = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        total = total * tl.exp(highest - shift) + tl.sum(tl.exp(x - shift), 0)
        highest = new_highest
    shift = tl.where(highest == -float("inf"), 0.0, highest)
    lse = shift + tl.log(total)
    in_range = (target >= 0) & (target < vocab)
    picked = tl.load(x_ptr + target, mask=in_range, other=float("nan")).to(tl.float32)
    # Not lse - picked: both may be large where the loss is small.
    loss = tl.where(target == ignore_index, 0.0, tl.log(total) - (picked - shift))
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)


@triton.jit
def cross_entropy_bwd_kernel(
    dloss_ptr, logits_ptr, target_ptr, lse_ptr, dlogits_ptr,
    stride_dloss, stride_logits, stride_target, vocab, ignore_index,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row * stride_target).to(tl.int64)
    dloss = tl.load(dloss_ptr + row * stride_dloss).to(tl.float32)
    lse = tl.load(lse_ptr + row)
    mask = column < vocab
    x = tl.load(logits_ptr + row * stride_logits + column, mask=mask, other=-float("inf"))
    p = tl.exp(x.to(tl.float32) - lse)
    grad = dloss * (p - tl.where(column == target, 1.0, 0.0))
    grad = tl.where((target >= 0) & (target < vocab), grad, float("nan"))
    grad = tl.where(target == ignore_index, 0.0, grad)
    # Stride vocab: the gradient is a fresh contiguous buffer.
    out = dlogits_ptr + row * vocab + column
    tl.store(out, grad.to(dlogits_ptr.dtype.element_ty), mask=mask)


def block_size(vocab: int, interpreted: bool) -> int:
    """Columns a program handles at a time; small under the interpreter so that tests loop."""
    return min(triton.next_power_of_2(vocab), 128 if interpreted else 4096)


def cross_entropy_fwd(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``reference.cross_entropy_fwd``."""
    rows, vocab = logits.shape
    logits = dense_last_dim(logits)
    loss = logits.new_empty((rows,), dtype=torch.float32)
    lse = logits.new_empty((rows,), dtype=torch.float32)
    if rows:
        block = block_size(vocab, is_interpreted(cross_entropy_fwd_kernel))
        launch(
            cross_entropy_fwd_kernel, (rows,),
            logits, target, loss, lse, logits.stride(0), target.stride(0), vocab, ignore_index,
            BLOCK=block, num_warps=8 if block > 1024 else 4, on=logits,
        )  # fmt: skip
    return loss, lse


def cross_entropy_bwd(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    ignore_index: int,
) -> torch.Tensor:
    """As ``reference.cross_entropy_bwd``."""
    rows, vocab = logits.shape
    logits = dense_last_dim(logits)
    dlogits = logits.new_empty((rows, vocab))
    if rows:
        block = block_size(vocab, is_interpreted(cross_entropy_bwd_kernel))
        launch(
            cross_entropy_bwd_kernel, (rows, triton.cdiv(vocab, block)),
            dloss, logits, target, lse, dlogits,
            dloss.stride(0), logits.stride(0), target.stride(0), vocab, ignore_index,
            BLOCK=block, num_warps=8 if block > 1024 else 4, on=logits,
        )  # fmt: skip
    return dlogits
