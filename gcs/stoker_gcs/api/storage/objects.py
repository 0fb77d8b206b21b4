"""Routes of detached objects, which the cluster owns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker_gcs.api.filters import state_filter
from stoker_gcs.registry.objects.rules import OBJECTS
from stoker_wire.http.principals import NODES, READERS, WORK
from stoker_wire.http.server.routes import Route
from stoker_wire.messages.control import Page
from stoker_wire.messages.objects import (
    CommitDetachedObject,
    CreateDetachedObject,
    DetachedObject,
    DetachedObjectQuery,
    DetachedState,
    LocatedObject,
    LocateObject,
    ReportDetachedObjects,
    UnknownObjects,
)

if TYPE_CHECKING:
    from stoker_gcs.app import GcsApp
    from stoker_wire.http.server.request import Request


async def create_detached_object(app: GcsApp, req: Request) -> DetachedObject:
    """Without a value its name and its bytes are reserved, until a node is committed to have it."""
    await app.access.check_new(req.principal, job_id=req.body.job_id, namespace=req.body.namespace)
    return await app.objects.create(req.body)


async def list_detached_objects(app: GcsApp, req: Request) -> Any:
    query = req.query
    where = {
        "name": query.name,
        "namespace": query.namespace,
        "job_id": query.job_id,
        "state": state_filter(query.state, DetachedState),
    }
    return await app.state.page(OBJECTS, query, await app.access.narrowed(req.principal, where))


async def get_detached_object(app: GcsApp, req: Request) -> DetachedObject:
    return await app.objects.get(req.path["id"])


async def commit_detached_object(app: GcsApp, req: Request) -> DetachedObject:
    req.waiting_for(f"the copies of {req.path['id']}")
    return await app.copies.commit(req.path["id"], req.body.node_id)


async def locate_detached_object(app: GcsApp, req: Request) -> LocatedObject:
    req.waiting_for(f"nodes to say whether they have {req.path['id']}")
    return await app.copies.locate(req.path["id"], req.body.without)


async def free_detached_object(app: GcsApp, req: Request) -> DetachedObject:
    return await app.objects.free(req.path["id"])


async def report_detached_objects(app: GcsApp, req: Request) -> UnknownObjects:
    await app.nodes.get(req.path["id"])
    unknown = await app.copies.report(req.path["id"], req.body.object_ids)
    return UnknownObjects(object_ids=unknown)


ROUTES = (
    Route(
        "POST",
        "/v1/detached-objects",
        create_detached_object,
        body=CreateDetachedObject,
        reply=DetachedObject,
        roles=WORK,
        summary="Create or reserve detached object",
    ),
    Route(
        "GET",
        "/v1/detached-objects",
        list_detached_objects,
        query=DetachedObjectQuery,
        reply=Page[DetachedObject],
        roles=READERS,
        summary="List detached objects",
    ),
    Route(
        "GET",
        "/v1/detached-objects/{id}",
        get_detached_object,
        reply=DetachedObject,
        roles=READERS,
        summary="Get detached object",
    ),
    Route(
        "POST",
        "/v1/detached-objects/{id}/commit",
        commit_detached_object,
        body=CommitDetachedObject,
        reply=DetachedObject,
        roles=WORK,
        summary="Report that node has detached object; waits until it has its copies",
    ),
    Route(
        "POST",
        "/v1/detached-objects/{id}/locate",
        locate_detached_object,
        body=LocateObject,
        reply=LocatedObject,
        roles=WORK | NODES,
        summary="Find from where detached object can be read",
    ),
    Route(
        "DELETE",
        "/v1/detached-objects/{id}",
        free_detached_object,
        reply=DetachedObject,
        roles=WORK,
        summary="Free detached object",
    ),
    Route(
        "POST",
        "/v1/nodes/{id}/detached-objects",
        report_detached_objects,
        body=ReportDetachedObjects,
        reply=UnknownObjects,
        roles=NODES,
        summary="Report the detached objects that node has; the reply names those it may free",
    ),
)
