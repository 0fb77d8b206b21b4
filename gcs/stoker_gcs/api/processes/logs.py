"""Routes of logs: NDJSON for programs, plain lines for ``curl -H 'Accept: text/plain'``."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from aiohttp import ClientConnectionResetError, web

from stoker_gcs import log_stream
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_wire.errors import BadRequestError, NotFoundError
from stoker_wire.http.codec import TEXT
from stoker_wire.http.principals import READERS
from stoker_wire.http.server.routes import Route
from stoker_wire.http.server.watch import stream_response
from stoker_wire.messages.control import LogCursors, LogLine
from stoker_wire.messages.queries import LogQuery

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from stoker_gcs.app import GcsApp
    from stoker_wire.http.server.request import Request


async def get_job_logs(app: GcsApp, req: Request) -> web.StreamResponse:
    query: LogQuery = req.query
    job = await app.state.get(JOBS, req.path["job_id"])
    attempt = query.attempt or job.attempt
    if attempt > job.max_attempts:
        raise BadRequestError(
            f"attempt: job {job.job_id} has at most {job.max_attempts}", field="attempt"
        )
    node_id = log_stream.node_of_attempt(job, attempt)
    if not query.follow and node_id:
        app.peers.nodelet(node_id)  # Raises while the status can still say so.
    source = log_stream.driver_lines(
        app.state,
        app.peers,
        job,
        attempt,
        follow=query.follow,
        since=query.since,
        tail=query.tail,
    )
    return await _answer(req, source, named=False)


async def get_job_worker_logs(app: GcsApp, req: Request) -> web.StreamResponse:
    query: LogQuery = req.query
    job = await app.state.get(JOBS, req.path["job_id"])
    source = log_stream.job_worker_lines(
        app.state,
        app.peers,
        job.job_id,
        follow=query.follow,
        worker_id=query.worker_id,
        tail=query.tail,
    )
    return await _answer(req, source, named=True)


async def get_remaining_worker_logs(app: GcsApp, req: Request) -> web.StreamResponse:
    job = await app.state.get(JOBS, req.path["job_id"])
    source = log_stream.remaining_worker_lines(app.peers, job.job_id, req.body)
    return await _answer(req, source, named=True)


async def get_task_logs(app: GcsApp, req: Request) -> web.StreamResponse:
    record = (await app.history.attempts(req.path["task_id"]))[-1]
    if not record.worker_id or not record.node_id:
        raise NotFoundError(f"task {record.task_id} is {record.state} and has no worker yet")
    app.peers.nodelet(record.node_id)
    query: LogQuery = req.query
    source = log_stream.worker_lines(
        app.peers,
        record.node_id,
        record.worker_id,
        follow=query.follow,
        since=query.since,
        tail=query.tail,
    )
    return await _answer(req, source, named=False)


async def _answer(
    req: Request, source: AsyncGenerator[LogLine, None], *, named: bool
) -> web.StreamResponse:
    if TEXT not in req.http.headers.get("Accept", ""):
        return await stream_response(req, source)
    response = web.StreamResponse(headers={"Content-Type": "text/plain; charset=utf-8"})
    await response.prepare(req.http)
    try:
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(_write(response, source, named=named))
            stopping = group.create_task(req.stopping.wait())
            await asyncio.wait((writing, stopping), return_when=asyncio.FIRST_COMPLETED)
            writing.cancel()
            stopping.cancel()
            if writing.done() and not writing.cancelled():
                await writing
    except* (ConnectionError, ClientConnectionResetError):
        pass
    else:
        await response.write_eof()
    return response


async def _write(
    response: web.StreamResponse, source: AsyncGenerator[LogLine, None], *, named: bool
) -> None:
    async with aclosing(source):
        async for line in source:
            text = f"({line.name} pid={line.pid}) {line.text}\n" if named else f"{line.text}\n"
            await response.write(text.encode())


ROUTES = (
    Route(
        "GET",
        "/v1/jobs/{job_id}/logs",
        get_job_logs,
        query=LogQuery,
        reply=LogLine,
        stream=True,
        media_type=TEXT,
        roles=READERS,
        summary="Stream output of job's driver",
    ),
    Route(
        "GET",
        "/v1/jobs/{job_id}/worker-logs",
        get_job_worker_logs,
        query=LogQuery,
        reply=LogLine,
        stream=True,
        media_type=TEXT,
        roles=READERS,
        summary="Stream output of job's workers, merged",
    ),
    Route(
        "GET",
        "/v1/tasks/{task_id}/logs",
        get_task_logs,
        query=LogQuery,
        reply=LogLine,
        stream=True,
        media_type=TEXT,
        roles=READERS,
        summary="Stream output of the worker that ran a task",
    ),
    Route(
        "POST",
        "/v1/jobs/{job_id}/worker-logs",
        get_remaining_worker_logs,
        body=LogCursors,
        reply=LogLine,
        stream=True,
        media_type=TEXT,
        roles=READERS,
        summary="Stream output of job's workers behind the lines seen, up to now",
    ),
)
