"""Stories: the events of one thing and of what it touched, in order, with their causes.

What a thing touched is what its records name: the workers and nodes on which it was, the job and the owner
that it belongs to, what was lost with it. Of these only what happened while the thing was there belongs to
its story, and what ended because of it right after.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from stoker_gcs.history.sentences import line_of, lines_of_attempt
from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.registry.groups.rules import GROUPS
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.registry.nodes.rules import NODES
from stoker_gcs.state import schema
from stoker_gcs.store.changes import Expired
from stoker_gcs.store.rows import event_of, task_of
from stoker_wire import ids
from stoker_wire.errors import NotFoundError
from stoker_wire.messages.cluster import Node
from stoker_wire.messages.events import EventKind, Story, payload_as
from stoker_wire.messages.work import Actor, Job, TaskState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stoker_gcs.registry.task_history import TaskHistory
    from stoker_gcs.state.records import StateStore
    from stoker_gcs.state.schema import Table
    from stoker_gcs.store.changes import Condition, Row
    from stoker_wire.messages.control import Event
    from stoker_wire.messages.events import StoryLine
    from stoker_wire.messages.work import TaskRecord

T = TypeVar("T")
KINDS = {
    ids.Prefix.TASK: "task",
    ids.Prefix.ACTOR: "actor",
    ids.Prefix.NODE: "node",
    ids.Prefix.JOB: "job",
    ids.Prefix.GROUP: "placement group",
}
AFTER_S = 60.0
"""What follows an end by no more is told with it: a node is declared dead after its work was lost."""
MOST_EVENTS = 2000
"""The limit of events about the same things that one story has: the newest."""
TOLD = tuple(kind.value for kind in EventKind if kind is not EventKind.JOB_HINTED)
"""The kinds of events of which stories are made: hints come by the minute, and tell nothing."""
MOST_THINGS = 200
"""The same of actors, groups, workers and attempts that it follows."""
_NODE_TURNS = (
    EventKind.NODE_REGISTERED.value,
    EventKind.NODE_SUSPECTED.value,
    EventKind.NODE_RECOVERED.value,
    EventKind.NODE_DIED.value,
    EventKind.NODE_DRAINING.value,
    EventKind.NODE_DRAINED.value,
    EventKind.GPU_QUARANTINED.value,
)
_NODE_ENDS = (EventKind.NODE_DIED, EventKind.NODE_DRAINED, EventKind.NODE_REGISTERED)
_ACTOR_TURNS = (
    EventKind.ACTOR_CREATED.value,
    EventKind.ACTOR_RESTARTING.value,
    EventKind.ACTOR_DIED.value,
)
_LOSSES = (
    EventKind.ACTOR_RESTARTING.value,
    EventKind.ACTOR_DIED.value,
    EventKind.JOB_RETRYING.value,
    EventKind.JOB_FINISHED.value,
    EventKind.WORKER_EXITED.value,
    EventKind.GROUP_RESCHEDULING.value,
)
"""What the death of a node does to what was there."""


class _Lines:
    """The lines of a story: each event once. ``cut``: there is more than it has looked at."""

    def __init__(self) -> None:
        self.cut = False
        self._by_seq: dict[int, StoryLine] = {}
        self._others: list[StoryLine] = []

    def add(self, *events: Event) -> None:
        """Add the lines of events."""
        for event in events:
            if event.seq not in self._by_seq:
                self._by_seq[event.seq] = line_of(event)

    def add_attempt(self, record: TaskRecord, before: TaskRecord | None = None) -> None:
        """Add the lines of an attempt of a task, which follows another of the same task."""
        self._others += lines_of_attempt(record, before)

    def newest(self, things: Sequence[T], most: int) -> Sequence[T]:
        """Return the last of what is given in order, and remember whether any were left out."""
        self.cut = self.cut or len(things) > most
        return things[-most:]

    def in_order(self) -> list[StoryLine]:
        """Return all lines by time; events that came at once by their numbers."""
        lines = [*self._by_seq.values(), *self._others]
        return sorted(lines, key=lambda line: (line.at_s, line.seq or math.inf))


class Storyteller:
    """The stories that a gcs tells, of the log and the task history."""

    def __init__(self, state: StateStore, history: TaskHistory) -> None:
        self._state = state
        self._history = history

    async def tell(self, id_: str, limit: int) -> Story:
        """Return the story of a task, actor, node, job or placement group; NotFoundError if there is none."""
        tellers = {
            "task": self._task,
            "actor": self._actor,
            "node": self._node,
            "job": self._job,
            "placement group": self._group,
        }
        kind = next((name for stem, name in KINDS.items() if id_.startswith(f"{stem}_")), "")
        if not kind:
            raise NotFoundError(
                f"{id_!r} is no id of what has a story\n"
                "give one of a task (t_), actor (a_), node (n_), job (job_) or placement group (pg_)"
            )
        lines = _Lines()
        name, state, began_at_s = await tellers[kind](id_, lines)
        told = lines.in_order()
        compacted, _ = await self._state.store.bounds()
        since_s = None
        if compacted:
            first = await self._state.store.events(compacted, 1)
            if first and first[0].at_s > began_at_s:
                since_s = first[0].at_s
        return Story(
            id=id_,
            kind=kind,
            name=name,
            state=state,
            lines=tuple(told[-limit:]),
            more=lines.cut or len(told) > limit,
            since_s=since_s,
        )

    async def _events_of(
        self,
        lines: _Lines,
        *subjects: str,
        kinds: tuple[str, ...] = (),
        from_s: float = -math.inf,
        until_s: float = math.inf,
    ) -> list[Event]:
        """Return the newest events that the log still has about these, of between two times, in order."""
        where: dict[str, Condition] = {"subject": subjects, "kind": kinds or TOLD}
        if until_s != math.inf:
            where["at_s"] = Expired(until_s)
        if not subjects:
            return []
        rows = await self._state.store.select(
            schema.EVENTS, where, limit=MOST_EVENTS + 1, descending=True
        )
        those = [row for row in reversed(rows) if row["at_s"] >= from_s]
        return [event_of(row) for row in lines.newest(those, MOST_EVENTS)]

    async def _newest(
        self,
        lines: _Lines,
        table: Table,
        where: dict[str, Condition],
        columns: tuple[str, ...] = (),
    ) -> Sequence[Row]:
        """Return the rows that came last, in the order in which they came."""
        rows = await self._state.store.select(
            table, where, limit=MOST_THINGS + 1, columns=columns, arrival=True, descending=True
        )
        return lines.newest(rows[::-1], MOST_THINGS)

    async def _add_node(self, lines: _Lines, node_id: str, from_s: float, to_s: float) -> None:
        """Add how a node fared between two times."""
        if node_id:
            events = await self._events_of(
                lines, node_id, kinds=_NODE_TURNS, from_s=from_s, until_s=to_s
            )
            lines.add(*(one for one in events if one.at_s > from_s))

    async def _add_exits(self, lines: _Lines, worker_ids: Iterable[str]) -> None:
        known = lines.newest(list(dict.fromkeys(one for one in worker_ids if one)), MOST_THINGS)
        lines.add(*await self._events_of(lines, *known, kinds=(EventKind.WORKER_EXITED.value,)))

    async def _task(self, task_id: str, lines: _Lines) -> tuple[str, str, float]:
        attempts = await self._history.attempts(task_id)
        before: TaskRecord | None = None
        for record in lines.newest(attempts, MOST_THINGS):
            lines.add_attempt(record, before)
            before = record
            await self._add_surroundings(lines, record)
        slow = (EventKind.TASK_SLOW.value,)
        lines.add(*await self._events_of(lines, task_id, kinds=slow))
        begins = [one for one in (attempts[0].submitted_at_s, attempts[0].started_at_s) if one]
        began_at_s = min(begins, default=0.0)
        ended_at_s = max((one.ended_at_s or math.inf) for one in attempts)
        last = attempts[-1]
        # The end of the job belongs to what it ended.
        more_s = 0.0 if last.state is TaskState.FINISHED else AFTER_S
        turns = await self._events_of(
            lines,
            last.job_id,
            kinds=(EventKind.JOB_RETRYING.value, EventKind.JOB_FINISHED.value),
            from_s=began_at_s,
            until_s=ended_at_s + more_s,
        )
        lines.add(*turns)
        return last.name, last.state.value, began_at_s

    async def _add_surroundings(self, lines: _Lines, record: TaskRecord) -> None:
        """Add what happened to the worker, the node, the actor and the owner of an attempt."""
        begun_s = record.started_at_s or record.submitted_at_s or 0.0
        failed = record.state in (TaskState.FAILED, TaskState.CANCELLED)
        until_s = (record.ended_at_s or math.inf) + (AFTER_S if failed else 0.0)
        if failed or record.ended_at_s is None:
            # Later the same worker runs other tasks, and how it ends is their story.
            exits = await self._events_of(
                lines,
                *{one for one in (record.worker_id, record.owner_id) if one.startswith("w_")},
                kinds=(EventKind.WORKER_EXITED.value,),
                from_s=begun_s,
                until_s=until_s,
            )
            lines.add(*exits)
            await self._add_node(lines, record.node_id, begun_s, until_s)
        if record.actor_id:
            from_s = record.submitted_at_s or begun_s
            lines.add(
                *await self._events_of(lines, record.actor_id, from_s=from_s, until_s=until_s)
            )

    async def _actor(self, actor_id: str, lines: _Lines) -> tuple[str, str, float]:
        found = await self._state.find(ACTORS, actor_id)
        events = await self._events_of(lines, actor_id)
        actor = found.record if found is not None else None
        for event in events:
            actor_then = payload_as(event, Actor)
            actor = actor or actor_then
        if actor is None:
            raise NotFoundError(f"there is no actor {actor_id!r}")
        lines.add(*events)
        seen = [one for one in (payload_as(event, Actor) for event in events) if one is not None]
        await self._add_exits(lines, (one.worker_id for one in seen))
        ended_at_s = math.inf if actor.ended_at_s is None else actor.ended_at_s
        for node_id, from_s, to_s in _stays(events, ended_at_s):
            await self._add_node(lines, node_id, from_s, to_s + AFTER_S)
        if actor.ended_at_s is not None:
            above = {actor.job_id}
            if actor.owner is not None:
                above |= {actor.owner.actor_id, actor.owner.peer_id}
            ends = (EventKind.JOB_FINISHED.value, EventKind.ACTOR_DIED.value,
                    EventKind.WORKER_EXITED.value)  # fmt: skip
            lines.add(
                *await self._events_of(lines, *(above - {""}), kinds=ends, until_s=ended_at_s)
            )
        last = seen[-1] if seen else actor
        return actor.class_name, (found.record if found else last).state.value, actor.created_at_s

    async def _group(self, group_id: str, lines: _Lines) -> tuple[str, str, float]:
        found = await self._state.find(GROUPS, group_id)
        events = await self._events_of(lines, group_id)
        if found is None and not events:
            raise NotFoundError(f"there is no placement group {group_id!r}")
        lines.add(*events)
        if found is None:
            return "", "REMOVED", events[0].at_s
        group = found.record
        for node_id in {one.node_id for one in group.placements.values()}:
            until_s = math.inf if group.removed_at_s is None else group.removed_at_s
            await self._add_node(lines, node_id, group.placed_at_s or group.created_at_s, until_s)
        return group.name, group.state.value, group.created_at_s

    async def _job(self, job_id: str, lines: _Lines) -> tuple[str, str, float]:
        found = await self._state.find(JOBS, job_id)
        events = await self._events_of(lines, job_id)
        job = found.record if found is not None else None
        for event in events:
            job = (payload_as(event, Job) or job) if found is None else job
        if job is None:
            raise NotFoundError(f"there is no job {job_id!r}")
        lines.add(*events)
        ended_at_s = math.inf if job.ended_at_s is None else job.ended_at_s
        for attempt in job.attempts:
            await self._add_node(
                lines, attempt.node_id, attempt.started_at_s, attempt.ended_at_s + AFTER_S
            )
        # Whether the node of a driver died before or after its job ended, it is told.
        began_at_s = job.attempt_started_at_s or job.started_at_s or job.created_at_s
        await self._add_node(lines, job.node_id, began_at_s, ended_at_s)
        of_job: dict[str, Condition] = {"job_id": job_id}
        actors = await self._newest(lines, schema.ACTORS, of_job, ("actor_id",))
        actor_ids = [row["actor_id"] for row in actors]
        lines.add(*await self._events_of(lines, *actor_ids, kinds=_ACTOR_TURNS))
        groups = await self._newest(lines, schema.PLACEMENT_GROUPS, of_job, ("group_id",))
        lines.add(*await self._events_of(lines, *(row["group_id"] for row in groups)))
        await self._add_failures(lines, of_job)
        return job.name or job.entrypoint, job.state.value, job.created_at_s

    async def _add_failures(self, lines: _Lines, where: dict[str, Condition]) -> None:
        """Add the attempts of tasks that failed, and what happened where they ran."""
        failed: dict[str, Condition] = {**where, "state": TaskState.FAILED.value}
        rows = await self._newest(lines, schema.TASKS, failed)
        records = [task_of(row) for row in rows]
        for record in records:
            lines.add_attempt(record)
        await self._add_exits(lines, (one.worker_id for one in records))
        spans: dict[str, tuple[float, float]] = {}
        for one in records:
            begun_s = one.started_at_s or one.submitted_at_s or 0.0
            from_s, to_s = spans.get(one.node_id, (math.inf, 0.0))
            to_s = max(to_s, (one.ended_at_s or begun_s) + AFTER_S)
            spans[one.node_id] = (min(from_s, begun_s), to_s)
        for node_id, (from_s, to_s) in spans.items():
            await self._add_node(lines, node_id, from_s, to_s)

    async def _node(self, node_id: str, lines: _Lines) -> tuple[str, str, float]:
        found = await self._state.find(NODES, node_id)
        events = await self._events_of(lines, node_id)
        node = found.record if found is not None else None
        for event in events:
            node = (payload_as(event, Node) or node) if found is None else node
        if node is None:
            raise NotFoundError(f"there is no node {node_id!r}")
        lines.add(*events)
        actors = await self._newest(lines, schema.ACTORS, {"node_id": node_id}, ("actor_id",))
        of_actors = await self._events_of(lines, *(row["actor_id"] for row in actors))
        lines.add(*(one for one in of_actors if one.payload.get("node_id") == node_id))
        for event in events:
            if event.kind in _NODE_ENDS:
                await self._add_losses(lines, node_id, event)
        await self._add_failures(lines, {"node_id": node_id})
        return node.hostname, node.state.value, min((one.at_s for one in events), default=0.0)

    async def _add_losses(self, lines: _Lines, node_id: str, turn: Event) -> None:
        """Add what ended or moved because a node died, or came back as another incarnation."""
        rows = await self._state.store.select(schema.EVENTS, after=(turn.seq,), limit=MOST_EVENTS)
        name = node_id.encode()
        for row in rows:
            if row["at_s"] > turn.at_s + AFTER_S:
                return
            if row["kind"] in _LOSSES and name in bytes(row["payload"]):
                lines.add(event_of(row))
        lines.cut = lines.cut or len(rows) == MOST_EVENTS


def _stays(events: list[Event], ended_at_s: float) -> list[tuple[str, float, float]]:
    """Return on which nodes an actor was, from when until when."""
    stays: list[tuple[str, float, float]] = []
    node_id, since_s = "", 0.0
    for event in events:
        actor = payload_as(event, Actor)
        if actor is None or actor.node_id == node_id:
            continue
        if node_id:
            stays.append((node_id, since_s, event.at_s))
        node_id, since_s = actor.node_id, event.at_s
    if node_id:
        stays.append((node_id, since_s, ended_at_s))
    return stays
