"""The accounting of GPUs, whole and in fractions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker_scheduler.core.model.devices import Devices
from stoker_scheduler.core.model.resources import UNIT


def test_fractions_fill_one_gpu_before_the_next_and_whole_ones_take_free_devices() -> None:
    devices = Devices((0, 1, 2))
    taken = []
    for units in (5000, 3000, 3000, 2000, UNIT):
        shares = devices.choose(units)
        assert shares is not None
        devices.allocate(shares)
        taken.append(shares)
    assert taken == [{0: 5000}, {0: 3000}, {1: 3000}, {0: 2000}, {2: UNIT}]
    assert devices.choose(2 * UNIT) is None
    for shares in taken:
        devices.free(shares)
    assert devices.choose(3 * UNIT) == {0: UNIT, 1: UNIT, 2: UNIT}


sizes = st.one_of(st.integers(1, UNIT - 1), st.integers(1, 4).map(lambda n: n * UNIT))


@given(st.lists(st.tuples(sizes, st.integers(0, 5)), max_size=40))
def test_devices_are_never_over_allocated_and_end_free(steps: list[tuple[int, int]]) -> None:
    devices = Devices(range(4))
    taken: list[dict[int, int]] = []
    for units, give in steps:
        shares = devices.choose(units)
        if shares is not None:
            assert sum(shares.values()) == units
            assert len(shares) == max(1, units // UNIT)
            devices.allocate(shares)
            taken.append(shares)
        if taken and give == 0:
            devices.free(taken.pop(0))
        assert all(0 <= free <= UNIT for free in devices.free_by_device.values())
    for shares in taken:
        devices.free(shares)
    assert devices.free_units == devices.total_units
