"""Routes of the task history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_gcs.api.queries import TaskQuery, states
from stoker_wire.data.spool import MAX_FRAME_BYTES
from stoker_wire.messages.control import Page
from stoker_wire.messages.work import ReportTasks, TaskHistoryStatus, TaskRecord, TaskState

if TYPE_CHECKING:
    from stoker_gcs.app import Parts
    from stoker_wire.http.server import Request, Service

FILTERS = ("job_id", "state", "name", "node_id", "actor_id")


def add_routes(service: Service, parts: Parts) -> None:
    """Add the routes."""

    async def report(req: Request) -> TaskHistoryStatus:
        return await parts.history.report(req.body.records)

    async def spooled(req: Request) -> TaskHistoryStatus:
        return await parts.history.spooled(await req.read())

    async def listing(req: Request) -> Page[TaskRecord]:
        where = {name: getattr(req.query, name) for name in FILTERS}
        where["state"] = states(req.query.state, TaskState)
        return await parts.history.page(req.query, where)

    async def one(req: Request) -> TaskRecord:
        return (await parts.history.attempts(req.path["task_id"]))[-1]

    async def attempts(req: Request) -> Page[TaskRecord]:
        return Page(items=tuple(await parts.history.attempts(req.path["task_id"])))

    service.route(
        "POST",
        "/v1/tasks/report",
        report,
        body=ReportTasks,
        reply=TaskHistoryStatus,
        # Reports merge, so a repeated one changes nothing and its reply need not be kept.
        idempotency=False,
        summary="Add to the task history",
    )
    service.route(
        "POST",
        "/v1/tasks/spooled",
        spooled,
        raw_body=True,
        reply=TaskHistoryStatus,
        max_body_bytes=2 * MAX_FRAME_BYTES,
        idempotency=False,
        summary="Add whole frames of spool files to the task history",
    )
    service.route(
        "GET",
        "/v1/tasks",
        listing,
        query=TaskQuery,
        reply=Page[TaskRecord],
        summary="List task attempts",
    )
    service.route(
        "GET", "/v1/tasks/{task_id}", one, reply=TaskRecord, summary="A task's last attempt"
    )
    service.route(
        "GET",
        "/v1/tasks/{task_id}/attempts",
        attempts,
        reply=Page[TaskRecord],
        summary="All attempts of a task",
    )
