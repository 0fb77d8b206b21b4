"""Amounts of resources as people write them: ``2``, ``0.5``, ``64GiB``."""

from __future__ import annotations

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
