"""Linear layer and cross-entropy over chunks of tokens: what runs on CPU and GPU.

Per chunk of C tokens, in one buffer of (C, V) logits that is used again and again: a GEMM makes the
logits, one kernel turns them in place into their gradient and gives the loss, two GEMMs make dx and add
to dW. GEMMs are PyTorch's (cuBLAS). 6*T*H*V flops with gradients, 2*T*H*V without; 8*T*H*V for
``reduction="none"``, whose backward makes the logits again.

Memory beyond inputs and gradients: the buffer. The sum of dW over chunks is kept in fp32, 4 bytes per
weight: in bf16 its error grows with the number of chunks, as each addition rounds. Where V is no multiple of
ALIGNMENT the products run over a copy of the weight with rows of zeros behind: those of an odd V took
six times as long on an H200.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from stoker_kernels.ops.cross_entropy import reference as cross_entropy
from stoker_kernels.runtime.backend import Backend, backend_for, compute_dtype

if TYPE_CHECKING:
    from stoker_kernels.ops.linear_cross_entropy.reference import Result, Settings, Wanted

# Each chunk reads and writes the fp32 sum of dW, 8 bytes per weight, for 2 * C flops per weight. On an
# H200 (989 TFLOP/s, 4.8 TB/s) that traffic is the longer of the two below C = 824.
SMALLEST_CHUNKS = 1024, 2048
ALIGNMENT = 64  # classes: cuBLAS has its fast kernels only for even ones, and these are the fastest


def chunk_size(rows: int, hidden: int, vocab: int) -> int:
    """Return the tokens per chunk: as many as make the logits no larger than x, or an eighth of all tokens

    where that is between the two of SMALLEST_CHUNKS, but never fewer than the first of them.
    ceil(T / that) chunks, of equal size up to a multiple of 128.
    """
    least, enough = SMALLEST_CHUNKS
    largest = max(rows * hidden // vocab, min(max(rows // 8, least), enough))
    chunks = -(-rows // largest)
    even = -(-rows // max(1, chunks))
    return max(1, min(rows, -(-even // 128) * 128))


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    dloss: torch.Tensor | None,
    settings: Settings,
    wanted: Wanted,
) -> Result:
    """Compute ``reference.linear_cross_entropy`` chunk by chunk."""
    (rows, hidden), vocab = x.shape, weight.shape[0]
    dtype, wide = settings.dtype, compute_dtype(settings.dtype)
    padded = -(-vocab // ALIGNMENT) * ALIGNMENT
    weight = _padded(weight.to(dtype), padded)
    bias = None if bias is None else _padded(bias.to(dtype), padded)
    chunk = min(settings.chunk or chunk_size(rows, hidden, vocab), max(1, rows))
    buffer = x.new_empty((chunk, padded), dtype=dtype)
    dloss = x.new_ones((), dtype=wide).expand(rows) if dloss is None else dloss
    loss = x.new_empty((rows,), dtype=wide)
    dx = x.new_empty(x.shape if wanted.x else 0)
    dw = weight.new_zeros(
        weight.shape if wanted.weight else 0, dtype=settings.accumulator
    )  # padded
    db = weight.new_zeros((vocab,) if wanted.bias else 0, dtype=wide)
    for begin in range(0, rows, chunk):
        part = slice(begin, min(begin + chunk, rows))
        x_part = x[part].to(dtype)
        wide_logits = buffer[: x_part.shape[0]]
        logits = wide_logits[:, :vocab]
        if bias is None:
            torch.mm(x_part, weight.t(), out=wide_logits)
        else:
            torch.addmm(bias, x_part, weight.t(), out=wide_logits)
        loss[part] = _losses(logits, target[part], dloss[part], settings, any(wanted))
        if vocab < padded:
            wide_logits[:, vocab:] = 0  # it is, but for rows of x that are not finite
        if wanted.x:
            dx_part = dx[part] if dx.dtype == dtype else dx.new_empty(x_part.shape, dtype=dtype)
            torch.mm(wide_logits, weight, out=dx_part)
            if dx.dtype != dtype:
                dx[part] = dx_part
        if wanted.weight:
            add_product(dw, wide_logits.t(), x_part)
        if wanted.bias:
            db += logits.sum(0, dtype=wide)
    return loss, dx, dw[:vocab], db


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return ``tensor`` (V, ...) with zeros behind, so that it has ``rows``; itself if it has them."""
    if tensor.shape[0] == rows:
        return tensor
    wider = tensor.new_empty((rows, *tensor.shape[1:]))
    wider[: tensor.shape[0]] = tensor
    wider[tensor.shape[0] :] = 0
    return wider


def _losses(
    logits: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor, settings: Settings, grad: bool
) -> torch.Tensor:
    """Return the losses (C,) of a chunk; with ``grad`` the logits become their gradient."""
    s = settings.ignore_index, settings.label_smoothing, settings.z_loss
    if backend_for(logits) is Backend.TRITON:
        from stoker_kernels.ops.cross_entropy import triton

        if grad:
            return triton.cross_entropy_fused_(dloss, logits, target, *s)
        return triton.cross_entropy_fwd(logits, target, *s)[0]
    if grad:
        return cross_entropy.cross_entropy_fused_(dloss, logits, target, *s)
    return cross_entropy.cross_entropy_fwd(logits, target, *s)[0]


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add: total (V, H) += a (V, C) @ b (C, H), where total may be fp32 and a, b narrower."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    elif _adds_in_fp32(a.device, a.dtype):
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        # In slices of V, so that the product takes no more room than the logits.
        step = max(1, a.numel() // max(1, b.shape[1]))
        for begin in range(0, total.shape[0], step):
            part = slice(begin, begin + step)
            total[part] += _product_in_fp32(a[part], b)


def _product_in_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if _multiplies_to_fp32(a.device, a.dtype):
        return torch.ops.aten.mm.dtype(a, b, torch.float32)
    return torch.mm(a.float(), b.float())


@lru_cache
def _adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this torch adds a bf16 product to an fp32 sum in one GEMM here: tried out, once.

    The overload came to CUDA with torch 2.8, but refused an fp32 sum at first.
    """
    total = torch.zeros((16, 16), dtype=torch.float32, device=device)
    a = torch.zeros((16, 16), dtype=dtype, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, a, a, torch.float32, out=total)
    except (AttributeError, RuntimeError):
        return False
    return True


@lru_cache
def _multiplies_to_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this torch multiplies bf16 matrices to an fp32 result here: tried out, once."""
    a = torch.zeros((16, 16), dtype=dtype, device=device)
    try:
        torch.ops.aten.mm.dtype(a, a, torch.float32)
    except (AttributeError, RuntimeError):
        return False
    return True
