"""The choice of GPUs that are near each other, against all sets there are."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from stoker_scheduler.core.model.devices import DeviceFacts, Devices
from stoker_scheduler.core.model.resources import UNIT
from stoker_scheduler.core.model.topology import DISTANCES, FARTHEST, Topology, make_topology

kinds = st.sampled_from(sorted(DISTANCES))


@st.composite
def topologies(draw: st.DrawFn, most: int = 8) -> tuple[int, Topology]:
    """A number of devices, and some path between each two of them."""
    count = draw(st.integers(2, most))
    pairs = list(combinations(range(count), 2))
    chosen = draw(st.lists(kinds, min_size=len(pairs), max_size=len(pairs)))
    links: dict[int, dict[int, str]] = {}
    for (one, other), kind in zip(pairs, chosen, strict=True):
        links.setdefault(one, {})[other] = kind
        links.setdefault(other, {})[one] = kind
    topology = make_topology(links)
    assert topology is not None
    return count, topology


def two_switches(gpus: int = 8) -> Topology:
    """Half of the GPUs are joined by NVLink, and so is the other half; between the halves is the CPU."""
    half = gpus // 2
    links = {
        one: {
            other: "nvlink" if one // half == other // half else "numa"
            for other in range(gpus)
            if other != one
        }
        for one in range(gpus)
    }
    topology = make_topology(links)
    assert topology is not None
    return topology


@given(topologies(), st.data())
def test_up_to_eight_devices_the_nearest_set_is_found(
    known: tuple[int, Topology], data: st.DataObject
) -> None:
    count, topology = known
    free = tuple(sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1))))
    wanted = data.draw(st.integers(1, len(free)))
    chosen, spread = topology.nearest(free, wanted)
    assert spread == topology.spread(chosen)
    assert len(chosen) == wanted and set(chosen) <= set(free)
    least = min(topology.spread(one) for one in combinations(free, wanted))
    assert topology.spread(chosen) == least


@given(topologies(most=8), st.lists(st.tuples(st.integers(1, 8), st.booleans()), max_size=20))
def test_devices_with_a_topology_are_given_whole_and_end_free(
    known: tuple[int, Topology], steps: list[tuple[int, bool]]
) -> None:
    count, topology = known
    plain = Devices.whole(range(count))
    near = Devices.whole(range(count), DeviceFacts(topology=topology))
    taken: list[dict[int, int]] = []
    for wanted, give in steps:
        shares = near.choose(wanted * UNIT)
        assert (shares is None) == (plain.choose(wanted * UNIT) is None), "it fits as without one"
        if shares is not None:
            assert len(shares) == wanted
            near.allocate(shares)
            plain.allocate(plain.choose(wanted * UNIT) or {})
            taken.append(shares)
        if taken and give:
            near.free(taken.pop())
            plain = Devices.whole(range(count))
            plain.allocate({i: UNIT for shares in taken for i in shares})
    for shares in taken:
        near.free(shares)
    assert near.free_units == near.total_units


def test_what_is_left_is_near_each_other_too() -> None:
    topology = two_switches()
    assert topology.nearest((0, 1, 2, 3, 4, 5, 6), 2)[0] == (4, 5)
    assert topology.nearest((0, 1, 2, 3, 4, 5, 6, 7), 4)[0] == (0, 1, 2, 3)
    assert topology.nearest((0, 1, 2, 3, 5), 1)[0] == (5,), "a whole half stays together"


def test_of_many_devices_a_good_set_is_found() -> None:
    topology = two_switches(16)
    free = (0, 1, 2, *range(4, 16))
    assert topology.nearest(free, 8)[0] == tuple(range(8, 16))


def test_equal_nodes_share_a_topology_and_unknown_paths_are_the_longest() -> None:
    links = {0: {1: "nvlink"}, 1: {0: "nvlink"}}
    assert make_topology(links) is make_topology(dict(links))
    assert make_topology({0: {}, 1: {}}) is None
    topology = make_topology(links)
    assert topology is not None and topology.spread((0, 1, 2)) == 1 + 2 * FARTHEST
