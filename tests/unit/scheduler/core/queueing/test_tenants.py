"""Queues of tenants: whose turn it is, what limits hold back, and what a queue can claim from others."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.queues import DEFAULT_QUEUE, Account, QueueSpec
from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.core.model.resources import UNIT, to_units
from stoker_scheduler.core.queueing.tenants import Tenants
from tests.unit.scheduler.core_driver import Core, of

DIMENSIONS = ("quota", "limit", "user_limit", "job_limit")


def spec(name: str, **options: Any) -> QueueSpec:
    """A queue whose resources are written as amounts."""
    units = {n: to_units(v) if n in DIMENSIONS else v for n, v in options.items()}
    return QueueSpec(name=name, **units)


def core_with(*queues: QueueSpec, cpus: float = 8) -> Core:
    core = Core({"CPU": cpus})
    core.feed(ev.QueuesChanged(at_s=0.0, queues=queues))
    return core


def cpus_of(core: Core) -> dict[str, float]:
    """The CPUs that leases of each queue have."""
    held: dict[str, float] = {}
    for account, units in core.state.usage.items():
        held[account.queue] = held.get(account.queue, 0) + units["CPU"] / UNIT
    return held


def end_all(core: Core, queue: str = "") -> None:
    leases = core.state.leases.values()
    core.release(*[one.lease_id for one in leases if queue in ("", one.account.queue)])


# Turns


def test_queues_take_turns_by_weight_whatever_arrived_first() -> None:
    core = core_with(spec("small"), spec("large", weight=3.0))
    core.ask("p_0", CPU=8)
    core.ask("p_1", count=8, CPU=1, queue="small")
    core.ask("p_2", count=8, CPU=1, queue="large")
    end_all(core)
    assert cpus_of(core) == {"small": 2, "large": 6}


def test_what_a_queue_can_count_on_goes_before_what_others_borrow() -> None:
    core = core_with(spec("sure", quota={"CPU": 6}), spec("heavy", weight=100.0))
    core.ask("p_0", CPU=8)
    core.ask("p_1", count=8, CPU=1, queue="heavy")
    core.ask("p_2", count=8, CPU=1, queue="sure")
    end_all(core)
    assert cpus_of(core) == {"sure": 6, "heavy": 2}


def test_a_queue_below_another_shares_its_turns() -> None:
    core = core_with(
        spec("team"), spec("team.a", parent="team"), spec("team.b", parent="team"), spec("other")
    )
    core.ask("p_0", CPU=8)
    for index, queue in enumerate(("team.a", "team.b", "other")):
        core.ask(f"p_{index}", count=8, CPU=1, queue=queue)
    end_all(core)
    assert cpus_of(core) == {"team.a": 2, "team.b": 2, "other": 4}


def test_within_a_queue_priority_decides_and_between_queues_their_shares() -> None:
    core = core_with(spec("a"), spec("b"))
    core.ask("p_0", CPU=8)
    low = core.ask("p_1", count=4, CPU=1, queue="a")
    high = core.ask("p_1", count=4, CPU=1, queue="a", priority=5)
    other = core.ask("p_2", count=8, CPU=1, queue="b")
    end_all(core)
    granted = [len(core.granted(one) or ()) for one in (low, high, other)]
    assert granted == [0, 4, 4]


def test_what_a_queue_had_lately_counts_and_is_forgotten() -> None:
    tenants = Tenants(half_life_s=10.0)
    tenants.capacity = {"CPU": 10 * UNIT}
    a, b = Account("p", "j", queue="a"), Account("p", "j", queue="b")
    tenants.change((spec("a"), spec("b")), {})
    need = (("CPU", 10 * UNIT),)
    tenants.charge(a, need, 1, 0.0)
    tenants.charge(a, need, -1, 10.0)
    assert tenants.order("a", need, 10.0) == ((True, 0.5),), "one half-life of the whole cluster"
    assert tenants.order("b", need, 10.0) < tenants.order("a", need, 10.0)
    assert tenants.order("a", need, 20.0) == ((True, 0.25),)
    tenants.change((spec("a", weight=2.0), spec("b")), {})
    assert tenants.order("a", need, 20.0) == ((True, 0.125),), "a change forgets nothing"
    assert tenants.hold(b, need, 20.0) is None


@pytest.mark.parametrize("seed", range(2))
def test_long_run_shares_are_those_of_the_weights(seed: int) -> None:
    random = Random(seed)
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    core = core_with(*(spec(name, weight=weight) for name, weight in weights.items()), cpus=64)
    core.state.tenants.half_life_s = 60.0
    ends: dict[str, float] = {}
    used = dict.fromkeys(weights, 0.0)
    waiting: dict[tuple[str, int], str] = {}
    for step in range(1200):
        core.at_s = step * 0.5
        for name in weights:
            for cpus in (1, 2, 3):
                if waiting.get((name, cpus)) not in core.state.pending:
                    request = core.ask(f"p_{name}", count=50, CPU=cpus, queue=name, wait_s=9e9)
                    waiting[name, cpus] = request
        for lease in core.state.leases.values():
            ends.setdefault(lease.lease_id, core.at_s + random.uniform(0.5, 8))
        core.release(*[i for i, end_s in ends.items() if end_s <= core.at_s])
        ends = {i: end_s for i, end_s in ends.items() if end_s > core.at_s}
        if step > 200:
            for name, cpus_held in cpus_of(core).items():
                used[name] += cpus_held
    shares = {name: used[name] / sum(used.values()) for name in weights}
    errors = {name: abs(shares[name] - weights[name] / 8) for name in weights}
    assert max(errors.values()) < 0.02, f"shares {shares}"


# Limits


@pytest.mark.parametrize(
    ("limits", "asks", "runs"),
    [
        ({"limit": {"CPU": 3}}, [("p_1", "job_1", "ann"), ("p_2", "job_2", "bob")], 3),
        ({"user_limit": {"CPU": 2}}, [("p_1", "job_1", "ann"), ("p_2", "job_2", "ann")], 2),
        ({"user_limit": {"CPU": 2}}, [("p_1", "job_1", "ann"), ("p_2", "job_2", "bob")], 4),
        ({"job_limit": {"CPU": 2}}, [("p_1", "job_1", "ann"), ("p_2", "job_1", "ann")], 2),
        ({"job_limit": {"CPU": 2}}, [("p_1", "job_1", "ann"), ("p_2", "job_2", "ann")], 4),
    ],
)
def test_a_limit_holds_what_is_beyond_it_and_nothing_else(
    limits: dict[str, Any], asks: list[tuple[str, str, str]], runs: int
) -> None:
    core = core_with(spec("q", **limits))
    for _ in range(4):
        for owner, job, user in asks:
            core.ask(owner, CPU=1, job_id=job, user=user, queue="q")
    free = core.ask("p_9", count=8 - runs, CPU=1)
    assert cpus_of(core) == {"q": runs, DEFAULT_QUEUE: 8 - runs}
    assert core.granted(free)
    end_all(core, "q")
    assert cpus_of(core)["q"] == min(runs, 8 - runs), "what ends makes room for more"


def test_a_limit_above_holds_the_queues_below_together() -> None:
    core = core_with(
        spec("team", limit={"CPU": 4}), spec("a", parent="team"), spec("b", parent="team")
    )
    for _ in range(3):
        core.ask("p_1", CPU=1, queue="a")
        core.ask("p_2", CPU=1, queue="b")
    assert sum(cpus_of(core).values()) == 4
    core.feed(ev.QueuesChanged(at_s=0.0, queues=(spec("a"), spec("b"))))
    assert cpus_of(core) == {"a": 3, "b": 3}


def test_a_rate_limit_spaces_starts_and_needs_no_event() -> None:
    core = core_with(spec("q", rate_limit=2.0), cpus=64)
    for _ in range(20):
        core.ask("p_1", CPU=1, user="ann", queue="q")
        core.ask("p_2", CPU=1, user="bob", queue="q")
    assert cpus_of(core) == {"q": 6}, "a second's worth and the next, of each"
    core.wait(4)
    assert cpus_of(core) == {"q": 22}


def test_nothing_starts_from_a_queue_that_is_stopped() -> None:
    core = core_with(spec("q", stopped=True))
    held = core.ask(CPU=1, queue="q")
    core.wait(30)
    assert core.granted(held) is None
    core.feed(ev.QueuesChanged(at_s=core.at_s, queues=(spec("q"),)))
    assert core.granted(held)


def test_what_is_more_than_the_limit_by_itself_is_refused_unless_it_waits() -> None:
    core = core_with(spec("q", limit={"CPU": 2}))
    core.ask(CPU=3, queue="q")
    (refused,) = of(cmd.Reject, core.out)
    assert "queue 'q' has a limit of 2 CPU" in refused.text
    assert "stoker queue set q --limit CPU=AMOUNT" in refused.text
    waits = core.ask(CPU=3, queue="q", wait_if_infeasible=True)
    core.feed(ev.QueuesChanged(at_s=0.0, queues=(spec("q", limit={"CPU": 3}),)))
    assert core.granted(waits)


def test_a_gang_is_held_as_a_whole_and_its_work_is_counted_once() -> None:
    core = core_with(spec("q", limit={"CPU": 4}))
    held = core.group("PACK", {"CPU": 2}, {"CPU": 3}, queue="q")
    assert core.granted(held) is None and not core.state.leases
    core.feed(ev.GroupRemoved(at_s=0.0, group_id="pg_1"))
    placed = core.group("PACK", {"CPU": 2}, {"CPU": 2}, group_id="pg_2", queue="q")
    assert core.granted(placed)
    inside = make_requirements({"CPU": 2}, group_id="pg_2")
    assert core.granted(core.ask(requirements=inside, queue="q"))
    assert cpus_of(core) == {"q": 4}


def test_an_unknown_queue_has_no_limits_until_it_is_announced() -> None:
    core = Core({"CPU": 4})
    core.ask(CPU=1, queue="new")
    core.feed(ev.QueuesChanged(at_s=0.0, queues=(spec("new", limit={"CPU": 2}),)))
    core.ask("p_2", count=3, CPU=1, queue="new")
    assert cpus_of(core) == {"new": 2}


# Claims


def test_a_queue_reclaims_its_quota_from_those_that_borrow_it() -> None:
    core = core_with(spec("sure", quota={"CPU": 6}), spec("other"))
    core.ask("p_1", count=8, CPU=1, queue="other", priority=9)
    core.wait(0.5)
    core.ask("p_2", count=8, CPU=1, queue="sure")
    core.wait(0.5)
    taken = [i for one in of(cmd.Preempt, core.out) for i in one.lease_ids]
    assert len(taken) == 7, "six of the quota, and half of the two besides"
    core.release(*taken)
    core.wait(3)
    assert cpus_of(core) == {"sure": 7, "other": 1}


def test_a_queue_within_its_part_keeps_it_whatever_its_accounts_have() -> None:
    core = core_with(spec("a"), spec("b"))
    core.ask("p_1", count=4, CPU=1, queue="a")
    core.ask("p_2", count=4, CPU=1, queue="b")
    core.wait(0.5)
    core.ask("p_3", count=4, CPU=1, queue="a", job_id="job_2")
    core.wait(3)
    preempted = [i for one in of(cmd.Preempt, core.out) for i in one.lease_ids]
    assert {core.state.leases[i].account.queue for i in preempted} == {"a"}


def test_priority_preempts_within_a_queue_only() -> None:
    core = core_with(spec("a"), spec("b"), cpus=2)
    core.ask("p_1", CPU=1, queue="a")
    core.ask("p_2", CPU=1, queue="b")
    core.wait(0.5)
    core.ask("p_3", CPU=1, queue="a", priority=5)
    (preemption,) = of(cmd.Preempt, core.out)
    assert preemption.owner_id == "p_1"


def test_nothing_is_preempted_for_what_a_limit_holds() -> None:
    core = core_with(spec("q", limit={"CPU": 2}), spec("other"))
    ids = core.granted(core.ask("p_1", count=8, CPU=1, queue="other")) or ()
    core.wait(0.5)
    core.poll("p_1", *ids, idle=ids)
    core.ask("p_2", count=8, CPU=1, queue="q")
    assert sum(len(one.lease_ids) for one in of(cmd.Preempt, core.out)) == 2


def test_entitlements_divide_the_cluster_level_by_level() -> None:
    tenants = Tenants()
    tenants.capacity = to_units({"CPU": 10, "GPU": 4})
    tenants.change(
        (
            spec("a", quota={"GPU": 2}),
            spec("a.x", parent="a", weight=3.0),
            spec("a.y", parent="a"),
            spec("b"),
        ),
        {},
    )
    x, y = Account("p_1", "j", queue="a.x"), Account("p_2", "j", queue="a.y")
    b1, b2 = Account("p_3", "j", queue="b"), Account("p_4", "j", queue="b")
    found = tenants.entitlements([x, y, b1, b2])
    assert found.of_queue == {"a": 0.75, "b": 0.25, "a.x": 0.5625, "a.y": 0.1875}
    assert found.of_account == {x: 0.5625, y: 0.1875, b1: 0.125, b2: 0.125}
    assert tenants.entitlements([x]).of_account == {x: 1.0}, "what is not active claims nothing"
    tenants.change((spec("a", quota={"GPU": 4}), spec("b", quota={"GPU": 4})), {})
    a = Account("p_1", "j", queue="a")
    assert tenants.entitlements([a, b1]).of_account == {a: 0.5, b1: 0.5}, (
        "more promised than is there"
    )


def test_users_beyond_their_rate_start_when_their_own_time_has_come() -> None:
    core = core_with(spec("q", rate_limit=1.0), cpus=64)
    for _ in range(3):
        core.ask("p_1", CPU=1, user="ann", queue="q")
    core.wait(0.5)
    for cpus in (1, 2, 3):
        core.ask("p_2", CPU=cpus, user="bob", queue="q")
    started = []
    for _ in range(8):
        core.wait(0.25)
        started.append(len(core.state.leases))
    assert started == [4, 5, 5, 6, 6, 6, 6, 6]


def test_a_gang_claims_its_queues_part_and_no_more() -> None:
    core = core_with(spec("a"), spec("b"))
    core.ask("p_1", count=8, CPU=1, queue="a")
    core.wait(0.5)
    core.group("PACK", *[{"CPU": 1}] * 4, queue="b")
    core.wait(0.5)
    taken = [i for one in of(cmd.Preempt, core.out) for i in one.lease_ids]
    assert len(taken) == 4
    core.release(*taken)
    core.wait(1)
    assert cpus_of(core) == {"a": 4, "b": 4}
    core.group("PACK", *[{"CPU": 1}] * 3, queue="b", group_id="pg_2")
    core.wait(3)
    assert sum(len(one.lease_ids) for one in of(cmd.Preempt, core.out)) == 4, (
        "that would be too much"
    )
