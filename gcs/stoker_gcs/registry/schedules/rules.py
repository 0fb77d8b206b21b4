"""The rules of schedules: the times of a cron line, and what becomes of a run whose time has come.

Times of the day that the clocks jump over come right after the jump, and those that come twice come once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo, available_timezones

import msgspec
from cronsim import CronSim, CronSimError

from stoker_gcs.registry.jobs.rules import NOBODY, Submitter
from stoker_gcs.state import schema
from stoker_gcs.state.records import RecordTable, Transition
from stoker_wire.errors import BadRequestError
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.schedules import Concurrency, CreateSchedule, MissedRuns, Schedule
from stoker_wire.suggestions import suggestion

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEDULES: RecordTable[Schedule] = RecordTable(
    schema.SCHEDULES, Schedule, lambda schedule: {"name": schedule.name}, label="schedule"
)
ON_TIME_S = 60.0
"""How late a run of a schedule that skips missed ones may start: a change of the leader takes seconds."""
_FIELDS = "minute hour day-of-month month day-of-week"
_replace = msgspec.structs.replace


@dataclass(frozen=True, slots=True)
class Run:
    """A run whose time has come: its job, or why it is ``skipped``, and jobs to ``stop`` before it."""

    at_s: float
    job_id: str
    skipped: str = ""
    stop: tuple[str, ...] = ()


def created(body: CreateSchedule, now_s: float, *, by: Submitter = NOBODY) -> Schedule:
    """Return the schedule that a request creates; BadRequestError names the field that is wrong."""
    _check(body)
    settings = {name: getattr(body, name) for name in body.__struct_fields__}
    schedule = Schedule(
        **settings,
        user=by.user,
        namespaces=by.namespaces,
        run_as=by.run_as,
        created_at_s=now_s,
    )
    return _replace(schedule, next_at_s=None if body.paused else next_after(schedule, now_s))


def _check(body: CreateSchedule) -> None:
    zone_of(body.time_zone)
    if len(body.cron.split()) != 5:
        raise BadRequestError(
            f"cron: {body.cron!r} has not five fields\nwrite {_FIELDS}, as '30 3 * * 1-5'",
            field="cron",
        )
    try:
        never = next(CronSim(body.cron, datetime(2000, 1, 1)), None) is None
    except CronSimError as error:
        raise BadRequestError(
            f"cron: {body.cron!r} is no cron line\n"
            f"{str(error).lower()}\nwrite {_FIELDS}, as '30 3 * * 1-5'",
            field="cron",
        ) from None
    if never:
        raise BadRequestError(
            f"cron: {body.cron!r} never comes\nwrite {_FIELDS} of a day that there is", field="cron"
        )
    if body.job.job_id is not None:
        raise BadRequestError(
            "job.job_id: each run has an id of its own\nleave it out", field="job.job_id"
        )
    if body.job.after:
        raise BadRequestError(
            "job.after: a run comes after its time and no job\nleave it out", field="job.after"
        )


def id_prefix(name: str) -> str:
    """Return how the ids of the jobs of a schedule begin; others may begin so too."""
    return f"job_{name}."


@lru_cache(maxsize=256)
def zone_of(name: str) -> ZoneInfo:
    """Return a time zone; BadRequestError suggests one for an unknown name."""
    try:
        return ZoneInfo(name)
    except (KeyError, OSError, ValueError):
        raise BadRequestError(
            f"time_zone: {name!r} is none\n{suggestion(name, available_timezones())}",
            field="time_zone",
        ) from None


def next_after(schedule: Schedule, at_s: float) -> float | None:
    """Return the first time of a schedule after then; None if none comes."""
    start = datetime.fromtimestamp(at_s, zone_of(schedule.time_zone))
    # In an hour that comes twice, the times after its second coming begin with those of its first.
    times = (found.timestamp() for found in CronSim(schedule.cron, start))
    return next((time_s for time_s in times if time_s > at_s), None)


def last_until(schedule: Schedule, at_s: float) -> float:
    """Return the last time of a schedule up to then; its next one if that is later."""
    assert schedule.next_at_s is not None
    start = datetime.fromtimestamp(at_s + 60, zone_of(schedule.time_zone))
    for found in CronSim(schedule.cron, start, reverse=True):
        if found.timestamp() <= at_s:
            return max(found.timestamp(), schedule.next_at_s)
    return schedule.next_at_s


def job_id_of(schedule: Schedule, at_s: float) -> str:
    """Return the id of the job of a run: one per time, whoever leads."""
    stamp = datetime.fromtimestamp(at_s, ZoneInfo("UTC")).strftime("%Y%m%dt%H%M%S")
    return id_prefix(schedule.name) + stamp


def run_due(schedule: Schedule, now_s: float, living: Sequence[str]) -> Run | None:
    """Return the run of a schedule whose time has come, if one has; ``living`` are its jobs that go on.

    Of several times that have passed only the last counts.
    """
    if schedule.paused or schedule.next_at_s is None or schedule.next_at_s > now_s:
        return None
    at_s = last_until(schedule, now_s)
    job_id = job_id_of(schedule, at_s)
    others = tuple(one for one in living if one != job_id)
    late_s = now_s - at_s
    if late_s > _deadline_s(schedule):
        return Run(at_s, job_id, f"its time was {late_s:.0f} s ago, and it may be no later")
    match schedule.concurrency:
        case Concurrency.FORBID if others:
            return Run(at_s, job_id, f"job {others[0]} of an earlier run goes on")
        case Concurrency.REPLACE:
            return Run(at_s, job_id, stop=others)
    return Run(at_s, job_id)


def _deadline_s(schedule: Schedule) -> float:
    if schedule.starting_deadline_s is not None:
        return schedule.starting_deadline_s
    return ON_TIME_S if schedule.missed_runs is MissedRuns.SKIP else math.inf


def ran(schedule: Schedule, run: Run, now_s: float) -> Transition[Schedule] | None:
    """Record that a run was started or skipped; None if that is known."""
    if schedule.next_at_s is None or schedule.next_at_s > run.at_s:
        return None
    then = _replace(schedule, next_at_s=next_after(schedule, max(run.at_s, now_s)))
    if run.skipped:
        skipped = _replace(then, skipped=schedule.skipped + 1, message=run.skipped)
        return Transition(skipped, EventKind.SCHEDULE_SKIPPED)
    started = _replace(
        then, last_at_s=run.at_s, last_job_id=run.job_id, runs=schedule.runs + 1, message=""
    )
    return Transition(started, EventKind.SCHEDULE_RAN)


def paused(schedule: Schedule, is_paused: bool, now_s: float) -> Transition[Schedule] | None:
    """Pause or resume a schedule; times that passed meanwhile do not count."""
    if schedule.paused == is_paused:
        return None
    next_at_s = None if is_paused else next_after(schedule, now_s)
    then = _replace(schedule, paused=is_paused, next_at_s=next_at_s)
    return Transition(then, EventKind.SCHEDULE_CHANGED)
