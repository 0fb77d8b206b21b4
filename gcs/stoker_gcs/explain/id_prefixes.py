"""Ids by their beginning, for people who type a part of one and for shells that complete it.

Each kind is one range of an index; only workers are asked for at the nodelets, which know them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.registry.nodes.rules import NODES
from stoker_gcs.state import schema
from stoker_gcs.store.changes import Prefix
from stoker_wire import ids
from stoker_wire.messages.cluster import Worker
from stoker_wire.messages.control import IdMatch, IdMatches, Page

if TYPE_CHECKING:
    from stoker_gcs.app import Parts
    from stoker_wire.http.client import Client
    from stoker_wire.messages.cluster import Node
    from stoker_wire.messages.control import IdQuery

KINDS = {
    "node": ids.Prefix.NODE,
    "job": ids.Prefix.JOB,
    "task": ids.Prefix.TASK,
    "actor": ids.Prefix.ACTOR,
    "worker": ids.Prefix.WORKER,
}
_ATTEMPTS = 4
"""Rows read per task that is wanted: one that was tried again has several."""


async def find_ids(parts: Parts, query: IdQuery) -> IdMatches:
    """Return the ids that begin with ``query.prefix``, in their order; an exact match is the first."""
    found: list[IdMatch] = []
    wanted = query.limit + 1
    for kind, stem in KINDS.items():
        if _may_begin(query.prefix, f"{stem}_") and len(found) < wanted:
            found += await _FINDERS[kind](parts, query.prefix, wanted - len(found))
    return IdMatches(matches=tuple(found[: query.limit]), more=len(found) > query.limit)


def _may_begin(prefix: str, stem: str) -> bool:
    return prefix.startswith(stem) or stem.startswith(prefix)


async def _nodes(parts: Parts, prefix: str, limit: int) -> list[IdMatch]:
    rows = await parts.truth.store.select(schema.NODES, {"node_id": Prefix(prefix)}, limit=limit)
    nodes = [NODES.kept(row).record for row in rows]
    return [IdMatch(id=n.node_id, kind="node", state=n.state, name=n.hostname) for n in nodes]


async def _jobs(parts: Parts, prefix: str, limit: int) -> list[IdMatch]:
    rows = await parts.truth.store.select(schema.JOBS, {"job_id": Prefix(prefix)}, limit=limit)
    jobs = [JOBS.kept(row).record for row in rows]
    return [
        IdMatch(id=j.job_id, kind="job", state=j.state, name=j.name or j.entrypoint) for j in jobs
    ]


async def _actors(parts: Parts, prefix: str, limit: int) -> list[IdMatch]:
    rows = await parts.truth.store.select(schema.ACTORS, {"actor_id": Prefix(prefix)}, limit=limit)
    actors = [ACTORS.kept(row).record for row in rows]
    return [IdMatch(id=a.actor_id, kind="actor", state=a.state, name=a.class_name) for a in actors]


async def _tasks(parts: Parts, prefix: str, limit: int) -> list[IdMatch]:
    rows = await parts.truth.store.select(
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


async def _workers(parts: Parts, prefix: str, limit: int) -> list[IdMatch]:
    async def ask(_: Node, client: Client) -> Page[Worker]:
        return await client.call(
            "GET", "/v1/workers", reply=Page[Worker], query={"limit": 1000}, retry=False
        )

    pages = await parts.links.every_nodelet(ask)
    found = {
        worker.worker_id: IdMatch(
            id=worker.worker_id, kind="worker", state=worker.state, name=worker.job_id
        )
        for page in pages.values()
        for worker in page.items
        if worker.worker_id.startswith(prefix)
    }
    gone = await parts.truth.store.select(
        schema.EVENTS,
        {"subject": Prefix(max(prefix, "w_")), "kind": "worker.exited"},
        limit=limit,
        columns=("subject",),
    )
    for row in gone:
        found.setdefault(row["subject"], IdMatch(id=row["subject"], kind="worker", state="DEAD"))
    return sorted(found.values(), key=lambda match: match.id)[:limit]


_FINDERS = {
    "node": _nodes,
    "job": _jobs,
    "task": _tasks,
    "actor": _actors,
    "worker": _workers,
}
