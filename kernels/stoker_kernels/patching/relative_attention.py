"""T5's attention blocks, whose learned bias by distance our attention computes from its table.

The forward is its original's, but for the bias: blocks hand on the table (buckets, heads) where the
original's hand on a tensor of all queries and keys. It is the result of calling the first block's embedding,
not its weight, which FSDP2 frees behind the first block, and adapters change.
"""

from __future__ import annotations

from typing import Any

import torch

from stoker_kernels.ops.attention.relative import RelativeBias
from stoker_kernels.patching.attention import NAME, attend


class T5AttentionForward:
    """T5: self-attention with the bias of the stack's first block, or attention to the encoder without."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        mask: Any = None,
        key_value_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """Map x (B, S, C) -> (B, S, C), the table of the bias or None, no weights."""
        if self.config._attn_implementation != NAME:
            return super().forward(  # type: ignore[misc]
                hidden_states, mask, key_value_states, position_bias, cache, **kwargs
            )
        q = self._heads(self.q(hidden_states))
        k, v = self._keys_and_values(hidden_states, key_value_states, cache, kwargs)
        bias = None
        if position_bias is None and self.has_relative_attention_bias:
            every = torch.arange(self.relative_attention_num_buckets, device=q.device)
            position_bias = self.relative_attention_bias(every)  # (buckets, heads)
        if position_bias is not None:
            bias = RelativeBias(
                position_bias, not self.is_decoder, self.relative_attention_max_distance
            )
        y, _ = attend(
            self, q, k, v, mask, dropout=self.dropout if self.training else 0.0,
            scaling=self.scaling, relative_bias=bias, **kwargs,
        )  # fmt: skip
        return self.o(y.flatten(2)), position_bias, None

    def _heads(self: Any, x: torch.Tensor) -> torch.Tensor:
        """Map x (B, S, H * D) -> (B, H, S, D)."""
        return x.view(*x.shape[:-1], -1, self.key_value_proj_dim).transpose(1, 2)

    def _keys_and_values(
        self: Any,
        hidden_states: torch.Tensor,
        encoded: torch.Tensor | None,
        cache: Any,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v (B, H, S_k, D), those of ``cache`` with them."""
        updated = getattr(cache, "is_updated", None)  # of a cache for encoder and decoder alone
        if updated is not None:
            of_encoder = encoded is not None
            layers = cache.cross_attention_cache if of_encoder else cache.self_attention_cache
            if of_encoder and updated.get(self.layer_idx):
                layer = layers.layers[self.layer_idx]
                return layer.keys, layer.values
        else:
            layers = cache
        x = hidden_states if encoded is None else encoded
        k, v = self._heads(self.k(x)), self._heads(self.v(x))
        if cache is None:
            return k, v
        k, v = layers.update(k, v, self.layer_idx, kwargs=options)
        if encoded is not None and updated is not None:
            updated[self.layer_idx] = True
        return k, v

    @staticmethod
    def why_not(module: Any) -> str:
        """Return why it stays, or ""."""
        buckets = module.relative_attention_num_buckets
        ways = 1 if module.is_decoder else 2
        far = module.relative_attention_max_distance
        if buckets < 2 * ways or far <= buckets // ways // 2:
            return f"{buckets} buckets for distances up to {far} are none that our attention takes"
        return ""
