"""Routes of jobs (submit, attach, follow, end), and of the schedules that submit them.

JobRegistry owns the jobs, DriverSessions the drivers' sessions. A job is in SQL before the reply to its
submission, and a repeated one (same idempotency key) is the same job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stoker_gcs.api.events import watch
from stoker_gcs.api.filters import event_filter, state_filter
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.registry.schedules.rules import SCHEDULES, id_prefix
from stoker_gcs.store.changes import Prefix
from stoker_wire.http.principals import NODES, READERS, WORK
from stoker_wire.http.server.routes import Route, WebSocketRoute
from stoker_wire.http.trace_context import of_headers, variables
from stoker_wire.messages.control import Page
from stoker_wire.messages.elastic import GenerationTurn, ReportGenerationTurn
from stoker_wire.messages.queries import DriverExitQuery, JobQuery, ScheduleQuery, WaitQuery
from stoker_wire.messages.schedules import ChangeSchedule, CreateSchedule, Schedule
from stoker_wire.messages.work import (
    AttachDriver,
    FinishJob,
    Job,
    JobState,
    ReportSlowRank,
    SlowRank,
    SubmitJob,
)

if TYPE_CHECKING:
    from aiohttp import web

    from stoker_gcs.app import GcsApp
    from stoker_gcs.store.changes import Condition
    from stoker_wire.http.server.request import Request


async def submit_job(app: GcsApp, req: Request) -> Job:
    """A `traceparent` header goes on as the driver's `TRACEPARENT`, unless the job sets its own."""
    await app.access.check_new(req.principal, namespace=req.body.namespace)
    await app.queues.check(req.body.queue)
    by = app.access.submitter(req.principal)
    return await app.jobs.submit(_traced(req), by=by, key=req.idempotency_key)


def _traced(req: Request) -> SubmitJob:
    """Return the submission with the trace context of its request."""
    body: SubmitJob = req.body
    env = body.runtime_env
    given = variables(of_headers(req.http.headers))
    if not given or "TRACEPARENT" in env.env_vars:
        return body
    env = msgspec.structs.replace(env, env_vars={**env.env_vars, **given})
    return msgspec.structs.replace(body, runtime_env=env)


async def attach_driver(app: GcsApp, req: Request) -> Job:
    await app.access.check_new(
        req.principal, job_id=req.body.job_id or "", namespace=req.body.namespace
    )
    await app.queues.check(req.body.queue)
    by = app.access.submitter(req.principal)
    job = await app.jobs.attach(req.body, by=by, key=req.idempotency_key)
    return msgspec.structs.replace(job, token=app.tokens.signer.job(job.job_id))


async def list_jobs(app: GcsApp, req: Request) -> Any:
    query = req.query
    of_schedule = id_prefix(query.schedule) if query.schedule else ""
    if query.watch:
        return await watch(app, req, event_filter("job.", of_schedule))
    where: dict[str, Condition] = {
        "state": state_filter(query.state, JobState),
        "namespace": query.namespace,
        "job_id": Prefix(of_schedule) if of_schedule else "",
        "owner": "" if req.principal.sees_all else req.principal.name,
    }
    page = await app.state.page(JOBS, query, where)
    of_it = tuple(job for job in page.items if query.schedule in ("", job.schedule))
    return msgspec.structs.replace(page, items=of_it)


async def get_job(app: GcsApp, req: Request) -> Job:
    req.waiting_for("the job to end", explain=f"{req.http.path}/explain")
    return await app.state.wait_for(
        JOBS, req.path["job_id"], lambda job: job.state.terminal, req.query.wait_s
    )


async def stop_job(app: GcsApp, req: Request) -> Job:
    return await app.jobs.end(req.path["job_id"], JobState.STOPPED, message="stopped")


async def delete_job(app: GcsApp, req: Request) -> Job:
    return await app.jobs.delete(req.path["job_id"])


async def finish_job(app: GcsApp, req: Request) -> Job:
    return await app.jobs.finish(req.path["job_id"], req.body)


async def report_slow_rank(app: GcsApp, req: Request) -> SlowRank:
    await app.access.check_new(req.principal, job_id=req.path["job_id"])
    await app.nodes.get(req.body.node_id)
    return await app.jobs.report_slow_rank(req.path["job_id"], req.body)


async def report_turn(app: GcsApp, req: Request) -> GenerationTurn:
    await app.access.check_new(req.principal, job_id=req.path["job_id"])
    return await app.jobs.report_turn(req.path["job_id"], req.body)


async def report_driver_exit(app: GcsApp, req: Request) -> None:
    await app.sessions.until_exit(req)


async def hold_driver_session(app: GcsApp, req: Request, ws: web.WebSocketResponse) -> None:
    await app.sessions.serve(req, ws)


async def create_schedule(app: GcsApp, req: Request) -> Schedule:
    await app.access.check_new(req.principal, namespace=req.body.job.namespace)
    return await app.schedules.create(req.body, by=app.access.submitter(req.principal))


async def list_schedules(app: GcsApp, req: Request) -> Any:
    if req.query.watch:
        return await watch(app, req, event_filter("schedule."))
    page = await app.state.page(SCHEDULES, req.query, {})
    seen = tuple(
        one for one in page.items if req.principal.sees_all or one.user == req.principal.name
    )
    return msgspec.structs.replace(page, items=seen)


async def get_schedule(app: GcsApp, req: Request) -> Schedule:
    return await app.schedules.get(req.path["name"])


async def change_schedule(app: GcsApp, req: Request) -> Schedule:
    return await app.schedules.pause(req.path["name"], req.body.paused)


async def delete_schedule(app: GcsApp, req: Request) -> Schedule:
    return await app.schedules.delete(req.path["name"])


ROUTES = (
    Route(
        "POST", "/v1/jobs", submit_job, body=SubmitJob, reply=Job, roles=WORK, summary="Submit job"
    ),
    Route(
        "POST",
        "/v1/jobs/attach",
        attach_driver,
        body=AttachDriver,
        reply=Job,
        # Kept by the registry: the reply, which has a token, is stored nowhere.
        idempotency=False,
        roles=WORK,
        summary="Attach driver, to a new job or to the one it names",
    ),
    Route(
        "GET",
        "/v1/jobs",
        list_jobs,
        query=JobQuery,
        reply=Page[Job],
        roles=READERS,
        summary="List or watch jobs",
    ),
    Route(
        "GET",
        "/v1/jobs/{job_id}",
        get_job,
        query=WaitQuery,
        reply=Job,
        roles=READERS,
        summary="Get job; wait for its end",
    ),
    Route("POST", "/v1/jobs/{job_id}/stop", stop_job, reply=Job, roles=WORK, summary="Stop job"),
    Route(
        "DELETE",
        "/v1/jobs/{job_id}",
        delete_job,
        reply=Job,
        roles=WORK,
        summary="Delete job that has ended, with history of its tasks",
    ),
    Route(
        "POST",
        "/v1/jobs/{job_id}/finish",
        finish_job,
        body=FinishJob,
        reply=Job,
        roles=WORK | NODES,
        summary="Report end of job",
    ),
    Route(
        "POST",
        "/v1/jobs/{job_id}/slow-ranks",
        report_slow_rank,
        body=ReportSlowRank,
        reply=SlowRank,
        roles=WORK,
        summary="Report slow rank of training job, for policies to act on",
    ),
    Route(
        "POST",
        "/v1/jobs/{job_id}/turns",
        report_turn,
        body=ReportGenerationTurn,
        reply=GenerationTurn,
        roles=WORK,
        summary="Report turn of elastic trainer's generations, for its job's story",
    ),
    Route(
        "POST",
        "/v1/jobs/{job_id}/exit",
        report_driver_exit,
        query=DriverExitQuery,
        raw_body=True,
        stream=True,
        replies={204: None},
        roles=WORK,
        summary="Report exit of attached driver: the one byte of the body is its exit code",
    ),
    Route(
        "POST",
        "/v1/schedules",
        create_schedule,
        body=CreateSchedule,
        reply=Schedule,
        roles=WORK,
        summary="Create schedule, which submits job at times of cron line",
    ),
    Route(
        "GET",
        "/v1/schedules",
        list_schedules,
        query=ScheduleQuery,
        reply=Page[Schedule],
        roles=READERS,
        summary="List or watch schedules",
    ),
    Route(
        "GET",
        "/v1/schedules/{name}",
        get_schedule,
        reply=Schedule,
        roles=READERS,
        summary="Get schedule",
    ),
    Route(
        "PATCH",
        "/v1/schedules/{name}",
        change_schedule,
        body=ChangeSchedule,
        reply=Schedule,
        roles=WORK,
        summary="Pause or resume schedule",
    ),
    Route(
        "DELETE",
        "/v1/schedules/{name}",
        delete_schedule,
        reply=Schedule,
        roles=WORK,
        summary="Delete schedule; its jobs stay",
    ),
    WebSocketRoute(
        "/v1/jobs/{job_id}/session",
        hold_driver_session,
        roles=WORK,
        summary="Hold session of driver: the job fails if it ends without a finish",
        heartbeat_s=None,
    ),
)
