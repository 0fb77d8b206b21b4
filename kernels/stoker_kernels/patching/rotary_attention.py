"""Attention blocks of others with our rotary kernel; which attention runs is still their config's choice.

Each forward is its original's, but for the rotation: ``catalogue`` names the originals by digest.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from stoker_kernels.ops.rotary import rotary
from stoker_kernels.patching.attention import NAME, attend
from stoker_kernels.patching.masks import Layout

if TYPE_CHECKING:
    import torch


def rotated(
    x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Rotate x (B, S, H, D) by transformers' cos and sin (B, S, R), which hold every angle twice.

    The result has x's dtype, where the original promotes to the tables': under autocast attention
    rounds that to the same values.
    """
    cos, sin = position_embeddings
    half = cos.shape[-1] // 2
    return rotary(x, cos[..., :half].detach(), sin[..., :half].detach())


def _interface(module: Any) -> Any:
    """Return the attention that the module's config chooses."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original = type(module)._stoker_original
    eager = sys.modules[original.__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)


class LlamaAttentionForward:
    """Llama, Mistral, Mixtral, Qwen2, Qwen3 and Gemma 2: q, k, v, [norms of q and k,] rotation, attention."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Map x (B, S, C) -> (B, S, C) and the weights of eager attention."""
        shape = hidden_states.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        q, k = self.q_proj(hidden_states).view(heads), self.k_proj(hidden_states).view(heads)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotated(q, position_embeddings).transpose(1, 2)
        k = rotated(k, position_embeddings).transpose(1, 2)
        v = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs)
        options = dict(_options(self))
        y, weights = _interface(self)(
            self, q, k, v, attention_mask, dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling, **options, **kwargs,
        )  # fmt: skip
        return self.o_proj(y.reshape(*shape, -1).contiguous()), weights


def _options(module: Any) -> dict[str, Any]:
    """Return what a Llama-like block hands to its attention beside the common arguments."""
    name = type(module)._stoker_original.__name__
    if name in ("MistralAttention", "MixtralAttention"):
        return {"sliding_window": getattr(module.config, "sliding_window", None)}
    if name in ("Qwen2Attention", "Qwen3Attention"):
        return {"sliding_window": module.sliding_window}
    if name == "Gemma2Attention":
        cap = module.attn_logit_softcapping
        return {"sliding_window": module.sliding_window, "softcap": cap}
    return {}


class NeoXAttentionForward:
    """GPT-NeoX: one projection whose heads hold [q | k | v], and a rotation of their first part."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: Any,
        layer_past: Any = None,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Map x (B, S, C) -> (B, S, C) and the weights of eager attention."""
        shape = hidden_states.shape[:-1]
        qkv = self.query_key_value(hidden_states).view(*shape, -1, 3 * self.head_size)
        q, k, v = qkv.chunk(3, -1)  # (B, S, H, D)
        q = rotated(q, position_embeddings).transpose(1, 2)
        k = rotated(k, position_embeddings).transpose(1, 2)
        v = v.transpose(1, 2)
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        y, weights = _interface(self)(
            self, q, k, v, attention_mask, scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0, **kwargs,
        )  # fmt: skip
        return self.dense(y.reshape(*shape, -1).contiguous()), weights


class FalconAttentionForward:
    """Falcon with rotary positions, which chooses its attention itself: ours for a :class:`Layout`."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        alibi: Any,
        attention_mask: Any,
        position_ids: Any = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Map x (B, S, C) -> (B, S, C), no weights."""
        if self.config._attn_implementation != NAME:
            return super().forward(  # type: ignore[misc]
                hidden_states, alibi, attention_mask, position_ids, layer_past, use_cache,
                output_attentions, position_embeddings, **kwargs,
            )  # fmt: skip
        if alibi is not None or not isinstance(attention_mask, Layout | None):
            raise ValueError(
                "Falcon's attention 'stoker' takes neither ALiBi nor masks of its own\n"
                'use apply(model, skip={"attention"})'
            )
        q, k, v = self._split_heads(self.query_key_value(hidden_states))  # (B, S, heads, D)
        q = rotated(q, position_embeddings).transpose(1, 2)
        k = rotated(k, position_embeddings).transpose(1, 2)
        v = v.transpose(1, 2)
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        # Like the original, without dropout of the probabilities.
        y, _ = attend(self, q, k, v, attention_mask, output_attentions=output_attentions)
        return self.dense(y.flatten(2)), None
