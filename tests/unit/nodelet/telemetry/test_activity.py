"""A node's newest entries, in pages."""

from __future__ import annotations

import time

from stoker_nodelet.telemetry import activity
from stoker_nodelet.telemetry.activity import ActivityLog
from stoker_wire.messages.node_api import ActivityKind
from stoker_wire.messages.queries import ActivityQuery


def test_pages_go_on_where_the_one_before_ended() -> None:
    log = ActivityLog()
    for number in range(25):
        log.add(ActivityKind.SPILL, 100.0, name=str(number), job_id=f"job_{number % 2}")
    cursor, names = "", []
    while True:
        page = log.page(ActivityQuery(job_id="job_1", limit=5, cursor=cursor))
        names += [one.name for one in page.items]
        if not (cursor := page.next_cursor):
            break
    assert names == [str(number) for number in range(1, 25, 2)]


def test_the_oldest_leave_and_a_cursor_stays_right() -> None:
    log = ActivityLog()
    for number in range(activity.MAX_ENTRIES + 10):
        log.add(ActivityKind.TRANSFER, 100.0, name=str(number))
    first = log.page(ActivityQuery(limit=3))
    assert [one.name for one in first.items] == ["10", "11", "12"]
    assert log.page(ActivityQuery(limit=1, cursor=first.next_cursor)).items[0].name == "13"
    assert log.page(ActivityQuery(limit=1, cursor="3")).items[0].name == "10"


def test_a_window_has_what_was_under_way() -> None:
    log, now_s = ActivityLog(), time.time()
    log.add(ActivityKind.LEASE, now_s - 50, name="long")
    assert log.page(ActivityQuery(since_s=now_s - 30, until_s=now_s - 20)).items
    assert not log.page(ActivityQuery(until_s=now_s - 60)).items
    assert not log.page(ActivityQuery(since_s=now_s + 3600)).items


def test_gpus_are_entered_when_their_number_changes() -> None:
    log = ActivityLog()
    for amount in (0, 1, 1, 2.5, 0):
        log.gpus(amount)
    assert [one.amount for one in log.page(ActivityQuery()).items] == [1, 2.5, 0]
