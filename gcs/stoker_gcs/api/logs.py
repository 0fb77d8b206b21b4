"""Routes of logs: NDJSON for programs, plain lines for ``curl -H 'Accept: text/plain'``."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from aiohttp import ClientConnectionResetError, web

from stoker_gcs import log_stream
from stoker_gcs.api.queries import LogQuery
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_wire.errors import NotFoundError
from stoker_wire.http.server import stream_response
from stoker_wire.messages.control import LogCursors, LogLine

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from stoker_gcs.app import Parts
    from stoker_wire.http.server import Request, Service


def add_routes(service: Service, parts: Parts) -> None:
    """Add the routes."""
    truth, links = parts.truth, parts.links

    async def of_driver(req: Request) -> web.StreamResponse:
        query = req.query
        job = await truth.get(JOBS, req.path["job_id"])
        if not query.follow and job.node_id:
            links.nodelet(job.node_id)  # Raises while the status can still say so.
        source = log_stream.of_driver(
            truth, links, job.job_id, follow=query.follow, since=query.since, tail=query.tail
        )
        return await _answer(req, source, named=False)

    async def of_workers(req: Request) -> web.StreamResponse:
        query = req.query
        job = await truth.get(JOBS, req.path["job_id"])
        source = log_stream.of_workers(
            truth,
            links,
            job.job_id,
            follow=query.follow,
            worker_id=query.worker_id,
            tail=query.tail,
        )
        return await _answer(req, source, named=True)

    async def rest_of_workers(req: Request) -> web.StreamResponse:
        job = await truth.get(JOBS, req.path["job_id"])
        source = log_stream.rest_of_workers(links, job.job_id, req.body)
        return await _answer(req, source, named=True)

    async def of_task(req: Request) -> web.StreamResponse:
        record = (await parts.history.attempts(req.path["task_id"]))[-1]
        if not record.worker_id or not record.node_id:
            raise NotFoundError(f"task {record.task_id} is {record.state} and has no worker yet")
        links.nodelet(record.node_id)
        query = req.query
        source = log_stream.of_worker(
            links,
            record.node_id,
            record.worker_id,
            follow=query.follow,
            since=query.since,
            tail=query.tail,
        )
        return await _answer(req, source, named=False)

    routes = (
        ("/v1/jobs/{job_id}/logs", of_driver, "Output of a job's driver"),
        ("/v1/jobs/{job_id}/worker-logs", of_workers, "Output of a job's workers, merged"),
        ("/v1/tasks/{task_id}/logs", of_task, "Output of the worker that ran a task"),
    )
    for path, handler, summary in routes:
        service.route(
            "GET", path, handler, query=LogQuery, reply=LogLine, stream=True, summary=summary
        )
    service.route(
        "POST",
        "/v1/jobs/{job_id}/worker-logs",
        rest_of_workers,
        body=LogCursors,
        reply=LogLine,
        stream=True,
        summary="Output of a job's workers behind the lines seen, up to now",
    )


async def _answer(
    req: Request, source: AsyncGenerator[LogLine, None], *, named: bool
) -> web.StreamResponse:
    if "text/plain" not in req.http.headers.get("Accept", ""):
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
