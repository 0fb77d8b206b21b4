"""Node filters in the state machine: slow ranks pass, gangs obey, leases make room."""

from __future__ import annotations

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.gangs import GangStrategy, make_gang
from stoker_scheduler.core.placement.explain import explain
from stoker_scheduler.core.placement.feasibility import NodeFit
from tests.unit.scheduler.core_driver import POLICY, Core, of
from tests.unit.scheduler.samples import filtered


def test_a_slow_rank_counts_on_its_node_for_a_while() -> None:
    core = Core({"CPU": 4}, {"CPU": 4})
    picky = filtered({"CPU": 1}, "slow_ranks < 2")
    for rank in ("job_1//0", "job_1//1", "job_1//1"):
        core.feed(ev.RankSlow(at_s=core.at_s, node_id="n_1", rank=rank))
    core.feed(ev.RankSlow(at_s=core.at_s, node_id="n_gone", rank="job_1//2"))
    (lease_id,) = core.granted(core.ask(requirements=picky)) or ()
    assert core.state.leases[lease_id].node_id == "n_2"
    core.feed(ev.NodeLost(at_s=core.at_s, node_id="n_2"))
    request = core.ask("p_2", requirements=picky, wait_s=10_000.0)
    assert core.granted(request) is None
    core.at_s += POLICY.remember_slow_ranks_s
    core.feed(ev.Tick(at_s=core.at_s))
    assert core.granted(request)


def test_leases_of_a_lower_priority_make_room_for_what_a_filter_wants_free() -> None:
    core = Core({"CPU": 2, "GPU": 2})
    held = [core.ask(f"p_{i}", GPU=1) for i in range(2)]
    assert all(core.granted(request) for request in held)
    whole = filtered({"CPU": 1}, "free.gpu >= 2")
    core.ask("p_9", requirements=whole, priority=5)
    assert {i for preempt in of(cmd.Preempt, core.out) for i in preempt.lease_ids} == {
        lease_id for request in held for lease_id in core.granted(request) or ()
    }


def test_a_gang_goes_where_its_filter_holds_and_waits_for_what_time_may_change() -> None:
    core = Core({"CPU": 4}, {"CPU": 2}, {"CPU": 2})
    small = filtered({"CPU": 1}, "total.cpu < 4 and free.cpu < 2")
    gang = make_gang([small, small], GangStrategy.STRICT_SPREAD)
    core.feed(ev.GroupAdded(at_s=0.0, group_id="pg_1", job_id="job_1", gang=gang))
    core.ask_gang(gang)
    assert explain(core.state, gang, "").fit is NodeFit.BUSY
    for index, node_id in enumerate(("n_2", "n_3")):
        core.ask(f"p_{index}", requirements=filtered({"CPU": 1}, f"node_id = '{node_id}'"))
    assert sorted(core.held().values()) == ["n_2", "n_3"]


def test_a_gang_that_no_node_could_ever_pass_is_said_to_fit_never() -> None:
    core = Core({"CPU": 4}, {"CPU": 2})
    gang = make_gang([filtered({"CPU": 1}, "free.cpu > 4")], GangStrategy.PACK)
    found = explain(core.state, gang, "")
    assert found.fit is NodeFit.NEVER
    assert found.verdicts[0].detail == "node_filter: free.CPU > 4 is false: free.CPU is 4"
