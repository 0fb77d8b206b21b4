"""Routes of leadership, tokens, retention, targets of Prometheus and ids by prefix, for operators.

LeaderElection owns who leads, and its epochs only rise; Tokens owns the tokens; IdFinder and Retention own
nothing, they read what others own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from stoker_gcs.controllers.leader_election import GCS
from stoker_gcs.state.schema import RESIGNED, SCHEDULER
from stoker_wire.http.principals import ADMINS, JOBS, JOINERS, READERS, SCHEDULERS
from stoker_wire.http.server.request_guard import check_confidential
from stoker_wire.http.server.routes import Route
from stoker_wire.messages.cluster import NodeState
from stoker_wire.messages.control import (
    Campaign,
    ChannelReview,
    CreateToken,
    IdMatches,
    IdQuery,
    JoinReply,
    Leader,
    ListQuery,
    Page,
    RetentionStatus,
    ReviewChannel,
    Token,
    Whoami,
)
from stoker_wire.messages.node_api import ScrapeTargets
from stoker_wire.messages.queries import ResignQuery

if TYPE_CHECKING:
    from stoker_gcs.app import GcsApp
    from stoker_wire.http.server.request import Request


async def list_ids(app: GcsApp, req: Request) -> IdMatches:
    found = await app.id_finder.find(req.query)
    return await app.access.visible_ids(req.principal, found)


async def acquire_leadership(app: GcsApp, req: Request) -> Leader:
    app.presence.note(req.path["name"], req.body.holder, req.body.url)
    return await app.election.campaign(req.path["name"], req.body)


async def get_leader(app: GcsApp, req: Request) -> Leader:
    return await app.election.current(req.path["name"])


async def resign_leadership(app: GcsApp, req: Request) -> None:
    app.presence.forget(req.path["name"], req.query.holder)
    await app.election.resign(req.path["name"], req.query.holder)


async def get_retention(app: GcsApp, req: Request) -> RetentionStatus:
    return await app.retention.status()


async def create_token(app: GcsApp, req: Request) -> Token:
    return await app.tokens.create(req.body, by=req.principal, key=req.idempotency_key)


async def list_tokens(app: GcsApp, req: Request) -> Page[Token]:
    return await app.tokens.page(req.query)


async def whoami(app: GcsApp, req: Request) -> Whoami:
    sender = req.principal
    return Whoami(
        role=sender.role,
        name=sender.name,
        job_id=sender.job_id,
        namespaces=sender.namespaces,
        token_id=sender.token_id,
        expires_at_s=sender.expires_at_s,
        run_as=sender.run_as,
    )


async def join_cluster(app: GcsApp, req: Request) -> JoinReply:
    check_confidential(req.http)
    return JoinReply(secrets=await app.tokens.use_to_join(req.principal.token_id))


async def review_channel(app: GcsApp, req: Request) -> ChannelReview:
    return ChannelReview(allowed=await app.access.may_open_channel(req.principal, req.body))


async def revoke_token(app: GcsApp, req: Request) -> Token:
    return await app.tokens.revoke(req.path["token_id"])


async def list_scrape_targets(app: GcsApp, _: Request) -> list[ScrapeTargets]:
    """List the gcs that leads and the one that answers, the leading scheduler, and the living nodes."""
    found = {app.url: {"service": "gcs"}}
    for name in (GCS, SCHEDULER):
        leader = app.election.last_known(name)
        if leader is not None and leader.expires_at_s > RESIGNED:
            found[leader.url] = {"service": name}
    for node in app.nodes.view.values():
        if node.state is not NodeState.DEAD:
            found[node.url] = {"service": "nodelet", "node": node.node_id}
    return [
        ScrapeTargets(
            targets=(parts.netloc,), labels={"__scheme__": parts.scheme, **found[parts.geturl()]}
        )
        for parts in map(urlsplit, found)
    ]


ROUTES = (
    Route(
        "GET",
        "/v1/ids",
        list_ids,
        query=IdQuery,
        reply=IdMatches,
        roles=READERS,
        summary="List ids of nodes, jobs, tasks, actors, workers, groups and detached objects by prefix",
    ),
    Route(
        "POST",
        "/v1/leaders/{name}",
        acquire_leadership,
        body=Campaign,
        reply=Leader,
        idempotency=False,
        roles=SCHEDULERS,
        summary="Acquire or renew leadership; 409 names the present leader",
    ),
    Route(
        "GET",
        "/v1/leaders/{name}",
        get_leader,
        reply=Leader,
        roles=READERS,
        summary="Get leader; 503 while there is none",
    ),
    Route(
        "DELETE",
        "/v1/leaders/{name}",
        resign_leadership,
        query=ResignQuery,
        roles=SCHEDULERS | ADMINS,
        summary="Resign leadership",
    ),
    Route(
        "GET",
        "/v1/retention",
        get_retention,
        reply=RetentionStatus,
        roles=READERS,
        summary="Get what is kept of what has ended, since when, and by which policies",
    ),
    Route(
        "GET",
        "/v1/metrics/targets",
        list_scrape_targets,
        reply=list[ScrapeTargets],
        roles=READERS,
        summary="List addresses with metrics, for the HTTP service discovery of Prometheus",
    ),
    Route(
        "POST",
        "/v1/tokens",
        create_token,
        cost="expensive",
        body=CreateToken,
        reply=Token,
        # A retry derives the secret again; a store of replies must not hold it.
        idempotency=False,
        roles=ADMINS,
        summary="Create token; its secret is in this reply only",
    ),
    Route(
        "GET",
        "/v1/tokens",
        list_tokens,
        query=ListQuery,
        reply=Page[Token],
        roles=ADMINS,
        summary="List tokens",
    ),
    Route(
        "GET",
        "/v1/whoami",
        whoami,
        reply=Whoami,
        roles=READERS,
        summary="Get whom the request's token is for",
    ),
    Route(
        "POST",
        "/v1/join",
        join_cluster,
        reply=JoinReply,
        # The reply has the cluster's secret, which a store of replies must not hold.
        idempotency=False,
        roles=JOINERS,
        summary="Get cluster's secret, to join: over TLS, or on this machine",
    ),
    Route(
        "POST",
        "/v1/channel-reviews",
        review_channel,
        body=ReviewChannel,
        reply=ChannelReview,
        roles=JOBS,
        summary="Review whether a process of another job may open a channel to the caller",
    ),
    Route(
        "DELETE",
        "/v1/tokens/{token_id}",
        revoke_token,
        reply=Token,
        roles=ADMINS,
        summary="Revoke token",
    ),
)
