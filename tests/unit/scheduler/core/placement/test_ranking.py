"""The ranking: spread leases take turns, and the cache places where a full scan would."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.requirements import (
    PlacementPolicy,
    Requirements,
    make_requirements,
)
from stoker_scheduler.core.placement.verdicts import PlacementRequest, choose
from tests.unit.scheduler.core_driver import POLICY, Core
from tests.unit.scheduler.samples import clusters, requirement_sets, volatile_sets


def test_short_spread_leases_take_turns_however_idle_the_nodes_are() -> None:
    core, requirements = (
        Core(*[{"CPU": 8}] * 3),
        make_requirements({"CPU": 1}, policy=PlacementPolicy.SPREAD),
    )
    taken = []
    for _ in range(6):
        (lease_id,) = core.granted(core.ask(requirements=requirements)) or ()
        taken.append(core.state.leases[lease_id].node_id)
        core.release(lease_id)
    assert sorted(taken[:3]) == ["n_1", "n_2", "n_3"]
    assert taken[3:] == taken[:3]


@settings(max_examples=60, deadline=None)
@given(
    clusters,
    st.lists(
        st.tuples(
            requirement_sets | volatile_sets,
            st.booleans(),
            st.sampled_from(["", "k1", "k2"]),
            st.booleans(),
        ),
        max_size=25,
    ),
)
def test_the_ranking_places_where_a_full_scan_would(
    nodes: list[dict[str, float]], explanation: list[tuple[Requirements, bool, str, bool]]
) -> None:
    core = Core(*nodes)
    for index, (requirements, give_back, kernels, warms) in enumerate(explanation):
        request = PlacementRequest(requirements, kernels=kernels)
        expected = choose(core.state.nodes.values(), request, POLICY.score)
        before = set(core.state.leases)
        asked = core.ask(f"p_{index}", requirements=requirements, kernels=kernels)
        if not core.state.queue.subqueues:
            new = [i for i in core.state.leases if i not in before]
            assert [core.state.leases[i].node_id for i in new] == ([expected] if expected else [])
        if core.granted(asked) is None:
            core.feed(ev.LeaseRequestCancelled(at_s=core.at_s, request_id=asked))
        if give_back and core.state.leases:
            core.release(next(iter(core.state.leases)))
        if warms:
            spec = list(core.state.nodes.values())[index % len(nodes)].spec
            core.feed(ev.NodeChanged(at_s=0.0, spec=replace(spec, warm=(kernels,))))
