"""Routes that other services answer: the scheduler (leases, resources, plans), nodelets (objects).

Everything here is bounded in time, and a peer that is not there is named in the problem.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.explain.causes import cause_of
from stoker_wire.http.paging import page_of
from stoker_wire.http.principals import READERS
from stoker_wire.http.server.routes import Route
from stoker_wire.messages.cluster import ClusterResources, Demand, Lease, Node
from stoker_wire.messages.control import (
    ExplainQuery,
    Explanation,
    LeaseQuery,
    ListQuery,
    Page,
    QueueEntry,
)
from stoker_wire.messages.elastic import ElasticPlan, PoolPlan
from stoker_wire.messages.groups import PlanReply, PlanRequest
from stoker_wire.messages.objects import ObjectInfo
from stoker_wire.messages.queries import ObjectQuery
from stoker_wire.messages.queues import QueueExplanation, QueueUsage

if TYPE_CHECKING:
    from stoker_gcs.app import GcsApp
    from stoker_wire.http.client.client import Client
    from stoker_wire.http.server.request import Request


async def list_objects(app: GcsApp, req: Request) -> Page[ObjectInfo]:
    query: ObjectQuery = req.query

    async def ask(node: Node, client: Client) -> list[ObjectInfo]:
        if query.node_id not in ("", node.node_id):
            return []
        return await client.items("/v1/objects", Page[ObjectInfo], retry=False)

    replies = await app.peers.ask_nodelets(ask)
    items = [
        msgspec.structs.replace(item, node_id=item.node_id or node_id)
        for node_id, objects in replies.items()
        for item in objects
        if query.job_id in ("", item.job_id)
    ]
    page = page_of(
        items,
        query,
        key=lambda item: f"{item.object_id} {item.node_id}",
        created=lambda item: item.created_at_s,
    )
    return await app.access.visible(req.principal, page)


async def list_leases(app: GcsApp, req: Request) -> Page[Lease]:
    query = _without_defaults(req.query)
    page = await app.peers.call_scheduler("GET", "/v1/leases", reply=Page[Lease], query=query)
    return await app.access.visible(req.principal, page)


async def list_waiting_demands(app: GcsApp, req: Request) -> Page[QueueEntry]:
    query = _without_defaults(req.query)
    page = await app.peers.call_scheduler("GET", "/v1/queue", reply=Page[QueueEntry], query=query)
    return await app.access.visible(req.principal, page)


async def list_queue_usage(app: GcsApp, req: Request) -> Page[QueueUsage]:
    query, path = _without_defaults(req.query), "/v1/queue-usage"
    return await app.peers.call_scheduler("GET", path, reply=Page[QueueUsage], query=query)


async def get_cluster_resources(app: GcsApp, _: Request) -> ClusterResources:
    return await app.peers.call_scheduler("GET", "/v1/resources", reply=ClusterResources)


async def plan_demands(app: GcsApp, req: Request) -> PlanReply:
    body = msgspec.structs.replace(req.body, user=req.body.user or req.principal.name)
    return await app.peers.call_scheduler("POST", "/v1/plan", body, reply=PlanReply)


async def plan_elastic_round(app: GcsApp, req: Request) -> ElasticPlan:
    plan = await app.peers.call_scheduler("GET", "/v1/elastic-plan", reply=ElasticPlan)
    if req.principal.sees_all:
        return plan
    seen = await app.access.job_ids(req.principal)
    return msgspec.structs.replace(plan, pools=tuple(_seen(pool, seen) for pool in plan.pools))


def _seen(pool: PoolPlan, job_ids: frozenset[str]) -> PoolPlan:
    """Return a pool without the jobs that a principal does not see."""
    jobs = tuple(
        one if one.held_by in job_ids else msgspec.structs.replace(one, held_by="")
        for one in pool.jobs
        if one.job_id in job_ids
    )
    return msgspec.structs.replace(pool, jobs=jobs)


async def explain_demand(app: GcsApp, req: Request) -> Explanation:
    query = _without_defaults(req.query)
    explanation = await app.peers.call_scheduler(
        "POST", "/v1/explain", req.body, reply=Explanation, query=query
    )
    return msgspec.structs.replace(explanation, cause=cause_of(explanation))


async def explain_queue(app: GcsApp, req: Request) -> QueueExplanation:
    path = f"/v1/queues/{req.path['name']}/explain"
    return await app.peers.call_scheduler("GET", path, reply=QueueExplanation)


async def explain_task(app: GcsApp, req: Request) -> Explanation:
    return await app.explainer.task(req.path["task_id"])


async def explain_actor(app: GcsApp, req: Request) -> Explanation:
    return await app.explainer.actor(req.path["actor_id"])


async def explain_job(app: GcsApp, req: Request) -> Explanation:
    return await app.explainer.job(req.path["job_id"])


def _without_defaults(query: ListQuery | ExplainQuery) -> dict[str, object]:
    """Return the fields that differ from their defaults, so that other versions understand it."""
    default = type(query)()
    given: dict[str, object] = msgspec.to_builtins(query)
    return {k: v for k, v in given.items() if v != msgspec.to_builtins(getattr(default, k))}


ROUTES = (
    Route(
        "GET",
        "/v1/objects",
        list_objects,
        query=ObjectQuery,
        reply=Page[ObjectInfo],
        roles=READERS,
        summary="List objects in the nodes' shared memory",
    ),
    Route(
        "GET",
        "/v1/leases",
        list_leases,
        query=LeaseQuery,
        reply=Page[Lease],
        roles=READERS,
        summary="List leases",
    ),
    Route(
        "GET",
        "/v1/queue-usage",
        list_queue_usage,
        query=ListQuery,
        reply=Page[QueueUsage],
        roles=READERS,
        summary="List what queues have, can claim and wait for",
    ),
    Route(
        "GET",
        "/v1/queue",
        list_waiting_demands,
        query=ListQuery,
        reply=Page[QueueEntry],
        roles=READERS,
        summary="List waiting demands, in order",
    ),
    Route(
        "GET",
        "/v1/cluster",
        get_cluster_resources,
        reply=ClusterResources,
        roles=READERS,
        summary="Get total and available resources",
    ),
    Route(
        "POST",
        "/v1/plan",
        plan_demands,
        cost="expensive",
        body=PlanRequest,
        reply=PlanReply,
        idempotency=False,
        roles=READERS,
        summary="Plan where demands would go, and whom they would preempt",
    ),
    Route(
        "GET",
        "/v1/elastic-plan",
        plan_elastic_round,
        cost="expensive",
        reply=ElasticPlan,
        roles=READERS,
        summary="Plan a round of elastic jobs, and say what their replicas are worth",
    ),
    Route(
        "POST",
        "/v1/explain",
        explain_demand,
        cost="expensive",
        body=Demand,
        query=ExplainQuery,
        reply=Explanation,
        idempotency=False,
        roles=READERS,
        summary="Explain why a demand would wait",
    ),
    Route(
        "GET",
        "/v1/queues/{name}/explain",
        explain_queue,
        reply=QueueExplanation,
        roles=READERS,
        summary="Explain what queue has, and what waits in it",
    ),
    Route(
        "GET",
        "/v1/tasks/{task_id}/explain",
        explain_task,
        reply=Explanation,
        roles=READERS,
        summary="Explain why task waits, or what became of it",
    ),
    Route(
        "GET",
        "/v1/actors/{actor_id}/explain",
        explain_actor,
        reply=Explanation,
        roles=READERS,
        summary="Explain why actor waits, or what became of it",
    ),
    Route(
        "GET",
        "/v1/jobs/{job_id}/explain",
        explain_job,
        reply=Explanation,
        roles=READERS,
        summary="Explain why job waits, or what became of it",
    ),
)
