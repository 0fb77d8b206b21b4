"""The scheduler's copy of jobs: what it knows of them, and when an attempt of one is new."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_scheduler import jobs as module
from stoker_scheduler.jobs import JobDirectory
from tests.unit.scheduler.fakes import a_job

if TYPE_CHECKING:
    import pytest


def test_an_attempt_is_new_once_whoever_tells_of_it_first() -> None:
    jobs = JobDirectory()
    assert not jobs.put(a_job("job_1", queue="team")), "its first"
    assert jobs.put(a_job("job_1", queue="team", attempt=2))
    assert not jobs.begin_attempt("job_1", 2)
    assert jobs.begin_attempt("job_1", 3)
    assert not jobs.put(a_job("job_1", queue="team", attempt=3)), "the event of what was asked for"
    assert not jobs.put(a_job("job_1", queue="other", attempt=2)), "one from the past"
    facts = jobs.get("job_1")
    assert facts is not None and facts.attempt == 3


def test_a_job_that_is_first_heard_of_in_a_later_attempt_has_nothing_to_end() -> None:
    jobs = JobDirectory()
    assert not jobs.begin_attempt("job_1", 4)
    assert not jobs.put(a_job("job_1", attempt=4))
    jobs.drop("job_1")
    assert jobs.get("job_1") is None


async def test_a_job_of_which_the_gcs_could_not_say_whether_it_has_ended_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ARRIVAL_S", 0.01)
    answers: list[bool | None] = [None, True, False]

    async def has_ended(_: str) -> bool | None:
        return answers.pop(0)

    jobs = JobDirectory(has_ended)
    assert await jobs.arrival("job_1") is not None and jobs.get("job_1") is None
    assert await jobs.arrival("job_1") is None, "it has ended"
    assert await jobs.arrival("job_2") is not None and jobs.get("job_2") is not None
