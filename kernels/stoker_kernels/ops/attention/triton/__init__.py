"""Attention on the GPU: the kernels in ``forward`` and ``backward``, run by ``launchers``."""

from __future__ import annotations

from stoker_kernels.ops.attention.triton.launchers import attention_bwd, attention_fwd

__all__ = ("attention_bwd", "attention_fwd")
