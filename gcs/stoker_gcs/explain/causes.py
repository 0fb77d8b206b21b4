"""The waiting actors and tasks of a job, grouped by cause.

Called by the explanation of a job. All that wait for one cause are one group with a count and an
example, and the scheduler is asked once per scheduling class. All of it is bounded: the actors and
tasks that are looked at, and the demands that are asked for.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.registry.actors.registry import spec_of
from stoker_gcs.registry.actors.rules import ACTORS, lease_job, waits
from stoker_gcs.registry.groups.rules import GROUPS
from stoker_gcs.state import schema
from stoker_gcs.store.rows import task_of
from stoker_wire.errors import StokerError
from stoker_wire.messages.cluster import Demand, LeaseKind
from stoker_wire.messages.control import ConstraintKind, Explanation, Fit, WaitingGroup
from stoker_wire.messages.groups import GroupState
from stoker_wire.messages.work import ActorState, TaskState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker_gcs.peer_clients import PeerClients
    from stoker_gcs.state.records import StateStore
    from stoker_gcs.store.changes import Condition, Row
    from stoker_wire.messages.control import Verdict
    from stoker_wire.messages.work import Actor

LOOKED_AT = 1000
"""The limit of waiting actors, and of waiting tasks, that are looked at."""
ASKED_FOR = 20
"""The limit of demands for which the scheduler is asked; groups beyond show what they reported."""
SHOWN = 50
_DETAILS = 2
_PER_SELECT = 500
_ID = re.compile(r"\b[a-z]+_[0-9a-f]{8}[0-9a-f.]*")


@dataclass(slots=True)
class _Group:
    """Actors or tasks that wait for one cause; ``note`` is the reason that they reported."""

    kind: str
    name: str
    state: str
    example_id: str
    demand: Demand | None
    note: str
    count: int = 0


@dataclass(slots=True)
class _Groups:
    """Groups by what their members have in common, in the order of their first members."""

    by_key: dict[object, _Group] = field(default_factory=dict)
    bounded: set[str] = field(default_factory=set)

    def add(
        self,
        kind: str,
        name: str,
        state: str,
        id_: str,
        demand: Demand | None,
        note: str,
        alike: str = "",
    ) -> None:
        """Count one actor or task; without a demand, equal ``alike`` (or note) makes one group."""
        cause = (alike or _ID.sub("", note)) if demand is None else class_of(demand)
        key = (kind, name, state, cause)
        group = self.by_key.setdefault(key, _Group(kind, name, state, id_, demand, note))
        group.count += 1


def class_of(demand: Demand) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(demand, locality={}), order="sorted")


class WaitingGroups:
    """The search for what waits in a job: found in SQL, explained by the scheduler."""

    def __init__(self, state: StateStore, peers: PeerClients) -> None:
        self._state = state
        self._peers = peers

    async def of_job(self, job_id: str) -> tuple[WaitingGroup, ...]:
        """Return the waiting groups of a job, the largest first."""
        groups = _Groups()
        await self._add_actors(job_id, groups)
        await self._add_tasks(job_id, groups)
        await self._add_placement_groups(job_id, groups)
        largest = sorted(groups.by_key.values(), key=lambda group: -group.count)[:SHOWN]
        asked = [group for group in largest if group.demand is not None][:ASKED_FOR]
        replies = await asyncio.gather(*[self._ask(group.demand) for group in asked])
        explanations = dict(zip(map(id, asked), replies, strict=True))
        return tuple(
            _group_of(group, explanations.get(id(group)), group.kind not in groups.bounded)
            for group in largest
        )

    async def _add_actors(self, job_id: str, groups: _Groups) -> None:
        states = (ActorState.PENDING.value, ActorState.RESTARTING.value)
        for row in await self._select(schema.ACTORS, "actor", job_id, states, groups):
            actor = ACTORS.decode(row).record
            demand = None
            note = "runs its constructor"
            if waits(actor):
                note = actor.pending_reason
                demand = msgspec.structs.replace(
                    spec_of(row).demand, kind=LeaseKind.ACTOR, job_id=lease_job(actor)
                )
            groups.add("actor", actor.class_name, actor.state, actor.actor_id, demand, note)

    async def _add_tasks(self, job_id: str, groups: _Groups) -> None:
        states = (TaskState.WAITING.value, TaskState.QUEUED.value)
        rows = await self._select(schema.TASKS, "task", job_id, states, groups)
        tasks = [task_of(row) for row in rows]
        actors = await self._actors_by_id({task.actor_id for task in tasks if task.actor_id})
        for task in tasks:
            queued = task.state is TaskState.QUEUED and not task.actor_id
            note, alike = task.waiting_for or "waits for a worker", ""
            if (actor := actors.get(task.actor_id)) is not None:
                # As the actor is now: the task reported how it was when the call was made.
                alike = f"{actor.class_name} {actor.state}"
                note = (
                    f"waits for actor {actor.class_name} ({actor.actor_id}), which is {actor.state}"
                )
            demand = task.demand if queued else None
            groups.add("task", task.name, task.state, task.task_id, demand, note, alike)

    async def _add_placement_groups(self, job_id: str, groups: _Groups) -> None:
        states = (GroupState.PENDING.value, GroupState.RESCHEDULING.value)
        kind = "placement group"
        for row in await self._select(schema.PLACEMENT_GROUPS, kind, job_id, states, groups):
            group = GROUPS.decode(row).record
            note = group.reason or "waits for room for all of its bundles"
            groups.add(kind, group.name or group.strategy, group.state, group.group_id, None, note)

    async def _select(
        self, table: schema.Table, kind: str, job_id: str, states: tuple[str, ...], groups: _Groups
    ) -> Sequence[Row]:
        where: dict[str, Condition] = {"job_id": job_id, "state": states}
        rows = await self._state.store.select(table, where, limit=LOOKED_AT + 1)
        if len(rows) > LOOKED_AT:
            groups.bounded.add(kind)
        return rows[:LOOKED_AT]

    async def _actors_by_id(self, ids: set[str]) -> dict[str, Actor]:
        by_id = {}
        some = sorted(ids)
        for start in range(0, len(some), _PER_SELECT):
            where: dict[str, Condition] = {"actor_id": tuple(some[start : start + _PER_SELECT])}
            for row in await self._state.store.select(schema.ACTORS, where):
                by_id[row["actor_id"]] = ACTORS.decode(row).record
        return by_id

    async def _ask(self, demand: Demand | None) -> Explanation | None:
        try:
            return await self._peers.call_scheduler(
                "POST", "/v1/explain", demand, reply=Explanation
            )
        except StokerError:
            return None


def _group_of(group: _Group, explanation: Explanation | None, exact: bool) -> WaitingGroup:
    cause = short_of(group.note)
    if explanation is not None:
        cause = cause_of(explanation)
    return WaitingGroup(
        kind=group.kind,
        name=group.name,
        count=group.count,
        cause=cause,
        example_id=group.example_id,
        state=group.state,
        remedy=explanation.remedy if explanation is not None else "",
        infeasible=explanation is not None and explanation.state == "INFEASIBLE",
        count_exact=exact,
    )


def short_of(note: str) -> str:
    """Return the reason that a task reported ("it waits for ...") as the end of a sentence about it."""
    return note.removeprefix("it ")


def cause_of(explanation: Explanation) -> str:
    """Return in a few words why a demand waits: a limit that binds, or the nodes' verdicts, counted."""
    constraint = explanation.constraint
    if constraint is not None and constraint.kind is ConstraintKind.QUEUE_LIMIT:
        return constraint.text
    if not explanation.verdicts:
        return explanation.summary
    if any(verdict.fit is Fit.FITS for verdict in explanation.verdicts):
        return "there is room for it: it starts when its turn comes"
    return _details(explanation.verdicts)


def _details(verdicts: Sequence[Verdict]) -> str:
    # Nodes that could take it later come before those that never can.
    ordered = sorted(verdicts, key=lambda verdict: verdict.fit is Fit.NEVER)
    counted = Counter(verdict.detail for verdict in ordered)
    if len(counted) == 1:
        [(detail, count)] = counted.items()
        return detail if count == 1 else f"{detail}, on each of {count} nodes"
    shown = [f"{_nodes(count)}: {detail}" for detail, count in list(counted.items())[:_DETAILS]]
    left = sum(list(counted.values())[_DETAILS:])
    return "; ".join(shown) + (f"; and {_nodes(left)} more" if left else "")


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
