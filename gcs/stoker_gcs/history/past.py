"""The state of the cluster at an earlier time: the newest snapshot before it, and the events from there on.

Tasks are in no event: those of a time are the attempts of the task history, by when they were submitted,
began and ended, as far back as retention has removed none.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from stoker_gcs.history.fold import TABLES, ClusterState, fold
from stoker_gcs.history.moments import ROUNDED_S, Moment, iso, parse
from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.registry.groups.rules import GROUPS
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.registry.nodes.rules import NODES
from stoker_gcs.registry.objects.rules import OBJECTS
from stoker_gcs.registry.queues.rules import QUEUES
from stoker_gcs.registry.schedules.rules import SCHEDULES
from stoker_gcs.state import schema
from stoker_gcs.state.removed_tasks import whole_since
from stoker_gcs.store.rows import task_of, times_of
from stoker_wire.errors import BadRequestError, CompactedError
from stoker_wire.http.paging import bad_cursor
from stoker_wire.messages.events import PastKind, PastState
from stoker_wire.messages.work import TaskRecord, TaskState
from stoker_wire.suggestions import suggestion

if TYPE_CHECKING:
    from stoker_gcs.history.snapshots import Head, Snapshots
    from stoker_gcs.state.records import RecordTable, StateStore
    from stoker_gcs.store.changes import Condition, Row
    from stoker_gcs.store.rows import TaskTimes
    from stoker_wire.messages.events import StateQuery

_RECORDS: dict[str, RecordTable[Any]] = {
    "nodes": NODES,
    "jobs": JOBS,
    "actors": ACTORS,
    "placement_groups": GROUPS,
    "detached_objects": OBJECTS,
    "queues": QUEUES,
    "schedules": SCHEDULES,
}
_BATCH = 2000
_PER_PAGE = 50_000
"""Attempts that one page of tasks reads at most: it may be short, or empty, with a next cursor."""
_COUNTED = ("state", "node_id", "record")
_NOT_BEGUN = (TaskState.WAITING.value, TaskState.QUEUED.value)
STOPPED, RUNNING, PAUSED, ACTIVE = "STOPPED", "RUNNING", "PAUSED", "ACTIVE"
"""The states of queues, and of schedules, in counts and filters."""


class _Shown(msgspec.Struct, frozen=True):
    """The members of records by which they are counted and filtered."""

    state: str = ""
    job_id: str = ""
    node_id: str = ""
    placements: dict[int, dict[str, Any]] = {}


_shown = msgspec.msgpack.Decoder(_Shown)


class TimeMachine:
    """The state of the cluster at any time whose events are kept."""

    def __init__(self, state: StateStore, snapshots: Snapshots) -> None:
        self._state = state
        self._snapshots = snapshots

    async def at(self, query: StateQuery) -> PastState:
        """Return the state at a moment; CompactedError names the oldest that is left."""
        compacted, last = await self._state.store.bounds()
        now_s, numbering = self._state.now(), self._state.log.numbering
        moment = parse(query.at, last=last, now_s=now_s, numbering=numbering)
        heads = [head for head in await self._snapshots.heads() if head.seq >= compacted]
        since_s = await whole_since(self._state.store)
        tasks_since_s = since_s if query.kind is PastKind.TASKS else -math.inf
        state = await self.rebuild(
            moment, heads, compacted=compacted, last=last, tasks_since_s=tasks_since_s
        )
        at_s = moment.at_s if moment.at_s is not None else state.at_s
        reply: dict[str, Any] = {
            "seq": state.seq,
            "at_s": at_s,
            "oldest_seq": 0 if not compacted or not heads else heads[0].seq,
            "oldest_at_s": heads[0].at_s if compacted and heads else None,
            "counts": {},
        }
        if query.kind is None:
            reply |= await _pages(state, query)
        elif query.kind is not PastKind.TASKS:
            reply |= _page(state, query.kind.value, query)
        if query.count or query.kind is PastKind.TASKS:
            reply |= await self._tasks_at(query, at_s, since_s, reply)
            since_s = await whole_since(self._state.store)
        if since_s != -math.inf:
            reply["tasks_since_s"] = since_s
        return PastState(**reply)

    async def rebuild(
        self,
        moment: Moment,
        heads: list[Head],
        *,
        compacted: int,
        last: int,
        tasks_since_s: float = -math.inf,
    ) -> ClusterState:
        """Return the state at a moment, by the newest of these snapshots that is not after it."""
        state = await self._base(moment, heads)
        if state is None:
            if compacted:
                raise _gone(moment, heads, compacted, tasks_since_s)
            state = ClusterState()
        base = state.seq
        async for events in self._snapshots.events(
            base, last if moment.seq is None else moment.seq
        ):
            if moment.at_s is None:
                state = fold(state, events)
                continue
            later = (i for i, one in enumerate(events) if one.at_s > moment.at_s)
            count = next(later, len(events))
            state = fold(state, events[:count])
            if count < len(events):
                break
        now_compacted, _ = await self._state.store.bounds()
        if base < now_compacted:
            left = [head for head in heads if head.seq >= now_compacted]
            raise _gone(moment, left, now_compacted, tasks_since_s)
        return state

    async def _base(self, moment: Moment, heads: list[Head]) -> ClusterState | None:
        """Return the newest snapshot that is not after a moment; another replica may remove one meanwhile."""
        for head in reversed(heads):
            if _is_reached(head, moment):
                state = await self._snapshots.load(head)
                if state is not None:
                    return state
        return None

    async def _tasks_at(
        self, query: StateQuery, at_s: float, since_s: float, reply: dict[str, Any]
    ) -> dict[str, Any]:
        """Return a page of tasks, and counts, where they are whole; CompactedError for a page of before."""
        is_page = query.kind is PastKind.TASKS
        found: dict[str, Any] = {}
        if not query.at:
            # They may have ended after the newest event; and what was removed has ended by now.
            at_s, since_s = self._state.now(), -math.inf
        if at_s >= since_s:
            if is_page:
                found = {"at_s": at_s, **await self._page_of_tasks(query, at_s)}
            if query.count:
                tasks = await self._count_tasks(query, at_s)
                found["counts"] = {**reply["counts"], "tasks": tasks}
            if query.at:
                since_s = await whole_since(self._state.store)
        if at_s >= since_s:
            return found
        if is_page:
            raise _tasks_gone(at_s, since_s, max(since_s, reply["oldest_at_s"] or since_s))
        return {}

    async def _page_of_tasks(self, query: StateQuery, at_s: float) -> dict[str, Any]:
        cursor = query.cursor
        if cursor and not (cursor.isascii() and cursor.isdecimal() and len(cursor) < 19):
            raise bad_cursor(cursor)
        states = _states(query, [one.value for one in TaskState])
        items: list[TaskRecord] = []
        after: tuple[int, ...] = (int(cursor),) if cursor else ()
        read = 0
        while read < _PER_PAGE:
            rows = await self._tasks(query, after, _BATCH)
            for row in rows:
                after = (row[schema.ARRIVAL],)
                state = _state_at(row["state"], times_of(row), at_s)
                if not _is_task_asked_for(row, state, query) or (states and state not in states):
                    continue
                record = task_at(task_of(row), at_s)
                if record is not None:
                    items.append(record)
                if len(items) == query.limit:
                    return {"tasks": tuple(items), "next_cursor": str(after[0])}
            read += len(rows)
            if len(rows) < _BATCH:
                return {"tasks": tuple(items)}
        return {"tasks": tuple(items), "next_cursor": str(after[0])}

    async def _count_tasks(self, query: StateQuery, at_s: float) -> dict[str, int]:
        counts: Counter[str] = Counter()
        after: tuple[int, ...] = ()
        while rows := await self._tasks(query, after, _BATCH, _COUNTED):
            after = (rows[-1][schema.ARRIVAL],)
            for row in rows:
                state = _state_at(row["state"], times_of(row), at_s)
                if _is_task_asked_for(row, state, query):
                    counts[state] += 1
            await asyncio.sleep(0)
        return dict(counts)

    async def _tasks(
        self,
        query: StateQuery,
        after: tuple[int, ...],
        limit: int,
        columns: tuple[str, ...] = (),
    ) -> list[dict[str, Any]]:
        where: dict[str, Condition] = {"job_id": query.job_id} if query.job_id else {}
        return await self._state.store.select(
            schema.TASKS, where, after=after, limit=limit, columns=columns, arrival=True
        )


def task_at(record: TaskRecord, at_s: float) -> TaskRecord | None:
    """Return an attempt as it was at a time; None if it was not there yet."""
    state = _state_at(record.state.value, record, at_s)
    if not state:
        return None
    if record.ended_at_s is not None and record.ended_at_s <= at_s:
        return record
    then = msgspec.structs.replace(
        record, state=TaskState(state), ended_at_s=None, error=None, result_nbytes=0
    )
    if state == TaskState.RUNNING:
        return then
    return msgspec.structs.replace(then, started_at_s=None, node_id="", worker_id="")


def _state_at(state: str, times: TaskTimes | TaskRecord, at_s: float) -> str:
    """Return the state at a time of an attempt that is in ``state`` now; empty if it was not there yet."""
    submitted_s, started_s, ended_s = times.submitted_at_s, times.started_at_s, times.ended_at_s
    begun_s = started_s if submitted_s is None else submitted_s
    if begun_s is None:
        begun_s = ended_s or 0.0
    elif started_s is not None and started_s < begun_s:
        begun_s = started_s
    if begun_s > at_s:
        return ""
    if ended_s is not None and ended_s <= at_s:
        return state
    if started_s is not None and started_s <= at_s:
        return TaskState.RUNNING.value
    # Which of the two it was is known of those alone that have not begun since.
    waits = state == TaskState.WAITING
    return TaskState.WAITING.value if waits else TaskState.QUEUED.value


def _is_task_asked_for(row: Row, state: str, query: StateQuery) -> bool:
    """Return whether an attempt was there, and on the node of the query: only one that began is on one."""
    if not query.node_id or not state:
        return state != ""
    return row["node_id"] == query.node_id and state not in _NOT_BEGUN


async def _pages(state: ClusterState, query: StateQuery) -> dict[str, Any]:
    """Return the first page of each table and all counts."""
    reply: dict[str, Any] = {}
    counts: dict[str, dict[str, int]] = {}
    more = []
    for name in TABLES:
        shown = _page(state, name, msgspec.structs.replace(query, cursor=""))
        reply[name] = shown[name]
        counts |= shown["counts"]
        more += [name] if shown["next_cursor"] else []
        await asyncio.sleep(0)
    return {**reply, "counts": counts, "more": tuple(more)}


def _page(state: ClusterState, name: str, query: StateQuery) -> dict[str, Any]:
    """Return counts of one table, and the page of its records behind the cursor, by their keys."""
    records, table = _RECORDS[name], state.tables[name]
    counts: Counter[str] = Counter()
    items: list[Any] = []
    cursor, following = "", ""
    states = [part for part in query.state.split(",") if part]
    for key in sorted(table):
        shown = _facts(name, table[key])
        if not _is_asked_for(shown, query):
            continue
        counts[shown.state] += 1
        if (states and shown.state not in states) or key <= query.cursor:
            continue
        if len(items) < query.limit:
            items.append(records.decode({"record": table[key]}).record)
            cursor = key
        else:
            following = cursor
    return {name: tuple(items), "counts": {name: dict(counts)}, "next_cursor": following}


def _facts(name: str, record: bytes) -> _Shown:
    if name == "queues":
        return _Shown(
            state=STOPPED if QUEUES.decode({"record": record}).record.stopped else RUNNING
        )
    if name == "schedules":
        return _Shown(
            state=PAUSED if SCHEDULES.decode({"record": record}).record.paused else ACTIVE
        )
    return _shown.decode(record)


def _is_asked_for(shown: _Shown, query: StateQuery) -> bool:
    nodes = {shown.node_id, *(one.get("node_id") for one in shown.placements.values())}
    return query.job_id in ("", shown.job_id) and (not query.node_id or query.node_id in nodes)


def _states(query: StateQuery, known: list[str]) -> set[str]:
    states = {part for part in query.state.split(",") if part}
    for name in states.difference(known):
        raise BadRequestError(f"state: {name!r} is none\n{suggestion(name, known)}", field="state")
    return states


def _is_reached(head: Head, moment: Moment) -> bool:
    if moment.seq is not None:
        return head.seq <= moment.seq
    return moment.at_s is not None and head.at_s <= moment.at_s


def _gone(
    moment: Moment, heads: list[Head], compacted: int, tasks_since_s: float
) -> CompactedError:
    what = f"after event {moment.seq}" if moment.at_s is None else f"at {iso(moment.at_s)}"
    if not heads:
        return CompactedError(
            f"the state {what} is gone: events up to {compacted} are not kept\n"
            "the first snapshot after them is taken in a few seconds: try again",
            extra={"compacted": compacted},
        )
    oldest = heads[0]
    at_s = max(oldest.at_s, tasks_since_s)
    by_number = f"at={oldest.seq}, or " if at_s == oldest.at_s else ""
    return CompactedError(
        f"the state {what} is gone: events up to {compacted} are not kept\n"
        f"the oldest that is left is {by_number}at={iso(at_s + ROUNDED_S)}",
        extra={"oldest_seq": oldest.seq, "oldest_at_s": at_s},
    )


def _tasks_gone(at_s: float, since_s: float, oldest_at_s: float) -> CompactedError:
    return CompactedError(
        f"the tasks at {iso(at_s)} are gone: some that had ended by {iso(since_s)} are not kept\n"
        f"the oldest that are left are those of at={iso(oldest_at_s + ROUNDED_S)}",
        extra={"oldest_at_s": oldest_at_s},
    )
