"""The transformer that all models share: embeddings, layers, and the residual stream between them.

    tokens (B, S) -> embeddings (B, S, C) -> layers of [attention, MLP] -> (B, S, C)

A pre-normed layer gets the stream h and the update x that the layer before has not added yet: its first
norm adds them and normalises in one pass over memory, ``y, h = norm(x, h)``. A post-normed one (BERT)
does the same with its own input as the stream.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stoker_kernels.nn import (
    GELUMLP,
    Attention,
    Impl,
    LayerNorm,
    Packing,
    RMSNorm,
    Rotary,
    SwiGLUMLP,
)
from stoker_kernels.optim import AdamW

if TYPE_CHECKING:
    from stoker_kernels.models.config import TransformerConfig


def make_norm(config: TransformerConfig, dropout: float = 0.0) -> RMSNorm | LayerNorm:
    """Make the norm that ``config`` names; ``dropout`` is of what it adds to the stream."""
    kind = RMSNorm if config.norm == "rms" else LayerNorm
    return kind(config.dim, config.eps, dropout=dropout, ops=config.switches.norm)


def make_mlp(config: TransformerConfig) -> GELUMLP | SwiGLUMLP:
    """Make the feed-forward block that ``config`` names."""
    ops = config.switches.mlp
    if config.mlp == "swiglu":
        return SwiGLUMLP(config.dim, config.width, bias=config.bias, ops=ops)
    approximate: Literal["tanh", "none"] = "tanh" if config.mlp == "gelu_tanh" else "none"
    return GELUMLP(config.dim, config.width, approximate=approximate, bias=config.bias, ops=ops)


def make_adamw(
    model: nn.Module, ops: Impl, lr: float, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """Make AdamW over all trainable parameters, ours or torch's; norms and biases do not decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    kind = AdamW if ops == "stoker" else torch.optim.AdamW
    return kind([g for g in groups if g["params"]], lr=lr, betas=betas)


class Layer(nn.Module):
    """Attention and MLP, each with a norm: before it, or after the residual sum."""

    def __init__(self, config: TransformerConfig, rotary: Rotary | None, first: bool) -> None:
        super().__init__()
        self.post_norm = config.post_norm
        # The first layer's update is the embeddings, which have had their dropout.
        arriving = 0.0 if first and not config.post_norm else config.dropout
        self.norm_attention = make_norm(config, arriving)
        self.attention = Attention(
            config.dim, config.heads, config.kv_heads, causal=config.causal, bias=config.bias,
            dropout=config.dropout, rotary=rotary, ops=config.switches.attention,
        )  # fmt: skip
        self.norm_mlp = make_norm(config, config.dropout)
        self.mlp = make_mlp(config)

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor | None, packing: Packing | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Update x and stream (B, S, C), None at the start -> the next layer's x and stream."""
        if self.post_norm:
            x, _ = self.norm_attention(self.attention(x, packing), x)
            x, _ = self.norm_mlp(self.mlp(x), x)
            return x, None
        if stream is None:
            y, stream = self.norm_attention(x), x
        else:
            y, stream = self.norm_attention(x, stream)
        y, stream = self.norm_mlp(self.attention(y, packing), stream)
        return self.mlp(y), stream


class Transformer(nn.Module):
    """Embeddings and layers; :class:`CausalLM` and :class:`Bert` put heads on it.

    Weights are drawn from torch's global generator; seed it for a repeatable start.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        c, head_dim = config.dim, config.dim // config.heads
        self.embed = nn.Embedding(config.vocab_size, c)
        self.position = self.token_type = rotary = None
        if config.position == "learned":
            self.position = nn.Embedding(config.block_size, c)
        else:
            rotary = Rotary(
                head_dim, config.block_size, config.rotary_base, ops=config.switches.rotary
            )
        if config.token_types:
            self.token_type = nn.Embedding(config.token_types, c)
        self.layers = nn.ModuleList(
            Layer(config, rotary, first=index == 0) for index in range(config.layers)
        )
        # Pre-norm: after the last layer. Post-norm: of the embeddings.
        self.norm = make_norm(config, 0.0 if config.post_norm else config.dropout)

    def start(self) -> None:
        """Draw the weights: normal of std 0.02; biases zero, norms one.

        Projections into a pre-normed residual stream get 1/sqrt(2 * layers) of that, as in GPT-2.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                shrink = residual and not self.config.post_norm
                std = 0.02 / math.sqrt(2 * self.config.layers) if shrink else 0.02
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.ones_(parameter)

    def hidden(
        self,
        tokens: torch.Tensor,
        token_types: torch.Tensor | None = None,
        packing: Packing | None = None,
    ) -> torch.Tensor:
        """Map tokens, token_types (B, S) int64 -> the last layer's output (B, S, C), normalised.

        With ``packing`` B is 1. Raises ``ValueError`` for a sequence longer than ``block_size``.
        """
        config = self.config
        longest = tokens.shape[1] if packing is None else packing.max_seqlen
        if longest > config.block_size:
            raise ValueError(
                f"{type(self).__name__}: sequence of {longest} exceeds block_size {config.block_size}"
            )
        x = self.embed(tokens)  # (B, S, C)
        if self.position is not None:
            x = x + (
                self.position.weight[: tokens.shape[1]]
                if packing is None
                else self.position(packing.positions)
            )
        if self.token_type is not None:
            x = x + self.token_type(
                torch.zeros_like(tokens) if token_types is None else token_types
            )
        if config.post_norm:
            x = self.norm(x)
        x, stream = F.dropout(x, config.dropout, self.training), None
        for layer in self.layers:
            if config.checkpoint and torch.is_grad_enabled():
                # Without dropout there is no random state to keep, and a CUDA graph could not read it.
                x, stream = checkpoint(
                    layer, x, stream, packing,
                    use_reentrant=False, preserve_rng_state=config.dropout > 0 and self.training,
                )  # fmt: skip
            else:
                x, stream = layer(x, stream, packing)
        return x if config.post_norm or stream is None else self.norm(x, stream)[0]

    def optimizer(
        self, lr: float = 1e-3, weight_decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95)
    ) -> torch.optim.Optimizer:
        """Return :func:`make_adamw` of this model."""
        return make_adamw(self, self.config.switches.optimizer, lr, weight_decay, betas)
