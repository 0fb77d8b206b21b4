"""Times Hopper's attention beside the kernels that run elsewhere and cuDNN's.

``python -m benchmarks.kernels.hopper`` prints what has to be known before ``STOKER_KERNELS_HOPPER=1`` becomes
the default: TFLOP/s forward and backward, of useful products (5 of them backward), causal and full, 16,384
tokens in all. ``--dry`` proves on a CPU that it runs.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.timing import device_name, timed
from stoker_kernels import flash_attention
from stoker_kernels.ops.attention.hopper import HOPPER_VARIABLE, chosen
from stoker_kernels.ops.attention.reference import Options

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = 16384


def _attend(name: str, causal: bool, *qkv: torch.Tensor) -> torch.Tensor:
    if name != "cudnn":
        os.environ[HOPPER_VARIABLE] = str(int(name == "hopper"))
        return flash_attention(*qkv, causal=causal)
    on_gpu = qkv[0].is_cuda
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if on_gpu else nullcontext():
        return scaled_dot_product_attention(*qkv, is_causal=causal)


def _measure(name: str, device: str, tokens: int, length: int, dim: int, causal: bool) -> str:
    """Return one line: both passes' TFLOP/s and milliseconds."""
    heads = 2048 // dim
    q, k, v = (
        torch.randn(tokens // length, length, heads, dim, device=device)
        .bfloat16().transpose(1, 2).requires_grad_()
        for _ in range(3)
    )  # fmt: skip
    os.environ[HOPPER_VARIABLE] = "1"
    if name == "hopper" and q.is_cuda and not chosen(q, k, v, Options(scale=1.0)):
        return "hopper: not for this GPU or this Triton"
    flops = 4 * tokens * length * heads * dim / (2 if causal else 1)
    out = _attend(name, causal, q, k, v)
    dout = torch.randn_like(out)

    def clear() -> None:
        q.grad = k.grad = v.grad = None

    passes: tuple[tuple[str, float, Callable[[], Any]], ...] = (
        ("forward", 1.0, lambda: _attend(name, causal, q, k, v)),
        ("backward", 2.5, lambda: out.backward(dout, retain_graph=True)),
    )
    parts = []
    for what, factor, call in passes:
        ms = timed(call, device, clear).median_ms
        parts.append(f"{what} {factor * flops / ms / 1e9:6.1f} TFLOP/s {ms:8.3f} ms")
    mask = "causal" if causal else "full"
    return f"{name:8} D={dim} S={length} {mask:6}: " + ", ".join(parts)


def main() -> None:
    """Print a line for each kernel, head dimension, length and mask."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="on the CPU, with few tokens")
    dry = parser.parse_args().dry
    device = "cpu" if dry else device_name()
    tokens = 64 if dry else TOKENS
    for length in (tokens, tokens // 4):
        for dim in (128, 64):
            for causal in (True, False):
                for name in ("hopper", "triton", "cudnn"):
                    print(_measure(name, device, tokens, length, dim, causal), flush=True)


if __name__ == "__main__":
    main()
