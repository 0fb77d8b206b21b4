"""Routes of queues, which :class:`~stoker_gcs.registry.queues.registry.QueueRegistry` owns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker_gcs.api.events import watch
from stoker_gcs.api.filters import event_filter
from stoker_gcs.registry.queues.rules import QUEUES
from stoker_wire.http.principals import ADMINS, READERS
from stoker_wire.http.server.routes import Route
from stoker_wire.messages.control import Page
from stoker_wire.messages.queries import QueueQuery
from stoker_wire.messages.queues import ChangeQueue, CreateQueue, Queue, SetQueues, SetQueuesReply

if TYPE_CHECKING:
    from stoker_gcs.app import GcsApp
    from stoker_wire.http.server.request import Request


async def create_queue(app: GcsApp, req: Request) -> Queue:
    return await app.queues.create(req.body)


async def list_queues(app: GcsApp, req: Request) -> Any:
    query = req.query
    if query.watch:
        return await watch(app, req, event_filter("queue."))
    return await app.state.page(QUEUES, query, {"parent": query.parent})


async def get_queue(app: GcsApp, req: Request) -> Queue:
    return await app.queues.get(req.path["name"])


async def change_queue(app: GcsApp, req: Request) -> Queue:
    return await app.queues.change(req.path["name"], req.body)


async def set_queues(app: GcsApp, req: Request) -> SetQueuesReply:
    return await app.queues.set_all(req.body)


async def remove_queue(app: GcsApp, req: Request) -> Queue:
    return await app.queues.remove(req.path["name"])


ROUTES = (
    Route(
        "POST",
        "/v1/queues",
        create_queue,
        body=CreateQueue,
        reply=Queue,
        roles=ADMINS,
        summary="Create queue",
    ),
    Route(
        "GET",
        "/v1/queues",
        list_queues,
        query=QueueQuery,
        reply=Page[Queue],
        roles=READERS,
        summary="List or watch queues; the default one is among them once it is changed",
    ),
    Route(
        "PUT",
        "/v1/queues",
        set_queues,
        body=SetQueues,
        reply=SetQueuesReply,
        roles=ADMINS,
        summary="Set all queues at once",
    ),
    Route("GET", "/v1/queues/{name}", get_queue, reply=Queue, roles=READERS, summary="Get queue"),
    Route(
        "PATCH",
        "/v1/queues/{name}",
        change_queue,
        body=ChangeQueue,
        reply=Queue,
        roles=ADMINS,
        summary="Change queue; what is null stays",
    ),
    Route(
        "DELETE",
        "/v1/queues/{name}",
        remove_queue,
        reply=Queue,
        roles=ADMINS,
        summary="Remove queue that nothing is in; resets the default one",
    ),
)
