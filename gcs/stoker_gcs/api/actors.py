"""Routes of actors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker_gcs.api.events import matcher, watch
from stoker_gcs.api.queries import ActorQuery, WaitQuery, states
from stoker_gcs.registry.actors.rules import ACTORS
from stoker_wire.messages.control import Page
from stoker_wire.messages.work import (
    Actor,
    ActorState,
    CreateActor,
    KillActor,
    ReportActor,
    SupplyArguments,
)

if TYPE_CHECKING:
    from stoker_gcs.app import Parts
    from stoker_wire.http.server import Request, Service

FILTERS = ("job_id", "state", "name", "namespace", "node_id", "class_name")


def add_routes(service: Service, parts: Parts) -> None:
    """Add the routes."""

    async def create(req: Request) -> Actor:
        return await parts.actors.create(req.body)

    async def listing(req: Request) -> Any:
        query = req.query
        if query.watch:
            bookmark_s = service.settings.bookmark_s
            return await watch(parts.truth, req, query.since, matcher("actor."), bookmark_s)
        where = {name: getattr(query, name) for name in FILTERS}
        where["state"] = states(query.state, ActorState)
        return await parts.truth.page(ACTORS, query, where)

    async def one(req: Request) -> Actor:
        req.waiting_for("the actor to start", explain=f"{req.http.path}/explain")
        return await parts.actors.get(req.path["actor_id"], req.query.wait_s)

    async def named(req: Request) -> Actor:
        return await parts.actors.named(req.path["namespace"], req.path["name"])

    async def supply(req: Request) -> Actor:
        return await parts.actors.supply(req.path["actor_id"], req.body)

    async def report(req: Request) -> Actor:
        req.waiting_for("the actor's lease to be recorded")
        return await parts.actors.report(req.path["actor_id"], req.body)

    async def kill(req: Request) -> Actor:
        return await parts.actors.kill(req.path["actor_id"], req.body)

    path = "/v1/actors"
    service.route("POST", path, create, body=CreateActor, reply=Actor, summary="Create an actor")
    service.route(
        "GET", path, listing, query=ActorQuery, reply=Page[Actor], summary="List or watch actors"
    )
    service.route(
        "GET",
        path + "/{actor_id}",
        one,
        query=WaitQuery,
        reply=Actor,
        summary="One actor; waits until it is ALIVE or DEAD",
    )
    service.route(
        "GET",
        "/v1/named-actors/{namespace}/{name}",
        named,
        reply=Actor,
        summary="The living actor of a name",
    )
    service.route(
        "POST",
        path + "/{actor_id}/arguments",
        supply,
        body=SupplyArguments,
        reply=Actor,
        summary="The arguments of the constructor are there",
    )
    service.route(
        "POST",
        path + "/{actor_id}/report",
        report,
        body=ReportActor,
        reply=Actor,
        summary="The worker tells how its actor does",
    )
    service.route(
        "POST", path + "/{actor_id}/kill", kill, body=KillActor, reply=Actor, summary="End an actor"
    )
