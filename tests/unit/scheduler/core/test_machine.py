"""The state machine, event by event: leases granted, released, adopted, blocked and lost."""

from __future__ import annotations

from typing import Any

import pytest

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.nodes import make_node_spec
from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.core.model.resources import UNIT
from tests.unit.scheduler.core_driver import POLICY, Core, is_reply, of


def test_a_lease_that_starts_after_its_request_ended_serves_the_next_one() -> None:
    core = Core({"CPU": 1}, slow=True)
    core.ask("p_1", CPU=1, wait_s=1)
    core.wait(4)
    again = core.ask("p_1", CPU=1)
    (start,) = of(cmd.StartWorker, core.out)
    core.feed(ev.LeaseStarted(at_s=core.at_s, lease_id=start.lease_id))
    assert core.granted(again) == (start.lease_id,)


def test_a_lease_that_is_orphaned_or_listed_no_more_is_released() -> None:
    core = Core({"CPU": 2}, slow=True)
    request = core.ask("p_1", CPU=1, wait_s=1)
    core.feed(ev.LeaseRequestCancelled(at_s=0.0, request_id=request))
    held = core.ask("p_2", CPU=1)
    for start in of(cmd.StartWorker, core.out):
        core.feed(ev.LeaseStarted(at_s=core.at_s, lease_id=start.lease_id))
    core.poll("p_2", *(core.granted(held) or ()))
    core.poll("p_2")
    out = core.wait(POLICY.lease_ttl_s + 1, renew=False)
    assert len(of(cmd.ReleaseLease, out)) == 2
    assert [lost.lease_ids for lost in of(cmd.Lost, out)] == [core.granted(held)]


def test_an_owner_that_is_silent_keeps_its_leases_until_it_ends() -> None:
    core = Core({"CPU": 4})
    (listed,) = core.granted(core.ask("w_1", CPU=1, owner_node_id="n_2")) or ()
    core.poll("w_1", listed)
    core.ask("w_1", CPU=1, owner_node_id="n_2")
    core.ask("w_2", CPU=1)
    assert not of(cmd.ReleaseLease, core.wait(60, renew=False))
    assert [
        r.reason
        for r in of(cmd.ReleaseLease, core.feed(ev.OwnerLost(at_s=core.at_s, owner_id="w_2")))
    ] == ["its owner w_2 is gone"]
    core.feed(ev.NodeJoined(at_s=core.at_s, spec=make_node_spec("n_2", {"CPU": 1})))
    out = core.feed(ev.NodeLost(at_s=core.at_s, node_id="n_2"))
    assert len(of(cmd.ReleaseLease, out)) == 2 and not core.state.leases


def test_a_lease_that_nobody_ever_lists_ends_at_last() -> None:
    core = Core({"CPU": 1})
    core.ask("p_1", CPU=1)
    out = core.wait(POLICY.unconfirmed_ttl_s + 1, renew=False)
    assert [r.kill for r in of(cmd.ReleaseLease, out)] == [True]


def test_an_idle_lease_of_a_silent_owner_goes_to_who_waits() -> None:
    core = Core({"CPU": 1})
    (idle,) = core.granted(core.ask("p_1", CPU=1)) or ()
    core.poll("p_1", idle, idle=(idle,))
    waiting = core.ask("p_2", CPU=1, wait_s=60, job_id="job_2")
    core.wait(POLICY.lease_ttl_s + 2, renew=False)
    assert core.granted(waiting)


def test_leases_of_the_gcs_do_not_expire_and_actors_outlive_their_job() -> None:
    core = Core({"CPU": 2})
    (actor,) = core.granted(core.ask("gcs", CPU=1, kind=ev.Kind.ACTOR)) or ()
    core.ask("p_1", CPU=1)
    core.wait(POLICY.lease_ttl_s * 2, renew=False)
    core.feed(ev.JobFinished(at_s=core.at_s, job_id="job_1"))
    assert list(core.state.leases) == [actor]
    late = core.ask("p_1", CPU=1)
    assert any(is_reply(c, cmd.Reject, late) for c in core.out)
    assert of(cmd.ReleaseLease, core.release(actor))[0].kill


def test_a_new_incarnation_loses_the_leases_of_the_old_and_a_stale_one_is_ignored() -> None:
    core = Core({"CPU": 1})
    (lease_id,) = core.granted(core.ask(CPU=1)) or ()
    spec = make_node_spec("n_1", {"CPU": 1}, incarnation=2)
    out = core.feed(ev.NodeJoined(at_s=0.0, spec=spec))
    assert [lost.lease_ids for lost in of(cmd.Lost, out)] == [(lease_id,)]
    core.feed(ev.NodeLost(at_s=0.0, node_id="n_1", incarnation=1))
    assert core.state.nodes["n_1"].spec.incarnation == 2


def test_unblocking_takes_the_cpu_back_and_nothing_is_granted_below_zero() -> None:
    core = Core({"CPU": 1, "GPU": 1})
    (parent,) = core.granted(core.ask(CPU=1, GPU=1)) or ()
    core.feed(ev.LeaseBlocked(at_s=0.0, lease_id=parent))
    assert core.granted(core.ask("p_2", GPU=1, wait_s=1)) is None
    (child,) = core.granted(core.ask("p_2", CPU=1)) or ()
    core.feed(ev.LeaseUnblocked(at_s=0.0, lease_id=parent))
    assert core.state.nodes["n_1"].available["CPU"] == -UNIT
    late = core.ask("p_3", CPU=1)
    core.release(child)
    assert core.granted(late) is None
    core.release(parent)
    assert core.granted(late)


def test_an_adopted_lease_is_the_answer_to_its_request_and_conflicts_are_ended() -> None:
    core = Core({"GPU": 1})
    facts: dict[str, Any] = {
        "at_s": 0.0,
        "owner_id": "p_1",
        "job_id": "job_1",
        "kind": ev.Kind.TASK,
        "node_id": "n_1",
        "incarnation": 1,
        "requirements": make_requirements({"GPU": 1}),
        "gpus": {0: UNIT},
    }
    core.feed(ev.LeaseAdopted(lease_id="l_old.0.1", **facts))
    out = core.feed(ev.LeaseAdopted(lease_id="l_two.0.2", **facts))
    assert [c.lease_id for c in of(cmd.ReleaseLease, out)] == ["l_two.0.2"]
    core.ask(request_id="r_old", GPU=1)
    assert core.granted("r_old") == ("l_old.0.1",)


def test_an_adopted_lease_that_its_owner_does_not_list_was_released_at_the_leader_before() -> None:
    core = Core({"CPU": 1})
    core.feed(
        ev.LeaseAdopted(
            at_s=0.0,
            lease_id="l_old.0.1",
            owner_id="p_1",
            job_id="job_1",
            kind=ev.Kind.TASK,
            node_id="n_1",
            incarnation=1,
            requirements=make_requirements({"CPU": 1}),
            gpus={},
        )
    )
    core.wait(POLICY.lease_ttl_s + 1, renew=False)
    assert list(core.state.leases) == ["l_old.0.1"]  # its owner may be stopped
    core.poll("p_1")
    core.wait(POLICY.lease_ttl_s + 1, renew=False)
    assert list(core.state.leases) == ["l_old.0.1"]  # the answer that grants it may be on its way
    out = core.poll("p_1")
    assert [one.lease_id for one in of(cmd.ReleaseLease, out)] == ["l_old.0.1"]


def test_a_request_that_comes_again_after_its_leases_were_released_takes_nothing_for_long() -> None:
    core = Core({"CPU": 1})
    request = core.ask("p_1", CPU=1, request_id="r_1")
    core.poll("p_1", *(core.granted(request) or ()))
    core.release(*(core.granted(request) or ()))
    core.ask("p_1", CPU=1, request_id="r_1")
    (lease_id,) = core.state.leases
    core.poll("p_1")
    core.wait(POLICY.lease_ttl_s + 1, renew=False)
    assert [one.lease_id for one in of(cmd.ReleaseLease, core.poll("p_1"))] == [lease_id]


@pytest.mark.parametrize("count", [1, 7])
def test_everything_given_back_leaves_nothing_behind(count: int) -> None:
    core = Core({"CPU": 4, "GPU": 2}, {"CPU": 4})
    for resources in ({"CPU": 1.0}, {"GPU": 0.3}, {"CPU": 0.1, "GPU": 1.0}):
        core.ask("p_1", count=count, **resources)
    core.release(*core.state.leases)
    core.feed(ev.JobFinished(at_s=core.at_s, job_id="job_1"))
    assert not core.state.leases and not core.state.usage and not core.state.pending
    for node in core.state.nodes.values():
        assert node.available_units == node.spec.total_units
