"""Prefix tuning: trained keys and values before those of each layer's tokens (Li and Liang, ACL 2021).

    attention = softmax(q [prefix_k | k]^T) [prefix_v | v]

Every token sees the whole prefix, in a causal model too. The prefix has no positions of its own: tokens
keep theirs, rotary turns no prefix key, and ALiBi and T5's buckets count it as the P places before the first
token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from stoker_kernels.models.adapter_state import take_over
from stoker_kernels.nn import Attention


class Prefix(nn.Module):
    """The keys and values of one layer, (P, G, D) each.

    With ``hidden`` they are made by a network of that width, as in the paper, which found training them
    directly to be unstable; :func:`fold` keeps the result alone.
    """

    def __init__(self, start: torch.Tensor, width: int, hidden: int) -> None:
        super().__init__()
        length, heads, head_dim = start.shape  # heads: 2 G
        self.shape = (length, heads, head_dim)
        self.network: nn.Sequential | None = None
        if hidden:
            self.vectors = nn.Parameter(torch.randn(length, width))
            self.network = nn.Sequential(
                nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, heads * head_dim)
            )
        else:
            self.vectors = nn.Parameter(start.detach().flatten(1).clone())
        self.to(start.device, start.dtype)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values (P, G, D)."""
        vectors: torch.Tensor = self.vectors
        if self.network is not None:
            vectors = self.network(vectors)
        keys, values = vectors.view(self.shape).chunk(2, 1)
        return keys, values


def inject(model: nn.Module, length: int, *, hidden: int = 0) -> list[str]:
    """Freeze ``model`` and put ``length`` trained keys and values into each self-attention; returns names.

    ``hidden`` is the width of the network that makes each, 0 for none. Make the optimizer afterwards: it
    takes the parameters that train. Raises ``ValueError`` for a model without attention of ours or with a
    prefix already, and for numbers that do not fit.
    """
    if length < 1 or hidden < 0:
        raise ValueError(
            f"prefix.inject: length must be at least 1 and hidden at least 0, got {length}, {hidden}"
        )
    found = {n: m for n, m in model.named_modules() if isinstance(m, Attention)}
    if not found:
        raise ValueError(
            f"prefix.inject: {type(model).__name__} holds no attention of stoker_kernels.nn"
        )
    if any(attention.prefix is not None for attention in found.values()):
        raise ValueError("prefix.inject: the model has a prefix already")
    model.requires_grad_(False)
    for attention in found.values():
        weight = attention.qkv.weight
        # As small as what a new layer's tokens have: the prefix takes its share of attention from the start.
        start = weight.new_empty(length, 2 * attention.kv_heads, attention.head_dim)
        nn.init.normal_(start, std=0.02)
        attention.prefix = Prefix(start, weight.shape[1], hidden)
    return list(found)


def prefixes(model: nn.Module) -> Iterator[tuple[str, Attention, Prefix]]:
    """Return every attention of ``model`` that has a prefix, by name."""
    for name, module in model.named_modules():
        if isinstance(module, Attention) and isinstance(module.prefix, Prefix):
            yield name, module, module.prefix


def fold(model: nn.Module) -> None:
    """Keep the keys and values that the networks make, and drop these: the same outputs for less."""
    for _, attention, prefix in list(prefixes(model)):
        with torch.no_grad():
            attention.prefix = Prefix(torch.cat(prefix(), 1), 0, 0)


def state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the prefixes' tensors alone, by name: what a fine-tuning run has to store."""
    return {
        f"{name}.prefix.{own}": parameter.detach()
        for name, _, prefix in prefixes(model)
        for own, parameter in prefix.named_parameters()
    }


def load_state_dict(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Take over what :func:`state_dict` returned. Raises ``ValueError`` where names or shapes differ."""
    take_over(state_dict(model), state, "prefix.load_state_dict")
