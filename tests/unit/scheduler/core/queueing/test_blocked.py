"""Blocked subqueues: whatever happens to nodes, nothing is left waiting that fits."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.requirements import Requirements
from stoker_scheduler.core.placement.verdicts import PlacementRequest, choose
from tests.unit.scheduler.core_driver import POLICY, Core
from tests.unit.scheduler.samples import clusters, filtered, requirement_sets, volatile_sets


@settings(max_examples=100, deadline=None)
@given(
    clusters,
    st.lists(
        st.tuples(requirement_sets | volatile_sets, st.sampled_from(["ask", "release", "label"])),
        max_size=25,
    ),
)
def test_what_waits_fits_nowhere(
    nodes: list[dict[str, float]], steps: list[tuple[Requirements, str]]
) -> None:
    core = Core(*nodes)
    for index, (requirements, what) in enumerate(steps):
        if what == "ask":
            core.ask(f"p_{index}", requirements=requirements, wait_if_infeasible=True)
        elif what == "release" and core.state.leases:
            core.release(list(core.state.leases)[index % len(core.state.leases)])
        elif what == "label":
            spec = list(core.state.nodes.values())[index % len(nodes)].spec
            core.feed(ev.NodeChanged(at_s=0.0, spec=replace(spec, labels={"zone": "a"})))
        for waiting in core.state.queue.subqueues:
            assert isinstance(waiting, Requirements)
            request = PlacementRequest(waiting)
            assert choose(core.state.nodes.values(), request, POLICY.score) is None


def test_a_lease_that_starts_helps_what_wants_little_free() -> None:
    core = Core({"CPU": 4})
    waits = core.ask(requirements=filtered({"CPU": 1}, "free.cpu <= 1"))
    assert core.granted(waits) is None
    core.ask("p_2", CPU=2)
    assert core.granted(waits) is None
    core.ask("p_3", CPU=1)
    assert core.granted(waits)
