"""The runs of training that jobs report, their metrics, and curves over their steps.

Reports come in frames of the spool, so nobody waits for an answer: what is beyond the bounds of a job is
left out, and its runs say so. What is accepted is durable before the reply.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.state import schema
from stoker_gcs.store.changes import Between
from stoker_gcs.store.training import Point, width_for
from stoker_wire.data.training import MAX_METRICS, MAX_RUNS
from stoker_wire.errors import ForbiddenError, NotFoundError
from stoker_wire.http.training import Curve, TrainingCurves, TrainingRun
from stoker_wire.messages.control import Page
from stoker_wire.messages.work import DETACHED_JOB
from stoker_wire.suggestions import suggestion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stoker_gcs.registry.jobs.registry import JobRegistry
    from stoker_gcs.state.records import StateStore
    from stoker_gcs.store.changes import Condition, Row
    from stoker_wire.data.training import TrainingReport
    from stoker_wire.http.principals import Principal
    from stoker_wire.http.training import CurveQuery, Number, TrainingRunsQuery

MAX_VALUES = 20_000_000
"""Values of one job."""
_RECENT = 30
"""Reports of which the present speed is made."""
_KNOWN_JOBS = 1000


class _Bounds:
    """The runs, metrics and number of values of a job, as far as this replica knows."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.metrics: defaultdict[str, set[str]] = defaultdict(set)
        self.values = 0
        for row in rows:
            self.metrics[row["run"]].add(row["metric"])
            self.values += row["count"]

    def admit(self, run: str, metric: str) -> bool:
        """Return whether a value is stored; a new name is known from then on."""
        if self.values >= MAX_VALUES:
            return False
        known = self.metrics.get(run)
        if known is None or metric not in known:
            if known is None and len(self.metrics) >= MAX_RUNS:
                return False
            if known is not None and len(known) >= MAX_METRICS:
                return False
            self.metrics[run].add(metric)
        self.values += 1
        return True


class TrainingRuns:
    """The runs of jobs. ``accepted`` counts the reports that this replica has stored."""

    def __init__(self, state: StateStore, jobs: JobRegistry) -> None:
        self._state = state
        self._jobs = jobs
        self._bounds: dict[str, _Bounds] = {}
        self.accepted = 0

    async def add(self, reports: Sequence[TrainingReport], principal: Principal) -> None:
        """Store reports; those of jobs that are gone are forgotten, as they would be with their job."""
        points: list[Point] = []
        jobs: dict[tuple[str, str], str] = {}
        for report in reports:
            source = (report.job_id, report.actor_id)
            if source not in jobs:
                jobs[source] = await self._job_of(*source, principal)
            if job_id := jobs[source]:
                bounds = await self._bounds_of(job_id)
                points += [
                    Point(job_id, report.run, metric, report.step, value, report.at_s)
                    for metric, value in report.values.items()
                    if bounds.admit(report.run, metric)
                ]
        if points:
            await self._state.store.put_points(points)
            self.accepted += len(reports)

    async def _job_of(self, job_id: str, actor_id: str, principal: Principal) -> str:
        """Return the job whose runs an actor or a job reports, empty if there is none any more."""
        if principal.job_id and not principal.owns_all:
            if job_id != principal.job_id:
                raise ForbiddenError(
                    f"{principal} may report nothing of job {job_id}\nreport what is its own",
                    field="job_id",
                )
            actor_id = principal.actor_id
        if job_id == DETACHED_JOB:
            actor = await self._state.find(ACTORS, actor_id)
            if actor is None:
                return ""
            job_id = actor.record.origin_job_id or actor.record.job_id
        return "" if await self._jobs.find(job_id) is None else job_id

    async def _bounds_of(self, job_id: str) -> _Bounds:
        bounds = self._bounds.get(job_id)
        if bounds is None:
            if len(self._bounds) >= _KNOWN_JOBS:
                self._bounds.clear()
            rows = await self._state.store.select(
                schema.TRAINING_METRICS,
                {"job_id": job_id},
                limit=MAX_RUNS * MAX_METRICS,
                columns=("run", "metric", "count"),
            )
            bounds = self._bounds.setdefault(job_id, _Bounds(rows))
        return bounds

    async def page(
        self, query: TrainingRunsQuery, where: Mapping[str, Condition]
    ) -> Page[TrainingRun]:
        """Return a page of runs."""
        given = {name: value for name, value in where.items() if value not in ("", ())}
        rows, cursor = await self._state.rows(schema.TRAINING_RUNS, query, given)
        total, exact = await self._state.total(schema.TRAINING_RUNS, query, given)
        return Page(
            items=tuple([await self._run(*one) for one in await self._with_metrics(rows)]),
            next_cursor=cursor,
            seq=self._state.log.last,
            total=total,
            total_exact=exact,
        )

    async def _with_metrics(self, runs: Sequence[Row]) -> list[tuple[Row, list[Row]]]:
        """Return each run with the rows of its metrics."""
        metrics: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
        wanted = defaultdict(list)
        for run in runs:
            wanted[run["job_id"]].append(run["run"])
        for job_id, names in wanted.items():
            for row in await self._state.store.select(
                schema.TRAINING_METRICS,
                {"job_id": job_id, "run": tuple(names)},
                limit=len(names) * MAX_METRICS,
            ):
                metrics[job_id, row["run"]].append(row)
        return [
            (run, metrics[key]) for run in runs if (key := (run["job_id"], run["run"])) in metrics
        ]

    async def _run(self, run: Row, metrics: list[Row]) -> TrainingRun:
        newest = max(metrics, key=lambda row: float(row["newest_at_s"]))
        return TrainingRun(
            job_id=run["job_id"],
            run=run["run"],
            first_step=min(row["first_step"] for row in metrics),
            last_step=max(row["last_step"] for row in metrics),
            newest_step=newest["newest_step"],
            first_at_s=min(row["first_at_s"] for row in metrics),
            newest_at_s=newest["newest_at_s"],
            steps_per_s=await self._speed(newest),
            newest={row["metric"]: _shown(row["newest_value"]) for row in metrics},
            note=await self._note(run["job_id"], len(metrics)),
        )

    async def _speed(self, metric: Row) -> float | None:
        """Return how many steps a second the last reports of a metric were apart."""
        rows = await self._state.store.select(
            schema.TRAINING_VALUES,
            {
                "series": metric["series"],
                "width": 1,
                "step": Between(metric["first_step"], metric["newest_step"]),
            },
            limit=_RECENT,
            columns=("step", "at_s"),
            descending=True,
        )
        if len(rows) < 2 or rows[0]["at_s"] <= rows[-1]["at_s"]:
            return None
        speed: float = (rows[0]["step"] - rows[-1]["step"]) / (rows[0]["at_s"] - rows[-1]["at_s"])
        return speed

    async def _note(self, job_id: str, metrics: int) -> str:
        bounds = await self._bounds_of(job_id)
        if bounds.values >= MAX_VALUES:
            return f"the job has {MAX_VALUES:,} values, and more are not kept: report every so many steps"
        if metrics >= MAX_METRICS:
            return f"it has {MAX_METRICS} metrics, and others are not kept: give fewer names"
        if len(bounds.metrics) >= MAX_RUNS:
            return f"the job has {MAX_RUNS:,} runs, and others are not kept: give fewer names"
        return ""

    async def curves(self, job_id: str, run: str, query: CurveQuery) -> TrainingCurves:
        """Return the curves of a run's metrics; NotFoundError if there is none of that name."""
        row = await self._state.store.get(schema.TRAINING_RUNS, {"job_id": job_id, "run": run})
        found = [] if row is None else await self._with_metrics([row])
        if not found:
            raise NotFoundError(
                f"job {job_id} has no run {run!r}\n"
                "GET /v1/training-runs has those that it has reported, by stoker.train.report()"
            )
        series = {metric["metric"]: metric["series"] for metric in found[0][1]}
        shown = await self._run(*found[0])
        wanted = [name for name in query.metrics.split(",") if name] or list(series)
        last = shown.last_step if query.to_step < 0 else min(query.to_step, shown.last_step)
        first = min(max(query.from_step, shown.first_step), last)
        size = -(-(last - first + 1) // query.points)
        width = width_for(size)
        size = -(-size // width) * width
        curves = {}
        for name in dict.fromkeys(wanted):
            if name not in series:
                raise NotFoundError(
                    f"metrics: run {run!r} has none of name {name!r}\n{suggestion(name, list(series))}",
                    field="metrics",
                )
            begin = first // width * width
            rows = await self._state.store.curve(series[name], begin, last, size)
            curves[name] = _curve(rows, first)
        return TrainingCurves(
            run=shown, from_step=first, to_step=last, steps_per_point=size, metrics=curves
        )


def _curve(rows: Sequence[Row], first: int) -> Curve:
    return Curve(
        step=tuple(max(first, row["step"]) for row in rows),
        at_s=tuple(row["at_s"] for row in rows),
        mean=tuple(_number(row["total"] / row["count"]) if row["count"] else None for row in rows),
        min=tuple(_number(row["low"]) for row in rows),
        max=tuple(_number(row["high"]) for row in rows),
        nans=tuple(row["nans"] for row in rows),
    )


def _shown(value: float | None) -> Number:
    return "nan" if value is None else _number(value)


def _number(value: float | None) -> Number:
    """Return a value as JSON can say it; None where there is none."""
    if value is None or math.isfinite(value):
        return value
    return str(value)
