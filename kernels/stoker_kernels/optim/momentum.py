"""SGD and LARS."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from stoker_kernels.optim.hyper import sgd_hyper
from stoker_kernels.optim.optimizer import FusedOptimizer

if TYPE_CHECKING:
    import torch


class SGD(FusedOptimizer):
    """SGD with the numerics of ``torch.optim.SGD``: momentum, dampening, Nesterov, L2 weight decay.

    20 bytes of memory traffic per fp32 parameter with momentum, 12 without, and then no state but the
    step number. Options: see :class:`FusedOptimizer`.
    """

    rule = "sgd"
    state_names = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_grad_norm: float | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize, "stochastic_rounding": stochastic_rounding,
            "seed": seed,
        }  # fmt: skip
        super().__init__(params, defaults, max_grad_norm)

    def check(self, group: dict[str, Any]) -> None:
        """Check what Nesterov needs too; see :class:`FusedOptimizer`."""
        super().check(group)
        if group["nesterov"] and (group["momentum"] <= 0.0 or group["dampening"] != 0.0):
            raise ValueError("SGD: nesterov needs a momentum and zero dampening")

    def states_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the states' names; no buffer without momentum."""
        return self.state_names if group["momentum"] != 0.0 else ()

    def hyper_of(self, group: dict[str, Any], lr: float) -> tuple[float, ...]:
        """Return the group's numbers; see :class:`FusedOptimizer`."""
        return sgd_hyper(group, lr)


class LARS(FusedOptimizer):
    """LARS (You et al. 2017, algorithm 1): each tensor's rate is set by its norm over its gradient's.

    The rate is lr * trust_coefficient |p| / (|g| + weight_decay |p| + eps), and lr where either norm is 0;
    it multiplies the gradient on its way into the momentum buffer, as in the paper. A group with
    ``adapt=False`` (biases, norms) moves without the ratio. eps is not the paper's. Options: see
    :class:`FusedOptimizer`.
    """

    rule = "lars"
    state_names = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust_coefficient: float = 1e-3,
        eps: float = 0.0,
        adapt: bool = True,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_grad_norm: float | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient, "eps": eps, "adapt": adapt,
            "maximize": maximize, "stochastic_rounding": stochastic_rounding, "seed": seed,
        }  # fmt: skip
        super().__init__(params, defaults, max_grad_norm)

    def hyper_of(self, group: dict[str, Any], lr: float) -> tuple[float, ...]:
        """Return the group's numbers; see :class:`FusedOptimizer`."""
        return sgd_hyper(group, lr)
