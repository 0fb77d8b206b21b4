"""Routes of the state at an earlier time, and of stories: they read what others own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_wire.http.principals import AUDITORS, READERS
from stoker_wire.http.server.routes import Route
from stoker_wire.messages.events import PastState, StateQuery, Story, StoryQuery

if TYPE_CHECKING:
    from stoker_gcs.app import GcsApp
    from stoker_wire.http.server.request import Request


async def get_cluster_state(app: GcsApp, req: Request) -> PastState:
    return await app.time_machine.at(req.query)


async def get_story(app: GcsApp, req: Request) -> Story:
    return await app.storyteller.tell(req.path["id"], req.query.limit)


ROUTES = (
    Route(
        "GET",
        "/v1/state",
        get_cluster_state,
        cost="expensive",
        query=StateQuery,
        reply=PastState,
        roles=AUDITORS,
        summary="Get state of the cluster at a sequence number or time; 410 if that is not kept any more",
    ),
    Route(
        "GET",
        "/v1/story/{id}",
        get_story,
        cost="expensive",
        query=StoryQuery,
        reply=Story,
        roles=READERS,
        summary="Get what happened to a task, actor, node, job or placement group, and why",
    ),
)
