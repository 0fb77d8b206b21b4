"""Routes of the task history, which :class:`~stoker_gcs.registry.task_history.TaskHistory` owns.

What is accepted is durable before the reply. Reports merge, so that none needs an idempotency key.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from stoker_gcs.api.filters import state_filter
from stoker_wire.data.spool import MAX_FRAME_BYTES
from stoker_wire.data.training import reports_in
from stoker_wire.http.codec import without_env_vars
from stoker_wire.http.principals import JOBS, NODES, READERS
from stoker_wire.http.server.routes import Route
from stoker_wire.http.server.watch import stream_response
from stoker_wire.ids import Prefix, check_id, id_pattern
from stoker_wire.messages.common import Role
from stoker_wire.messages.control import Page
from stoker_wire.messages.queries import TaskQuery
from stoker_wire.messages.work import (
    ReportSlowTask,
    ReportTasks,
    SlowTask,
    TaskHistoryStatus,
    TaskRecord,
    TaskState,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import web

    from stoker_gcs.app import GcsApp
    from stoker_wire.http.server.request import Request

FILTERS = ("job_id", "state", "name", "node_id", "actor_id")


async def report_tasks(app: GcsApp, req: Request) -> TaskHistoryStatus:
    return await app.history.report(req.body.records)


async def add_spooled_tasks(app: GcsApp, req: Request) -> TaskHistoryStatus:
    body = await req.read()
    status = await app.history.add_spooled(body)
    if reports := reports_in(body):
        await app.training.add(reports, req.principal)
    return status


async def list_tasks(app: GcsApp, req: Request) -> Page[TaskRecord] | web.StreamResponse:
    """With `watch` the answer is a line of JSON for each attempt that matches, and again for each later
    state, without end.
    """
    where = {name: getattr(req.query, name) for name in FILTERS}
    where["state"] = state_filter(req.query.state, TaskState)
    narrowed = partial(app.access.narrowed, req.principal, where)
    if req.query.watch:
        req.lift_deadline()
        records = app.history.follow(narrowed)
        if req.principal.role is Role.VIEWER:
            return await stream_response(req, _without_env_vars(records))
        return await stream_response(req, records)
    return await app.history.page(req.query, await narrowed())


async def _without_env_vars(records: AsyncIterator[TaskRecord]) -> AsyncIterator[Any]:
    async for record in records:
        yield without_env_vars(record)


async def get_task(app: GcsApp, req: Request) -> TaskRecord:
    return (await app.history.attempts(req.path["task_id"]))[-1]


async def list_task_attempts(app: GcsApp, req: Request) -> Page[TaskRecord]:
    return Page(items=tuple(await app.history.attempts(req.path["task_id"])))


async def report_slow_task(app: GcsApp, req: Request) -> SlowTask:
    task_id = check_id(req.path["task_id"], Prefix.TASK, field="task_id")
    job_id = req.principal.origin_job_id or req.principal.job_id
    return await app.history.report_slow(job_id, task_id, req.body)


ROUTES = (
    Route(
        "POST",
        "/v1/tasks/report",
        report_tasks,
        body=ReportTasks,
        reply=TaskHistoryStatus,
        # Reports merge: a repeated one changes nothing, so its reply need not be stored.
        idempotency=False,
        roles=NODES | JOBS,
        summary="Add records to task history",
    ),
    Route(
        "POST",
        "/v1/tasks/spooled",
        add_spooled_tasks,
        raw_body=True,
        reply=TaskHistoryStatus,
        max_body_bytes=2 * MAX_FRAME_BYTES,
        idempotency=False,
        roles=NODES | JOBS,
        summary="Add whole frames of spool files to task history and training",
    ),
    Route(
        "GET",
        "/v1/tasks",
        list_tasks,
        query=TaskQuery,
        reply=Page[TaskRecord],
        replies={200: TaskRecord},
        roles=READERS,
        summary="List task attempts, or watch them",
    ),
    Route(
        "GET",
        "/v1/tasks/{task_id}",
        get_task,
        reply=TaskRecord,
        roles=READERS,
        summary="Get last attempt of task",
    ),
    Route(
        "POST",
        "/v1/tasks/{task_id}/slow",
        report_slow_task,
        parts={"task_id": id_pattern(Prefix.TASK)},
        body=ReportSlowTask,
        reply=SlowTask,
        roles=JOBS,
        cost="expensive",
        summary="Report that task runs much longer than its function does",
    ),
    Route(
        "GET",
        "/v1/tasks/{task_id}/attempts",
        list_task_attempts,
        reply=Page[TaskRecord],
        roles=READERS,
        summary="List attempts of task",
    ),
)
