"""Routes of nodes, which :class:`~stoker_gcs.registry.nodes.registry.NodeRegistry` owns, and of workers.

Workers are no state of the gcs: each list asks the nodelets that own them. Only their exits are recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from stoker_gcs.api.events import watch
from stoker_gcs.api.filters import event_filter, state_filter
from stoker_gcs.peer_clients import CALL_S
from stoker_gcs.state.schema import SCHEDULER
from stoker_wire.http.paging import page_of
from stoker_wire.http.principals import ADMINS, NODES, READERS
from stoker_wire.http.server.routes import Route
from stoker_wire.messages.cluster import (
    GPU_INDEX,
    ChangeTaints,
    CordonNode,
    DrainNode,
    DrainStatus,
    Heartbeat,
    Node,
    NodeState,
    RegisteredNode,
    RegisterNode,
    Worker,
    WorkersExited,
    WorkerState,
)
from stoker_wire.messages.common import Empty
from stoker_wire.messages.control import Page
from stoker_wire.messages.node_api import NodeActivity, ReportBuilds
from stoker_wire.messages.queries import ActivityQuery, Leave, NodeQuery, WorkerQuery

if TYPE_CHECKING:
    from stoker_gcs.app import GcsApp
    from stoker_wire.http.server.request import Request


async def register_node(app: GcsApp, req: Request) -> RegisteredNode:
    registered = await app.nodes.register(req.body)
    app.probes.watches(registered.node_id, req.http)
    leader = app.election.last_known(SCHEDULER)  # as of now: a later one asks the node first
    return replace(registered, epoch=0 if leader is None else leader.epoch)


async def list_nodes(app: GcsApp, req: Request) -> Any:
    if req.query.watch:
        return await watch(app, req, event_filter("node.,gpu."))
    return await app.nodes.page(req.query, state_filter(req.query.state, NodeState))


async def get_node(app: GcsApp, req: Request) -> Node:
    return await app.nodes.get(req.path["node_id"])


async def record_heartbeat(app: GcsApp, req: Request) -> None:
    await app.nodes.heartbeat(req.path["node_id"], req.body)


async def deregister_node(app: GcsApp, req: Request) -> None:
    await app.nodes.leave(req.path["node_id"], req.body.incarnation)


async def cordon_node(app: GcsApp, req: Request) -> Node:
    return await app.nodes.cordon(req.path["node_id"], req.body, user=req.principal.name)


async def uncordon_node(app: GcsApp, req: Request) -> Node:
    return await app.nodes.uncordon(req.path["node_id"])


async def drain_node(app: GcsApp, req: Request) -> Node:
    return await app.nodes.drain(req.path["node_id"], req.body, user=req.principal.name)


async def get_drain(app: GcsApp, req: Request) -> DrainStatus:
    return await app.drains.status(req.path["node_id"])


async def taint_node(app: GcsApp, req: Request) -> Node:
    return await app.nodes.taint(req.path["node_id"], req.body)


async def release_gpu(app: GcsApp, req: Request) -> None:
    node_id, index = req.path["node_id"], req.path["index"]
    req.waiting_for(f"the nodelet of {node_id}")
    client = app.peers.nodelet(node_id)
    await client.call("POST", f"/v1/gpus/{index}/release", reply=Empty, timeout_s=CALL_S)


async def list_node_activity(app: GcsApp, req: Request) -> Page[NodeActivity]:
    """The newest 10,000 entries, as long as its nodelet runs. Users see those of their jobs."""
    node_id, query = req.path["node_id"], req.query
    req.waiting_for(f"the nodelet of {node_id}")
    page = await app.peers.nodelet(node_id).call(
        "GET",
        "/v1/activity",
        reply=Page[NodeActivity],
        query={name: one for name, one in msgspec.to_builtins(query).items() if one != ""},
        timeout_s=CALL_S,
        retry=False,
    )
    return await app.access.visible(req.principal, page)


async def record_worker_exits(app: GcsApp, req: Request) -> None:
    await app.worker_exits.report(req.body)


async def record_builds(app: GcsApp, req: Request) -> None:
    await app.nodes.record_builds(req.body)


async def list_workers(app: GcsApp, req: Request) -> Page[Worker]:
    query: WorkerQuery = req.query
    states = state_filter(query.state, WorkerState)
    workers = [
        worker
        for worker in await app.peers.workers()
        if query.node_id in ("", worker.node_id)
        and query.job_id in ("", worker.job_id)
        and query.actor_id in ("", worker.actor_id)
        and (not states or worker.state.value in query.state.split(","))
    ]
    page = page_of(
        workers,
        query,
        key=lambda worker: worker.worker_id,
        created=lambda worker: worker.started_at_s,
    )
    return await app.access.visible(req.principal, page)


ROUTES = (
    Route(
        "POST",
        "/v1/nodes",
        register_node,
        body=RegisterNode,
        reply=RegisteredNode,
        roles=NODES,
        summary="Register node",
    ),
    Route(
        "GET",
        "/v1/nodes",
        list_nodes,
        query=NodeQuery,
        reply=Page[Node],
        roles=READERS,
        summary="List or watch nodes",
    ),
    Route("GET", "/v1/nodes/{node_id}", get_node, reply=Node, roles=READERS, summary="Get node"),
    Route(
        "POST",
        "/v1/nodes/{node_id}/heartbeat",
        record_heartbeat,
        body=Heartbeat,
        idempotency=False,
        roles=NODES,
        summary="Record node heartbeat",
    ),
    Route(
        "POST",
        "/v1/nodes/{node_id}/leave",
        deregister_node,
        body=Leave,
        roles=NODES | ADMINS,
        summary="Deregister node",
    ),
    Route(
        "POST",
        "/v1/nodes/{node_id}/cordon",
        cordon_node,
        body=CordonNode,
        reply=Node,
        roles=ADMINS,
        summary="Place nothing more on a node",
    ),
    Route(
        "POST",
        "/v1/nodes/{node_id}/uncordon",
        uncordon_node,
        reply=Node,
        roles=ADMINS,
        summary="Place work on a node again",
    ),
    Route(
        "POST",
        "/v1/nodes/{node_id}/drain",
        drain_node,
        body=DrainNode,
        reply=Node,
        roles=ADMINS,
        summary="Empty a node, which then leaves",
    ),
    Route(
        "GET",
        "/v1/nodes/{node_id}/drain",
        get_drain,
        reply=DrainStatus,
        roles=READERS,
        summary="Get how a node's drain goes, and what is left there",
    ),
    Route(
        "POST",
        "/v1/nodes/{node_id}/taints",
        taint_node,
        body=ChangeTaints,
        reply=Node,
        roles=ADMINS,
        summary="Change the taints of a node",
    ),
    Route(
        "POST",
        "/v1/nodes/{node_id}/gpus/{index}/release",
        release_gpu,
        parts={"index": GPU_INDEX},
        roles=ADMINS,
        summary="Put a quarantined GPU back to use",
    ),
    Route(
        "GET",
        "/v1/nodes/{node_id}/activity",
        list_node_activity,
        query=ActivityQuery,
        reply=Page[NodeActivity],
        roles=READERS,
        summary="List what node did beside running calls",
    ),
    Route(
        "POST",
        "/v1/workers/exited",
        record_worker_exits,
        body=WorkersExited,
        roles=NODES,
        summary="Record worker exits",
    ),
    Route(
        "POST",
        "/v1/environments/reported",
        record_builds,
        body=ReportBuilds,
        roles=NODES,
        summary="Record what nodes install",
    ),
    Route(
        "GET",
        "/v1/workers",
        list_workers,
        query=WorkerQuery,
        reply=Page[Worker],
        roles=READERS,
        summary="List workers of all nodes",
    ),
)
