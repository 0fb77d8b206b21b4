"""The standing of a queue: used, borrowed, lent, who waits in which order, and the limits that hold them."""

from __future__ import annotations

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.queues import QueueSpec
from stoker_scheduler.core.model.resources import to_units
from stoker_scheduler.core.queueing.standing import standing
from tests.unit.scheduler.core_driver import Core


def two_teams() -> Core:
    """Team a has lent what b borrows."""
    core = Core({"CPU": 8})
    quota = to_units({"CPU": 4})
    parts = (
        QueueSpec(name="a", quota=quota),
        QueueSpec(name="b", quota=quota, limit=to_units({"CPU": 6})),
        QueueSpec(name="b.c", parent="b"),
    )
    core.feed(ev.QueuesChanged(at_s=0.0, queues=parts))
    core.ask("p_1", CPU=1, queue="a")
    core.ask("p_2", count=6, CPU=1, queue="b.c")
    return core


def test_what_one_borrows_the_other_has_lent() -> None:
    core = two_teams()
    a, b = standing(core.state, "a"), standing(core.state, "b")
    assert (a.used, a.borrowed, a.lent) == (to_units({"CPU": 1}), {}, to_units({"CPU": 2}))
    assert (b.used, b.borrowed, b.lent) == (to_units({"CPU": 6}), to_units({"CPU": 2}), {})
    assert a.text == "queue 'a' has 1 CPU; its quota is 4 CPU; it has lent 2 CPU; 0 requests wait"


def test_those_that_wait_are_in_the_queue_s_order_with_the_limit_that_holds_them() -> None:
    core = two_teams()
    later = core.ask("p_3", CPU=1, queue="b.c")
    first = core.ask("p_4", CPU=1, queue="b.c", priority=3)
    other = core.ask("p_5", CPU=8, queue="a")
    b = standing(core.state, "b")
    assert [pending.request_id for pending, _ in b.waiting] == [first, later]
    (hold,) = b.holds
    assert hold.queue == "b" and "limit of 6 CPU" in hold.text
    ((pending, none),) = standing(core.state, "a").waiting
    assert pending.request_id == other and none is None
