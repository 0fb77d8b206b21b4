"""Gangs: the placement of all bundles at once, against an exhaustive search on small clusters."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.gangs import Gang, GangStrategy, make_gang
from stoker_scheduler.core.model.nodes import NodeInfo, make_node_spec
from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.core.model.resources import UNIT, InvalidDemandError
from stoker_scheduler.core.model.topology import Topology, make_topology
from stoker_scheduler.core.placement.gang import (
    GangPlacement,
    GangRanking,
    could_ever_be_placed,
    gpus_together,
)
from stoker_scheduler.core.placement.ranking import DirtyNodes
from stoker_scheduler.core.placement.scoring import ScorePolicy
from tests.unit.scheduler.core_driver import Core

if TYPE_CHECKING:
    from collections.abc import Mapping

POLICY = ScorePolicy()
Resources = dict[str, float]


def nodes_of(*resources: Resources, labels: tuple[dict[str, str], ...] = ()) -> dict[str, NodeInfo]:
    named = itertools.zip_longest(resources, labels, fillvalue={})
    return {
        f"n_{index}": NodeInfo(make_node_spec(f"n_{index}", has, labels=with_labels))
        for index, (has, with_labels) in enumerate(named, start=1)
    }


def gang_of(strategy: str, *bundles: Resources, taken: tuple[str, ...] = ()) -> Gang:
    return make_gang([make_requirements(b) for b in bundles], GangStrategy(strategy), taken=taken)


def place(gang: Gang, nodes: Mapping[str, NodeInfo]) -> GangPlacement | None:
    return GangRanking(gang).best(nodes, DirtyNodes(), POLICY)


def hosts(placement: GangPlacement | None) -> list[str]:
    """Return the node of each bundle, by its number."""
    assert placement is not None
    return [node_id for _, node_id in sorted(placement)]


def allocates(gang: Gang, nodes: Mapping[str, NodeInfo], placement: GangPlacement) -> bool:
    """Return whether the bundles can be allocated in the order of ``placement``."""
    trial = {node_id: node.copy() for node_id, node in nodes.items()}
    for index, node_id in placement:
        bundle, node = gang.bundles[index], trial[node_id]
        gpus = node.devices.choose(bundle.gpu)
        if gpus is None or any(node.available.get(n, 0) < count for n, count in bundle.items):
            return False
        node.allocate(bundle, gpus)
    return True


def possible(gang: Gang, nodes: Mapping[str, NodeInfo]) -> list[list[str]]:
    """Return every placement there is, as the node of each bundle."""
    found = []
    largest_first = sorted(
        range(len(gang.bundles)), key=lambda i: gang.kinds.index(gang.bundles[i])
    )
    for chosen in itertools.product(nodes, repeat=len(gang.bundles)):
        used = len(set(chosen))
        if gang.strategy is GangStrategy.STRICT_PACK and used > 1:
            continue
        if gang.strategy is GangStrategy.STRICT_SPREAD and used < len(chosen):
            continue
        if allocates(gang, nodes, [(index, chosen[index]) for index in largest_first]):
            found.append(list(chosen))
    return found


AMOUNTS = st.fixed_dictionaries(
    {}, optional={"CPU": st.integers(1, 4), "GPU": st.sampled_from([0.25, 0.5, 1, 2])}
).filter(bool)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries({"CPU": st.integers(0, 6), "GPU": st.integers(0, 3)}), max_size=4
    ),
    st.lists(AMOUNTS, min_size=1, max_size=5),
    st.sampled_from(list(GangStrategy)),
)
def test_it_finds_what_an_exhaustive_search_finds(
    clusters: list[Resources], bundles: list[Resources], strategy: GangStrategy
) -> None:
    nodes, gang = nodes_of(*clusters), gang_of(strategy, *bundles)
    placement, all_of_them = place(gang, nodes), possible(gang, nodes)
    assert (placement is not None) == bool(all_of_them)
    assert could_ever_be_placed(nodes, gang, POLICY) == bool(all_of_them)
    if placement is None:
        return
    assert allocates(gang, nodes, placement)
    used = len(set(hosts(placement)))
    counts = [len(set(chosen)) for chosen in all_of_them]
    if strategy is GangStrategy.PACK:
        assert used == min(counts)
    if strategy in (GangStrategy.STRICT_PACK, GangStrategy.STRICT_SPREAD):
        assert used in counts


def test_pack_takes_the_fewest_nodes_and_leaves_large_ones_alone() -> None:
    nodes = nodes_of({"GPU": 8}, {"GPU": 2}, {"GPU": 8}, {"GPU": 4})
    assert hosts(place(gang_of("PACK", *[{"GPU": 1}] * 2), nodes)) == ["n_2", "n_2"]
    assert hosts(place(gang_of("PACK", *[{"GPU": 1}] * 3), nodes)) == ["n_4"] * 3
    assert set(hosts(place(gang_of("PACK", *[{"GPU": 1}] * 12), nodes))) in (
        {"n_1", "n_4"},
        {"n_3", "n_4"},
    )


def test_pack_avoids_nodes_with_gpus_when_it_needs_none() -> None:
    nodes = nodes_of({"CPU": 8, "GPU": 8}, {"CPU": 8})
    assert hosts(place(gang_of("PACK", *[{"CPU": 1}] * 3), nodes)) == ["n_2"] * 3


def test_spread_uses_every_node_before_one_twice() -> None:
    nodes = nodes_of(*[{"CPU": 4}] * 3)
    used = hosts(place(gang_of("SPREAD", *[{"CPU": 1}] * 6), nodes))
    assert sorted(used) == ["n_1", "n_1", "n_2", "n_2", "n_3", "n_3"]


def test_spread_is_a_wish_and_strict_spread_is_none() -> None:
    nodes = nodes_of({"CPU": 4}, {"CPU": 1})
    assert hosts(place(gang_of("SPREAD", *[{"CPU": 2}] * 2), nodes)) == ["n_1", "n_1"]
    assert place(gang_of("STRICT_SPREAD", *[{"CPU": 2}] * 2), nodes) is None


def test_a_bundle_makes_way_for_one_that_can_go_nowhere_else() -> None:
    nodes = nodes_of({"CPU": 2, "disk": 1}, {"CPU": 2})
    gang = gang_of("STRICT_SPREAD", {"CPU": 1}, {"CPU": 1, "disk": 1})
    assert hosts(place(gang, nodes)) == ["n_2", "n_1"]


def test_bundles_that_are_placed_again_keep_away_from_the_others_or_near_them() -> None:
    nodes = nodes_of(*[{"CPU": 4}] * 3)
    apart = gang_of("STRICT_SPREAD", {"CPU": 1}, taken=("n_1", "n_2"))
    assert hosts(place(apart, nodes)) == ["n_3"]
    assert hosts(place(gang_of("PACK", {"CPU": 1}, taken=("n_3",)), nodes)) == ["n_3"]


def test_labels_of_each_bundle_hold() -> None:
    nodes = nodes_of({"CPU": 4}, {"CPU": 4}, labels=({"rack": "a"}, {"rack": "b"}))
    from stoker_scheduler.core.model.labels import Term

    in_b = make_requirements({"CPU": 1}, terms=(Term("rack", ("b",)),))
    anywhere = make_requirements({"CPU": 1})
    for strategy in GangStrategy:
        placement = place(make_gang([anywhere, in_b], strategy), nodes)
        assert hosts(placement)[1] == "n_2", strategy


@pytest.mark.parametrize("strategy", list(GangStrategy))
def test_a_ranking_follows_nodes_that_change(strategy: GangStrategy) -> None:
    nodes, dirty = nodes_of({"CPU": 1}, {"CPU": 1}), DirtyNodes()
    both = 1 if strategy is GangStrategy.STRICT_PACK else 2
    ranking = GangRanking(gang_of(strategy, *[{"CPU": 1}] * both))
    assert ranking.best(nodes, dirty, POLICY) is not None
    one = make_requirements({"CPU": 1})
    for node_id in ("n_1", "n_2"):
        nodes[node_id].allocate(one, {})
        dirty.add(node_id, None, len(nodes))
    assert ranking.best(nodes, dirty, POLICY) is None
    assert ranking.room(nodes, dirty) == (0,)
    for node_id in ("n_2", "n_1"):
        nodes[node_id].free(one, {})
        dirty.add(node_id, None, len(nodes))
    assert ranking.best(nodes, dirty, POLICY) is not None


def test_a_gang_without_bundles_or_with_empty_ones_is_refused() -> None:
    with pytest.raises(InvalidDemandError, match="at least one") as error:
        gang_of("PACK")
    assert error.value.field == "bundles"
    with pytest.raises(InvalidDemandError, match="bundle 1 asks for nothing") as error:
        gang_of("PACK", {"CPU": 1}, {})
    assert error.value.field == "bundles.1"


# Topology and racks


def joined(*groups: tuple[int, ...], gpus: int = 8) -> Topology:
    """Return the topology of GPUs of which those in one group are joined by NVLink."""
    links = {
        one: {
            other: "nvlink" if any(one in g and other in g for g in groups) else "system"
            for other in range(gpus)
            if other != one
        }
        for one in range(gpus)
    }
    topology = make_topology(links)
    assert topology is not None
    return topology


def gpu_node(
    node_id: str, topology: Topology | None, *, rack: str = "", used: tuple[int, ...] = ()
) -> NodeInfo:
    labels = {"rack": rack} if rack else {}
    resources = {"CPU": 64.0, "GPU": 8.0}
    node = NodeInfo(make_node_spec(node_id, resources, topology=topology, labels=labels))
    node.devices.allocate(dict.fromkeys(used, UNIT))
    return node


def gpus_of(gang: Gang, *nodes: NodeInfo) -> dict[str, tuple[int, ...]]:
    """Return the GPUs that a gang gets, by node."""
    known = {node.node_id: node for node in nodes}
    placement = place(gang, known)
    assert placement is not None
    return gpus_together(known, gang, placement)


HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))


def test_a_gang_gets_gpus_that_are_near_each_other() -> None:
    four = gang_of("PACK", *[{"GPU": 1}] * 4)
    assert gpus_of(four, gpu_node("n_1", joined(*HALVES), used=(0,))) == {"n_1": (4, 5, 6, 7)}
    pairs = gang_of("STRICT_PACK", {"GPU": 2}, {"GPU": 2, "CPU": 1})
    assert gpus_of(pairs, gpu_node("n_1", joined(*HALVES), used=(2,))) == {"n_1": (4, 5, 6, 7)}


def test_of_nodes_with_room_the_one_whose_gpus_are_nearest_is_taken() -> None:
    apart = gpu_node("n_1", joined(*HALVES), used=(0, 1, 4, 5))
    near = gpu_node("n_2", joined(*HALVES), used=(0, 1, 2, 3))
    for strategy in ("PACK", "STRICT_PACK"):
        four = gang_of(strategy, *[{"GPU": 1}] * 4)
        assert gpus_of(four, apart, near) == {"n_2": (4, 5, 6, 7)}
    assert hosts(place(gang_of("PACK", *[{"GPU": 1}] * 2), {"n_1": apart, "n_2": near}))


def test_few_nodes_come_before_near_gpus() -> None:
    near = [gpu_node(f"n_{i}", joined(*HALVES), used=(4, 5, 6, 7)) for i in (1, 2)]
    far = gpu_node("n_3", joined())
    eight = gang_of("PACK", *[{"GPU": 1}] * 8)
    assert gpus_of(eight, *near, far) == {"n_3": tuple(range(8))}


def test_racks_break_ties_between_nodes_few_of_them() -> None:
    racks = ["a", "b", "a", "b", "a", "c", "c", "c"]
    nodes = {f"n_{i}": gpu_node(f"n_{i}", None, rack=rack) for i, rack in enumerate(racks, start=1)}

    def racks_of(bundles: int) -> list[str]:
        placement = place(gang_of("PACK", *[{"GPU": 8}] * bundles), nodes)
        return sorted({nodes[host].spec.labels["rack"] for host in hosts(placement)})

    assert racks_of(1) == ["b"], "the smallest rack that has room for all"
    assert racks_of(2) == ["b"]
    assert racks_of(3) == ["a"]
    assert len(racks_of(5)) == 2
    assert racks_of(8) == ["a", "b", "c"]


@given(st.sets(st.integers(0, 7), max_size=5), st.integers(1, 3), st.data())
@settings(max_examples=60)
def test_no_other_gpus_of_the_node_are_nearer(
    used: set[int], bundles: int, data: st.DataObject
) -> None:
    groups = data.draw(st.lists(st.tuples(*[st.integers(0, 7)] * 3), max_size=4))
    topology = joined(*groups)
    node = gpu_node("n_1", topology, used=tuple(used))
    ((_, chosen),) = gpus_of(gang_of("PACK", *[{"GPU": 1}] * bundles), node).items()
    free = [index for index in range(8) if index not in used]
    least = min(topology.spread(one) for one in itertools.combinations(free, bundles))
    assert topology.spread(tuple(sorted(chosen))) == least


def test_the_bundles_of_a_gang_share_the_gpus_that_it_gets() -> None:
    core = Core()
    spec = make_node_spec("n_1", {"CPU": 8.0, "GPU": 8.0}, topology=joined(*HALVES))
    core.feed(ev.NodeJoined(at_s=0.0, spec=spec))
    core.granted(core.ask(GPU=1))
    core.group("PACK", {"GPU": 1}, {"GPU": 2}, {"GPU": 1})
    bundles = [lease.gpus for lease in core.state.leases.values() if lease.kind is ev.Kind.BUNDLE]
    assert sorted(index for gpus in bundles for index in gpus) == [4, 5, 6, 7]
    assert sorted(map(len, bundles)) == [1, 1, 2]
