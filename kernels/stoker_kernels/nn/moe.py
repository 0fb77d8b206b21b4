"""A mixture of experts: each token goes through the best few of many SwiGLU blocks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from stoker_kernels.nn.switches import Impl, checked
from stoker_kernels.ops.gemm.grouped import grouped_gemm
from stoker_kernels.ops.glu import swiglu


class MoE(nn.Module):
    """Mixtral's sparse block: a linear router, ``top_k`` of ``experts``, weighted by their softmax.

    No token is dropped and no expert padded: tokens are sorted by expert and each projection is one grouped
    product. Nothing waits for the device, and results repeat bit for bit.
    """

    def __init__(
        self, dim: int, hidden: int, experts: int, top_k: int = 2, *, ops: Impl = "stoker"
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"MoE: top_k must lie in 1 .. {experts} (experts), got {top_k}")
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, 2 * hidden, dim))  # [gate | value] of each
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))
        for weight in (self.up, self.down):
            bound = weight.shape[2] ** -0.5  # as nn.Linear begins
            nn.init.uniform_(weight, -bound, bound)
        self.experts, self.top_k = experts, top_k
        self.ours = checked(ops, "MoE: ops") == "stoker"

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map x (..., C) -> y (..., C), and the router's logits (T, E) for :func:`load_balancing_loss`."""
        tokens = x.reshape(-1, x.shape[-1])  # (T, C)
        logits = self.router(tokens)
        scores, chosen = logits.float().topk(self.top_k, -1)  # (T, k)
        shares = scores.softmax(-1).to(x.dtype)
        if self.ours:
            y = swiglu_experts(tokens, self.up, self.down, chosen, shares)
        else:
            y = self._plain(tokens, shares, chosen)
        return y.view(x.shape), logits

    def _plain(
        self, tokens: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        y = torch.zeros_like(tokens)
        for expert in range(self.experts):
            share = (shares * (chosen == expert)).sum(
                -1, keepdim=True
            )  # (T, 1), 0 where not chosen
            gate, value = F.linear(tokens, self.up[expert]).chunk(2, -1)
            y = y + share * F.linear(F.silu(gate) * value, self.down[expert])
        return y


def swiglu_experts(
    tokens: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
) -> torch.Tensor:
    """Send tokens (T, C) through their SwiGLU experts and sum what these return by ``shares`` -> (T, C).

    ``up`` (E, 2 F, C), [gate | value] of each expert, ``down`` (E, C, F); ``chosen`` and ``shares`` (T, k).
    An index of E or more sends a token nowhere: it adds zero, and has no gradient.
    """
    of_expert, order = chosen.flatten().sort(stable=True)  # (T k,) copies of tokens
    every = torch.arange(up.shape[0], device=tokens.device)
    ends = torch.searchsorted(of_expert, every, right=True).to(torch.int32)
    wide = swiglu(grouped_gemm(tokens[order // chosen.shape[1]], up, ends))
    out = grouped_gemm(wide, down, ends)  # (T k, C), by expert
    back = out[order.argsort()].unflatten(0, chosen.shape)  # (T, k, C)
    return (back * shares[..., None]).sum(1).to(tokens.dtype)


def load_balancing_loss(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Map logits (T, E) -> E times the sum over experts of share of tokens times mean probability.

    It is ``top_k`` when all experts have as many tokens, and more otherwise (Fedus et al., arXiv 2101.03961,
    eq. 4, over the best ``top_k`` as Mixtral has it).
    """
    experts = logits.shape[1]
    probability = logits.float().softmax(-1)
    chosen = probability.topk(top_k, -1).indices
    every = torch.arange(experts, device=logits.device)
    share = (chosen[..., None] == every).float().mean(0).sum(0)  # (E,)
    return experts * (share * probability.mean(0)).sum()
