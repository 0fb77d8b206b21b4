"""Ids by prefix, for people who type a part of one and for shells that complete it.

Each kind is one range of an index; only the workers are asked of the nodelets, which own them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.registry.groups.rules import GROUPS
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.registry.nodes.rules import NODES
from stoker_gcs.registry.objects.rules import OBJECTS
from stoker_gcs.state import schema
from stoker_gcs.store.changes import Prefix
from stoker_wire import ids
from stoker_wire.messages.control import IdMatch, IdMatches
from stoker_wire.messages.events import EventKind

if TYPE_CHECKING:
    from stoker_gcs.peer_clients import PeerClients
    from stoker_gcs.state.records import StateStore
    from stoker_wire.messages.control import IdQuery

KINDS = {
    "node": ids.Prefix.NODE,
    "job": ids.Prefix.JOB,
    "task": ids.Prefix.TASK,
    "actor": ids.Prefix.ACTOR,
    "worker": ids.Prefix.WORKER,
    "placement group": ids.Prefix.GROUP,
    "object": ids.Prefix.OBJECT,
}
_ATTEMPTS = 4
"""Rows read per task: one that was retried has several."""


class IdFinder:
    """The search for ids by prefix."""

    def __init__(self, state: StateStore, peers: PeerClients) -> None:
        self._state = state
        self._peers = peers

    async def find(self, query: IdQuery) -> IdMatches:
        """Return the ids that begin with ``query.prefix``, in their order; an exact match is the first."""
        matches: list[IdMatch] = []
        wanted = query.limit + 1
        finders = {
            "node": self._nodes,
            "job": self._jobs,
            "task": self._tasks,
            "actor": self._actors,
            "worker": self._workers,
            "placement group": self._groups,
            "object": self._objects,
        }
        for kind, stem in KINDS.items():
            if _may_begin(query.prefix, f"{stem}_") and len(matches) < wanted:
                matches += await finders[kind](query.prefix, wanted - len(matches))
        return IdMatches(matches=tuple(matches[: query.limit]), more=len(matches) > query.limit)

    async def _nodes(self, prefix: str, limit: int) -> list[IdMatch]:
        rows = await self._state.store.select(
            schema.NODES, {"node_id": Prefix(prefix)}, limit=limit
        )
        nodes = [NODES.decode(row).record for row in rows]
        return [IdMatch(id=n.node_id, kind="node", state=n.state, name=n.hostname) for n in nodes]

    async def _jobs(self, prefix: str, limit: int) -> list[IdMatch]:
        rows = await self._state.store.select(schema.JOBS, {"job_id": Prefix(prefix)}, limit=limit)
        jobs = [JOBS.decode(row).record for row in rows]
        return [
            IdMatch(id=j.job_id, kind="job", state=j.state, name=j.name or j.entrypoint)
            for j in jobs
        ]

    async def _actors(self, prefix: str, limit: int) -> list[IdMatch]:
        rows = await self._state.store.select(
            schema.ACTORS, {"actor_id": Prefix(prefix)}, limit=limit
        )
        actors = [ACTORS.decode(row).record for row in rows]
        return [
            IdMatch(id=a.actor_id, kind="actor", state=a.state, name=a.class_name) for a in actors
        ]

    async def _tasks(self, prefix: str, limit: int) -> list[IdMatch]:
        rows = await self._state.store.select(
            schema.TASKS,
            {"task_id": Prefix(prefix)},
            limit=_ATTEMPTS * limit,
            columns=("task_id", "state", "name"),
        )
        last = {
            row["task_id"]: IdMatch(
                id=row["task_id"], kind="task", state=row["state"], name=row["name"]
            )
            for row in rows
        }
        return list(last.values())[:limit]

    async def _groups(self, prefix: str, limit: int) -> list[IdMatch]:
        rows = await self._state.store.select(
            schema.PLACEMENT_GROUPS, {"group_id": Prefix(prefix)}, limit=limit
        )
        groups = [GROUPS.decode(row).record for row in rows]
        return [
            IdMatch(id=g.group_id, kind="placement group", state=g.state, name=g.name)
            for g in groups
        ]

    async def _objects(self, prefix: str, limit: int) -> list[IdMatch]:
        """Return detached objects; others are known to their owners only."""
        rows = await self._state.store.select(
            schema.DETACHED_OBJECTS, {"object_id": Prefix(prefix)}, limit=limit
        )
        objects = [OBJECTS.decode(row).record for row in rows]
        return [IdMatch(id=o.object_id, kind="object", state=o.state, name=o.name) for o in objects]

    async def _workers(self, prefix: str, limit: int) -> list[IdMatch]:
        matches = {
            worker.worker_id: IdMatch(
                id=worker.worker_id, kind="worker", state=worker.state, name=worker.job_id
            )
            for worker in await self._peers.workers()
            if worker.worker_id.startswith(prefix)
        }
        exited = await self._state.store.select(
            schema.EVENTS,
            {"subject": Prefix(max(prefix, "w_")), "kind": EventKind.WORKER_EXITED.value},
            limit=limit,
            columns=("subject",),
        )
        for row in exited:
            matches.setdefault(
                row["subject"], IdMatch(id=row["subject"], kind="worker", state="DEAD")
            )
        return sorted(matches.values(), key=lambda match: match.id)[:limit]


def _may_begin(prefix: str, stem: str) -> bool:
    return prefix.startswith(stem) or stem.startswith(prefix)
