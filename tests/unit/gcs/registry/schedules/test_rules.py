"""Rules of schedules: times of cron lines in time zones, and what becomes of each run."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
import pytest

from stoker_gcs.registry.schedules import rules
from stoker_wire.errors import BadRequestError
from stoker_wire.messages.schedules import Concurrency, CreateSchedule, MissedRuns, Schedule
from stoker_wire.messages.work import After, Dependency, SubmitJob


def at(text: str) -> float:
    """The time of a text such as ``2026-03-01T10:00:00+00:00``."""
    return datetime.fromisoformat(text).timestamp()


NOON = at("2026-03-01T12:00:00+00:00")
HOUR = 3600.0


def a_schedule(**options: Any) -> Schedule:
    settings = {"name": "nightly", "cron": "0 * * * *", "job": SubmitJob(entrypoint="x"), **options}
    return rules.created(CreateSchedule(**settings), NOON + 1)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cron": "61 * * * *"}, "cron"),
        ({"cron": "* * * *"}, "cron"),
        ({"cron": "* * * * * *"}, "cron"),
        ({"cron": "@daily"}, "cron"),
        ({"cron": "0 0 31 2 *"}, "cron"),
        ({"time_zone": "Europe/Zürich"}, "time_zone"),
        ({"time_zone": "../etc/passwd"}, "time_zone"),
        ({"time_zone": ""}, "time_zone"),
        ({"job": SubmitJob(entrypoint="x", job_id="job_1")}, "job.job_id"),
        ({"job": SubmitJob(entrypoint="x", after=(Dependency("job_1", After.OK),))}, "job.after"),
    ],
)
def test_what_is_wrong_is_refused_with_its_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        a_schedule(**options)
    assert caught.value.field == field


def test_times_are_of_the_time_zone_and_survive_its_clock_changes() -> None:
    schedule = a_schedule(cron="30 2 * * *", time_zone="Europe/Zurich")
    spring = rules.next_after(schedule, at("2026-03-28T12:00:00+01:00"))
    assert spring == at("2026-03-29T03:00:00+02:00"), "02:30 does not exist: right after the jump"
    autumn = rules.next_after(schedule, at("2026-10-24T12:00:00+02:00"))
    assert autumn == at("2026-10-25T02:30:00+02:00")
    assert autumn is not None
    assert rules.next_after(schedule, autumn) == at("2026-10-26T02:30:00+01:00"), "once, not twice"
    again = rules.next_after(schedule, at("2026-10-25T02:10:00+01:00"))
    assert again == at("2026-10-26T02:30:00+01:00"), "nothing in the past when the hour comes again"


def test_a_run_is_due_at_its_time_and_then_the_next_one_is_awaited() -> None:
    schedule = a_schedule()
    assert schedule.next_at_s == NOON + HOUR
    assert rules.run_due(schedule, NOON + HOUR - 1, ()) is None
    run = rules.run_due(schedule, NOON + HOUR, ())
    assert run == rules.Run(NOON + HOUR, "job_nightly.20260301t130000")
    done = rules.ran(schedule, run, NOON + HOUR)
    assert done is not None and done.kind == "schedule.ran"
    then = done.record
    assert (then.next_at_s, then.last_at_s, then.runs) == (NOON + 2 * HOUR, NOON + HOUR, 1)
    assert rules.ran(then, run, NOON + HOUR) is None, "written down once"
    assert rules.run_due(then, NOON + HOUR, ()) is None


@pytest.mark.parametrize(
    ("options", "late_s", "runs"),
    [
        ({}, 59.0, True),
        ({}, 61.0, False),
        ({"starting_deadline_s": 600.0}, 599.0, True),
        ({"starting_deadline_s": 5.0}, 6.0, False),
        ({"missed_runs": MissedRuns.RUN_ONCE}, 1800.0, True),
        ({"missed_runs": MissedRuns.RUN_ONCE, "starting_deadline_s": 600.0}, 601.0, False),
    ],
)
def test_missed_runs_are_skipped_or_run_once(
    options: dict[str, Any], late_s: float, runs: bool
) -> None:
    schedule = a_schedule(**options)
    now = NOON + 72 * HOUR + late_s
    run = rules.run_due(schedule, now, ())
    assert run is not None and run.at_s == NOON + 72 * HOUR, "the last of many"
    assert bool(run.skipped) != runs
    after = rules.ran(schedule, run, now)
    assert after is not None and after.record.next_at_s == NOON + 73 * HOUR
    assert (after.record.runs, after.record.skipped) == ((1, 0) if runs else (0, 1))


def test_runs_that_overlap_follow_the_concurrency() -> None:
    now, own = NOON + HOUR, "job_nightly.20260301t130000"
    allowed = rules.run_due(a_schedule(), now, ["job_old"])
    assert allowed is not None and not allowed.skipped and not allowed.stop
    forbids = a_schedule(concurrency=Concurrency.FORBID)
    forbidden = rules.run_due(forbids, now, ["job_old"])
    assert forbidden is not None and "job_old" in forbidden.skipped
    resumed = rules.run_due(forbids, now, [own])
    assert resumed is not None and not resumed.skipped, "started before a crash: its own job"
    replaced = rules.run_due(a_schedule(concurrency=Concurrency.REPLACE), now, ["job_old", own])
    assert replaced is not None and replaced.stop == ("job_old",)


def test_a_schedule_that_is_paused_has_no_next_time_and_makes_up_for_none() -> None:
    schedule = a_schedule(missed_runs=MissedRuns.RUN_ONCE)
    stopped = rules.paused(schedule, True, NOON + 2)
    assert stopped is not None and stopped.record.next_at_s is None
    assert rules.run_due(stopped.record, NOON + 9 * HOUR, ()) is None
    assert rules.paused(stopped.record, True, NOON + 3) is None
    resumed = rules.paused(stopped.record, False, NOON + 9.5 * HOUR)
    assert resumed is not None and resumed.record.next_at_s == NOON + 10 * HOUR
    assert msgspec.structs.replace(resumed.record, next_at_s=schedule.next_at_s) == schedule
