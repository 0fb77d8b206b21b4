"""Routes of elastic jobs, whose states :class:`~stoker_gcs.registry.jobs.elastic.ElasticRegistry` owns.

A job states limits and hints, and answers offers; the scheduler makes and withdraws them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_wire.http.principals import ADMINS, READERS, SCHEDULERS, WORK
from stoker_wire.http.server.routes import Route
from stoker_wire.messages.common import Empty
from stoker_wire.messages.elastic import (
    AnswerOffer,
    ElasticQuery,
    ElasticState,
    Hints,
    MakeOffer,
    Scaling,
    WithdrawReplicas,
)

if TYPE_CHECKING:
    from stoker_gcs.app import GcsApp
    from stoker_wire.http.server.request import Request


async def get_elastic(app: GcsApp, req: Request) -> ElasticState:
    req.waiting_for("an offer, or other replicas")
    query: ElasticQuery = req.query
    return await app.elastic.get(req.path["job_id"], seen=query.seen, wait_s=query.wait_s)


async def put_scaling(app: GcsApp, req: Request) -> ElasticState:
    return await app.elastic.scale(req.path["job_id"], req.body)


async def delete_scaling(app: GcsApp, req: Request) -> Empty:
    await app.elastic.end(req.path["job_id"])
    return Empty()


async def put_hints(app: GcsApp, req: Request) -> ElasticState:
    return await app.elastic.hint(req.path["job_id"], req.body)


async def accept_offer(app: GcsApp, req: Request) -> ElasticState:
    return await app.elastic.accept(req.path["job_id"], req.body)


async def make_offer(app: GcsApp, req: Request) -> ElasticState:
    return await app.elastic.offer(req.path["job_id"], req.body)


async def withdraw_replicas(app: GcsApp, req: Request) -> ElasticState:
    return await app.elastic.withdraw(req.path["job_id"], req.body)


ROUTES = (
    Route(
        "GET",
        "/v1/jobs/{job_id}/elastic",
        get_elastic,
        query=ElasticQuery,
        reply=ElasticState,
        roles=READERS,
        summary="Get replicas, offer and hints of elastic job; wait for another version",
    ),
    Route(
        "PUT",
        "/v1/jobs/{job_id}/scaling",
        put_scaling,
        body=Scaling,
        reply=ElasticState,
        roles=WORK,
        summary="Make job elastic: state how many replicas, and which batches, it may have",
    ),
    Route(
        "DELETE",
        "/v1/jobs/{job_id}/scaling",
        delete_scaling,
        reply=Empty,
        roles=WORK,
        summary="Make job rigid again; its replicas are released",
    ),
    Route(
        "PUT",
        "/v1/jobs/{job_id}/hints",
        put_hints,
        body=Hints,
        reply=ElasticState,
        roles=WORK,
        summary="Report how fast elastic job is, and what larger batch is worth to it",
    ),
    Route(
        "POST",
        "/v1/jobs/{job_id}/generation",
        accept_offer,
        body=AnswerOffer,
        reply=ElasticState,
        roles=WORK,
        summary="Begin generation that was offered, at batch boundary",
    ),
    Route(
        "POST",
        "/v1/jobs/{job_id}/offer",
        make_offer,
        body=MakeOffer,
        reply=ElasticState,
        roles=SCHEDULERS | ADMINS,
        summary="Offer replicas to elastic job (by the scheduler)",
    ),
    Route(
        "POST",
        "/v1/jobs/{job_id}/withdraw",
        withdraw_replicas,
        body=WithdrawReplicas,
        reply=ElasticState,
        roles=SCHEDULERS | ADMINS,
        summary="Void open offer, or take replicas that are gone (by the scheduler)",
    ),
)
