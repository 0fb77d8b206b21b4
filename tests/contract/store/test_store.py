"""One contract for every store: memory (the specification), SQLite in memory and on disk, PostgreSQL."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from stoker_gcs.state import schema
from stoker_gcs.store.changes import (
    Append,
    Change,
    Delete,
    Expired,
    Insert,
    Prefix,
    Unexpired,
    Update,
    Upsert,
    WriteConflict,
)
from stoker_gcs.store.group_commit import GroupCommitWriter
from stoker_gcs.store.opening import open_store
from stoker_gcs.store.rows import task_of
from stoker_gcs.store.statements import distinct, select
from stoker_wire.data.spool import row_of
from stoker_wire.messages.work import TaskRecord, TaskState
from stoker_wire.process.background import Background
from tests.contract.gcs_support import migrate

if TYPE_CHECKING:
    from stoker_gcs.store.changes import Condition
    from stoker_gcs.store.protocol import Store
    from stoker_wire.data.spool import TaskRow


def key(
    name: str, value: bytes = b"v", namespace: str = "ns"
) -> dict[str, str | int | float | bytes | None]:
    return {
        "namespace": namespace,
        "key": name,
        "nbytes": len(value),
        "revision": 0,
        "value": value,
        "expires_at_s": None,
    }


def told(subject: str, kind: str = "kv.put") -> Append:
    return Append(kind, subject, b"\x81\xa1a\x01", 5.0)


def a_task(task_id: str = "t_1", state: TaskState = TaskState.RUNNING, **more: object) -> TaskRow:
    given: dict[str, object] = {"job_id": "job_1", "name": "f", **more}
    return row_of(TaskRecord(task_id=task_id, attempt=0, state=state, **given))  # type: ignore[arg-type]


async def test_a_row_and_its_event_are_committed_together(store: Store) -> None:
    [events] = await store.commit([Change((Insert(schema.KV, key("a")),), (told("ns/a"),))])
    assert not isinstance(events, WriteConflict)
    assert events[0].payload == {"a": 1}
    row = await store.get(schema.KV, {"namespace": "ns", "key": "a"})
    assert row is not None and bytes(row["value"]) == b"v"
    assert await store.events(0) == list(events)
    assert await store.bounds() == (0, events[0].seq)


async def test_a_clash_undoes_its_change_whole_and_leaves_the_others(store: Store) -> None:
    await store.commit([Change((Insert(schema.KV, key("taken")),))])
    results = await store.commit(
        [
            Change((Insert(schema.KV, key("before")),), (told("before"),)),
            Change(
                (Insert(schema.KV, key("undone")), Insert(schema.KV, key("taken"))), (told("no"),)
            ),
            Change((Insert(schema.KV, key("after")),), (told("after"),)),
        ]
    )
    assert isinstance(results[1], WriteConflict)
    assert results[1].table == "kv"
    names = [row["key"] for row in await store.select(schema.KV)]
    assert names == ["after", "before", "taken"]
    assert [event.subject for event in await store.events(0)] == ["before", "after"]


@pytest.mark.parametrize("make", [Insert, Upsert])
async def test_a_row_is_stamped_with_the_number_of_its_last_event(
    store: Store, make: type[Insert | Upsert]
) -> None:
    [before] = await store.commit([Change((), (told("first"),))])
    two = Change((make(schema.KV, key("a"), stamp="revision"),), (told("a"), told("ns/a")))
    change = Update(schema.KV, {"namespace": "ns", "key": "a"}, {"value": b"w"}, stamp="revision")
    stale = replace(change, expect={"nbytes": 99})
    for made in (two, Change((change,), (told("ns/a"),))):
        results = await store.commit([Change((stale,), (told("no"),)), made])
        assert isinstance(results[0], WriteConflict)
        events = results[1]
        assert not isinstance(events, WriteConflict) and not isinstance(before, WriteConflict)
        assert events[-1].seq > before[-1].seq
        row = await store.get(schema.KV, {"namespace": "ns", "key": "a"})
        assert row is not None and row["revision"] == events[-1].seq
    assert [event.subject for event in await store.events(0)] == ["first", "a", "ns/a", "ns/a"]


async def test_times_that_are_over_and_those_that_are_not(store: Store) -> None:
    times = {"a": None, "b": 1.0, "c": 2.0, "d": 3.0}
    rows = [{**key(name), "expires_at_s": at_s} for name, at_s in times.items()]
    await store.commit([Change(tuple(Insert(schema.KV, row) for row in rows))])

    async def found(condition: Condition) -> str:
        rows = await store.select(schema.KV, {"expires_at_s": condition}, columns=("key",))
        assert await store.count(schema.KV, {"expires_at_s": condition}) == len(rows)
        return "".join(row["key"] for row in rows)

    some = await store.select(schema.KV, {"expires_at_s": Expired(2.0)}, limit=1, any_order=True)
    assert len(some) == 1 and some[0]["key"] in "bc"
    assert await found(Expired(2.0)) == "bc"
    assert await found(Unexpired(2.0)) == "ad"
    await store.commit([Change((Delete(schema.KV, {"expires_at_s": Expired(2.0)}),))])
    assert await found(Unexpired(0.0)) == "ad"


async def test_an_update_is_fenced_by_what_it_expects(store: Store) -> None:
    leader = {"name": "s", "holder": "a", "url": "u", "epoch": 1, "expires_at_s": 1.5}
    await store.commit([Change((Insert(schema.LEADERS, leader),))])
    stale = Update(schema.LEADERS, {"name": "s"}, {"holder": "b"}, {"epoch": 0})
    right = Update(
        schema.LEADERS,
        {"name": "s"},
        {"holder": "c", "epoch": 2},
        {"epoch": 1, "expires_at_s": 1.5},
    )
    lenient = Update(schema.LEADERS, {"name": "no"}, {"holder": "d"}, must_exist=False)
    results = await store.commit([Change((stale,)), Change((right,)), Change((lenient,))])
    assert [isinstance(result, WriteConflict) for result in results] == [True, False, False]
    row = await store.get(schema.LEADERS, {"name": "s"})
    assert row is not None and (row["holder"], row["epoch"]) == ("c", 2)


async def test_a_unique_name_is_taken_by_one_living_row_only(store: Store) -> None:
    def actor(actor_id: str, live_name: str | None) -> Insert:
        values = {
            **dict.fromkeys(schema.ACTORS.names, ""),
            "actor_id": actor_id,
            "live_name": live_name,
            "incarnation": 0,
            "version": 1,
            "record": b"",
            "spec": b"",
        }
        return Insert(schema.ACTORS, values)

    first, second = await store.commit(
        [Change((actor("a_1", "ns/x"),)), Change((actor("a_2", "ns/x"),))]
    )
    assert not isinstance(first, WriteConflict) and isinstance(second, WriteConflict)
    free = Update(schema.ACTORS, {"actor_id": "a_1"}, {"live_name": None})
    results = await store.commit([Change((free,)), Change((actor("a_3", "ns/x"),))])
    assert not any(isinstance(result, WriteConflict) for result in results)
    unnamed = await store.commit([Change((actor("a_4", None),)), Change((actor("a_5", None),))])
    assert not any(isinstance(result, WriteConflict) for result in unnamed)


async def test_no_character_in_a_name_stops_a_store(store: Store) -> None:
    [events] = await store.commit([Change((Insert(schema.KV, key("a\0b")),), (told("ns/a\0b"),))])
    assert not isinstance(events, WriteConflict)
    assert await store.get(schema.KV, {"namespace": "ns", "key": "a\0b"}) is not None
    await store.put_tasks([a_task("t_1", node_id="n\0"), a_task("t_2")])
    assert len(await store.select(schema.TASKS)) == 2


async def test_delete_and_upsert(store: Store) -> None:
    await store.commit([Change((Upsert(schema.KV, key("a")), Upsert(schema.KV, key("b"))))])
    await store.commit([Change((Upsert(schema.KV, key("a", b"new")),))])
    row = await store.get(schema.KV, {"namespace": "ns", "key": "a"})
    assert row is not None and bytes(row["value"]) == b"new"
    gone = Delete(schema.KV, {"namespace": "ns", "key": "a"}, must_exist=True)
    first, again = await store.commit([Change((gone,)), Change((gone,))])
    assert not isinstance(first, WriteConflict) and isinstance(again, WriteConflict)
    await store.commit([Change((Delete(schema.KV, {"namespace": "ns"}),))])
    assert await store.select(schema.KV) == []


async def test_selects_filter_and_page_in_key_order(store: Store) -> None:
    names = [f"k{i:02}" for i in range(10)] + ["k_%", "x"]
    await store.commit([Change(tuple(Insert(schema.KV, key(name)) for name in names))])
    await store.commit([Change((Insert(schema.KV, key("other", namespace="zz")),))])
    found: list[str] = []
    after: list[str | int] = []
    while True:
        rows = await store.select(
            schema.KV, {"namespace": "ns", "key": Prefix("k")}, after=after, limit=4
        )
        if not rows:
            break
        found += [row["key"] for row in rows]
        after = [rows[-1]["namespace"], rows[-1]["key"]]
    assert found == sorted(names)[: len(names) - 1]
    some = await store.select(schema.KV, {"key": ("x", "other", "missing")}, columns=("key",))
    assert some == [{"key": "x"}, {"key": "other"}]
    assert await store.select(schema.KV, {"key": Prefix("k_")}, columns=("key",)) == [
        {"key": "k_%"}
    ]
    assert await store.select(schema.KV, {"key": ()}) == []


async def test_rows_come_in_the_order_of_their_arrival_whatever_their_keys(store: Store) -> None:
    for name in ("t_b", "t_c", "t_a"):
        await store.put_tasks([a_task(name)])
    await store.put_tasks([a_task("t_b", TaskState.FINISHED), a_task("t_0")])
    newest = [
        row["task_id"] for row in await store.select(schema.TASKS, arrival=True, descending=True)
    ]
    assert newest == ["t_0", "t_a", "t_c", "t_b"], "a change of a row does not move it"
    found: list[str] = []
    after: list[str | int] = []
    while rows := await store.select(
        schema.TASKS, {"job_id": "job_1"}, after=after, limit=1, arrival=True, descending=True,
        columns=("task_id",),
    ):  # fmt: skip
        found.append(rows[0]["task_id"])
        after = [rows[0][schema.ARRIVAL]]
        await store.put_tasks([a_task(f"t_z{len(found)}")])  # what comes now is not on a later page
    assert found == newest
    back = await store.select(schema.TASKS, {"state": "FINISHED"}, descending=True)
    assert [row["task_id"] for row in back] == ["t_b"]
    assert schema.ARRIVAL not in back[0]


async def test_rows_are_counted_up_to_a_bound(store: Store) -> None:
    assert await store.count(schema.TASKS) == 0
    await store.put_tasks([a_task(f"t_{i}") for i in range(7)] + [a_task("t_7", TaskState.FAILED)])
    assert await store.count(schema.TASKS) == 8
    assert await store.count(schema.TASKS, {"state": "FAILED"}) == 1
    assert await store.count(schema.TASKS, {"state": ("FAILED", "RUNNING")}, most=5) == 5


async def test_values_are_found_once_and_deletions_are_bounded(store: Store) -> None:
    await store.put_tasks([a_task(f"t_{i:02}", job_id=f"job_{i % 3}") for i in range(30)])
    assert set(await store.distinct(schema.TASKS, "job_id")) == {"job_0", "job_1", "job_2"}
    assert await store.distinct(schema.TASKS, "job_id", {"state": "FAILED"}) == []
    of_two = {"job_id": ("job_0", "job_1")}
    await store.commit([Change((Delete(schema.TASKS, of_two, most=15),))])
    assert await store.count(schema.TASKS, of_two) == 5
    await store.commit([Change((Delete(schema.TASKS, of_two, most=15),))])
    assert (
        await store.count(schema.TASKS)
        == await store.count(schema.TASKS, {"job_id": "job_2"})
        == 10
    )
    again = Change((Upsert(schema.DELETED_JOBS, {"job_id": "job_0"}),))
    assert await store.commit([again, again]) == [(), ()], "a row that is all key"


async def test_ids_are_found_by_their_beginning(store: Store) -> None:
    names = ["t_a", "t_ab", "t_a_b", "t_a-b", "t_b", "t_é", "t_A", "t_\U0010ffff", "t_\ud7ff", "u"]
    await store.put_tasks([a_task(name) for name in names])

    async def found(prefix: str) -> set[str]:
        return {
            row["task_id"] for row in await store.select(schema.TASKS, {"task_id": Prefix(prefix)})
        }

    for prefix in ("", "t", "t_", "t_a", "t_a_", "t_a-b", "t_\U0010ffff", "t_\ud7ff", "t_é", "x"):
        assert await found(prefix) == {name for name in names if name.startswith(prefix)}, prefix
    await store.commit([Change(events=(told("w_1"), told("w_2"), told("x_1")))])
    rows = await store.select(schema.EVENTS, {"subject": Prefix("w_")}, columns=("subject",))
    assert [row["subject"] for row in rows] == ["w_1", "w_2"]


def test_lists_and_prefixes_are_served_by_an_index() -> None:
    connection = sqlite3.connect(":memory:")
    for statement in schema.sqlite_ddl():
        connection.execute(statement)

    def plan(table: schema.Table, where: dict[str, Condition], **order: bool) -> str:
        statement, parameters = select(table, where, (), 10, (), **order)
        found = connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
        return "; ".join(row[3] for row in found)

    newest = {"arrival": True, "descending": True}
    assert plan(schema.TASKS, {}, **newest) == "SCAN tasks"
    of_job = plan(schema.TASKS, {"job_id": "job_1", "state": "FAILED"}, **newest)
    assert of_job == "SEARCH tasks USING INDEX ix_tasks_state_job_id (state=? AND job_id=?)"
    newest_of_job = plan(schema.TASKS, {"job_id": "job_1"}, **newest)
    assert newest_of_job == "SEARCH tasks USING INDEX ix_tasks_job_id (job_id=?)", "no sorting"
    statement, parameters = distinct(schema.TASKS, "job_id", {"state": ("QUEUED", "RUNNING")})
    (of_open,) = connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters).fetchall()[:1]
    assert "COVERING INDEX ix_tasks_state_job_id (state=?)" in of_open[3], of_open[3]
    for table in (schema.TASKS, schema.JOBS, schema.ACTORS, schema.NODES):
        searched = plan(table, {table.key[0]: Prefix("t_1")})
        assert searched.startswith(f"SEARCH {table.name} USING INDEX"), searched
        assert "TEMP B-TREE" not in searched
    of_keys = {"namespace": "ns", "key": Prefix("k"), "expires_at_s": Unexpired(1.0)}
    listed = plan(schema.KV, of_keys)
    assert listed.startswith("SEARCH kv USING INDEX sqlite_autoindex_kv_1"), listed
    assert "TEMP B-TREE" not in listed
    for table in (schema.KV, schema.KV_REQUESTS):
        swept = plan(table, {"expires_at_s": Expired(1.0)}, any_order=True)
        index = f"ix_{table.name}_expires_at_s (expires_at_s<?)"
        assert swept == f"SEARCH {table.name} USING INDEX {index}"
    connection.close()


async def test_postgres_serves_them_by_an_index_too(postgres_url: str) -> None:
    await migrate(postgres_url)
    engine = create_async_engine(postgres_url)
    async with engine.connect() as connection:
        await connection.exec_driver_sql("SET enable_seqscan = off")

        async def plan(where: dict[str, Condition], **order: bool) -> str:
            statement, parameters = select(schema.TASKS, where, (), 10, (), **order)
            found = await connection.execute(text(f"EXPLAIN {statement}"), parameters)
            return "\n".join(row[0] for row in found)

        prefix = await plan({"task_id": Prefix("t_1")})
        newest = await plan({}, arrival=True, descending=True)
    await engine.dispose()
    assert "tasks_pkey" in prefix and "Index Cond: ((task_id >=" in prefix, prefix
    assert "Index Scan Backward using ix_tasks_rowid" in newest and "Sort" not in newest, newest


async def test_events_are_numbered_in_order_and_can_be_forgotten(store: Store) -> None:
    for i in range(5):
        await store.commit([Change(events=(told(f"s{i}"),))])
    events = await store.events(0)
    seqs = [event.seq for event in events]
    assert seqs == sorted(set(seqs))
    assert [event.subject for event in await store.events(seqs[1], limit=2)] == ["s2", "s3"]
    assert [event.subject for event in await store.events_back(seqs[3], limit=2)] == ["s2", "s1"]
    await store.compact(seqs[2])
    assert await store.bounds() == (seqs[2], seqs[4])
    assert [event.subject for event in await store.events(0)] == ["s3", "s4"]
    await store.compact(seqs[4] + 100)
    assert await store.bounds() == (seqs[4], seqs[4])
    [later] = await store.commit([Change(events=(told("later"),))])
    assert not isinstance(later, WriteConflict) and later[0].seq > seqs[4]


async def test_task_reports_merge_in_any_order(store: Store) -> None:
    done = a_task(state=TaskState.FINISHED, ended_at_s=3.0)
    await store.put_tasks([done, a_task("t_2", TaskState.QUEUED)])
    await store.put_tasks([a_task(node_id="n_1", started_at_s=2.0)])
    await store.put_tasks([a_task("t_2", TaskState.RUNNING), a_task("t_2", TaskState.QUEUED)])
    rows = await store.select(schema.TASKS, {"job_id": "job_1"})
    first, second = (task_of(row) for row in rows)
    assert (first.state, first.node_id, first.started_at_s) == (TaskState.FINISHED, "n_1", 2.0)
    assert second.state is TaskState.RUNNING
    assert await store.select(schema.TASKS, {"state": "QUEUED"}) == []
    await store.put_tasks([done, a_task("t_3"), a_task("t_2", TaskState.FAILED)])
    states = [row["state"] for row in await store.select(schema.TASKS)]
    assert states == ["FINISHED", "FAILED", "RUNNING"]


async def test_replicas_that_report_the_same_attempts_at_once_lose_none(postgres_url: str) -> None:
    await migrate(postgres_url)
    one, other = open_store(postgres_url), open_store(postgres_url)
    for store in (one, other):
        await store.start()
    for turn in range(5):
        names = [f"t_{turn}_{i}" for i in range(200)]
        await asyncio.gather(
            one.put_tasks([a_task(name, node_id="n_1") for name in names[:150]]),
            other.put_tasks([a_task(name, TaskState.FINISHED) for name in names[50:]]),
        )
    rows = [task_of(row) for row in await one.select(schema.TASKS)]
    for store in (one, other):
        await store.stop()
    assert len(rows) == 5 * 200
    assert sum(row.state is TaskState.FINISHED for row in rows) == 5 * 150
    assert sum(row.state is TaskState.FINISHED and row.node_id == "n_1" for row in rows) == 5 * 100


async def test_concurrent_callers_share_transactions_and_each_gets_its_own_result(
    store: Store,
) -> None:
    seen: list[int] = []
    writer = GroupCommitWriter(store, lambda events: seen.extend(event.seq for event in events))
    async with Background("test") as background:
        background.spawn(writer.changes.run(), name="changes")
        background.spawn(writer.tasks.run(), name="tasks")

        async def one(i: int) -> str:
            change = Change((Insert(schema.KV, key(f"k{i % 80}")),), (told(f"s{i}"),))
            try:
                events = await writer.apply(change)
            except WriteConflict:
                return "conflict"
            return events[0].subject

        results = await asyncio.gather(*[one(i) for i in range(100)])
        await asyncio.gather(*[writer.put_tasks((a_task(f"t_{i}"),)) for i in range(50)])
    assert results == [f"s{i}" for i in range(80)] + ["conflict"] * 20
    assert writer.changes.batches < 20
    assert writer.tasks.batches < 20
    assert len(seen) == 80 and seen == sorted(seen)
    assert len(await store.select(schema.TASKS)) == 50
