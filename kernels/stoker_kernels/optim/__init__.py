"""Optimizers whose step is one pass over all tensors: AdamW, Adam, SGD, LAMB, LARS."""

from __future__ import annotations

from stoker_kernels.optim.adaptive import LAMB, Adam, AdamW
from stoker_kernels.optim.momentum import LARS, SGD

__all__ = ("LAMB", "LARS", "SGD", "Adam", "AdamW")
