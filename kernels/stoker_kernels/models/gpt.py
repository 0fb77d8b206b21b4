"""A byte-level GPT in one file, every hot op of it ours.

Why it exists: the flagship example trains it, and the convergence test proves that swapping our kernels
in changes no loss. ``ops="torch"`` runs the same model on PyTorch's own ops.

    x (B, S) bytes -> embeddings (B, S, C) -> layers of [attention, MLP], pre-normed -> logits (B, S, 256)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from stoker_kernels.ops.attention import flash_attention
from stoker_kernels.ops.cross_entropy import cross_entropy
from stoker_kernels.ops.rms_norm import rms_norm
from stoker_kernels.optim import AdamW

IGNORE_INDEX = -100


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The model's shape; the defaults make the 0.8M-parameter demo."""

    vocab_size: int = 256
    layers: int = 4
    heads: int = 4
    dim: int = 128
    block_size: int = 128  # longest sequence, in bytes
    eps: float = 1e-6
    ops: Literal["stoker", "torch"] = "stoker"

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"GPTConfig: dim {self.dim} is not a multiple of heads {self.heads}")
        if self.ops not in ("stoker", "torch"):
            raise ValueError(f"GPTConfig: ops {self.ops!r}: expected stoker or torch")

    @property
    def parameter_count(self) -> int:
        """Closed form: tied embedding, positions, 12 C^2 + 2 C per layer, the last norm."""
        c = self.dim
        return (self.vocab_size + self.block_size) * c + self.layers * (12 * c * c + 2 * c) + c


class Norm(nn.Module):
    """RMSNorm with a learned weight."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.dim))
        self.eps, self.ours = config.eps, config.ops == "stoker"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, S, C) -> (B, S, C)."""
        if self.ours:
            return rms_norm(x, self.weight, eps=self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.heads, self.ours = config.heads, config.ops == "stoker"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, S, C) -> (B, S, C)."""
        b, s, c = x.shape
        qkv = self.qkv(x).view(b, s, 3, self.heads, c // self.heads)  # (B, S, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, H, S, D)
        sdpa = F.scaled_dot_product_attention
        # (B, H, S, D)
        y = flash_attention(q, k, v) if self.ours else sdpa(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, c))


class MLP(nn.Module):
    """C -> 4C -> C with a tanh GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.down = nn.Linear(4 * config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, S, C) -> (B, S, C)."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Layer(nn.Module):
    """One pre-normed transformer layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention, self.attention = Norm(config), Attention(config)
        self.norm_mlp, self.mlp = Norm(config), MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, S, C) -> (B, S, C)."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """The model. Weights are drawn from torch's global generator; seed it for a repeatable start."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or GPTConfig()
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.position = nn.Embedding(config.block_size, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = Norm(config)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.head.weight = self.embed.weight  # tied
        # GPT-2's start: std 0.02, projections into the residual stream by 1/sqrt(2 * layers) less.
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                std = 0.02 / math.sqrt(2 * config.layers) if residual else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """tokens, targets (B, S) int64 -> logits (B, S, V), mean loss in nats (None without targets).

        Targets of -100 are ignored. Raises ``ValueError`` for a sequence longer than ``block_size``.
        """
        s = tokens.shape[1]
        if s > self.config.block_size:
            raise ValueError(f"GPT: sequence of {s} exceeds block_size {self.config.block_size}")
        x = self.embed(tokens) + self.position.weight[:s]  # (B, S, C)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))  # (B, S, V)
        if targets is None:
            return logits, None
        if self.config.ops == "stoker":
            return logits, cross_entropy(logits, targets, ignore_index=IGNORE_INDEX)
        rows = logits.view(-1, self.config.vocab_size)  # (B * S, V)
        return logits, F.cross_entropy(rows, targets.reshape(-1), ignore_index=IGNORE_INDEX)

    def optimizer(
        self, lr: float = 1e-3, weight_decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95)
    ) -> torch.optim.Optimizer:
        """AdamW over all parameters, ours or torch's as ``config.ops`` says; norms do not decay."""
        groups = [
            {"params": [p for p in self.parameters() if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in self.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        kind = AdamW if self.config.ops == "stoker" else torch.optim.AdamW
        return kind(groups, lr=lr, betas=betas)

    @torch.no_grad()
    def generate(
        self,
        prompt: bytes | Iterable[int],
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> bytes:
        """Continue ``prompt`` by ``max_new_tokens`` sampled bytes; returns prompt and continuation.

        ``temperature=0`` takes the likeliest byte. An empty prompt starts from a newline, which is part
        of the result. The model's training mode is left as it was.
        """
        if self.config.vocab_size > 256:
            raise ValueError("GPT.generate returns bytes: vocab_size must be at most 256")
        device = self.embed.weight.device
        tokens = torch.tensor([list(prompt) or [ord("\n")]], device=device)  # (1, S)
        for _ in range(max_new_tokens):
            logits, _ = self(tokens[:, -self.config.block_size :])
            last = logits[:, -1].float()  # (1, V)
            if temperature == 0.0:
                chosen = last.argmax(-1, keepdim=True)
            else:
                last = last / temperature
                if top_k is not None:
                    threshold = last.topk(min(top_k, last.shape[-1])).values[:, -1:]
                    last = last.masked_fill(last < threshold, float("-inf"))
                chosen = torch.multinomial(last.softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, chosen], 1)
        return bytes(tokens[0].tolist())
