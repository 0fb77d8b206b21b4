"""Amounts of resources as whole numbers, so that allocating and freeing always ends at zero.

An amount is counted in units of 1e-4 (a third of a CPU is 3333 units), except for memory, which is
counted in bytes. Zero amounts are dropped: a vector without a name needs none of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

UNIT = 10_000
"""Units in 1.0 of a resource that is not counted in bytes."""

MAX_AMOUNT = 1e15
"""More of a resource is taken for a mistake: beyond, floats no longer hold every unit."""

MAX_LISTED = 20
"""The most names that a list in a text has."""

CPU = "CPU"
GPU = "GPU"
MEMORY = "memory"
GPU_MEMORY = "gpu_memory"
"""A part of one GPU, by its memory: which part that is depends on the device."""
COUNTED_IN_BYTES = frozenset({MEMORY, GPU_MEMORY, "object_store_memory"})

Units = dict[str, int]
"""Resource name -> units; never holds a zero."""

_GIB = 1 << 30


class InvalidDemandError(ValueError):
    """A demand that makes no sense on any cluster; ``field`` names the part at fault."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


def to_units(amounts: Mapping[str, float]) -> Units:
    """Return ``amounts`` in units, ordered by name; refuse what is negative, not finite or tiny."""
    units: Units = {}
    for name in sorted(amounts):
        amount = amounts[name]
        if not 0 <= amount <= MAX_AMOUNT:
            raise InvalidDemandError(
                f"resources.{name}",
                f"resources: {name}={amount} must be a number that is 0 or more"
                + (f", and at most {MAX_AMOUNT:g}" if amount > MAX_AMOUNT else ""),
            )
        whole = -int(-amount // 1) if name in COUNTED_IN_BYTES else round(amount * UNIT)
        if whole == 0 and amount > 0:
            raise InvalidDemandError(
                f"resources.{name}",
                f"resources: {name}={amount} is less than 0.0001, the smallest part",
            )
        if whole:
            units[name] = whole
    return units


def to_amount(name: str, units: int) -> float:
    """Return ``units`` of ``name`` as the amount that users write."""
    return float(units) if name in COUNTED_IN_BYTES else units / UNIT


def to_amounts(units: Mapping[str, int]) -> dict[str, float]:
    """Return a vector of units as amounts."""
    return {name: to_amount(name, count) for name, count in units.items()}


def amount_text(name: str, units: int) -> str:
    """Return an amount in words: ``2 CPU``, ``0.25 GPU``, ``1.5 GiB memory``."""
    if name in COUNTED_IN_BYTES:
        if abs(units) >= _GIB // 100:
            return f"{units / _GIB:.4g} GiB {name}"
        return f"{units} bytes {name}"
    return f"{units / UNIT:.10g} {name}"


def units_text(units: Iterable[tuple[str, int]]) -> str:
    """Return a vector in words: ``2 CPU, 1 GPU``; an empty one is ``no resources``."""
    return joined([amount_text(name, count) for name, count in units]) or "no resources"


def joined(parts: Sequence[str], separator: str = ", ") -> str:
    """Join the parts of a list in a text; of many, only the first are named and the others counted."""
    more = len(parts) - MAX_LISTED
    return separator.join(parts[:MAX_LISTED]) + (f"{separator}and {more} more" if more > 0 else "")


def add(into: Units, amounts: Iterable[tuple[str, int]], sign: int = 1) -> None:
    """Add ``amounts`` to ``into`` (or subtract them), keeping zeros out."""
    for name, count in amounts:
        total = into.get(name, 0) + sign * count
        if total:
            into[name] = total
        else:
            into.pop(name, None)
