"""The choice, op by op, between our kernels and PyTorch's in a model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Impl = Literal["stoker", "torch"]


def checked(value: str, what: str) -> Impl:
    """Return ``value`` if it names an implementation. Raises ``ValueError`` that starts with ``what``."""
    if value not in ("stoker", "torch"):
        raise ValueError(f"{what} {value!r}: expected stoker or torch")
    return value  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Ops:
    """One switch for each hot op of a model."""

    norm: Impl = "stoker"
    attention: Impl = "stoker"
    rotary: Impl = "stoker"
    mlp: Impl = "stoker"
    loss: Impl = "stoker"
    optimizer: Impl = "stoker"

    def __post_init__(self) -> None:
        for field in fields(self):
            checked(getattr(self, field.name), f"Ops: {field.name}")

    @classmethod
    def of(cls, value: Ops | str, what: str = "ops") -> Ops:
        """Return ``Ops`` itself, or "stoker" or "torch" for all of them."""
        if isinstance(value, Ops):
            return value
        impl = checked(value, what)
        return cls(**{field.name: impl for field in fields(cls)})
