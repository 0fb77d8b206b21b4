"""Drop-in modules on our kernels, each with PyTorch's own ops one switch away.

A model of yours takes single parts from here (a norm, an MLP, an attention block); the
models of :mod:`stoker_kernels.models` are built of nothing else. ``ops="torch"`` on any module runs the
same parameters through PyTorch: for comparison, and where a kernel does not fit.
"""

from __future__ import annotations

from stoker_kernels.nn.alibi import ALiBi
from stoker_kernels.nn.attention import Attention, CrossAttention
from stoker_kernels.nn.head import LMHead
from stoker_kernels.nn.mlp import GELUMLP, FusedMLP, FusedSwiGLU, SwiGLUMLP
from stoker_kernels.nn.moe import MoE, load_balancing_loss
from stoker_kernels.nn.norm import LayerNorm, RMSNorm
from stoker_kernels.nn.packing import Packing
from stoker_kernels.nn.relative import RelativeBias
from stoker_kernels.nn.rotary import Rotary
from stoker_kernels.nn.switches import Impl, Ops

__all__ = (
    "GELUMLP",
    "ALiBi",
    "Attention",
    "CrossAttention",
    "FusedMLP",
    "FusedSwiGLU",
    "Impl",
    "LMHead",
    "LayerNorm",
    "MoE",
    "Ops",
    "Packing",
    "RMSNorm",
    "RelativeBias",
    "Rotary",
    "SwiGLUMLP",
    "load_balancing_loss",
)
