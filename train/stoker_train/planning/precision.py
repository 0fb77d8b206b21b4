"""The bytes of a parameter and of what is kept with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes for each parameter, and for each value of an activation.

    Mixed precision with Adam: 2 + 2 + 12 (weights, gradients; a copy of the weights and two moments in
    fp32), the 16 bytes of Rajbhandari et al. 2020, section 3.1.
    """

    weight_bytes: float = 2.0
    gradient_bytes: float = 2.0
    optimizer_bytes: float = 12.0
    value_bytes: float = 2.0
    rate: float = 1.0
    """The part of the rate in 16 bit that products reach: 1/16 in exact fp32 (H100: 67 of 989 TFLOP/s)."""

    @property
    def state_bytes(self) -> float:
        """Weights, gradients and optimizer state of one parameter."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


_MOMENTS = {
    "adam": 8.0,
    "adamw": 8.0,
    "sgd": 0.0,
    "momentum": 4.0,
    "adagrad": 4.0,
    "adafactor": 0.1,
}


def precision(dtype: str = "bf16", optimizer: str = "adamw") -> Precision:
    """Return the bytes of training in ``dtype`` by ``optimizer``; in 16 bit there are fp32 masters.

    ValueError for another name of either.
    """
    moments = _MOMENTS.get(optimizer)
    if moments is None:
        known = ", ".join(sorted(_MOMENTS))
        raise ValueError(f"optimizer {optimizer!r} is not known: give one of {known}")
    if dtype in ("bf16", "fp16"):
        return Precision(2.0, 2.0, 4.0 + moments, 2.0)
    if dtype == "fp32":
        return Precision(4.0, 4.0, moments, 4.0, 1 / 16)
    raise ValueError(f"dtype {dtype!r} is not known: give one of bf16, fp16, fp32")
