"""Cordons, taints and drains in the state machine: what is placed no more, and what must leave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.gangs import GangStrategy, make_gang
from stoker_scheduler.core.model.requirements import Requirements, make_requirements
from stoker_scheduler.core.model.taints import Effect, Taint, Toleration
from stoker_scheduler.core.placement.explain import explain
from stoker_scheduler.core.placement.feasibility import NodeFit, Rule
from tests.unit.scheduler.core_driver import POLICY, Core, of

GPU_ONLY = Taint("gpu", "yes", Effect.NO_SCHEDULE)
GONE = Taint("gone", "", Effect.NO_EXECUTE)


def change(core: Core, node_id: str = "n_1", **spec: object) -> None:
    known = core.state.nodes[node_id].spec
    core.feed(ev.NodeChanged(at_s=core.at_s, spec=replace(known, **spec)))  # type: ignore[arg-type]


def node_of(core: Core, request_id: str) -> str | None:
    granted = core.granted(request_id)
    return core.state.leases[granted[0]].node_id if granted else None


def tolerating(*tolerations: Toleration, cpus: float = 1) -> Requirements:
    return make_requirements({"CPU": cpus}, tolerations=tolerations)


def stopped(core: Core) -> dict[str, float]:
    return {one.lease_id: one.grace_s for one in of(cmd.StopLease, core.out)}


def asked_back(core: Core) -> list[str]:
    return [i for preempt in of(cmd.Preempt, core.out) for i in preempt.lease_ids]


def test_a_cordoned_node_keeps_what_it_has_and_gets_nothing_more() -> None:
    core = Core({"CPU": 4}, {"CPU": 1})
    first = core.ask("p_1", CPU=1, requirements=make_requirements({"CPU": 2}))
    assert node_of(core, first) == "n_1"
    change(core, cordon="cordoned by ada since noon: disk")
    assert node_of(core, core.ask("p_2", CPU=1)) == "n_2"
    waiting = core.ask("p_3", CPU=1)
    core.wait(5)
    assert node_of(core, first) == "n_1" and core.granted(waiting) is None
    assert not {*(core.granted(first) or ())} & {*asked_back(core), *stopped(core)}
    found = explain(core.state, make_requirements({"CPU": 2}), "f")
    (verdict,) = [one for one in found.verdicts if one.node_id == "n_1"]
    assert found.fit is NodeFit.BUSY and verdict.rules == (Rule.CORDON,)
    assert verdict.detail == "the node is cordoned by ada since noon: disk"
    change(core, cordon="")
    assert node_of(core, waiting) == "n_1"


def test_work_still_goes_into_the_bundles_of_a_cordoned_node() -> None:
    core = Core({"CPU": 2})
    assert core.granted(core.group("PACK", {"CPU": 2}))
    change(core, cordon="cordoned", taints=(GPU_ONLY,))
    inside = make_requirements({"CPU": 1}, group_id="pg_1")
    assert node_of(core, core.ask(requirements=inside, group_id="pg_1")) == "n_1"


@pytest.mark.parametrize(
    ("toleration", "fits"),
    [
        (Toleration(), True),
        (Toleration("gpu"), True),
        (Toleration("gpu", "yes"), True),
        (Toleration("gpu", "no"), False),
        (Toleration("gpu", None, Effect.NO_EXECUTE), False),
        (Toleration("gpu", "yes", Effect.NO_SCHEDULE), True),
        (Toleration("other"), False),
    ],
)
def test_a_taint_keeps_away_what_does_not_tolerate_it(toleration: Toleration, fits: bool) -> None:
    core = Core({"CPU": 4})
    change(core, taints=(GPU_ONLY,))
    request = core.ask(requirements=tolerating(toleration))
    assert (core.granted(request) is not None) is fits
    if not fits:
        core.wait(2 * POLICY.infeasible_grace_s)
        assert not of(cmd.Reject, core.out), "it waits: a taint can be removed"
        (verdict,) = explain(core.state, tolerating(toleration), "f").verdicts
        assert verdict.rules == (Rule.TAINT,)
        assert verdict.detail == "the node has the taint gpu=yes:NoSchedule, which is not tolerated"
        change(core, taints=())
        assert core.granted(request)


def test_other_nodes_are_taken_before_one_whose_taint_is_a_preference() -> None:
    core = Core({"CPU": 4}, {"CPU": 4})
    change(core, taints=(Taint("old", "", Effect.PREFER_NO_SCHEDULE),))
    nodes = [node_of(core, core.ask(f"p_{i}", CPU=1)) for i in range(6)]
    assert nodes == ["n_2"] * 4 + ["n_1"] * 2
    tolerating_it = core.ask("p_9", requirements=tolerating(Toleration("old")))
    assert node_of(core, tolerating_it) == "n_1"


def test_no_execute_ends_what_does_not_tolerate_it_and_later_what_does_for_a_while() -> None:
    core = Core({"CPU": 8})
    plain = core.granted(core.ask("p_1", CPU=1)) or ()
    brief = core.granted(
        core.ask("p_2", requirements=tolerating(Toleration("gone", toleration_seconds=20)))
    )
    steady = core.granted(core.ask("p_3", requirements=tolerating(Toleration("gone")))) or ()
    core.at_s = 10.0
    change(core, taints=(replace(GONE, at_s=10.0),))
    assert list(stopped(core)) == [*plain]
    (stop,) = of(cmd.StopLease, core.out)
    assert stop.reason == "node n_1 has the taint gone:NoExecute, which it does not tolerate"
    core.wait(19)
    assert list(stopped(core)) == [*plain]
    core.wait(2)
    assert set(stopped(core)) == {*plain, *(brief or ())} and steady[0] not in stopped(core)


def test_no_execute_ends_a_placement_group_as_a_whole() -> None:
    core = Core({"CPU": 1}, {"CPU": 1})
    assert core.granted(core.group("STRICT_SPREAD", {"CPU": 1}, {"CPU": 1}))
    change(core, taints=(GONE,))
    core.wait(1)
    assert [one.group_id for one in of(cmd.PreemptGroup, core.out)] == ["pg_1"]


def test_a_bundle_goes_where_it_tolerates_the_taint() -> None:
    core = Core({"CPU": 4}, {"CPU": 4})
    for node_id in ("n_1", "n_2"):
        change(core, node_id, taints=(GPU_ONLY,))
    gang = make_gang([tolerating(Toleration("gpu"))] * 2, GangStrategy.STRICT_SPREAD)
    core.feed(ev.GroupAdded(at_s=0.0, group_id="pg_1", job_id="job_1", gang=gang))
    assert core.granted(core.ask_gang(gang))
    assert core.granted(core.group("PACK", {"CPU": 1}, group_id="pg_2")) is None


def test_a_drain_lets_tasks_finish_and_gives_notice_in_time_for_the_deadline() -> None:
    core = Core({"CPU": 8})
    task = core.granted(core.ask("p_1", CPU=1)) or ()
    soft = core.granted(core.ask("p_2", CPU=1, preemptible=True, preemption_grace_s=5.0)) or ()
    driver = core.granted(core.ask("gcs", CPU=1, kind=ev.Kind.DRIVER)) or ()
    actor = core.granted(core.ask("gcs", CPU=1, kind=ev.Kind.ACTOR)) or ()
    deadline_s = core.at_s + 100.0
    change(core, cordon="draining", drain_until_s=deadline_s)
    assert set(asked_back(core)) == {*task, *soft}
    assert stopped(core) == {soft[0]: 5.0}, "it said that it may be ended"
    assert core.granted(core.ask("p_3", CPU=1)) is None
    core.wait(100.0 - POLICY.preemption_grace_s - 1)
    assert stopped(core).keys() == {*soft}
    core.wait(2)
    assert stopped(core).keys() == {*soft, *task, *driver}
    assert actor[0] not in stopped(core), "the gcs moves actors"
    for lease_id in (*task, *driver):
        assert core.at_s + stopped(core)[lease_id] <= deadline_s + 2


def test_what_starts_on_a_node_as_its_drain_begins_starts_elsewhere() -> None:
    core = Core({"CPU": 1}, slow=True)
    request = core.ask("p_1", CPU=1)
    (start,) = of(cmd.StartWorker, core.out)
    change(core, cordon="draining", drain_until_s=100.0)
    (given_up,) = of(cmd.ReleaseLease, core.out)
    assert given_up.lease_id == start.lease_id and given_up.kill
    core.slow = False
    core.feed(ev.LeaseEnded(at_s=core.at_s, lease_id=start.lease_id))
    assert core.granted(request) is None
    change(core, cordon="", drain_until_s=None)
    assert node_of(core, request) == "n_1"


def test_a_new_leader_goes_on_with_the_drain_of_what_it_adopts() -> None:
    core = Core({"CPU": 2})
    change(core, cordon="draining", drain_until_s=10.0)
    adopted = ev.LeaseAdopted(
        at_s=0.0,
        lease_id="l_1.1.1",
        owner_id="p_1",
        job_id="job_1",
        kind=ev.Kind.TASK,
        node_id="n_1",
        incarnation=1,
        requirements=make_requirements({"CPU": 1}),
        gpus={},
    )
    core.feed(adopted)
    assert asked_back(core) == ["l_1.1.1"] and stopped(core) == {"l_1.1.1": 10.0}


def test_a_drain_that_is_cancelled_ends_nothing_more() -> None:
    core = Core({"CPU": 1})
    (lease,) = core.granted(core.ask("p_1", CPU=1)) or ()
    change(core, cordon="draining", drain_until_s=100.0)
    change(core, cordon="", drain_until_s=None)
    core.wait(110)
    assert not stopped(core) and lease in core.state.leases
