"""Rotary position embedding as a module: the tables, kept exact, and the rotation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stoker_kernels.nn.switches import Impl, checked
from stoker_kernels.ops.rotary import Llama3Scaling, YarnScaling, rotary, rotary_tables


class Rotary(nn.Module):
    """The rotation of pairs (i, i + D/2) of each head by position * base^(-2i/D), as LLaMA does.

    ``scaling`` stretches them to a longer context.

    The tables are no parameters: they are not saved, stay fp32 when the model is cast to bf16, and are
    made anew wherever the model moves, also from the meta device.
    """

    cos: torch.Tensor  # (max_positions, D/2)
    sin: torch.Tensor

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        base: float = 10000.0,
        *,
        scaling: Llama3Scaling | YarnScaling | None = None,
        ops: Impl = "stoker",
    ) -> None:
        super().__init__()
        self.head_dim, self.max_positions, self.base = head_dim, max_positions, base
        self.scaling = scaling
        self.ours = checked(ops, "Rotary: ops") == "stoker"
        cos, sin = rotary_tables(head_dim, max_positions, base, scaling=scaling)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)
        device = self.cos.device
        self.cos, self.sin = rotary_tables(
            self.head_dim, self.max_positions, self.base, scaling=self.scaling, device=device
        )
        return self

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Map x (B, S, H, D), positions (S,) or (B, S), 0 .. S-1 by default -> (B, S, H, D)."""
        if self.ours:
            return rotary(x, self.cos, self.sin, positions=positions)
        if positions is None:
            cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]  # (S, D/2)
        else:
            cos, sin = self.cos[positions], self.sin[positions]  # ([B,] S, D/2)
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # ([B,] S, 1, D/2): the same for every head
        a, b = x.float().chunk(2, -1)  # (B, S, H, D/2)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, {self.max_positions}, base={self.base}, ours={self.ours}"
