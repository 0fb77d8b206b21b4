"""Routes of placement groups, which :class:`~stoker_gcs.registry.groups.registry.GroupRegistry` owns.

A group is in SQL before the reply to its creation, and one that is removed twice is removed once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker_gcs.api.events import watch
from stoker_gcs.api.filters import event_filter, state_filter
from stoker_gcs.registry.groups.rules import GROUPS
from stoker_wire.http.principals import ADMINS, READERS, SCHEDULERS, WORK
from stoker_wire.http.server.routes import Route
from stoker_wire.messages.control import Explanation, Page
from stoker_wire.messages.groups import (
    CreatePlacementGroup,
    GroupState,
    PlacementGroup,
    PreemptGroup,
    ReleaseBundles,
)
from stoker_wire.messages.queries import GroupQuery, WaitQuery
from stoker_wire.messages.work import DETACHED_JOB

if TYPE_CHECKING:
    from stoker_gcs.app import GcsApp
    from stoker_wire.http.server.request import Request

FILTERS = ("job_id", "state", "name", "namespace")


async def create_placement_group(app: GcsApp, req: Request) -> PlacementGroup:
    # One that is of no job is all the same of a namespace, by which it is found.
    of_no_job = req.body.job_id == DETACHED_JOB and req.body.namespace
    await app.access.check_new(
        req.principal,
        job_id="" if of_no_job else req.body.job_id,
        namespace=req.body.namespace,
    )
    return await app.groups.create(req.body)


async def list_placement_groups(app: GcsApp, req: Request) -> Any:
    query = req.query
    if query.watch:
        return await watch(app, req, event_filter("placement_group."))
    where = {name: getattr(query, name) for name in FILTERS}
    where["state"] = state_filter(query.state, GroupState)
    return await app.state.page(GROUPS, query, await app.access.narrowed(req.principal, where))


async def get_placement_group(app: GcsApp, req: Request) -> PlacementGroup:
    req.waiting_for("the placement group to be placed", explain=f"{req.http.path}/explain")
    return await app.groups.get(req.path["group_id"], req.query.wait_s)


async def get_named_placement_group(app: GcsApp, req: Request) -> PlacementGroup:
    return await app.groups.get_named(req.path["namespace"], req.path["name"])


async def remove_placement_group(app: GcsApp, req: Request) -> PlacementGroup:
    return await app.groups.remove(req.path["group_id"], "removed by its user")


async def preempt_placement_group(app: GcsApp, req: Request) -> PlacementGroup:
    return await app.groups.preempt(req.path["group_id"], req.body)


async def release_bundles(app: GcsApp, req: Request) -> PlacementGroup:
    return await app.groups.release(req.path["group_id"], req.body)


async def explain_placement_group(app: GcsApp, req: Request) -> Explanation:
    return await app.explainer.group(req.path["group_id"])


ROUTES = (
    Route(
        "POST",
        "/v1/placement-groups",
        create_placement_group,
        body=CreatePlacementGroup,
        reply=PlacementGroup,
        roles=WORK | SCHEDULERS,
        summary="Create placement group",
    ),
    Route(
        "GET",
        "/v1/placement-groups",
        list_placement_groups,
        query=GroupQuery,
        reply=Page[PlacementGroup],
        roles=READERS,
        summary="List or watch placement groups",
    ),
    Route(
        "GET",
        "/v1/placement-groups/{group_id}",
        get_placement_group,
        query=WaitQuery,
        reply=PlacementGroup,
        roles=READERS,
        summary="Get placement group; wait until it is CREATED or REMOVED",
    ),
    Route(
        "GET",
        "/v1/named-placement-groups/{namespace}/{name}",
        get_named_placement_group,
        reply=PlacementGroup,
        roles=READERS,
        summary="Get living placement group by name",
    ),
    Route(
        "DELETE",
        "/v1/placement-groups/{group_id}",
        remove_placement_group,
        reply=PlacementGroup,
        roles=WORK | SCHEDULERS,
        summary="Remove placement group; what runs in it ends",
    ),
    Route(
        "POST",
        "/v1/placement-groups/{group_id}/preempt",
        preempt_placement_group,
        body=PreemptGroup,
        reply=PlacementGroup,
        roles=SCHEDULERS | ADMINS,
        summary="Place all bundles of placement group again (asked for by the scheduler)",
    ),
    Route(
        "POST",
        "/v1/placement-groups/{group_id}/release",
        release_bundles,
        body=ReleaseBundles,
        reply=PlacementGroup,
        roles=WORK | SCHEDULERS,
        summary="Give up some bundles of placement group for good; what runs in them ends",
    ),
    Route(
        "GET",
        "/v1/placement-groups/{group_id}/explain",
        explain_placement_group,
        reply=Explanation,
        roles=READERS,
        summary="Explain why placement group waits, or what became of it",
    ),
)
