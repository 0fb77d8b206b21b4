"""The transformer that all models share: embeddings, layers, and the residual stream between them.

    tokens (B, S) -> embeddings (B, S, C) -> layers of [attention, MLP] -> (B, S, C)

A pre-normed layer gets the stream h and the update x that the layer before has not added yet: its first
norm adds them and normalises in one pass over memory, ``y, h = norm(x, h)``. A post-normed one (BERT)
does the same with its own input as the stream. In a parallel layer (Falcon) attention and MLP read the same
stream, and their sum is the update.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.nn import functional as F

from stoker_kernels.models.recompute import run_layer
from stoker_kernels.nn import (
    GELUMLP,
    ALiBi,
    Attention,
    Impl,
    LayerNorm,
    Ops,
    Packing,
    RMSNorm,
    Rotary,
    SwiGLUMLP,
)
from stoker_kernels.optim import AdamW
from stoker_kernels.primitives.philox import draw_seeds

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


def with_prompt(prompt: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Put ``prompt()`` (P, C) before each row of x (B, S, C) -> (B, P + S, C)."""
    vectors = prompt().to(x.dtype)
    return torch.cat([vectors.expand(x.shape[0], *vectors.shape), x], 1)


Seeds = tuple[torch.Tensor | None, ...]


def step_seeds(device: torch.device, count: int, dropped: bool) -> Seeds:
    """Draw the seeds of ``count`` dropouts in our kernels in one launch; None each if nothing is dropped."""
    return draw_seeds(device, count) if dropped else (None,) * count


def takes_seeds(dropout: float, ops: Ops) -> bool:
    """Return whether a model in training drops anything in a kernel of ours."""
    return dropout > 0 and "stoker" in (ops.attention, ops.norm)


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
    """Attention and MLP, each with a norm: before it, or after the residual sum.

    ``rotary`` and ``alibi`` are shared by all layers.
    """

    def __init__(
        self, config: TransformerConfig, rotary: Rotary | None, alibi: ALiBi | None, first: bool
    ) -> None:
        super().__init__()
        self.post_norm, self.parallel = config.post_norm, config.parallel_norms > 0
        # The first layer's update is the embeddings, which have had their dropout.
        arriving = 0.0 if first and not config.post_norm else config.dropout
        self.norm_attention = make_norm(config, arriving)
        self.attention = Attention(
            config.dim, config.heads, config.kv_heads, causal=config.causal, bias=config.bias,
            dropout=config.dropout, rotary=rotary, alibi=alibi, ops=config.switches.attention,
        )  # fmt: skip
        # Beside attention it normalises the stream itself, where nothing is dropped any more.
        self.norm_mlp = (
            None
            if config.parallel_norms == 1
            else make_norm(config, 0.0 if self.parallel else config.dropout)
        )
        self.mlp = make_mlp(config)

    def forward(
        self,
        x: torch.Tensor,
        stream: torch.Tensor | None,
        packing: Packing | None = None,
        seeds: Seeds = (None,) * 3,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Update x and stream (B, S, C), None at the start -> the next layer's x and stream.

        ``seeds`` are of the three dropouts: in the first norm, of attention, in the second norm.
        """
        first, second, third = seeds
        if self.post_norm:
            assert self.norm_mlp is not None
            x, _ = self.norm_attention(self.attention(x, packing, second), x, first)
            x, _ = self.norm_mlp(self.mlp(x), x, third)
            return x, None
        if stream is None:
            y, stream = self.norm_attention(x), x
        else:
            y, stream = self.norm_attention(x, stream, first)
        if self.parallel:
            beside = y if self.norm_mlp is None else self.norm_mlp(stream)
            return self.attention(y, packing, second) + self.mlp(beside), stream
        assert self.norm_mlp is not None
        y, stream = self.norm_mlp(self.attention(y, packing, second), stream, third)
        return self.mlp(y), stream


class Transformer(nn.Module):
    """Embeddings and layers; :class:`CausalLM` and :class:`Bert` put heads on it.

    Weights are drawn from torch's global generator; seed it for a repeatable start.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self._takes_seeds = takes_seeds(config.dropout, config.switches)
        c, head_dim = config.dim, config.dim // config.heads
        self.embed = nn.Embedding(config.vocab_size, c)
        self.position = self.token_type = rotary = alibi = None
        if config.position == "learned":
            self.position = nn.Embedding(config.block_size, c)
        elif config.position == "alibi":
            alibi = ALiBi(config.heads, head_dim**-0.5 if config.scaled_alibi else 1.0)
        else:
            rotary = Rotary(
                head_dim, config.block_size, config.rotary_base, ops=config.switches.rotary
            )
        if config.token_types:
            self.token_type = nn.Embedding(config.token_types, c)
        self.layers = nn.ModuleList(
            Layer(config, rotary, alibi, first=index == 0) for index in range(config.layers)
        )
        # Makes vectors (P, C) before the tokens: ``models.prompt`` puts one here.
        self.prompt: nn.Module | None = None
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
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map tokens, token_types (B, S) int64 -> the last layer's output (B, S, C), normalised.

        ``lengths`` (B,) of each row are real. With ``packing`` B is 1. Raises ``ValueError`` for a sequence
        longer than ``block_size``, with the prompt before it, and for a packing with a prompt or lengths.
        """
        if packing is not None and (self.prompt is not None or lengths is not None):
            raise ValueError(
                f"{type(self).__name__}: packed tokens go with neither a prompt nor lengths\n"
                "give one sequence per row"
            )
        x = self.embeddings(tokens, token_types, packing)
        b, s, _ = x.shape
        before = s - tokens.shape[1]
        if lengths is not None:
            packing = Packing.padded(lengths + before, s)
            x = x.reshape(1, b * s, -1)
        x, stream = self.enter(x)
        x, _ = self.pass_layers(x, stream, packing, close=True)
        x = x.view(b, s, -1)
        return x[:, before:] if before else x

    def embeddings(
        self,
        tokens: torch.Tensor,
        token_types: torch.Tensor | None = None,
        packing: Packing | None = None,
    ) -> torch.Tensor:
        """Map tokens, token_types (B, S) int64 -> their embeddings (B, S, C), after those of a prompt.

        Raises ``ValueError`` for a sequence longer than ``block_size``.
        """
        config = self.config
        x: torch.Tensor = self.embed(tokens)  # (B, S, C)
        if self.prompt is not None:
            x = with_prompt(self.prompt, x)
        s = x.shape[1]
        longest = s if packing is None else packing.max_seqlen
        if longest > config.block_size:
            raise ValueError(
                f"{type(self).__name__}: sequence of {longest} exceeds block_size {config.block_size}"
            )
        if self.position is not None:
            x = x + (
                self.position.weight[:s] if packing is None else self.position(packing.positions)
            )
        if self.token_type is not None:
            types = torch.zeros_like(tokens) if token_types is None else token_types
            before = s - tokens.shape[1]
            x = x + self.token_type(F.pad(types, (before, 0)))  # a prompt is of the first type
        return x

    def enter(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map embeddings (B, S, C) -> x and stream of the first layer."""
        if self.config.post_norm:
            x = self.norm(x)
        return F.dropout(x, self.config.dropout, self.training), None

    def pass_layers(
        self,
        x: torch.Tensor,
        stream: torch.Tensor | None,
        packing: Packing | None = None,
        *,
        close: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map x and stream (B, S, C) of the first of ``layers`` -> those behind the last.

        ``close``: what leaves is read by no layer any more: x is then the sum, normalised.
        """
        config = self.config
        count = 3 * len(self.layers) + 1
        seeds = step_seeds(x.device, count, self.training and self._takes_seeds)
        for index, layer in enumerate(self.layers):
            x, stream = run_layer(
                layer, x, stream, packing, seeds[3 * index : 3 * index + 3],
                recompute=config.checkpoint, random=config.dropout > 0 and self.training,
            )  # fmt: skip
        if not close or config.post_norm or stream is None:
            return x, stream
        x, _ = self.norm(x, stream, seeds[-1])
        return x, None

    def optimizer(
        self, lr: float = 1e-3, weight_decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95)
    ) -> torch.optim.Optimizer:
        """Return :func:`make_adamw` of this model."""
        return make_adamw(self, self.config.switches.optimizer, lr, weight_decay, betas)
