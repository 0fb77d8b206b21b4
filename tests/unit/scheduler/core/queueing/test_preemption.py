"""Preemption: idle leases at once, busy ones for priority and fairness, and never too many."""

from __future__ import annotations

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.resources import UNIT
from tests.unit.scheduler.core_driver import Core, of


def test_idle_leases_of_others_are_preempted_at_once_but_not_for_more_of_the_same() -> None:
    core = Core({"CPU": 2})
    ids = core.granted(core.ask("p_1", count=2, CPU=1)) or ()
    core.ask("p_1", CPU=1)
    assert not of(cmd.Preempt, core.poll("p_1", *ids, idle=ids))
    core.ask("p_2", CPU=1)
    preemptions = of(cmd.Preempt, core.out)
    assert [(r.owner_id, len(r.lease_ids)) for r in preemptions] == [("p_1", 1)]


def test_an_idle_lease_of_another_class_is_preempted_from_the_requester_itself() -> None:
    core = Core({"CPU": 2})
    ids = core.granted(core.ask("p_1", CPU=2)) or ()
    core.ask("p_1", CPU=1)
    assert of(cmd.Preempt, core.poll("p_1", *ids, idle=ids))[0].lease_ids == ids


def test_busy_leases_beyond_the_fair_share_are_preempted_for_an_account_that_has_none() -> None:
    core = Core({"CPU": 8})
    core.ask("p_1", count=8, CPU=1)
    core.wait(0.5)
    core.ask("p_2", count=8, CPU=1)
    (preemption,) = of(cmd.Preempt, core.out)
    assert preemption.owner_id == "p_1" and len(preemption.lease_ids) == 4
    core.release(*preemption.lease_ids)
    assert not of(cmd.Preempt, core.wait(3))
    assert {a: u["CPU"] / UNIT for a, u in core.state.usage.items()} == {"p_1": 4, "p_2": 4}


def test_an_account_that_has_nothing_does_not_wait_behind_one_that_wants_more() -> None:
    core = Core({"CPU": 2})
    core.ask("p_1", count=2, CPU=1)
    core.ask("p_1", count=100, CPU=1)
    core.wait(0.5)
    assert not of(cmd.Preempt, core.out)
    core.ask("p_2", CPU=1)
    assert [r.owner_id for r in of(cmd.Preempt, core.out)] == ["p_1"], "not at the next look only"


def test_leases_change_hands_once_a_quantum_where_accounts_are_more() -> None:
    core = Core({"CPU": 1})
    (first,) = core.granted(core.ask("p_1", CPU=1)) or ()
    core.ask("p_2", CPU=1)
    assert not of(cmd.Preempt, core.out), "its owner has only just got it"
    core.wait(0.5)
    assert [r.lease_ids for r in of(cmd.Preempt, core.out)] == [(first,)]


def test_busy_leases_of_lower_priority_are_preempted_and_those_of_actors_never() -> None:
    core = Core({"CPU": 2})
    core.ask("gcs", CPU=1, kind=ev.Kind.ACTOR)
    (task,) = core.granted(core.ask("p_1", CPU=1)) or ()
    core.ask("p_1", CPU=1, priority=1)
    assert [r.lease_ids for r in of(cmd.Preempt, core.out)] == [(task,)]
