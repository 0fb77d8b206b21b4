"""The accounting of GPUs, whole and in fractions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker_scheduler.core.model.devices import DeviceFacts, Devices
from stoker_scheduler.core.model.resources import UNIT


def test_fractions_fill_one_gpu_before_the_next_and_whole_ones_take_free_devices() -> None:
    devices = Devices.whole((0, 1, 2))
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
    devices = Devices.whole(range(4))
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
        for asked in (1, UNIT // 2, *(count * UNIT for count in range(1, 5))):
            assert devices.can_serve(asked) == (devices.choose(asked) is not None)
    for shares in taken:
        devices.free(shares)
    assert devices.free_units == devices.total_units


def test_a_part_by_memory_goes_to_the_gpu_with_the_least_room_left_over() -> None:
    gib = 1 << 30
    devices = Devices.whole((0, 1, 2), DeviceFacts({0: 80 * gib, 1: 16 * gib}))
    assert devices.choose(0, 4 * gib) == {1: UNIT // 4}, "a larger part of the smaller one"
    assert devices.choose(0, 20 * gib) == {0: UNIT // 4}
    assert devices.choose(0, 81 * gib) is None and not devices.can_ever_serve(0, 81 * gib)
    assert devices.rooms(0, 16 * gib) == 6
    devices.allocate({1: UNIT // 2})
    assert devices.choose(0, 8 * gib) == {1: UNIT // 2}
    assert devices.choose(0, 9 * gib) == {0: 1125}
    assert devices.largest_free_bytes == 80 * gib
    assert devices.choose(UNIT // 2) == {1: UNIT // 2}, "fractions and parts share a GPU"
    assert devices.serves({1: UNIT // 4}, 0, 4 * gib) and not devices.serves({0: 1}, 0, 4 * gib)


@given(
    parts=st.lists(st.integers(1, 90 << 30), max_size=12),
    sizes=st.lists(st.sampled_from((0, 16 << 30, 24 << 30, 80 << 30)), min_size=1, max_size=4),
)
def test_parts_by_memory_never_add_up_to_more_than_a_gpu(
    parts: list[int], sizes: list[int]
) -> None:
    devices = Devices.whole(range(len(sizes)), DeviceFacts(dict(enumerate(sizes))))
    used = dict.fromkeys(range(len(sizes)), 0)
    for nbytes in parts:
        shares = devices.choose(0, nbytes)
        if shares is None:
            free = devices.free_by_device.items()
            assert all(units < devices.part(index, nbytes) for index, units in free)
            continue
        ((index, _),) = shares.items()
        devices.allocate(shares)
        used[index] += nbytes
    assert all(nbytes <= sizes[index] for index, nbytes in used.items())
