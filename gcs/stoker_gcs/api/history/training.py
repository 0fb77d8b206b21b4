"""Routes of what training has reported, which :class:`~stoker_gcs.registry.jobs.training.TrainingRuns` owns.

Reports come with the records of tasks, by ``POST /v1/tasks/spooled``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_wire.http.principals import READERS
from stoker_wire.http.server.routes import Route
from stoker_wire.http.training import CurveQuery, TrainingCurves, TrainingRun, TrainingRunsQuery
from stoker_wire.messages.control import Page

if TYPE_CHECKING:
    from stoker_gcs.app import GcsApp
    from stoker_wire.http.server.request import Request


async def list_training_runs(app: GcsApp, req: Request) -> Page[TrainingRun]:
    where = await app.access.narrowed(req.principal, {"job_id": req.query.job_id})
    return await app.training.page(req.query, where)


async def get_training_run(app: GcsApp, req: Request) -> TrainingCurves:
    return await app.training.curves(req.path["job_id"], req.path["run"], req.query)


ROUTES = (
    Route(
        "GET",
        "/v1/training-runs",
        list_training_runs,
        query=TrainingRunsQuery,
        reply=Page[TrainingRun],
        roles=READERS,
        summary="List runs that training has reported",
    ),
    Route(
        "GET",
        "/v1/training-runs/{job_id}/{run}",
        get_training_run,
        query=CurveQuery,
        reply=TrainingCurves,
        roles=READERS,
        summary="Get curves of run of training",
    ),
)
