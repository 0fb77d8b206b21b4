"""Routes of jobs: submit, attach, follow, end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker_gcs.api.events import matcher, watch
from stoker_gcs.api.queries import ExitQuery, JobQuery, WaitQuery, states
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_wire.messages.control import Page
from stoker_wire.messages.work import AttachDriver, FinishJob, Job, JobState, SubmitJob

if TYPE_CHECKING:
    from aiohttp import web

    from stoker_gcs.app import Parts
    from stoker_wire.http.server import Request, Service


def add_routes(service: Service, parts: Parts) -> None:
    """Add the routes."""

    async def submit(req: Request) -> Job:
        return await parts.ledger.submit(req.body, key=req.idempotency_key)

    async def attach(req: Request) -> Job:
        return await parts.ledger.attach(req.body, key=req.idempotency_key)

    async def listing(req: Request) -> Any:
        query = req.query
        if query.watch:
            bookmark_s = service.settings.bookmark_s
            return await watch(parts.truth, req, query.since, matcher("job."), bookmark_s)
        where = {"state": states(query.state, JobState), "namespace": query.namespace}
        return await parts.truth.page(JOBS, query, where)

    async def one(req: Request) -> Job:
        req.waiting_for("the job to end", explain=f"{req.http.path}/explain")
        return await parts.truth.wait_for(
            JOBS, req.path["job_id"], lambda job: job.state.terminal, req.query.wait_s
        )

    async def stop(req: Request) -> Job:
        return await parts.ledger.end(req.path["job_id"], JobState.STOPPED, message="stopped")

    async def finish(req: Request) -> Job:
        return await parts.ledger.finish(req.path["job_id"], req.body)

    async def exits(req: Request) -> None:
        await parts.sessions.until_exit(req)

    async def session(req: Request, ws: web.WebSocketResponse) -> None:
        await parts.sessions.serve(req, ws)

    path = "/v1/jobs"
    service.route("POST", path, submit, body=SubmitJob, reply=Job, summary="Submit a job")
    service.route(
        "POST", path + "/attach", attach, body=AttachDriver, reply=Job, summary="A driver joins"
    )
    service.route(
        "GET", path, listing, query=JobQuery, reply=Page[Job], summary="List or watch jobs"
    )
    service.route(
        "GET",
        path + "/{job_id}",
        one,
        query=WaitQuery,
        reply=Job,
        summary="One job; waits for its end",
    )
    service.route("POST", path + "/{job_id}/stop", stop, reply=Job, summary="Stop a job")
    service.route(
        "POST", path + "/{job_id}/finish", finish, body=FinishJob, reply=Job, summary="A job ended"
    )
    service.route(
        "POST",
        path + "/{job_id}/exit",
        exits,
        query=ExitQuery,
        raw_body=True,
        stream=True,
        summary="An attached driver exits: the one byte of the body, its exit code, ends the job",
    )
    service.websocket(
        path + "/{job_id}/session",
        session,
        summary="A driver's session: the job fails if it ends without a finish",
        heartbeat_s=5.0,
    )
