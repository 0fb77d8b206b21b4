"""The cluster at a glance: what there is and is used, what waits and why, what failed lately.

Counts come from SQL, resources and what waits from the scheduler. All of it is bounded, and what cannot
be asked just now is said to be missing: the rest is shown.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from stoker_gcs.controllers.usage import gpu_use, resource_use
from stoker_gcs.explain.causes import cause_of, class_of
from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.registry.groups.rules import GROUPS
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.state import schema
from stoker_gcs.store.rows import task_of
from stoker_wire.errors import ActorDiedError, StokerError
from stoker_wire.http.dashboard.figures import Failure, Overview, WaitingDemand
from stoker_wire.messages.cluster import ClusterResources, NodeState
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.control import Explanation, Page, QueueEntry
from stoker_wire.messages.work import ActorState, JobState, TaskState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stoker_gcs.app import GcsApp
    from stoker_gcs.store.changes import Condition
    from stoker_wire.http.dashboard.figures import ResourceUse
    from stoker_wire.http.principals import Principal
    from stoker_wire.messages.cluster import Node
    from stoker_wire.messages.work import Actor, Job, TaskRecord

RECENT_TASKS = 1000
"""The newest attempts among which failures are looked for."""
RECENT = 10
WAITING = 200
EXPLAINED = 8
FRESH_S = 0.5
"""How old an overview may be that is shown again: many pages may be open."""
MOST_KEPT = 1000
_NO_ERROR = ErrorInfo(code="", message="")
_BAD = frozenset({NodeState.DEAD, NodeState.SUSPECT})
_NUMBERS = re.compile(r"\b[a-z]+_[0-9a-f]{6,}[0-9a-f.]*|\d+(\.\d+)?")


@dataclass(slots=True)
class _Kept:
    """The last overview of those that see the same; it is made by one of them at a time."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    made_s: float = 0.0
    overview: Overview | None = None


class Overviews:
    """The maker of overviews, which keeps the last one of each that asks."""

    def __init__(self, app: GcsApp) -> None:
        self._app = app
        self._kept: dict[tuple[str, ...], _Kept] = {}

    async def of(self, principal: Principal) -> Overview:
        """Return the cluster as a principal sees it."""
        key = () if principal.sees_all else (principal.name, principal.origin_job_id)
        if len(self._kept) > MOST_KEPT:
            self._kept.clear()
        kept = self._kept.setdefault(key, _Kept())
        async with kept.lock:
            if kept.overview is None or time.monotonic() - kept.made_s > FRESH_S:
                kept.overview, kept.made_s = await self._make(principal), time.monotonic()
            return kept.overview

    async def _make(self, principal: Principal) -> Overview:
        app, store = self._app, self._app.state.store
        seen = await app.access.narrowed(principal, {})
        resources: dict[str, ResourceUse] = {}
        waiting: tuple[WaitingDemand, ...] = ()
        missing = ""
        try:
            resources = await self._resources()
            waiting = await self._waiting(principal)
        except StokerError as error:
            missing = f"what is used and what waits: {str(error).splitlines()[0]}"
        nodes = await app.nodes.latest()

        async def by_state(table: schema.Table) -> dict[str, int]:
            return {
                row["state"]: row["n"] for row in await store.grouped(table, ("state",), (), seen)
            }

        tasks = await store.grouped(schema.TASK_COUNTS, ("state",), ("count",), seen)
        return Overview(
            seq=app.state.log.last,
            at_s=app.state.now(),
            nodes=dict(Counter(node.state.value for node in nodes)),
            resources=resources,
            gpus=gpu_use(nodes, resources),
            jobs=await by_state(schema.JOBS),
            actors=await by_state(schema.ACTORS),
            groups=await by_state(schema.PLACEMENT_GROUPS),
            tasks={row["state"]: max(0, int(row["count"])) for row in tasks},
            waiting=waiting,
            failures=await self._failures(nodes, seen),
            missing=missing,
        )

    async def _resources(self) -> dict[str, ResourceUse]:
        found = await self._app.peers.call_scheduler("GET", "/v1/resources", reply=ClusterResources)
        return resource_use(found)

    async def _waiting(self, principal: Principal) -> tuple[WaitingDemand, ...]:
        app, now_s = self._app, self._app.state.now()
        page = await app.peers.call_scheduler(
            "GET", "/v1/queue", reply=Page[QueueEntry], query={"limit": WAITING}
        )
        entries = (await app.access.visible(principal, page)).items
        groups: dict[object, list[QueueEntry]] = {}
        for entry in entries:
            alike = entry.group_id if entry.demand is None else class_of(entry.demand)
            groups.setdefault((entry.job_id, alike), []).append(entry)
        found: list[WaitingDemand] = []
        for some in list(groups.values())[:RECENT]:
            first = some[0]
            explanation = None
            cause = await self._of_group(first.group_id) if first.group_id else ""
            if first.demand is not None and len(found) < EXPLAINED:
                explanation = await app.peers.call_scheduler(
                    "POST", "/v1/explain", first.demand, reply=Explanation
                )
            job = app.jobs.live.get(first.job_id)
            found.append(
                WaitingDemand(
                    job_id=first.job_id,
                    name=first.name,
                    queue="" if job is None else job.queue,
                    count=sum(entry.count for entry in some),
                    resources=dict(first.resources),
                    since_s=now_s - max(entry.waiting_s for entry in some),
                    cause=cause if explanation is None else cause_of(explanation),
                    remedy="" if explanation is None else explanation.remedy,
                    infeasible=first.infeasible,
                )
            )
        return tuple(found)

    async def _of_group(self, group_id: str) -> str:
        group = await self._app.state.find(GROUPS, group_id)
        return "" if group is None else group.record.reason

    async def _failures(
        self, nodes: Iterable[Node], seen: Mapping[str, Condition]
    ) -> tuple[Failure, ...]:
        store = self._app.state.store
        newest: Mapping[str, Any] = {"arrival": True, "descending": True}
        failures = [_of_node(one) for one in nodes if one.state in _BAD]
        failed: dict[str, Condition] = {**seen, "state": JobState.FAILED.value}
        rows = await store.select(schema.JOBS, failed, limit=RECENT, **newest)
        failures += [_of_job(JOBS.decode(row).record) for row in rows]
        dead: dict[str, Condition] = {**seen, "state": ActorState.DEAD.value}
        for row in await store.select(schema.ACTORS, dead, limit=5 * RECENT, **newest):
            actor = ACTORS.decode(row).record
            if actor.death_cause is not None and actor.death_cause.code != ActorDiedError.code:
                failures.append(_of_actor(actor, actor.death_cause))
        rows = await store.select(schema.TASKS, seen, limit=RECENT_TASKS, **newest)
        failures += alike(task_of(row) for row in rows if row["state"] == TaskState.FAILED.value)
        failures.sort(key=lambda failure: -failure.at_s)
        return tuple(failures[: 2 * RECENT])


def _of_node(node: Node) -> Failure:
    return Failure(
        kind="node",
        id=node.node_id,
        job_id="",
        name=node.hostname,
        at_s=node.heartbeat_at_s,
        code=node.state.value,
        message=node.reason,
    )


def _of_job(job: Job) -> Failure:
    return Failure(
        kind="job",
        id=job.job_id,
        job_id=job.job_id,
        name=job.name,
        at_s=job.ended_at_s or 0.0,
        code=job.state.value,
        message=job.message,
    )


def _of_actor(actor: Actor, cause: ErrorInfo) -> Failure:
    return Failure(
        kind="actor",
        id=actor.actor_id,
        job_id=actor.job_id,
        name=actor.class_name,
        at_s=actor.ended_at_s or 0.0,
        code=cause.code,
        message=cause.message,
    )


def alike(tasks: Iterable[TaskRecord]) -> list[Failure]:
    """Return failed attempts, newest first, as one failure for all of a function that failed alike."""
    found: dict[tuple[str, ...], Failure] = {}
    for task in tasks:
        error = task.error or _NO_ERROR
        key = (task.job_id, task.name, error.code, _NUMBERS.sub("", error.message[:200]))
        known = found.get(key)
        if known is not None:
            found[key] = replace(known, count=known.count + 1)
            continue
        found[key] = Failure(
            kind="task",
            id=task.task_id,
            job_id=task.job_id,
            name=task.name,
            at_s=task.ended_at_s or 0.0,
            code=error.code,
            message=error.message,
        )
    return list(found.values())
