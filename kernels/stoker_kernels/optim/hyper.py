"""The hyperparameters of an update: the numbers of a parameter group, in one small tensor.

They lie on the parameters' device, so a captured CUDA graph reads them at every replay instead of having
them baked in. The order of fields is the order in memory; the kernels read it from here.
``1 - beta`` and ``log(beta)`` are taken on the host in fp64: in fp32, 1 - 0.999 keeps four digits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch

LOG_OF_ZERO = -1e4  # exp of it, times any step number from 1, is 0 in fp32 and fp64 alike


class AdamHyper(NamedTuple):
    """Adam, AdamW and LAMB. Flags are 0 or 1."""

    lr: Any
    weight_decay: Any
    sign: Any  # -1 to maximize
    eps: Any
    alpha1: Any  # 1 - beta1
    alpha2: Any
    log_beta1: Any
    log_beta2: Any
    decoupled: Any  # AdamW's decay, not Adam's L2 term
    adapt: Any  # LAMB: use the trust ratio
    low: Any  # LAMB: bounds of phi
    high: Any


class SGDHyper(NamedTuple):
    """SGD and LARS. Flags are 0 or 1."""

    lr: Any
    weight_decay: Any
    sign: Any
    eps: Any  # LARS
    momentum: Any
    added: Any  # 1 - dampening
    nesterov: Any
    trust: Any  # LARS: the trust coefficient
    adapt: Any  # LARS: use the trust ratio


class SquareHyper(NamedTuple):
    """Adagrad, Adadelta and RMSprop, which divide by the root of accumulated squares."""

    lr: Any
    weight_decay: Any
    sign: Any
    eps: Any
    added: Any  # of a new square to the average: 1 - rho, 1 - alpha; Adagrad sums, and does not read it
    momentum: Any  # RMSprop
    lr_decay: Any  # Adagrad


H = TypeVar("H", AdamHyper, SGDHyper, SquareHyper)


def adam_hyper(group: dict[str, Any], lr: float, decoupled: bool) -> AdamHyper:
    """Return the numbers of a parameter group of Adam, AdamW or LAMB."""
    beta1, beta2 = group["betas"]
    low, high = group.get("norm_bounds", (0.0, math.inf))
    return AdamHyper(
        lr, group["weight_decay"], sign_of(group), group["eps"], 1.0 - beta1, 1.0 - beta2,
        math.log(beta1) if beta1 else LOG_OF_ZERO, math.log(beta2) if beta2 else LOG_OF_ZERO,
        float(decoupled), float(group.get("adapt", True)), low, high,
    )  # fmt: skip


def sgd_hyper(group: dict[str, Any], lr: float) -> SGDHyper:
    """Return the numbers of a parameter group of SGD or LARS."""
    return SGDHyper(
        lr, group["weight_decay"], sign_of(group), group.get("eps", 0.0), group["momentum"],
        1.0 - group.get("dampening", 0.0), float(group.get("nesterov", False)),
        group.get("trust_coefficient", 0.0), float(group.get("adapt", True)),
    )  # fmt: skip


def square_hyper(group: dict[str, Any], lr: float, kept: float = 0.0) -> SquareHyper:
    """Return the numbers of a group of Adagrad, Adadelta or RMSprop; ``kept``: of the average, a step."""
    return SquareHyper(
        lr, group["weight_decay"], sign_of(group), group["eps"], 1.0 - kept,
        group.get("momentum", 0.0), group.get("lr_decay", 0.0),
    )  # fmt: skip


def sign_of(group: dict[str, Any]) -> float:
    """Return the sign that gradients are multiplied by."""
    return -1.0 if group["maximize"] else 1.0


def unpack(kind: type[H], hyper: torch.Tensor, dtype: torch.dtype) -> H:
    """Return the fields as scalar tensors of ``dtype`` on the hyperparameters' own device: no wait for it."""
    return kind(*hyper.to(dtype).unbind())


def read(kind: type[H], hyper: torch.Tensor) -> H:
    """Return the fields as Python floats; waits for the device, so only for the CPU."""
    return kind(*hyper.tolist())
