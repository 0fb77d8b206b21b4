"""Adagrad, Adadelta and RMSprop: a rate for each value, from its own squared gradients so far."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from stoker_kernels.optim.hyper import square_hyper
from stoker_kernels.optim.optimizer import FusedOptimizer

if TYPE_CHECKING:
    import torch


class Adagrad(FusedOptimizer):
    """Adagrad with the numerics of ``torch.optim.Adagrad``: squares are summed, never forgotten.

    20 bytes of memory traffic per fp32 parameter. Options: see :class:`FusedOptimizer`.
    """

    rule = "adagrad"
    state_names = ("sum",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_grad_norm: float | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value, "eps": eps,
            "maximize": maximize, "stochastic_rounding": stochastic_rounding, "seed": seed,
        }  # fmt: skip
        super().__init__(params, defaults, max_grad_norm)

    def first_value(self, name: str, group: dict[str, Any]) -> float:
        """Return ``initial_accumulator_value``; see :class:`FusedOptimizer`."""
        return float(group["initial_accumulator_value"])

    def hyper_of(self, group: dict[str, Any], lr: float) -> tuple[float, ...]:
        """Return the group's numbers; see :class:`FusedOptimizer`."""
        return square_hyper(group, lr)


class Adadelta(FusedOptimizer):
    """Adadelta with the numerics of ``torch.optim.Adadelta``: steps as long as the steps so far.

    28 bytes of memory traffic per fp32 parameter. Options: see :class:`FusedOptimizer`.
    """

    rule = "adadelta"
    state_names = ("square_avg", "acc_delta")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_grad_norm: float | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
            "stochastic_rounding": stochastic_rounding, "seed": seed,
        }  # fmt: skip
        super().__init__(params, defaults, max_grad_norm)

    def hyper_of(self, group: dict[str, Any], lr: float) -> tuple[float, ...]:
        """Return the group's numbers; see :class:`FusedOptimizer`."""
        return square_hyper(group, lr, group["rho"])


class RMSprop(FusedOptimizer):
    """RMSprop with the numerics of ``torch.optim.RMSprop``, with or without momentum.

    20 bytes of memory traffic per fp32 parameter, 28 with momentum. Options: see :class:`FusedOptimizer`.
    Not supported: centered.
    """

    rule = "rmsprop"
    state_names = ("square_avg", "momentum_buffer")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        *,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_grad_norm: float | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum,
            "maximize": maximize, "stochastic_rounding": stochastic_rounding, "seed": seed,
        }  # fmt: skip
        super().__init__(params, defaults, max_grad_norm)

    def states_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the states' names; no buffer without momentum."""
        return self.state_names if group["momentum"] != 0.0 else self.state_names[:1]

    def hyper_of(self, group: dict[str, Any], lr: float) -> tuple[float, ...]:
        """Return the group's numbers; see :class:`FusedOptimizer`."""
        return square_hyper(group, lr, group["alpha"])
