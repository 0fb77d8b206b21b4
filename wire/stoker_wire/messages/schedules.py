"""Schedules: jobs that are submitted at the times of a cron line, owned by the gcs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from stoker_wire.messages.common import ANY_NAMESPACE, Message, PositiveSeconds, Record, stated
from stoker_wire.messages.work import SubmitJob

ScheduleName = Annotated[
    str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_-]*$", min_length=1, max_length=60)
]
HISTORY_LIMIT = 10


class Concurrency(StrEnum):
    """The rule for a run whose time comes while jobs of earlier runs go on, as in Kubernetes."""

    ALLOW = "Allow"
    """They run side by side."""
    FORBID = "Forbid"
    """The run is skipped."""
    REPLACE = "Replace"
    """The earlier ones are stopped."""


class MissedRuns(StrEnum):
    """The rule for times at which no gcs ran: skip them, or run once for all of them, however late."""

    SKIP = "skip"
    RUN_ONCE = "run-once"


class CreateSchedule(Message):
    """Request to submit ``job`` at the times of ``cron`` (minute hour day month weekday) in ``time_zone``.

    A run that cannot start within ``starting_deadline_s`` of its time is skipped (null: 60 s, with
    ``missed_runs`` run-once any time). ``job`` has no ``job_id`` and nothing in ``after``. The
    ``history_limit`` last jobs that have ended are kept.
    """

    name: ScheduleName
    cron: Annotated[str, msgspec.Meta(min_length=1, max_length=200), stated(format="cron")]
    job: SubmitJob
    time_zone: Annotated[str, stated(format="time-zone")] = "UTC"
    concurrency: Concurrency = Concurrency.ALLOW
    missed_runs: MissedRuns = MissedRuns.SKIP
    starting_deadline_s: PositiveSeconds | None = None
    history_limit: Annotated[int, msgspec.Meta(ge=0, le=1000)] = HISTORY_LIMIT
    paused: bool = False


class ChangeSchedule(Message):
    """Request to pause a schedule, or to resume it: times that pass meanwhile are not made up for."""

    paused: bool


class Schedule(Record):
    """A schedule as the gcs knows it; fields as in :class:`CreateSchedule`."""

    name: str
    cron: str
    job: SubmitJob
    time_zone: str = "UTC"
    concurrency: Concurrency = Concurrency.ALLOW
    missed_runs: MissedRuns = MissedRuns.SKIP
    starting_deadline_s: float | None = None
    history_limit: int = HISTORY_LIMIT
    paused: bool = False
    user: str = ""
    """The name of the token with which it was created: the user of its jobs."""
    namespaces: tuple[str, ...] = (ANY_NAMESPACE,)
    """Those that its jobs may use."""
    run_as: str = ""
    """The Unix user of its jobs, from that token."""
    created_at_s: float = 0.0
    next_at_s: float | None = None
    """The next time of the cron line; None while it is paused."""
    last_at_s: float | None = None
    """The time of the last run that was not skipped, and its job."""
    last_job_id: str = ""
    runs: int = 0
    skipped: int = 0
    message: str = ""
    """Why the latest run was skipped, if it was."""
