"""Routes of Ray's job API, for its own client: each calls what the route of ``/v1`` for the same calls.

It has no state of its own: a package lies where Stoker's do, by its content, and a key of the KV store has
the hash for the name that the client gave it. That name says nothing of the content, so it is its user's
alone. Errors are plain text, which the client prints.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
from aiohttp import ClientConnectionResetError

from stoker_gcs import log_stream
from stoker_gcs.api.ray_jobs import mapping
from stoker_gcs.api.ray_jobs.types import (
    RayDeleted,
    RayJob,
    RayLogs,
    RayStopped,
    RaySubmit,
    RaySubmitted,
    RayVersion,
)
from stoker_gcs.api.storage.kv import MAX_BLOB_BYTES
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.registry.kv.blobs import PACKAGES
from stoker_wire.errors import NotFoundError, StokerError
from stoker_wire.http.principals import READERS, WORK
from stoker_wire.http.server.routes import Route, WebSocketRoute
from stoker_wire.messages.control import KvPut, ListQuery
from stoker_wire.messages.work import JobState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from aiohttp import web

    from stoker_gcs.app import GcsApp
    from stoker_gcs.store.changes import Condition
    from stoker_wire.http.principals import Principal
    from stoker_wire.http.server.request import Request
    from stoker_wire.messages.control import LogLine
    from stoker_wire.messages.work import Job

MAX_LOG_LINES = 100_000
"""Of longer output ``/logs`` has the end; ``/logs/tail`` has all."""
PACKAGE_S = 30 * 86_400.0
"""How long the name of a package is known; the client uploads it again after that."""
_PAGE = 1000
_NAME = r"[A-Za-z0-9_.+\-]{1,200}"


async def get_ray_version(_: GcsApp, __: Request) -> RayVersion:
    return RayVersion()


def _namespace(principal: Principal) -> str:
    return f"stoker.ray-packages/{principal.name}"


async def _hash_of(app: GcsApp, principal: Principal, name: str) -> str:
    """Return the hash of a package that is stored; NotFoundError if none is of this name."""
    item = await app.kv.get(_namespace(principal), name, 0.0)
    digest = item.value.decode()
    if await app.blobs.size(PACKAGES, digest) is None:
        raise NotFoundError(f"the package {name} has left by retention\nsubmit again to upload it")
    return digest


async def check_ray_package(app: GcsApp, req: Request) -> RayVersion:
    await _hash_of(app, req.principal, req.path["name"])
    return RayVersion()


async def put_ray_package(app: GcsApp, req: Request) -> RayVersion:
    name, content = req.path["name"], await req.read()
    digest = await asyncio.to_thread(lambda: hashlib.sha256(content).hexdigest())
    await app.blobs.put(PACKAGES, digest, content)
    body = KvPut(key=name, value=digest.encode(), ttl_s=PACKAGE_S)
    await app.kv.put(_namespace(req.principal), body)
    return RayVersion()


async def submit_ray_job(app: GcsApp, req: Request) -> RaySubmitted:
    body: RaySubmit = req.body
    names = mapping.package_names(body.runtime_env or {})
    packages = {name: await _hash_of(app, req.principal, name) for name in names}
    wanted = mapping.submission(body, packages)
    await app.access.check_new(req.principal, namespace=wanted.namespace)
    by = app.access.submitter(req.principal)
    job = await app.jobs.submit(wanted, by=by, key=req.idempotency_key)
    shown = mapping.shown_id(job)
    return RaySubmitted(job_id=shown, submission_id=shown)


async def list_ray_jobs(app: GcsApp, req: Request) -> list[RayJob]:
    where: dict[str, Condition] = {
        "owner": "" if req.principal.sees_all else req.principal.name,
    }
    jobs: list[RayJob] = []
    query = ListQuery(limit=_PAGE)
    while True:
        page = await app.state.page(JOBS, query, where)
        jobs += map(mapping.details, page.items)
        if not page.next_cursor:
            return jobs
        query = msgspec.structs.replace(query, cursor=page.next_cursor)


async def _job(app: GcsApp, req: Request) -> Job:
    """Return the job that the URL names, if it is the caller's to see, or to change."""
    job_id = mapping.job_id_of(req.path["submission_id"])
    # The dispatcher has asked with the id as it stands in the URL, which need not be the job's.
    if not req.principal.owns_all:
        method = req.route.method
        await app.access.admit(req.principal, method, "/v1/jobs/{job_id}", {"job_id": job_id})
    return await app.state.get(JOBS, job_id)


async def get_ray_job(app: GcsApp, req: Request) -> RayJob:
    return mapping.details(await _job(app, req))


async def stop_ray_job(app: GcsApp, req: Request) -> RayStopped:
    job = await _job(app, req)
    await app.jobs.end(job.job_id, JobState.STOPPED, message="stopped")
    return RayStopped(stopped=not job.state.terminal)


async def delete_ray_job(app: GcsApp, req: Request) -> RayDeleted:
    job = await _job(app, req)
    await app.jobs.delete(job.job_id)
    return RayDeleted(deleted=True)


def _lines(app: GcsApp, job: Job, *, follow: bool) -> AsyncGenerator[LogLine, None]:
    return log_stream.driver_lines(
        app.state,
        app.peers,
        job,
        job.attempt,
        follow=follow,
        since=0,
        tail=0 if follow else MAX_LOG_LINES,
    )


async def get_ray_job_logs(app: GcsApp, req: Request) -> RayLogs:
    job = await _job(app, req)
    async with aclosing(_lines(app, job, follow=False)) as lines:
        return RayLogs(logs="".join([f"{line.text}\n" async for line in lines]))


async def tail_ray_job_logs(app: GcsApp, req: Request, ws: web.WebSocketResponse) -> None:
    job = await _job(app, req)

    async def send() -> StokerError | None:
        try:
            async with aclosing(_lines(app, job, follow=True)) as lines:
                async for line in lines:
                    await ws.send_str(f"{line.text}\n")
        except StokerError as error:
            return error
        except (ConnectionError, ClientConnectionResetError):
            pass  # the reader has left
        return None

    async def until_closed() -> None:
        async for _ in ws:
            pass

    async with asyncio.TaskGroup() as group:
        sending, reading = group.create_task(send()), group.create_task(until_closed())
        await asyncio.wait((sending, reading), return_when=asyncio.FIRST_COMPLETED)
        failure = sending.result() if sending.done() else None
        sending.cancel()
        reading.cancel()
    if failure is not None:
        raise failure  # breaks the connection: the client must not take this for the end of the log


ROUTES = (
    Route(
        "GET",
        "/api/version",
        get_ray_version,
        reply=RayVersion,
        roles=READERS,
        plain_errors=True,
        summary="Get version of Ray whose job API this is",
    ),
    Route(
        "GET",
        "/api/packages/gcs/{name}",
        check_ray_package,
        reply=RayVersion,
        parts={"name": _NAME},
        roles=WORK,
        plain_errors=True,
        summary="Check whether package of Ray's client is stored",
    ),
    Route(
        "PUT",
        "/api/packages/gcs/{name}",
        put_ray_package,
        raw_body=True,
        reply=RayVersion,
        parts={"name": _NAME},
        max_body_bytes=MAX_BLOB_BYTES,
        roles=WORK,
        cost="expensive",
        plain_errors=True,
        summary="Store package of Ray's client, for jobs of its user",
    ),
    Route(
        "POST",
        "/api/jobs/",
        submit_ray_job,
        body=RaySubmit,
        reply=RaySubmitted,
        roles=WORK,
        plain_errors=True,
        summary="Submit job as Ray's client does",
    ),
    Route(
        "GET",
        "/api/jobs/",
        list_ray_jobs,
        reply=list[RayJob],
        roles=READERS,
        plain_errors=True,
        summary="List jobs as Ray's client shows them",
    ),
    Route(
        "GET",
        "/api/jobs/{submission_id}",
        get_ray_job,
        reply=RayJob,
        roles=READERS,
        plain_errors=True,
        summary="Get job as Ray's client shows it",
    ),
    Route(
        "POST",
        "/api/jobs/{submission_id}/stop",
        stop_ray_job,
        reply=RayStopped,
        roles=WORK,
        plain_errors=True,
        summary="Stop job, for Ray's client",
    ),
    Route(
        "DELETE",
        "/api/jobs/{submission_id}",
        delete_ray_job,
        reply=RayDeleted,
        roles=WORK,
        plain_errors=True,
        summary="Delete job that has ended, for Ray's client",
    ),
    Route(
        "GET",
        "/api/jobs/{submission_id}/logs",
        get_ray_job_logs,
        reply=RayLogs,
        roles=READERS,
        plain_errors=True,
        summary="Get output of job's driver, for Ray's client",
    ),
    WebSocketRoute(
        "/api/jobs/{submission_id}/logs/tail",
        tail_ray_job_logs,
        roles=READERS,
        summary="Follow output of job's driver, for Ray's client",
    ),
)
