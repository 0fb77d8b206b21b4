"""Routes of actors, which :class:`~stoker_gcs.registry.actors.registry.ActorRegistry` owns.

An actor is in SQL before the reply to its creation, and a report or kill that comes twice changes nothing
more. Lists and watches show the same records, the watch as events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker_gcs.api.events import watch
from stoker_gcs.api.filters import event_filter, state_filter
from stoker_gcs.registry.actors.rules import ACTORS
from stoker_wire.http.principals import READERS, WORK
from stoker_wire.http.server.routes import Route
from stoker_wire.messages.control import Page
from stoker_wire.messages.queries import ActorQuery, WaitQuery
from stoker_wire.messages.work import (
    DETACHED_JOB,
    Actor,
    ActorState,
    CreateActor,
    KillActor,
    ReportActor,
    SupplyArguments,
)

if TYPE_CHECKING:
    from stoker_gcs.app import GcsApp
    from stoker_wire.http.server.request import Request

FILTERS = ("job_id", "state", "name", "namespace", "node_id", "class_name")


async def create_actor(app: GcsApp, req: Request) -> Actor:
    await app.access.check_new(
        req.principal, job_id=req.body.demand.job_id, namespace=req.body.namespace
    )
    of_detached = req.body.demand.job_id == DETACHED_JOB
    origin = req.principal.origin_job_id if of_detached else ""
    return await app.actors.create(req.body, origin_job_id=origin)


async def list_actors(app: GcsApp, req: Request) -> Any:
    query = req.query
    if query.watch:
        return await watch(app, req, event_filter("actor."))
    where = {name: getattr(query, name) for name in FILTERS}
    where["state"] = state_filter(query.state, ActorState)
    return await app.state.page(ACTORS, query, await app.access.narrowed(req.principal, where))


async def get_actor(app: GcsApp, req: Request) -> Actor:
    req.waiting_for("the actor to start", explain=f"{req.http.path}/explain")
    return await app.actors.get(req.path["actor_id"], req.query.wait_s)


async def get_named_actor(app: GcsApp, req: Request) -> Actor:
    return await app.actors.get_named(req.path["namespace"], req.path["name"])


async def supply_arguments(app: GcsApp, req: Request) -> Actor:
    return await app.actors.supply(req.path["actor_id"], req.body)


async def report_actor(app: GcsApp, req: Request) -> Actor:
    req.waiting_for("the actor's lease to be recorded")
    return await app.actors.report(req.path["actor_id"], req.body)


async def kill_actor(app: GcsApp, req: Request) -> Actor:
    return await app.actors.kill(req.path["actor_id"], req.body)


ROUTES = (
    Route(
        "POST",
        "/v1/actors",
        create_actor,
        body=CreateActor,
        reply=Actor,
        roles=WORK,
        summary="Create actor",
    ),
    Route(
        "GET",
        "/v1/actors",
        list_actors,
        query=ActorQuery,
        reply=Page[Actor],
        roles=READERS,
        summary="List or watch actors",
    ),
    Route(
        "GET",
        "/v1/actors/{actor_id}",
        get_actor,
        query=WaitQuery,
        reply=Actor,
        roles=READERS,
        summary="Get actor; wait until it is ALIVE or DEAD",
    ),
    Route(
        "GET",
        "/v1/named-actors/{namespace}/{name}",
        get_named_actor,
        reply=Actor,
        roles=READERS,
        summary="Get living actor by name",
    ),
    Route(
        "POST",
        "/v1/actors/{actor_id}/arguments",
        supply_arguments,
        body=SupplyArguments,
        reply=Actor,
        roles=WORK,
        summary="Supply arguments of actor's constructor",
    ),
    Route(
        "POST",
        "/v1/actors/{actor_id}/report",
        report_actor,
        body=ReportActor,
        reply=Actor,
        roles=WORK,
        summary="Report actor state",
    ),
    Route(
        "POST",
        "/v1/actors/{actor_id}/kill",
        kill_actor,
        body=KillActor,
        reply=Actor,
        roles=WORK,
        summary="Kill actor",
    ),
)
