"""All that the report of a job tells, as the gcs says it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from stoker.cli.lists import fetch_newest
from stoker_wire.errors import ActorDiedError, NotFoundError, StokerError
from stoker_wire.http.dashboard.figures import JobCost, TaskSummary, Timeline, Usage
from stoker_wire.messages.control import Explanation, LogLine, Page
from stoker_wire.messages.events import Story
from stoker_wire.messages.work import Actor, Job, TaskRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.runtime.net.http import HttpClient

TAIL = 200
"""Lines of the driver's output."""
_FAILED = 1000
_POINTS = 240
_STORY = 200
_FUNCTIONS = 100
_LANES = 60
_MOST = 1000


class Cause(msgspec.Struct):
    """A failure: of what, why, how often, and one of those that failed so."""

    kind: str
    name: str
    code: str
    message: str
    example_id: str
    count: int = 1


class Facts(msgspec.Struct):
    """A job, and what became of it and of its work."""

    job: Job
    made_at_s: float
    story: Story
    explanation: Explanation
    tasks: TaskSummary
    cost: JobCost
    causes: list[Cause]
    timeline: Timeline
    usage: Usage | None
    output: list[str]
    actors: dict[str, int]


def collect(client: HttpClient, job_id: str) -> Facts:
    """Ask for all of it."""
    job = client.call("GET", f"/v1/jobs/{job_id}", reply=Job)
    only = {"job_id": job_id}
    actors = client.call("GET", "/v1/actors", reply=Page[Actor], query={**only, "limit": _MOST})
    return Facts(
        job=job,
        made_at_s=time.time(),
        story=client.call("GET", f"/v1/story/{job_id}", reply=Story, query={"limit": _STORY}),
        explanation=client.call("GET", f"/v1/jobs/{job_id}/explain", reply=Explanation),
        tasks=client.call(
            "GET", "/v1/tasks/summary", reply=TaskSummary, query={**only, "limit": _FUNCTIONS}
        ),
        cost=client.call("GET", f"/v1/jobs/{job_id}/cost", reply=JobCost),
        causes=[*_of_job(job), *_of_actors(actors.items), *_of_tasks(client, job_id)],
        timeline=client.call(
            "GET", "/v1/tasks/timeline", reply=Timeline, query={**only, "lane_limit": _LANES}
        ),
        usage=_usage(client, job),
        output=_output(client, job),
        actors=_by_state(actors.items),
    )


def _of_job(job: Job) -> list[Cause]:
    if job.state != "FAILED":
        return []
    return [Cause("job", job.name or job.entrypoint, job.state, job.message, job.job_id)]


def _of_actors(actors: Iterable[Actor]) -> list[Cause]:
    """Return why actors died, but for those that were ended, or ended themselves."""
    return alike(
        Cause("actor", one.class_name, one.death_cause.code, one.death_cause.message, one.actor_id)
        for one in actors
        if one.death_cause is not None and one.death_cause.code != ActorDiedError.code
    )


def _of_tasks(client: HttpClient, job_id: str) -> list[Cause]:
    query = {"job_id": job_id, "state": "FAILED"}
    rows = fetch_newest(client, "/v1/tasks", _FAILED, query).items
    tasks = (msgspec.convert(row, TaskRecord) for row in rows)
    return alike(
        Cause("task", one.name, one.error.code, one.error.message, one.task_id)
        for one in tasks
        if one.error is not None
    )


def alike(causes: Iterable[Cause]) -> list[Cause]:
    """Return one of all that failed with the same first line, with their number, the most first."""
    found: dict[tuple[str, ...], Cause] = {}
    for one in causes:
        key = (one.kind, one.name, one.code, one.message.partition("\n")[0])
        if key in found:
            found[key].count += 1
        else:
            found[key] = one
    return sorted(found.values(), key=lambda one: -one.count)


def _by_state(actors: Iterable[Actor]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in actors:
        counts[one.state] = counts.get(one.state, 0) + 1
    return counts


def _usage(client: HttpClient, job: Job) -> Usage | None:
    query = {
        "since_s": job.started_at_s or job.created_at_s,
        "until_s": job.ended_at_s or time.time(),
        "points": _POINTS,
    }
    try:
        return client.call("GET", "/v1/usage", reply=Usage, query=query)
    except StokerError:  # a job may have ended before its first sample
        return None


def _output(client: HttpClient, job: Job) -> list[str]:
    if not job.submitted:
        return []
    path = f"/v1/jobs/{job.job_id}/logs"
    try:
        return [line.text for line in client.lines(path, item=LogLine, query={"tail": TAIL})]
    except NotFoundError:
        return []
