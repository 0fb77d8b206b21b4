"""Who is stopped when memory runs short, and when a node takes no new work."""

from __future__ import annotations

from typing import Any

import pytest

from stoker_nodelet.core.memory import (
    Consumer,
    Disk,
    Loss,
    NodeMemory,
    Watermarks,
    choose,
    over_limit,
    pause_s,
)

GIB = 1 << 30
FULL = NodeMemory(97 * GIB, 100 * GIB)


def one(name: str, used_gib: float, **given: Any) -> Consumer:
    fields: dict[str, Any] = {"loss": Loss.TASK, "owner_id": "p_1", "since_s": 0.0}
    return Consumer(worker_id=name, used_bytes=int(used_gib * GIB), **{**fields, **given})


def test_whoever_uses_more_than_it_declared_is_stopped() -> None:
    greedy = one("greedy", 3, limit_bytes=2 * GIB)
    modest, free = one("modest", 2, limit_bytes=2 * GIB), one("free", 50)
    assert over_limit([modest, greedy, free]) == [greedy]


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (one("task", 5), one("actor", 50, loss=Loss.ACTOR)),
        (one("actor", 5, loss=Loss.ACTOR), one("with-state", 50, loss=Loss.STATE)),
        (one("with-state", 5, loss=Loss.STATE), one("driver", 50, loss=Loss.DRIVER)),
        (one("yields", 5, yields=True), one("task", 50, since_s=9.0)),
        (one("free", 5), one("declared", 50, since_s=9.0, limit_bytes=60 * GIB)),
        (one("newest", 5, since_s=9.0), one("oldest", 50)),
        (one("large", 50), one("too-little", 1.5, since_s=9.0)),
        (one("larger", 1.8), one("too-little", 1.5, since_s=9.0)),
        (one("task", 5), one("tiny", 0.5, since_s=9.0, yields=True)),
        (one("actor", 5, loss=Loss.ACTOR), one("tiny", 0.5, since_s=9.0)),
    ],
    ids=lambda of: of.worker_id,
)
def test_the_least_is_lost(first: Consumer, other: Consumer) -> None:
    for consumers in ([first, other], [other, first]):
        chosen = choose(consumers, FULL, 0.95)
        assert chosen is first


def test_an_owner_keeps_its_only_worker_while_another_has_several() -> None:
    single = one("single", 5, owner_id="p_2", since_s=9.0)
    several = [one("old", 5, since_s=1.0), one("new", 5, since_s=2.0)]
    assert choose([single, *several], FULL, 0.95) is several[1]
    assert choose([single, several[0]], FULL, 0.95) is single


def test_nobody_is_stopped_below_the_threshold_or_where_it_frees_next_to_nothing() -> None:
    assert choose([one("a", 50)], NodeMemory(94 * GIB, 100 * GIB), 0.95) is None
    assert choose([one("a", 0.5), one("b", 0.9)], FULL, 0.95) is None
    assert choose([], FULL, 0.95) is None


def test_the_node_is_measured_more_often_near_the_threshold() -> None:
    pauses = [
        pause_s(NodeMemory(used, 100), 0.95, 0.25, has_limits=False)
        for used in (20, 69, 71, 86, 92, 99)
    ]
    assert pauses == [1.0, 1.0, 0.25, 0.25, 0.05, 0.05]
    assert pause_s(NodeMemory(20, 100), 0.95, 0.25, has_limits=True) == 0.25


def test_memory_pressure_ends_below_where_it_began() -> None:
    marks = Watermarks(0.9, 0)
    seen = []
    for used in (80, 90, 88, 95, 86, 84, 88):
        changed = marks.see_memory(NodeMemory(used * GIB, 100 * GIB))
        seen.append((changed, bool(marks.memory)))
    ends = [(False, False), (True, True), *[(False, True)] * 3, (True, False), (False, False)]
    assert seen == ends
    marks.see_memory(NodeMemory(90 * GIB, 100 * GIB))
    assert marks.memory == (
        "90.0 GiB of 100.0 GiB of memory are in use (90%): it takes new work again below 85%"
    )
    assert not Watermarks(0.0, 0).see_memory(FULL)


def test_disk_pressure_is_of_any_disk_and_ends_with_twice_as_much_free() -> None:
    marks = Watermarks(0.0, GIB)
    large, small = Disk("/logs", 50 * GIB, 100 * GIB), Disk("/spill", GIB, 10 * GIB)
    assert not marks.see_disk([large, small]), "of a small one 5 % is enough"
    assert marks.see_disk([large, Disk("/spill", GIB // 4, 10 * GIB)])
    assert marks.disk == (
        "the disk of /spill has 256.0 MiB of 10.0 GiB free: it takes new work again with 1.0 GiB free"
    )
    assert not marks.see_disk([large, Disk("/spill", GIB // 2, 10 * GIB)])
    assert marks.disk
    assert marks.see_disk([large, small])
    assert not marks.disk
    assert not Watermarks(0.0, 0).see_disk([Disk("/", 0, GIB)])
