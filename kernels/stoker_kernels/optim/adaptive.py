"""Adam, AdamW and LAMB."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from stoker_kernels.optim.hyper import adam_hyper
from stoker_kernels.optim.optimizer import FusedOptimizer

if TYPE_CHECKING:
    import torch


class Adam(FusedOptimizer):
    """Adam with the numerics of ``torch.optim.Adam``: weight decay is an L2 term in the gradient.

    28 bytes of memory traffic per fp32 parameter. Options: see :class:`FusedOptimizer`.
    Not supported: amsgrad.
    """

    rule = "adam"
    state_names = ("exp_avg", "exp_avg_sq")
    decoupled = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_grad_norm: float | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "maximize": maximize, "stochastic_rounding": stochastic_rounding, "seed": seed,
        }  # fmt: skip
        super().__init__(params, defaults, max_grad_norm)

    def hyper_of(self, group: dict[str, Any], lr: float) -> tuple[float, ...]:
        """Return the group's numbers; see :class:`FusedOptimizer`."""
        return adam_hyper(group, lr, self.decoupled)


class AdamW(Adam):
    """AdamW with decoupled weight decay and the numerics of ``torch.optim.AdamW``. As :class:`Adam`."""

    decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **options)


class LAMB(FusedOptimizer):
    """LAMB (You et al. 2020, algorithm 2): Adam's direction, its length set by the parameter's norm.

    The trust ratio is phi(|p|) / |direction + weight_decay p|, phi clamping to ``norm_bounds``, and 1 where
    either norm is 0. A group with ``adapt=False`` (biases, norms) moves without it. The moments are
    bias-corrected, gradients not clipped unless ``max_grad_norm`` says so. Options: see
    :class:`FusedOptimizer`.
    """

    rule = "lamb"
    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        adapt: bool = True,
        norm_bounds: tuple[float, float] = (0.0, math.inf),
        maximize: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_grad_norm: float | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt,
            "norm_bounds": norm_bounds, "maximize": maximize,
            "stochastic_rounding": stochastic_rounding, "seed": seed,
        }  # fmt: skip
        super().__init__(params, defaults, max_grad_norm)

    def check(self, group: dict[str, Any]) -> None:
        """Check ``norm_bounds`` too; see :class:`FusedOptimizer`."""
        super().check(group)
        low, high = group["norm_bounds"]
        if not 0.0 <= low <= high:
            raise ValueError(f"LAMB: norm_bounds must be 0 <= low <= high, got {(low, high)}")

    def hyper_of(self, group: dict[str, Any], lr: float) -> tuple[float, ...]:
        """Return the group's numbers; see :class:`FusedOptimizer`."""
        return adam_hyper(group, lr, decoupled=True)
