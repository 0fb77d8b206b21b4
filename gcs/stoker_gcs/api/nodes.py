"""Routes of nodes and workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stoker_gcs.api.events import matcher, watch
from stoker_gcs.api.queries import Leave, NodeQuery, WorkerQuery, states
from stoker_gcs.registry.nodes.rules import NODES
from stoker_gcs.state import schema
from stoker_gcs.store.changes import Change
from stoker_wire.http.paging import page_of
from stoker_wire.messages.cluster import (
    Heartbeat,
    Node,
    NodeState,
    RegisteredNode,
    RegisterNode,
    Worker,
    WorkerExit,
    WorkersExited,
    WorkerState,
)
from stoker_wire.messages.control import Page

if TYPE_CHECKING:
    from stoker_gcs.app import Parts
    from stoker_wire.http.client import Client
    from stoker_wire.http.server import Request, Service


def add_routes(service: Service, parts: Parts) -> None:
    """Add the routes."""

    async def register(req: Request) -> RegisteredNode:
        return await parts.nodes.register(req.body)

    async def listing(req: Request) -> Any:
        if req.query.watch:
            bookmark_s = service.settings.bookmark_s
            return await watch(parts.truth, req, req.query.since, matcher("node."), bookmark_s)
        return await parts.nodes.page(req.query, states(req.query.state, NodeState))

    async def one(req: Request) -> Node:
        return await parts.nodes.one(req.path["node_id"])

    async def heartbeat(req: Request) -> None:
        await parts.nodes.heartbeat(req.path["node_id"], req.body)

    async def leave(req: Request) -> None:
        await parts.nodes.leave(req.path["node_id"], req.body.incarnation)

    async def exited(req: Request) -> None:
        await note_exits(parts, await _of_this_life(parts, req.body))

    async def workers(req: Request) -> Page[Worker]:
        async def ask(_: Node, client: Client) -> Page[Worker]:
            return await client.call(
                "GET", "/v1/workers", reply=Page[Worker], query={"limit": 1000}, retry=False
            )

        pages = await parts.links.every_nodelet(ask)
        query = req.query
        states(query.state, WorkerState)
        wanted = query.state.split(",")
        found = [
            worker
            for page in pages.values()
            for worker in page.items
            if query.node_id in ("", worker.node_id)
            and query.job_id in ("", worker.job_id)
            and query.actor_id in ("", worker.actor_id)
            and (not query.state or worker.state.value in wanted)
        ]
        return page_of(
            found,
            req.query,
            key=lambda worker: worker.worker_id,
            created=lambda worker: worker.started_at_s,
        )

    path = "/v1/nodes"
    service.route(
        "POST", path, register, body=RegisterNode, reply=RegisteredNode, summary="Admit a node"
    )
    service.route(
        "GET", path, listing, query=NodeQuery, reply=Page[Node], summary="List or watch nodes"
    )
    service.route("GET", path + "/{node_id}", one, reply=Node, summary="One node")
    service.route(
        "POST",
        path + "/{node_id}/heartbeat",
        heartbeat,
        body=Heartbeat,
        idempotency=False,
        summary="A node's sign of life",
    )
    service.route("POST", path + "/{node_id}/leave", leave, body=Leave, summary="A node says bye")
    service.route(
        "POST", "/v1/workers/exited", exited, body=WorkersExited, summary="Workers that ended"
    )
    service.route(
        "GET", "/v1/workers", workers, query=WorkerQuery, reply=Page[Worker], summary="All workers"
    )


async def _of_this_life(parts: Parts, body: WorkersExited) -> tuple[WorkerExit, ...]:
    """The exits that count: those of a node's earlier incarnation ended with it, and change nothing."""
    fenced = set()
    for node_id in {exit_.node_id for exit_ in body.exits}:
        found = await parts.truth.find(NODES, node_id)
        if found is not None and 0 < body.incarnation < found.record.incarnation:
            fenced.add(node_id)
    return tuple(exit_ for exit_ in body.exits if exit_.node_id not in fenced)


async def note_exits(parts: Parts, exits: tuple[WorkerExit, ...]) -> None:
    """Log each exit once, then let actors and jobs die or restart of it."""
    if not exits:
        return
    ids = tuple({exit_.worker_id for exit_ in exits})
    rows = await parts.truth.store.select(
        schema.EVENTS, {"subject": ids, "kind": "worker.exited"}, columns=("subject",)
    )
    told = {row["subject"] for row in rows}
    fresh = {exit_.worker_id: exit_ for exit_ in exits if exit_.worker_id not in told}
    if fresh:
        events = tuple(
            parts.truth.event(
                "worker.exited",
                worker_id,
                exit_ if exit_.at_s else msgspec.structs.replace(exit_, at_s=parts.truth.now()),
            )
            for worker_id, exit_ in fresh.items()
        )
        await parts.truth.journal.apply(Change(events=events))
    # Also for those told before: the process that told them may have died before this.
    for exit_ in exits:
        await parts.actors.worker_exited(exit_)
        await parts.ledger.worker_exited(exit_)
