"""Stories over real HTTP: what happened to a thing and to what it touched, in order, with the causes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from stoker_gcs.history import story as teller
from stoker_wire.errors import ConflictError, NotFoundError
from stoker_wire.messages.cluster import Demand, WorkerExit, WorkersExited
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.elastic import GenerationTurn, ReportGenerationTurn
from stoker_wire.messages.events import Story
from stoker_wire.messages.work import (
    Actor,
    ActorState,
    CreateActor,
    FinishJob,
    Job,
    JobState,
    KillActor,
    ReportActor,
    ReportTasks,
    TaskHistoryStatus,
    TaskRecord,
    TaskState,
)
from tests.contract.gcs_support import attach, eventually, gcs, register, scheduler

if TYPE_CHECKING:
    from stoker_gcs.service import Running
    from stoker_wire.http.client.client import Client
    from tests.contract.gcs_support import FakeScheduler


async def story(client: Client, id_: str, **query: object) -> Story:
    return await client.call("GET", f"/v1/story/{id_}", reply=Story, query=query)


def in_order(told: Story, *parts: str) -> None:
    """Check that lines with these texts are there, in this order."""
    assert [line.at_s for line in told.lines] == sorted(line.at_s for line in told.lines)
    texts = [f"{line.text} [{line.why}]" for line in told.lines]
    at = -1
    for part in parts:
        later = [i for i, text in enumerate(texts) if part in text and i > at]
        assert later, (part, texts)
        at = later[0]


async def an_actor(client: Client, job: Job, actor_id: str = "a_1", incarnation: int = 0) -> Actor:
    """An actor that is ALIVE on n_1."""
    body = CreateActor(
        actor_id=actor_id,
        demand=Demand(job_id=job.job_id, resources={}),
        class_name="Counter",
        payload=b"",
        max_restarts=1,
    )
    await client.call("POST", "/v1/actors", body, reply=Actor)
    now = await placed(client, actor_id, incarnation)
    alive = ReportActor(state=ActorState.ALIVE, incarnation=incarnation, worker_id=now.worker_id)
    return await client.call("POST", f"/v1/actors/{actor_id}/report", alive, reply=Actor)


async def placed(client: Client, actor_id: str, incarnation: int) -> Actor:
    async def has_lease() -> bool:
        found = await client.call("GET", f"/v1/actors/{actor_id}", reply=Actor)
        return bool(found.lease_id) and found.incarnation == incarnation

    await eventually(has_lease, "the actor is placed")
    return await client.call("GET", f"/v1/actors/{actor_id}", reply=Actor)


async def worker_exits(client: Client, now: Actor, **more: object) -> None:
    gone = WorkerExit(
        worker_id=now.worker_id,
        node_id="n_1",
        lease_id=now.lease_id,
        actor_id=now.actor_id,
        job_id=now.job_id,
        signal=9,
        **more,  # type: ignore[arg-type]
    )
    await client.call("POST", "/v1/workers/exited", WorkersExited(exits=(gone,)))


async def test_an_actors_story_tells_its_leases_workers_and_the_death_of_its_node(
    client: Client, fake: FakeScheduler
) -> None:
    await register(client, "n_1")
    job = await attach(client)
    now = await an_actor(client, job)
    await worker_exits(client, now, cause="killed by SIGKILL")
    again = await placed(client, "a_1", 1)
    await client.call("POST", "/v1/nodes/n_1/leave", {"incarnation": 1})
    ended = await client.call("GET", "/v1/actors/a_1", reply=Actor, query={"wait_s": 20})

    async def is_dead() -> bool:
        found = await client.call("GET", "/v1/actors/a_1", reply=Actor)
        return found.state is ActorState.DEAD

    await eventually(is_dead, f"the actor is dead with its node: {ended.state}")
    told = await story(client, "a_1")
    assert (told.kind, told.name, told.state) == ("actor", "Counter", "DEAD")
    in_order(
        told,
        "was created",
        f"node n_1, worker {now.worker_id}, under lease {now.lease_id}",
        "is ALIVE",
        f"worker {now.worker_id} on node n_1 (lease {now.lease_id}) ended with signal 9",
        "restarts (0 restarts left) [its worker",
        f"node n_1, worker {again.worker_id}",
        "node n_1 died [left the cluster]",
        "actor a_1 died",
    )
    assert "n_1" in told.lines[-1].why
    # What was before it is not of its story.
    assert not [line for line in told.lines if line.kind == "node.registered"]
    of_node = await story(client, "n_1")
    in_order(
        of_node, "on here registered", "was placed on node n_1", "n_1 died", "actor a_1 died ["
    )
    of_job = await story(client, job.job_id)
    in_order(of_job, "started", "a_1 (Counter) was created", "restarts", "actor a_1 died")


async def test_a_preemption_names_its_cause(client: Client, fake: FakeScheduler) -> None:
    await register(client, "n_1")
    now = await an_actor(client, await attach(client))
    await worker_exits(client, now, preempted=True, cause="made room for job_urgent")
    in_order(
        await story(client, "a_1"),
        "was preempted with signal 9 [made room for job_urgent]",
        "was preempted and restarts [its worker",
    )


async def test_a_tasks_story_tells_each_attempt_and_what_ended_it(client: Client) -> None:
    await register(client, "n_1")
    await register(client, "n_2")
    job = await attach(client)
    start_s = time.time()
    lost = ErrorInfo(code="worker_died", message="its worker w_1 ended: killed by SIGKILL")
    first = TaskRecord(
        task_id="t_1",
        attempt=0,
        job_id=job.job_id,
        name="f",
        state=TaskState.FAILED,
        submitted_at_s=start_s - 2,
        started_at_s=start_s - 1,
        ended_at_s=start_s,
        node_id="n_1",
        worker_id="w_1",
        owner_id="w_owner",
        error=lost,
    )
    gone = WorkerExit(worker_id="w_1", node_id="n_1", signal=9, cause="killed by SIGKILL")
    await client.call("POST", "/v1/workers/exited", WorkersExited(exits=(gone,)))
    await client.call("POST", "/v1/nodes/n_1/leave", {"incarnation": 1})
    now_s = time.time()
    second = TaskRecord(
        task_id="t_1",
        attempt=1,
        job_id=job.job_id,
        name="f",
        state=TaskState.FINISHED,
        submitted_at_s=now_s,
        started_at_s=now_s,
        ended_at_s=now_s,
        node_id="n_2",
        worker_id="w_2",
    )
    body = ReportTasks(records=(first, second))
    await client.call("POST", "/v1/tasks/report", body, reply=TaskHistoryStatus)
    told = await story(client, "t_1")
    assert (told.kind, told.name, told.state) == ("task", "f", "FINISHED")
    in_order(
        told,
        "attempt 0 of task t_1 (f) was submitted by w_owner",
        "attempt 0 of task t_1 began on node n_1, worker w_1 after 1.000 s",
        "attempt 0 of task t_1 is FAILED after 1.000 s [worker_died: its worker w_1 ended",
        "worker w_1 on node n_1 ended with signal 9 [killed by SIGKILL]",
        "node n_1 died [left the cluster]",
        "attempt 1 of task t_1 began on node n_2",
        "attempt 1 of task t_1 is FINISHED",
    )
    assert [line.seq is None for line in told.lines if line.kind.startswith("task.")] == [True] * 6
    # The end of a job that came later did not end it.
    finished = FinishJob(state=JobState.SUCCEEDED)
    await client.call("POST", f"/v1/jobs/{job.job_id}/finish", finished)
    assert "job.finished" not in [line.kind for line in (await story(client, "t_1")).lines]
    of_job = await story(client, job.job_id)
    in_order(of_job, "t_1 is FAILED", "node n_1 died", f"job {job.job_id} is SUCCEEDED")
    in_order(await story(client, "n_1"), "registered", "t_1 is FAILED", "n_1 died")


async def test_an_elastic_trainers_story_tells_the_turns_of_its_generations(client: Client) -> None:
    job = await attach(client)
    turn = ReportGenerationTurn(
        generation=3, before="RUNNING", after="DRAINING", why="2 ranks become 4", replicas=2
    )
    path = f"/v1/jobs/{job.job_id}/turns"
    reported = await client.call("POST", path, turn, reply=GenerationTurn)
    assert (reported.job_id, reported.generation, reported.after) == (job.job_id, 3, "DRAINING")
    told = await story(client, job.job_id)
    (line,) = [one for one in told.lines if one.kind == "generation.turned"]
    assert line.text == "generation 3 with 2 replicas: RUNNING -> DRAINING"
    assert line.why == "2 ranks become 4"
    ended = FinishJob(state=JobState.SUCCEEDED)
    await client.call("POST", f"/v1/jobs/{job.job_id}/finish", ended, reply=Job)
    with pytest.raises(ConflictError):
        await client.call("POST", path, turn, reply=GenerationTurn)


async def test_what_was_deleted_keeps_its_story_while_its_events_are_kept(
    served: tuple[Running, Client],
) -> None:
    running, client = served
    async with scheduler(client):
        job = await attach(client)
        await register(client, "n_1")
        await an_actor(client, job)
        await client.call("POST", "/v1/actors/a_1/kill", KillActor(), reply=Actor)
        finished = FinishJob(state=JobState.SUCCEEDED)
        await client.call("POST", f"/v1/jobs/{job.job_id}/finish", finished)
        await client.call("DELETE", f"/v1/jobs/{job.job_id}", reply=Job)
    told = await story(client, "a_1")
    assert told.state == "DEAD"
    in_order(told, "was created", "died [killed by stoker.kill()]")
    in_order(await story(client, job.job_id), "started", "is SUCCEEDED", "was deleted")
    short = await story(client, "a_1", limit=1)
    assert (len(short.lines), short.more) == (1, True)
    assert short.lines == told.lines[-1:]
    _, last = await running.app.state.store.bounds()
    await running.app.state.store.compact(last)
    with pytest.raises(NotFoundError):
        await story(client, "a_1")


async def test_a_story_says_which_part_has_left(sqlite_url: str) -> None:
    async with gcs(sqlite_url) as (running, client):
        await register(client, "n_1")
        await register(client, "n_1")
        assert (await story(client, "n_1")).since_s is None
        await attach(client)
        job = await attach(client)
        await running.app.state.store.compact(2)
        assert (await story(client, "n_1")).since_s is not None
        assert (await story(client, job.job_id)).since_s is None


async def test_a_story_that_is_too_long_keeps_what_is_newest_and_says_so(
    client: Client, fake: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teller, "MOST_EVENTS", 3)
    monkeypatch.setattr(teller, "MOST_THINGS", 2)
    await register(client, "n_1")
    job = await attach(client)
    whole = await story(client, "n_1")
    assert len(whole.lines) == 1 and not whole.more
    attempts = []
    for number in range(3):
        attempts.append(
            TaskRecord(
                task_id=f"t_{number}",
                attempt=0,
                job_id=job.job_id,
                name="f",
                state=TaskState.FAILED,
                started_at_s=time.time(),
                ended_at_s=time.time(),
                node_id="n_1",
                worker_id=f"w_{9 - number}",
            )
        )
        gone = WorkerExit(worker_id=f"w_{9 - number}", node_id="n_1", signal=9)
        await client.call("POST", "/v1/workers/exited", WorkersExited(exits=(gone,)))
    body = ReportTasks(records=tuple(attempts))
    await client.call("POST", "/v1/tasks/report", body, reply=TaskHistoryStatus)
    told = await story(client, job.job_id)
    assert told.more
    assert {one.about for one in told.lines if one.kind.startswith("task.")} == {"t_1", "t_2"}
    exits = {one.about for one in told.lines if one.kind == "worker.exited"}
    assert exits == {"w_8", "w_7"}
    for _ in range(4):
        await register(client, "n_1")
    told = await story(client, "n_1")
    assert told.more
    registered = [one.text for one in told.lines if one.kind == "node.registered"]
    assert len(registered) == 3 and "incarnation 5" in registered[-1]


async def test_what_came_later_does_not_crowd_out_of_a_story_what_belongs_to_it(
    client: Client, fake: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teller, "MOST_EVENTS", 3)
    await register(client, "n_1")
    job = await attach(client)
    began_s = time.time()
    now = await an_actor(client, job)
    record = TaskRecord(
        task_id="t_1",
        attempt=0,
        job_id=job.job_id,
        name="f",
        state=TaskState.FINISHED,
        actor_id="a_1",
        started_at_s=began_s,
        ended_at_s=time.time(),
    )
    body = ReportTasks(records=(record,))
    await client.call("POST", "/v1/tasks/report", body, reply=TaskHistoryStatus)
    await worker_exits(client, now)
    await placed(client, "a_1", 1)
    told = await story(client, "t_1")
    in_order(told, "was created", "under lease", "is ALIVE")
    assert not told.more
    assert (await story(client, "a_1")).more


@pytest.mark.parametrize("id_", ["t_none", "a_none", "n_none", "job_none", "pg_none"])
async def test_who_is_not_known_has_no_story(client: Client, id_: str) -> None:
    with pytest.raises(NotFoundError):
        await story(client, id_)


async def test_what_is_no_id_has_no_story(client: Client) -> None:
    with pytest.raises(NotFoundError, match="is no id of what has a story"):
        await story(client, "l_1")
