"""Preemption: idle leases at once, busy ones for priority and fairness, and never too many."""

from __future__ import annotations

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.requirements import make_requirements
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
    assert {a.owner: u["CPU"] / UNIT for a, u in core.state.usage.items()} == {"p_1": 4, "p_2": 4}


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


def stops(core: Core) -> list[str]:
    return [stop.lease_id for stop in of(cmd.StopLease, core.out)]


def test_a_preemptible_lease_is_stopped_for_a_higher_priority_and_killed_if_nothing_ends_it() -> (
    None
):
    core = Core({"CPU": 1})
    (low,) = core.granted(core.ask("p_1", CPU=1, preemptible=True, preemption_grace_s=5.0)) or ()
    core.ask("p_2", CPU=1, priority=2, name="train")
    (stop,) = of(cmd.StopLease, core.out)
    assert (stop.lease_id, stop.node_id, stop.grace_s) == (low, "n_1", 5.0)
    assert stop.reason == "preempted on node n_1 for train of job_1, of priority 2 (its own is 0)"
    assert not of(cmd.ReleaseLease, core.wait(14)), "that is the nodelet's to do"
    (kill,) = of(cmd.ReleaseLease, core.wait(2))
    assert kill.kill and kill.reason == stop.reason


def test_a_lease_that_is_not_preemptible_is_only_asked_for() -> None:
    core = Core({"CPU": 1})
    core.ask("p_1", CPU=1)
    core.ask("p_2", CPU=1, priority=2)
    core.wait(30)
    assert of(cmd.Preempt, core.out) and not stops(core)


def test_nothing_is_stopped_for_the_same_priority_nor_by_one_that_gave_way_to_it() -> None:
    core = Core({"CPU": 1})
    (low,) = core.granted(core.ask("p_1", CPU=1, preemptible=True)) or ()
    core.ask("p_1", CPU=1, preemptible=True)
    core.wait(2)
    assert not stops(core)
    high = core.ask("p_1", CPU=1, priority=1, preemptible=True)
    core.wait(1)
    core.feed(ev.WorkerExited(at_s=core.at_s, lease_id=low))
    assert core.granted(high)
    core.ask("p_1", CPU=1, preemptible=True)
    core.wait(100)
    assert stops(core) == [low], "age makes it next, and no more"


def test_actors_are_stopped_if_they_are_preemptible_and_never_only_asked() -> None:
    core = Core({"CPU": 1})
    (actor,) = (
        core.granted(core.ask("gcs", CPU=1, kind=ev.Kind.ACTOR, preemptible=True, priority=1)) or ()
    )
    core.ask("p_1", CPU=1, priority=1)
    core.wait(1)
    assert not of(cmd.Preempt, core.out)
    core.ask("p_1", CPU=1, priority=2)
    core.wait(1)
    assert stops(core) == [actor]


def test_the_cheapest_victims_of_all_nodes_are_stopped() -> None:
    core = Core({"CPU": 2}, {"CPU": 2}, {"CPU": 2})
    for priority in (2, 1, 2):
        core.ask("p_1", CPU=2, priority=priority, preemptible=True)
    cheapest = next(i for i, lease in core.state.leases.items() if lease.priority == 1)
    core.ask("p_2", CPU=2, priority=3)
    assert stops(core) == [cheapest]


def test_whose_class_was_preempted_most_is_spared() -> None:
    core = Core({"CPU": 1}, {"CPU": 1})
    core.ask("p_1", CPU=1, preemptible=True, class_key="a")
    core.ask("p_1", CPU=1, preemptible=True, class_key="b")
    for _ in range(4):
        before = len(stops(core))
        high = core.ask("p_2", CPU=1, priority=1)
        core.wait(0.5)
        (victim,) = stops(core)[before:]
        again = core.state.leases[victim].class_key
        core.feed(ev.WorkerExited(at_s=core.at_s, lease_id=victim))
        core.wait(0.5)
        core.release(*(core.granted(high) or ()))
        core.ask("p_1", CPU=1, preemptible=True, class_key=again)
    counts = sorted(core.state.preempted.values())
    assert counts == [2, 2], "they take turns"


def test_a_fair_share_is_claimed_by_force_once_and_not_back() -> None:
    core = Core({"CPU": 4})
    core.ask("p_1", count=4, CPU=1, preemptible=True)
    core.wait(1)
    core.ask("p_2", count=4, CPU=1, preemptible=True)
    core.wait(1)
    assert len(stops(core)) == 2
    for lease_id in stops(core):
        core.feed(ev.WorkerExited(at_s=core.at_s, lease_id=lease_id))
    core.ask("p_1", count=2, CPU=1, preemptible=True)
    core.wait(60)
    assert len(stops(core)) == 2


def test_a_gang_gives_way_as_a_whole_with_all_that_runs_in_it() -> None:
    core = Core({"CPU": 2}, {"CPU": 2})
    core.group("STRICT_SPREAD", {"CPU": 2}, {"CPU": 2}, preemptible=True, preemption_grace_s=4.0)
    inside = make_requirements({"CPU": 1}, group_id="pg_1", bundle=1)
    (task,) = core.granted(core.ask("p_1", requirements=inside)) or ()
    high = core.ask("p_2", CPU=1, priority=1)
    (stop,) = of(cmd.StopLease, core.out)
    assert (stop.lease_id, stop.grace_s) == (task, 4.0), "not the bundles: they have no workers"
    core.ask("p_1", requirements=inside)
    core.feed(ev.WorkerExited(at_s=core.at_s, lease_id=task))
    (order,) = of(cmd.PreemptGroup, core.wait(1))
    assert order.group_id == "pg_1" and "of priority 1" in order.reason
    core.ask_gang(core.state.groups["pg_1"].gang, request_id="r_again", preemptible=True)
    assert core.granted(high)
    assert core.held() == {} and core.granted("r_again") is None, "whole or not at all"
    core.release(*(core.granted(high) or ()))
    core.wait(2)
    assert len(core.held()) == 2


def test_what_was_only_asked_for_is_stopped_when_a_higher_priority_comes() -> None:
    core = Core({"CPU": 1})
    (low,) = core.granted(core.ask("p_1", CPU=1, preemptible=True)) or ()
    core.wait(1)
    core.ask("p_2", CPU=1)
    core.wait(1)
    assert of(cmd.Preempt, core.out) and not stops(core), "they would take turns"
    core.ask("p_3", CPU=1, priority=1)
    core.wait(1)
    assert stops(core) == [low]


def test_nothing_is_stopped_in_vain_beside_what_is_only_asked_for() -> None:
    core = Core({"CPU": 2})
    (asked,) = core.granted(core.ask("p_1", CPU=1)) or ()
    (low,) = core.granted(core.ask("p_2", CPU=1, preemptible=True)) or ()
    core.wait(1)
    core.ask("p_3", CPU=2, priority=1)
    core.wait(50)
    assert of(cmd.Preempt, core.out) and not stops(core), "half of the room is no room"
    core.release(asked)
    core.wait(5)
    assert stops(core) == [low]


def test_a_gang_that_is_not_preemptible_stays() -> None:
    core = Core({"CPU": 2})
    core.group("PACK", {"CPU": 2})
    core.ask("p_2", CPU=1, priority=1)
    core.wait(20)
    assert not of(cmd.PreemptGroup, core.out) and not stops(core)


def test_an_account_with_a_share_below_one_lease_stops_nothing() -> None:
    core = Core({"CPU": 1})
    core.ask("p_1", CPU=1, preemptible=True)
    core.wait(1)
    core.ask("p_2", CPU=1, preemptible=True)
    core.wait(30)
    assert of(cmd.Preempt, core.out), "they take turns, after each call"
    assert not stops(core), "else they would stop each other for ever"


def test_a_gang_that_ends_after_its_group_is_forgotten_makes_room_as_any_other() -> None:
    """Found by a random world: the second look asked the group that was removed, and the core failed."""
    core = Core({"CPU": 3})
    core.group("PACK", {"CPU": 2}, preemptible=True)
    (beside,) = core.granted(core.ask("p_1", CPU=1, preemptible=True)) or ()
    core.slow = True
    high = core.ask("p_2", CPU=2, priority=1)
    core.feed(ev.GroupRemoved(at_s=core.at_s, group_id="pg_1"))
    (ending,) = (one for one in core.state.leases.values() if one.kind is ev.Kind.BUNDLE)
    assert "pg_1" not in core.state.groups and stops(core) == []
    core.slow = False
    higher = core.ask("p_3", CPU=1, priority=2)
    core.wait(6)
    assert stops(core) == [beside]
    core.feed(ev.WorkerExited(at_s=core.at_s, lease_id=beside))
    core.feed(ev.LeaseEnded(at_s=core.at_s, lease_id=ending.lease_id))
    core.wait(1)
    assert core.granted(high) and core.granted(higher)


def test_nobody_ends_beside_a_gang_whose_end_makes_room_enough() -> None:
    core = Core({"GPU": 3})
    gang = core.group("PACK", {"GPU": 0.5}, {"GPU": 1}, {"GPU": 1}, preemptible=True)
    assert core.granted(gang)
    (beside,) = core.granted(core.ask("p_1", GPU=0.3, preemptible=True)) or ()
    core.ask("p_2", GPU=2, priority=5)
    assert core.state.groups["pg_1"].closing
    assert beside not in stops(core) and not core.state.leases[beside].preempted


def test_kinds_that_ask_for_a_look_all_the_time_do_not_keep_others_from_theirs() -> None:
    core = Core({"CPU": 4, "GPU": 1})
    core.ask("p_busy", CPU=4)
    (low,) = core.granted(core.ask("p_low", GPU=1, preemptible=True)) or ()
    core.wait(1)

    def noise() -> None:
        for number in range(20):
            owner = f"p_{core.at_s}.{number}"
            core.ask(owner, CPU=1 + number / 1000, kind=ev.Kind.ACTOR, wait_s=1.0)

    noise()
    core.ask("p_high", GPU=1, priority=5, wait_s=1e6)
    for _ in range(12):
        noise()
        core.wait(0.25)
    assert stops(core) == [low]
