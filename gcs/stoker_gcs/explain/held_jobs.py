"""Holds of a job whose driver is not asked of the scheduler yet: a retry, other jobs, its array."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_gcs.registry.jobs.rules import JOBS, is_whole, not_ended_text
from stoker_gcs.registry.nodes.rules import NODES
from stoker_wire.messages.work import JobState

if TYPE_CHECKING:
    from stoker_gcs.registry.jobs.registry import JobRegistry
    from stoker_gcs.state.records import StateStore
    from stoker_wire.messages.schedules import Schedule
    from stoker_wire.messages.work import Job


async def hold_of(state: StateStore, jobs: JobRegistry, job: Job) -> tuple[str, str] | None:
    """Return why a pending job is not asked of the scheduler yet and the remedy; None if it is."""
    left_s = (job.retry_at_s or 0.0) - state.now()
    if left_s > 0:
        last = job.attempts[-1]
        text = (
            f"attempt {job.attempt} of {job.max_attempts} starts in {left_s:.0f} s, "
            f"as attempt {last.attempt} failed: {last.cause}"
        )
        return text, f"wait, or give it up: stoker job stop {job.job_id}"
    for node in await state.all(NODES) if job.attempts else ():
        text = not_ended_text(node.node_id, job.job_id, job.attempts[-1].attempt)
        if job.message.startswith(text):
            return text, f"the node must answer, or be declared dead: stoker get {node.node_id}"
    for dependency in job.after:
        other = await state.find(JOBS, dependency.job_id)
        if other is not None and not other.record.state.terminal:
            text = f"it waits for the end of job {dependency.job_id}, which is {other.record.state}"
            return text, f"see why that goes on: stoker explain {dependency.job_id}"
    if is_whole(job):
        return "its members are about to start", ""
    return await _held_by_array(jobs, job) if job.array_id else None


async def _held_by_array(jobs: JobRegistry, job: Job) -> tuple[str, str] | None:
    """Return how its array holds a member; None if it does not, or those before it wait for nodes."""
    array = await jobs.find(job.array_id)
    most = array.array.parallelism if array is not None and array.array is not None else 0
    members = await jobs.members(job.array_id)
    running = [
        one
        for one in members
        if one.state is JobState.RUNNING or (one.attempts and not one.state.terminal)
    ]
    if not most or job.attempts or len(running) < most:
        return None
    pending = [one for one in members if one.state is JobState.PENDING and not one.attempts]
    ahead = sum(1 for one in pending if one.array_index < job.array_index)
    text = (
        f"it waits for its turn in array {job.array_id}, which runs {most} at a time: "
        f"{len(running)} run, {ahead} are before it"
    )
    return text, "wait until others of the array have ended"


def clause_of(name: str, schedule: Schedule | None, now_s: float) -> str:
    """Return what follows on a job of a schedule, None if that is deleted."""
    if schedule is None:
        return f"its schedule {name} is deleted"
    if schedule.next_at_s is None:
        return f"its schedule {name} is paused"
    left_s = max(0.0, schedule.next_at_s - now_s)
    return f"the next job of its schedule {name} comes in {left_s:.0f} s"
