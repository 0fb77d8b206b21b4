"""Peers from packages of others, where these are installed and a GPU is: Liger's kernels, FlashAttention.

They are no dependency: ``pip install liger-kernel flash-attn`` (FlashAttention 3's package is
``flash_attn_interface``). Their functions take what the workload gives, without a copy of our own.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Functions = dict[str, Callable[..., Any]]

_EPS = 1e-6


def package_peers() -> dict[str, Functions]:
    """Return the peers of each workload, by the workload's name and the package's."""
    found: dict[str, Functions] = {}
    for package, make in (
        ("liger_kernel", _liger),
        ("flash_attn", _flash_attention),
        ("flash_attn_interface", _flash_attention),
    ):
        if find_spec(package) is not None:
            provider = {"flash_attn": "flash_attn_2", "flash_attn_interface": "flash_attn_3"}
            for op, function in make(package).items():
                found.setdefault(op, {})[provider.get(package, "liger")] = function
    return found


def _liger(_: str) -> Functions:
    ops: Any = import_module("liger_kernel.transformers.functional")

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        # In place it would write into the gradient that the benchmark gives again.
        y: Tensor = ops.liger_rms_norm(x, weight, _EPS, in_place=False)
        return y

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        return ops.liger_fused_add_rms_norm(x, residual, weight, _EPS)

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return ops.liger_layer_norm(x, weight, bias, _EPS)

    def swiglu_pair(packed: Tensor, up: Tensor) -> Any:
        return ops.liger_swiglu(packed, up)

    def cross_entropy(logits: Tensor, target: Tensor) -> Any:
        return ops.liger_cross_entropy(logits, target)

    def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Any:
        return ops.liger_fused_linear_cross_entropy(x, weight, target)

    return {
        "rms_norm": rms_norm,
        "add_rms_norm": add_rms_norm,
        "layer_norm": layer_norm,
        "swiglu_pair": swiglu_pair,
        "cross_entropy": cross_entropy,
        "linear_cross_entropy": linear_cross_entropy,
    }


def _flash_attention(package: str) -> Functions:
    ops: Any = import_module(package)

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Any:
        """Map q, k, v (B, S, H, D) -> (B, H, S, D)."""
        out = ops.flash_attn_func(q, k, v, causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    def attend_windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Any:
        size = (window - 1, 0)
        out = ops.flash_attn_func(q, k, v, causal=True, window_size=size, softcap=50.0)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    def attend_varlen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
    ) -> Any:
        ends = cu_seqlens_q.int(), cu_seqlens_k.int()
        out = ops.flash_attn_varlen_func(q, k, v, *ends, max_seqlen_q, max_seqlen_k, causal=True)
        return out[0] if isinstance(out, tuple) else out

    def attend_full(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attend(q, k, v, causal=False)

    return {
        "attention": attend,
        "attention_full": attend_full,
        "attention_gqa": attend,
        "attention_window": attend_windowed,
        "attention_varlen": attend_varlen,
    }
