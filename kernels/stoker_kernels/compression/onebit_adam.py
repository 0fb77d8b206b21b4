"""1-bit Adam: Adam first, then its momentum in one bit per value (Tang et al. 2021).

Adam is not linear in the gradient, so error feedback on gradients does not carry over. After ``freeze``
steps the variance hardly changes: it is frozen, and what is left of Adam is a momentum method with a
fixed scale per value, whose momentum can be compressed. Two parts, used together:
:class:`OneBitAdamExchange` makes of gradients the mean gradient (before) or the mean momentum (after), and
:class:`OneBitAdam` is the optimizer that takes them as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from stoker_kernels.compression.interface import (
    Combine,
    Compressor,
    Exchange,
    Message,
    message_of,
)
from stoker_kernels.compression.onebit import unpack
from stoker_kernels.ops.onebit import onebit_compress
from stoker_kernels.runtime.backend import compute_dtype


class OneBitAdamExchange(Compressor):
    """The mean gradient for ``freeze`` steps, then the mean of the workers' 1-bit momenta.

        m_i = beta1 * m + (1 - beta1) * g_i;   m = mean of 1-bit(m_i + error_i)
    In the first phase the momentum of the mean gradient is kept beside, to start from. All workers receive
    all 1-bit messages, so there is no second compression as on a server. Non-finite values: as OneBit, and
    the momentum keeps its old value there.
    """

    name = "onebit_adam"
    residual = "error"

    def __init__(self, freeze: int = 100, beta1: float = 0.9) -> None:
        super().__init__()
        if freeze < 1:
            raise ValueError(f"freeze must be at least one step, to have a variance: got {freeze}")
        if not 0.0 <= beta1 < 1.0:
            raise ValueError(f"beta1 must be in [0, 1), got {beta1}")
        self.freeze, self.beta1 = freeze, beta1

    def exchange(self, gradient: torch.Tensor, name: str) -> Exchange:
        """Do as :meth:`Compressor.exchange`; after ``freeze`` steps the result is a momentum."""
        gradient = gradient.detach()
        momentum = self._memory_tensor(name, "momentum", gradient)
        if self._begin(name) < self.freeze:
            (message,) = yield message_of(gradient, Combine.MEAN, gradient.reshape(-1))
            mean = message.tensors[0]
            _keep_finite(momentum, momentum.lerp(mean.to(momentum.dtype), 1.0 - self.beta1))
            return mean.view(gradient.shape)
        local = momentum.lerp(gradient.reshape(-1).to(momentum.dtype), 1.0 - self.beta1)
        words, scales = onebit_compress(local, self._memory_tensor(name, "error", gradient))
        messages = yield message_of(gradient, Combine.GATHER, words, scales)
        result = unpack([_in_dtype(message, momentum.dtype) for message in messages])
        _keep_finite(momentum, result.view(-1))
        return result.to(gradient.dtype)

    def decompress(self, messages: Sequence[Message]) -> torch.Tensor:
        """Return the mean of messages of one phase."""
        if messages[0].combine is Combine.GATHER:
            return unpack(messages)
        mean = torch.stack([message.tensors[0] for message in messages]).mean(0)
        return mean.view(messages[0].shape)

    def config(self) -> dict[str, Any]:
        """Return all options."""
        return {"freeze": self.freeze, "beta1": self.beta1}


def _in_dtype(message: Message, dtype: torch.dtype) -> Message:
    return Message(message.tensors, message.combine, message.shape, dtype)


def _keep_finite(old: torch.Tensor, new: torch.Tensor) -> None:
    old.copy_(torch.where(new.isfinite(), new, old))


class OneBitAdam(torch.optim.Optimizer):
    """Adam whose ``grad`` is the mean gradient for ``freeze`` steps, and the momentum itself after.

    Both come from :class:`OneBitAdamExchange` with the same ``freeze`` and ``beta1``. The variance and
    its bias correction stand still after ``freeze`` steps. Weight decay is decoupled, as in AdamW.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        freeze: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if freeze < 1:
            raise ValueError(f"freeze must be at least one step, to have a variance: got {freeze}")
        defaults = {
            "lr": lr, "freeze": freeze, "betas": betas, "eps": eps, "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a ``grad``, once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        wide = compute_dtype(parameter.dtype)
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=wide)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=wide)
        state["step"] += 1
        step, momentum, square = state["step"], state["exp_avg"], state["exp_avg_sq"]
        assert parameter.grad is not None
        given = parameter.grad.to(wide)
        if step <= group["freeze"]:
            momentum.lerp_(given, 1.0 - beta1)
            square.mul_(beta2).addcmul_(given, given, value=1.0 - beta2)
        else:
            momentum.copy_(given)
        scale = square / (1.0 - beta2 ** min(step, group["freeze"]))
        change = momentum / (1.0 - beta1**step) / scale.sqrt_().add_(group["eps"])
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        parameter.add_(change.to(parameter.dtype), alpha=-group["lr"])
