"""Routes whose answers others know: the scheduler (leases, resources, plans), nodelets (objects).

Everything here is bounded in time, and a peer that is not there is named in the problem.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stoker_gcs.api.queries import ObjectQuery
from stoker_gcs.explain.causes import cause_of
from stoker_gcs.explain.explain import explain_actor, explain_job, explain_task
from stoker_wire.http.paging import page_of
from stoker_wire.messages.cluster import ClusterResources, Demand, Lease, Node
from stoker_wire.messages.control import Explanation, LeaseQuery, ListQuery, Page, QueueEntry
from stoker_wire.messages.work import ObjectInfo

if TYPE_CHECKING:
    from stoker_gcs.app import Parts
    from stoker_wire.http.client import Client
    from stoker_wire.http.server import Request, Service


def _given(query: ListQuery) -> dict[str, object]:
    """What differs from the defaults, so that a scheduler of another version understands it."""
    usual = type(query)()
    found: dict[str, object] = msgspec.to_builtins(query)
    return {k: v for k, v in found.items() if v != msgspec.to_builtins(getattr(usual, k))}


def add_routes(service: Service, parts: Parts) -> None:
    """Add the routes."""
    links = parts.links

    async def objects(req: Request) -> Page[ObjectInfo]:
        query = req.query

        async def ask(node: Node, client: Client) -> list[ObjectInfo]:
            if query.node_id not in ("", node.node_id):
                return []
            found: list[ObjectInfo] = []
            cursor = ""
            while True:
                page = await client.call(
                    "GET",
                    "/v1/objects",
                    reply=Page[ObjectInfo],
                    query={"limit": 1000, "cursor": cursor},
                    retry=False,
                )
                found += page.items
                cursor = page.next_cursor
                if not cursor:
                    return found

        found = await links.every_nodelet(ask)
        items = [
            msgspec.structs.replace(item, node_id=item.node_id or node_id)
            for node_id, of_node in found.items()
            for item in of_node
            if query.job_id in ("", item.job_id)
        ]
        return page_of(
            items,
            query,
            key=lambda item: f"{item.object_id} {item.node_id}",
            created=lambda item: item.created_at_s,
        )

    async def leases(req: Request) -> Page[Lease]:
        query = _given(req.query)
        return await links.scheduler("GET", "/v1/leases", reply=Page[Lease], query=query)

    async def queue(req: Request) -> Page[QueueEntry]:
        query = _given(req.query)
        return await links.scheduler("GET", "/v1/queue", reply=Page[QueueEntry], query=query)

    async def cluster(_: Request) -> ClusterResources:
        return await links.scheduler("GET", "/v1/resources", reply=ClusterResources)

    async def plan(req: Request) -> dict[str, Any]:
        return await links.scheduler("POST", "/v1/plan", req.body, reply=dict[str, Any])

    async def explain(req: Request) -> Explanation:
        told = await links.scheduler("POST", "/v1/explain", req.body, reply=Explanation)
        return msgspec.structs.replace(told, cause=cause_of(told))

    async def of_task(req: Request) -> Explanation:
        return await explain_task(parts, req.path["task_id"])

    async def of_actor(req: Request) -> Explanation:
        return await explain_actor(parts, req.path["actor_id"])

    async def of_job(req: Request) -> Explanation:
        return await explain_job(parts, req.path["job_id"])

    add = service.route
    add(
        "GET",
        "/v1/objects",
        objects,
        query=ObjectQuery,
        reply=Page[ObjectInfo],
        summary="Objects in the nodes' shared memory",
    )
    add("GET", "/v1/leases", leases, query=LeaseQuery, reply=Page[Lease], summary="All leases")
    add(
        "GET",
        "/v1/queue",
        queue,
        query=ListQuery,
        reply=Page[QueueEntry],
        summary="Demands that wait, in order",
    )
    add("GET", "/v1/cluster", cluster, reply=ClusterResources, summary="What there is and is free")
    add(
        "POST",
        "/v1/plan",
        plan,
        body=dict[str, Any],
        reply=dict[str, Any],
        idempotency=False,
        summary="Where demands would go, without taking anything (see the scheduler's API)",
    )
    add(
        "POST",
        "/v1/explain",
        explain,
        body=Demand,
        reply=Explanation,
        idempotency=False,
        summary="Why a demand would wait",
    )
    for path, handler, what in (
        ("/v1/tasks/{task_id}/explain", of_task, "task"),
        ("/v1/actors/{actor_id}/explain", of_actor, "actor"),
        ("/v1/jobs/{job_id}/explain", of_job, "job"),
    ):
        add("GET", path, handler, reply=Explanation, summary=f"Why a {what} waits, or its story")
