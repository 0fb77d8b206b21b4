"""Optimizers whose step is one pass over all tensors: AdamW, Adam, SGD, LAMB, LARS,
Adagrad, Adadelta, RMSprop; :class:`InBackward`, which takes it while the backward pass runs; and
:class:`KFAC`, which multiplies the gradients by an inverse Fisher matrix before it."""

from __future__ import annotations

from stoker_kernels.optim.adaptive import LAMB, Adam, AdamW
from stoker_kernels.optim.in_backward import InBackward
from stoker_kernels.optim.kfac import KFAC
from stoker_kernels.optim.momentum import LARS, SGD
from stoker_kernels.optim.squares import Adadelta, Adagrad, RMSprop

__all__ = (
    "KFAC",
    "LAMB",
    "LARS",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "InBackward",
    "RMSprop",
)
