"""The two feed-forward blocks: C -> F -> C with a GELU or a SwiGLU gate, and both fused into their GEMMs."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from stoker_kernels.nn.switches import Impl, checked
from stoker_kernels.ops.bias_gelu import bias_gelu
from stoker_kernels.ops.gemm.fused_dense import fused_dense, fused_glu_dense
from stoker_kernels.ops.glu import swiglu


class GELUMLP(nn.Module):
    """``down(gelu(up(x) + up_bias))``; the bias is added inside the GELU's kernel.

    ``approximate`` names the GELU as torch does: "tanh" (GPT-2), "none" for erf (BERT). Without ``bias``
    there is nothing to fuse, and the GELU is PyTorch's.
    """

    def __init__(
        self,
        dim: int,
        hidden: int | None = None,
        *,
        approximate: Literal["tanh", "none"] = "tanh",
        bias: bool = True,
        ops: Impl = "stoker",
    ) -> None:
        super().__init__()
        hidden = 4 * dim if hidden is None else hidden
        self.up = nn.Linear(dim, hidden, bias=False)
        self.up_bias = nn.Parameter(torch.zeros(hidden)) if bias else None
        self.down = nn.Linear(hidden, dim, bias=bias)
        self.approximate = approximate
        self.ours = checked(ops, "GELUMLP: ops") == "stoker"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x (..., C) -> (..., C)."""
        wide = self.up(x)  # (..., F)
        if self.up_bias is None:
            wide = F.gelu(wide, approximate=self.approximate)
        elif self.ours:
            wide = bias_gelu(wide, self.up_bias, approximate=self.approximate)
        else:
            # The sum in the linear layer's dtype, as under autocast.
            wide = F.gelu(wide + self.up_bias.to(wide.dtype), approximate=self.approximate)
        return self.down(wide)


class SwiGLUMLP(nn.Module):
    """``down(silu(gate) * value)`` where one packed projection ``up`` makes [gate | value]."""

    def __init__(self, dim: int, hidden: int, *, bias: bool = False, ops: Impl = "stoker") -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)
        self.ours = checked(ops, "SwiGLUMLP: ops") == "stoker"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x (..., C) -> (..., C)."""
        packed = self.up(x)  # (..., 2 F)
        if self.ours:
            return self.down(swiglu(packed))
        gate, value = packed.chunk(2, -1)  # (..., F) each
        return self.down(F.silu(gate) * value)


class FusedMLP(GELUMLP):
    """:class:`GELUMLP` in two kernels: bias and GELU in the first GEMM, bias and residual in the second.

    The parameters have the same names. ``recompute`` trades the pre-activation's memory for one more GEMM
    in the backward (see :func:`~stoker_kernels.ops.gemm.fused_dense.fused_dense`).
    """

    def __init__(
        self,
        dim: int,
        hidden: int | None = None,
        *,
        approximate: Literal["tanh", "none"] = "tanh",
        bias: bool = True,
        recompute: bool = False,
    ) -> None:
        super().__init__(dim, hidden, approximate=approximate, bias=bias)
        self.activation = "gelu_tanh" if approximate == "tanh" else "gelu"
        self.recompute = recompute

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Map x, residual (..., C) -> residual + mlp(x) (..., C)."""
        wide = fused_dense(
            x, self.up.weight, self.up_bias, activation=self.activation, recompute=self.recompute
        )
        return fused_dense(wide, self.down.weight, self.down.bias, residual=residual)


class FusedSwiGLU(SwiGLUMLP):
    """:class:`SwiGLUMLP` in two kernels: both projections with the gate, and the last with the residual.

    The parameters have the same names; ``recompute`` as for :class:`FusedMLP`.
    """

    def __init__(
        self, dim: int, hidden: int, *, bias: bool = False, recompute: bool = False
    ) -> None:
        super().__init__(dim, hidden, bias=bias)
        self.recompute = recompute

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Map x, residual (..., C) -> residual + mlp(x) (..., C)."""
        wide = fused_glu_dense(x, self.up.weight, bias=self.up.bias, recompute=self.recompute)
        return fused_dense(wide, self.down.weight, self.down.bias, residual=residual)
