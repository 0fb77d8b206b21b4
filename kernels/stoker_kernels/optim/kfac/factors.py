"""The Kronecker factors of one layer: gathered while a model runs, averaged, inverted with damping.

For a layer y = W [a; 1] and the gradient d of one case's loss with respect to y, the Fisher matrix of
vec(W) is E[(a a^T) x (d d^T)], which K-FAC takes for A x G with A = E[a a^T], G = E[d d^T] (Martens and
Grosse, arXiv 1503.05671). A convolution's A sums over its T places, and G is the mean over them (Grosse and
Martens, arXiv 1602.01407). :class:`~stoker_kernels.optim.kfac.optimizer.KFAC` calls it; it knows of no
processes and no parameters but its layer's.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from stoker_kernels.runtime.backend import compute_dtype

Inversion = Literal["cholesky", "eigen"]


def takes(module: nn.Module, largest: int) -> bool:
    """Return whether a module is a layer that has factors, neither of more than ``largest`` rows."""
    if type(module) is nn.Conv2d:
        if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
            return False
    elif not isinstance(module, nn.Linear):
        return False
    weight = module.weight
    return weight.requires_grad and max(len(weight), weight[0].numel() + 1) <= largest


class Factors:
    """A (I, I) and G (O, O) of one linear or convolutional layer, I with its bias; and their inverses.

    ``a`` and ``g`` are moving averages over batches, None before the first.
    """

    def __init__(self, module: nn.Linear | nn.Conv2d) -> None:
        self.module = module
        self.a: torch.Tensor | None = None
        self.g: torch.Tensor | None = None
        # By Cholesky: inverses of A and G. By eigenvalues: vectors and values of A, then of G.
        self.inverse: tuple[torch.Tensor, ...] = ()
        self._gathered: list[torch.Tensor | None] = [None, None]
        self._passes = [0, 0]

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of A and of G."""
        weight = self.module.weight
        return weight[0].numel() + (self.module.bias is not None), len(weight)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of both: at least fp32."""
        return compute_dtype(self.module.weight.dtype)

    @torch.no_grad()
    def gather_inputs(self, x: torch.Tensor) -> None:
        """Add what a forward pass gives to A: x is the layer's input, of a batch or of one case."""
        wide = self._batched(x)
        if isinstance(self.module, nn.Conv2d):
            m = self.module
            cases = len(wide)
            assert not isinstance(m.padding, str)  # see takes()
            patches = F.unfold(wide, m.kernel_size, m.dilation, m.padding, m.stride)  # (N, I, T)
            rows = patches.transpose(1, 2).flatten(0, 1)
        else:
            rows = wide  # (N, I)
            cases = len(rows)
        if self.module.bias is not None:
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        self._add(0, rows.mT @ rows / max(cases, 1))

    @torch.no_grad()
    def gather_output_gradient(self, dy: torch.Tensor) -> None:
        """Add what a backward pass gives to G: dy is the gradient of a loss that is the mean over cases."""
        wide = self._batched(dy)
        places = 1
        if isinstance(self.module, nn.Conv2d):
            places = wide.shape[2] * wide.shape[3]
            cases = len(wide)
            rows = wide.flatten(2).transpose(1, 2).flatten(0, 1)  # (N T, O)
        else:
            rows = wide
            cases = len(rows)
        self._add(1, rows.mT @ rows * (cases / max(places, 1)))

    def _batched(self, x: torch.Tensor) -> torch.Tensor:
        """Return an input or an output's gradient as (N, I), or (N, C, H, W) of a convolution, N cases."""
        wide = x.detach().to(self.dtype)
        if isinstance(self.module, nn.Conv2d):
            return wide[None] if wide.ndim == 3 else wide
        return wide[None] if wide.ndim == 1 else wide.flatten(0, -2)

    def _add(self, which: int, estimate: torch.Tensor) -> None:
        before = self._gathered[which]
        self._gathered[which] = estimate if before is None else before.add_(estimate)
        self._passes[which] += 1

    def take_gathered(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return A and G, means over what was gathered since the last call; None if either saw nothing."""
        gathered = [
            None if total is None else total / passes
            for total, passes in zip(self._gathered, self._passes, strict=True)
        ]
        self._gathered, self._passes = [None, None], [0, 0]
        a, g = gathered
        return None if a is None or g is None else (a, g)

    def absorb(self, a: torch.Tensor, g: torch.Tensor, decay: float) -> None:
        """Move the averages by 1 - ``decay`` towards a batch's factors."""
        self.a = a if self.a is None else self.a.lerp(a, 1 - decay)
        self.g = g if self.g is None else self.g.lerp(g, 1 - decay)

    def invert(self, damping: float, inversion: Inversion) -> None:
        """Invert the averages: (A + pi sqrt(damping) I), (G + sqrt(damping) / pi I), or by eigenvalues.

        pi^2 is the mean eigenvalue of A over that of G (Martens and Grosse, section 6.3). By eigenvalues the
        damping is exact, of the whole block: (A x G + damping I)^-1 (George et al., arXiv 1806.03884).
        """
        assert self.a is not None and self.g is not None
        if inversion == "eigen":
            a, g = torch.linalg.eigh(self.a), torch.linalg.eigh(self.g)
            self.inverse = (a[1], a[0].clamp(min=0), g[1], g[0].clamp(min=0))
            return
        mean_a, mean_g = self.a.diagonal().mean(), self.g.diagonal().mean()
        pi = torch.where((mean_a > 0) & (mean_g > 0), (mean_a / mean_g).sqrt(), 1.0)
        self.inverse = (
            _inverse(self.a, pi * damping**0.5),
            _inverse(self.g, damping**0.5 / pi),
        )

    def precondition(self, damping: float) -> torch.Tensor | None:
        """Multiply the layer's gradients by the inverse in place; returns <new, old>, None without any."""
        weight, bias = self.module.weight.grad, None
        if weight is None or not self.inverse:
            return None
        old = weight.flatten(1).to(self.dtype)
        if self.module.bias is not None:
            bias = self.module.bias.grad
            column = old.new_zeros(len(old)) if bias is None else bias.to(old.dtype)
            old = torch.cat([old, column[:, None]], 1)
        if len(self.inverse) == 2:
            a, g = self.inverse
            new = g @ old @ a
        else:
            a, a_values, g, g_values = self.inverse
            inner = g.mT @ old @ a / (g_values[:, None] * a_values + damping)
            new = g @ inner @ a.mT
        inputs = weight[0].numel()
        weight.copy_(new[:, :inputs].view_as(weight))
        if bias is not None:
            bias.copy_(new[:, inputs])
        return (new * old).sum()


def _inverse(matrix: torch.Tensor, damping: torch.Tensor) -> torch.Tensor:
    damped = matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    return torch.cholesky_inverse(torch.linalg.cholesky(damped))
