"""``ray.util.collective.types``: backends and reductions by Ray's names."""

from __future__ import annotations

from enum import Enum


class Backend(str):
    """The name of a backend: ``Backend("gloo")``. Unknown ones are refused as a group is made."""

    NCCL = "nccl"
    GLOO = "gloo"

    def __new__(cls, name: str) -> Backend:
        """Return the name in lower case."""
        return super().__new__(cls, name.lower())


class ReduceOp(Enum):
    """The ways in which tensors are combined."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    AVERAGE = 4
