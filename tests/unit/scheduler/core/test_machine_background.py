"""Background work: it has what other work leaves free, and is ended at once when that needs it."""

from __future__ import annotations

import pytest

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.dry_run.fork import fork
from stoker_scheduler.core.dry_run.plan import plan
from stoker_scheduler.core.model.queues import QueueSpec
from stoker_scheduler.core.model.requirements import InvalidDemandError, make_requirements
from stoker_scheduler.core.model.resources import UNIT
from tests.unit.scheduler.core_driver import Core, of


def in_background(core: Core, owner: str = "p_bg", **options: object) -> str:
    event = {n: options.pop(n) for n in ("count", "priority", "kind", "request_id") if n in options}
    requirements = make_requirements(options, background=True)  # type: ignore[arg-type]
    return core.ask(owner, requirements=requirements, preemptible=True, **event)


def stops(core: Core) -> list[str]:
    return [stop.lease_id for stop in of(cmd.StopLease, core.out)]


def end(core: Core, lease_id: str) -> None:
    core.feed(ev.WorkerExited(at_s=core.at_s, lease_id=lease_id))


def test_it_lives_on_the_idle_part_of_a_gpu_until_other_work_needs_it() -> None:
    core = Core({"GPU": 1})
    (busy,) = core.granted(core.ask("p_1", GPU=0.5)) or ()
    (background,) = core.granted(in_background(core, GPU=0.4)) or ()
    assert core.state.leases[background].gpus == {0: 4000}
    asked = core.ask("p_2", GPU=0.5, name="train")
    (stop,) = of(cmd.StopLease, core.out)
    assert stop.lease_id == background and stop.grace_s == core.state.policy.background_grace_s
    assert stop.reason == "preempted on node n_1 for train of job_1, which is no background work"
    again = in_background(core, GPU=0.4)
    end(core, background)
    assert core.granted(asked) and core.granted(again) is None
    core.release(busy)
    assert core.granted(again), "moved to where there is room"


def test_no_more_is_ended_than_is_needed_and_the_youngest_first() -> None:
    core = Core({"GPU": 2}, {"GPU": 2})
    held = [core.granted(in_background(core, GPU=1)) or () for _ in range(4)]
    core.wait(1)
    asked = core.ask("p_1", GPU=1)
    assert stops(core) == [*held[3]]
    core.wait(1)
    assert stops(core) == [*held[3]], "room is under way"
    end(core, held[3][0])
    assert core.granted(asked)


def test_a_gang_has_it_ended_on_all_the_nodes_that_it_takes() -> None:
    core = Core({"GPU": 2}, {"GPU": 2})
    held = [*(core.granted(in_background(core, count=4, GPU=1)) or ())]
    asked = core.group("STRICT_SPREAD", {"GPU": 1}, {"GPU": 1})
    nodes = [core.state.leases[lease_id].node_id for lease_id in stops(core)]
    assert sorted(nodes) == ["n_1", "n_2"]
    for lease_id in stops(core):
        end(core, lease_id)
    assert core.granted(asked)
    assert len([lease_id for lease_id in held if lease_id in core.state.leases]) == 2


def test_other_work_goes_first_whatever_the_age_and_priority_of_background_work() -> None:
    core = Core({"GPU": 1})
    (busy,) = core.granted(core.ask("p_1", GPU=1)) or ()
    old = in_background(core, GPU=1, priority=9)
    core.wait(60)
    young = core.ask("p_2", GPU=1)
    core.release(busy)
    assert core.granted(young) and core.granted(old) is None


def test_nothing_is_ended_or_reserved_for_it() -> None:
    core = Core({"GPU": 1})
    core.ask("p_1", GPU=1, preemptible=True)
    in_background(core, GPU=1, priority=9)
    in_background(core, owner="p_1", GPU=0.5)
    core.wait(20)
    assert not of(cmd.Preempt, core.out) and not stops(core) and not core.state.reserved


def test_its_own_kind_waits_for_it() -> None:
    core = Core({"GPU": 1})
    in_background(core, GPU=1)
    in_background(core, owner="p_2", GPU=1, priority=5)
    core.wait(10)
    assert not of(cmd.Preempt, core.out) and not stops(core)


def test_it_counts_for_no_share_and_no_quota() -> None:
    core = Core({"GPU": 4})
    limited = QueueSpec(name="default", limit={"GPU": UNIT})
    core.feed(ev.QueuesChanged(at_s=0.0, queues=(limited,)))
    assert len(core.granted(in_background(core, count=3, GPU=1)) or ()) == 3
    assert not core.state.usage
    assert core.granted(core.ask("p_1", GPU=1)), "the limit is free"
    core.feed(ev.QueuesChanged(at_s=0.0, queues=(QueueSpec(name="default", stopped=True),)))
    core.release(*list(core.state.leases))
    assert core.granted(in_background(core, GPU=1)) is None, "a stopped queue starts nothing"


def test_an_actor_may_be_background_work() -> None:
    core = Core({"GPU": 1})
    (actor,) = core.granted(in_background(core, "gcs", GPU=1, kind=ev.Kind.ACTOR)) or ()
    core.ask("p_1", GPU=1)
    assert stops(core) == [actor]


def test_a_plan_says_that_it_would_be_ended_and_ends_nothing() -> None:
    core = Core({"GPU": 1})
    (background,) = core.granted(in_background(core, GPU=1)) or ()
    request = ev.LeaseRequested(
        at_s=0.0,
        request_id="r_plan",
        owner_id="p_1",
        job_id="job_1",
        requirements=make_requirements({"GPU": 1}),
        class_key="c",
        count=1,
        deadline_s=9.0,
    )
    (planned,) = plan(fork(core.state), [request])
    assert [victim.lease_id for victim in planned.victims] == [background]
    assert not stops(core)


def test_in_a_placement_group_it_makes_no_sense() -> None:
    with pytest.raises(InvalidDemandError, match="has its bundle for itself"):
        make_requirements({"GPU": 1}, background=True, group_id="pg_1")


def test_it_is_ended_together_with_work_that_is_asked_for_its_place() -> None:
    """However long that takes, and whatever its own priority."""
    core = Core({"GPU": 2})
    (background,) = core.granted(in_background(core, GPU=1, priority=9)) or ()
    (plain,) = core.granted(core.ask("p_1", GPU=1)) or ()
    large = core.ask("p_2", GPU=2)
    core.wait(20)
    core.release(plain)
    core.wait(60)
    assert stops(core) == [background] and core.granted(large)


def test_it_is_ended_with_what_gives_way_to_a_priority_and_with_what_is_idle() -> None:
    for kind, priority in (("preemptible", 5), ("idle", 0)):
        core = Core({"GPU": 2})
        hidden = in_background(core, "gcs", GPU=1, priority=9, kind=ev.Kind.ACTOR)
        (background,) = core.granted(hidden) or ()
        (other,) = core.granted(core.ask("p_1", GPU=1, preemptible=kind == "preemptible")) or ()
        if kind == "idle":
            core.poll("p_1", other, idle=(other,))
        core.ask("p_2", GPU=2, priority=priority)
        core.wait(1)
        assert background in stops(core), kind
        asked = [lease_id for one in of(cmd.Preempt, core.out) for lease_id in one.lease_ids]
        assert other in asked, kind


def test_it_is_ended_while_it_waits_in_get_and_before_it_has_started() -> None:
    core = Core({"CPU": 1, "GPU": 1})
    (background,) = core.granted(in_background(core, CPU=1, GPU=1)) or ()
    core.feed(ev.LeaseBlocked(at_s=core.at_s, lease_id=background))
    core.ask("p_1", GPU=1)
    assert stops(core) == [background]
    core = Core({"GPU": 1}, slow=True)
    in_background(core, GPU=1)
    (starting,) = core.state.leases
    asked = core.ask("p_1", GPU=1)
    (order,) = of(cmd.ReleaseLease, core.out)
    assert order.lease_id == starting and order.kill and not stops(core)
    core.feed(ev.LeaseEnded(at_s=core.at_s, lease_id=starting))
    assert [one.request_id for one in of(cmd.StartWorker, core.out)][-1] == asked


def test_it_takes_no_idle_lease_and_none_of_the_rate_of_its_user() -> None:
    core = Core({"GPU": 1})
    (idle,) = core.granted(core.ask("p_1", GPU=1)) or ()
    core.poll("p_1", idle, idle=(idle,))
    in_background(core, GPU=1)
    assert not of(cmd.Preempt, core.out)
    core = Core({"GPU": 8})
    core.feed(ev.QueuesChanged(at_s=0.0, queues=(QueueSpec(name="default", rate_limit=0.01),)))
    assert core.granted(in_background(core, GPU=1)) and core.granted(in_background(core, GPU=1))
    assert core.granted(core.ask("p_1", GPU=1))


def test_others_are_before_it_in_the_queue() -> None:
    core = Core({"GPU": 1})
    core.ask("p_1", GPU=1)
    last = core.state.pending[in_background(core, GPU=1, priority=9)]
    first = core.state.pending[core.ask("p_2", GPU=1)]
    assert (core.state.queue.position(first), core.state.queue.position(last)) == (0, 1)
