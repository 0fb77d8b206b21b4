"""The model: label selectors, amounts in units, and the accounting of GPUs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_scheduler.core.model.devices import Devices
from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.core.model.resources import UNIT, InvalidDemandError, to_amounts, to_units
from stoker_scheduler.wire_types import terms_of


@pytest.mark.parametrize(
    ("written", "labels", "holds"),
    [
        ("a", {"zone": "a"}, True),
        ("a", {"zone": "b"}, False),
        ("a", {}, False),
        ("!a", {"zone": "b"}, True),
        ("!a", {"zone": "a"}, False),
        ("!a", {}, True),
        ("in(a, b)", {"zone": "b"}, True),
        ("in(a,b)", {"zone": "c"}, False),
        ("!in(a,b)", {"zone": "c"}, True),
        ("!in(a,b)", {"zone": "a"}, False),
        ("!in(a,b)", {}, True),
    ],
)
def test_a_label_selector(written: str, labels: dict[str, str], holds: bool) -> None:
    (term,) = terms_of({"zone": written})
    assert term.holds(labels) is holds


@pytest.mark.parametrize(
    "written", ["", "!", "in()", "in(a", "!in( , )", "in(a,, b)", "matches(x)", "??==zone!"]
)
def test_an_unreadable_selector_names_the_label(written: str) -> None:
    with pytest.raises(InvalidDemandError) as caught:
        terms_of({"zone": written})
    assert caught.value.field == "label_selector.zone"


@pytest.mark.parametrize(
    "resources", [{"GPU": 1.5}, {"CPU": -1}, {"CPU": float("nan")}, {"CPU": 1e-6}]
)
def test_a_senseless_amount_is_rejected(resources: dict[str, float]) -> None:
    with pytest.raises(InvalidDemandError):
        make_requirements(resources)


def test_amounts_become_whole_units_and_back() -> None:
    units = to_units({"memory": 1000.5, "CPU": 0.1, "GPU": 1 / 3, "none": 0})
    assert units == {"CPU": 1000, "GPU": 3333, "memory": 1001}
    assert to_amounts(units) == {"CPU": 0.1, "GPU": 0.3333, "memory": 1001.0}


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
