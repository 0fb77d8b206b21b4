"""Amounts as whole units."""

from __future__ import annotations

from stoker_scheduler.core.model.resources import to_amounts, to_units


def test_amounts_become_whole_units_and_back() -> None:
    units = to_units({"memory": 1000.5, "CPU": 0.1, "GPU": 1 / 3, "none": 0})
    assert units == {"CPU": 1000, "GPU": 3333, "memory": 1001}
    assert to_amounts(units) == {"CPU": 0.1, "GPU": 0.3333, "memory": 1001.0}
