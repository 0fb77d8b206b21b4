"""Amounts of resources as people write them: ``2``, ``0.5``, ``64GiB``."""

from __future__ import annotations

from collections.abc import Mapping

from stoker_wire.errors import BadRequestError

SMALLEST_PART = 1e-4
"""The smallest amount of a resource that can be asked for, or offered: schedulers count in it."""

_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_amount(written: object) -> float:
    """Return an amount; a suffix counts in 1024s, as in ``64GiB``, ``64G`` and ``64g``.

    ValueError for what is none.
    """
    if isinstance(written, (int, float)) and not isinstance(written, bool):
        return float(written)
    number, unit = str(written).strip().lower().removesuffix("b").removesuffix("i"), 1
    if number[-1:] in _UNITS:
        number, unit = number[:-1], _UNITS[number[-1]]
    try:
        return float(number) * unit
    except ValueError:
        raise ValueError(f"{written!r} is no amount, such as 2, 0.5 or 8GiB") from None


def check_parts(amounts: Mapping[str, float], field: str) -> None:
    """Raise BadRequestError for the first amount that is too small to be counted, and is not 0."""
    for name, amount in amounts.items():
        if 0 < amount < SMALLEST_PART:
            raise BadRequestError(
                f"{field}: {name}={amount:g} is less than {SMALLEST_PART:g}, the smallest part\n"
                "ask for none (0), or for more",
                field=f"{field}.{name}",
            )
