"""Jobs, actors and tasks over real HTTP, with a fake scheduler that places them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import WSMsgType

from stoker_gcs.state import schema
from stoker_wire.errors import (
    BadRequestError,
    ConflictError,
    FencedError,
    IdempotencyError,
    NotFoundError,
    UnavailableError,
)
from stoker_wire.http.server.service import Request, Service, bytes_response
from stoker_wire.messages.cluster import (
    Demand,
    RegisteredNode,
    WorkerExit,
    WorkersExited,
)
from stoker_wire.messages.common import RuntimeEnv
from stoker_wire.messages.control import (
    Event,
    Explanation,
    Page,
)
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.groups import Bundle, CreatePlacementGroup
from stoker_wire.messages.objects import CreateDetachedObject
from stoker_wire.messages.work import (
    JOB_IS_OVER,
    Actor,
    ActorState,
    AttachDriver,
    CreateActor,
    FinishJob,
    Job,
    JobArray,
    JobOutput,
    JobState,
    KillActor,
    NodeOutput,
    ReportActor,
    ReportTasks,
    SubmitJob,
    TaskRecord,
    TaskState,
)
from stoker_wire.settings import Settings
from tests.contract.gcs_support import PATIENT, TOKEN, a_node, attach, eventually, gcs, register

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import web

    from stoker_gcs.service import Running
    from stoker_gcs.state.schema import Table
    from stoker_gcs.store.changes import Row
    from stoker_wire.http.client.client import Client
    from tests.contract.gcs_support import FakeScheduler


def an_actor(job_id: str, actor_id: str = "a_1", **more: object) -> CreateActor:
    demand = Demand(job_id=job_id, resources={"CPU": 1.0}, name=str(more.pop("demand_name", "")))
    return CreateActor(
        actor_id=actor_id,
        demand=demand,
        class_name="Counter",
        payload=b"spec",
        **more,  # type: ignore[arg-type]
    )


async def create(client: Client, body: CreateActor) -> Actor:
    return await client.call("POST", "/v1/actors", body, reply=Actor)


async def actor(client: Client, actor_id: str = "a_1", wait_s: float = 0.0) -> Actor:
    query = {"wait_s": wait_s}
    return await client.call("GET", f"/v1/actors/{actor_id}", query=query, reply=Actor)


async def report(client: Client, now: Actor, state: ActorState = ActorState.ALIVE) -> Actor:
    body = ReportActor(state=state, incarnation=now.incarnation, worker_id=now.worker_id)
    return await client.call("POST", f"/v1/actors/{now.actor_id}/report", body, reply=Actor)


async def placed(client: Client, actor_id: str = "a_1", *, incarnation: int = 0) -> Actor:
    async def has_lease() -> bool:
        found = await actor(client, actor_id)
        return bool(found.lease_id) and found.incarnation == incarnation

    await eventually(has_lease, "the actor is placed")
    return await actor(client, actor_id)


async def exit_of(client: Client, now: Actor) -> None:
    gone = WorkerExit(
        worker_id=now.worker_id,
        node_id="n_1",
        lease_id=now.lease_id,
        actor_id=now.actor_id,
        job_id=now.job_id,
        signal=11,
        cause="killed by SIGSEGV",
    )
    await client.call("POST", "/v1/workers/exited", WorkersExited(exits=(gone,)))


async def test_neither_a_job_nor_an_actor_sets_what_its_lease_does(client: Client) -> None:
    job = await attach(client)
    mask = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    made = an_actor(job.job_id)
    demand = msgspec.structs.replace(made.demand, runtime_env=RuntimeEnv(env_vars=mask))
    for path, body in (
        ("/v1/jobs", SubmitJob(entrypoint="true", runtime_env=RuntimeEnv(env_vars=mask))),
        ("/v1/actors", msgspec.structs.replace(made, demand=demand)),
    ):
        with pytest.raises(BadRequestError, match="CUDA_VISIBLE_DEVICES: this variable"):
            await client.call("POST", path, body)


async def test_an_id_or_a_key_is_that_of_one_request(served: tuple[Running, Client]) -> None:
    """Also where its reply is not remembered: in another replica, or after a restart."""
    running, client = served
    jobs = running.app.jobs
    submission = SubmitJob(entrypoint="true", timeout_s=9.0, array=JobArray(indices=(1, 2)))
    first = await jobs.submit(submission, key="k")
    assert (await jobs.submit(submission, key="k")).job_id == first.job_id
    driver = AttachDriver(pid=7, hostname="h")
    attached = await jobs.attach(driver, key="d")
    assert (await jobs.attach(driver, key="d")).job_id == attached.job_id
    for other in (
        jobs.submit(msgspec.structs.replace(submission, timeout_s=8.0), key="k"),
        jobs.submit(msgspec.structs.replace(submission, array=None), key="k"),
        jobs.attach(driver, key="k"),
        jobs.attach(msgspec.structs.replace(driver, namespace="other"), key="d"),
    ):
        with pytest.raises(IdempotencyError, match="used before with another body"):
            await other
    mine, theirs = await attach(client), await attach(client)
    group = CreatePlacementGroup(
        group_id="pg_1", job_id=mine.job_id, bundles=(Bundle(resources={"CPU": 1.0}),)
    )
    value = CreateDetachedObject(object_id="o_detached_1", nbytes=1, name="x", value=b"v")
    for path, body, change in (
        ("/v1/actors", an_actor(mine.job_id), an_actor(theirs.job_id)),
        ("/v1/placement-groups", group, msgspec.structs.replace(group, job_id=theirs.job_id)),
        ("/v1/detached-objects", value, msgspec.structs.replace(value, name="y")),
    ):
        for _ in range(2):
            await client.call("POST", path, body)
        with pytest.raises(ConflictError, match="there is another"):
            await client.call("POST", path, change)


async def test_an_attached_job_ends_by_its_finish_or_by_the_loss_of_its_driver(
    sqlite_url: str,
) -> None:
    impatient = msgspec.structs.replace(PATIENT, driver_reconnect_s=1.5)
    async with gcs(sqlite_url, settings=impatient) as (_, client):
        await _finish_and_lose(client)


async def _finish_and_lose(client: Client) -> None:
    finished, lost = await attach(client), await attach(client)
    body = FinishJob(state=JobState.SUCCEEDED)
    for _ in range(2):
        done = await client.call("POST", f"/v1/jobs/{finished.job_id}/finish", body, reply=Job)
        assert done.state is JobState.SUCCEEDED
    with pytest.raises(ConflictError, match="takes no driver"):
        await attach(client, finished.job_id)
    session = await client.ws(f"/v1/jobs/{lost.job_id}/session")
    await session.close()
    session = await client.ws(f"/v1/jobs/{lost.job_id}/session")
    assert (await client.call("GET", f"/v1/jobs/{lost.job_id}", reply=Job)).state == "RUNNING"
    await session.close()
    query = {"wait_s": 30}
    dead = await client.call("GET", f"/v1/jobs/{lost.job_id}", query=query, reply=Job)
    assert dead.state is JobState.FAILED
    assert "driver died" in dead.message


async def test_a_driver_that_ends_before_its_start_is_known_says_where_its_log_lies(
    client: Client, fake: FakeScheduler
) -> None:
    fake.held_back.clear()
    job = await client.call("POST", "/v1/jobs", SubmitJob(entrypoint="true"), reply=Job)
    body = FinishJob(state=JobState.SUCCEEDED, exit_code=0, node_id="n_1")
    done = await client.call("POST", f"/v1/jobs/{job.job_id}/finish", body, reply=Job)
    assert (done.state, done.exit_code, done.node_id) == (JobState.SUCCEEDED, 0, "n_1")
    fake.held_back.set()


@asynccontextmanager
async def a_nodelet(client: Client, node_id: str, *, shared: bool = False) -> AsyncIterator[None]:
    """A node that has output of each job: one file, which says whose it is."""
    service = Service("nodelet", Settings(), token=TOKEN)

    async def output(_: Request) -> NodeOutput:
        return NodeOutput(node_id=node_id, path="/there", files=1, nbytes=3, shared=shared)

    async def archive(req: Request) -> web.StreamResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"tar of "
            yield node_id.encode()

        return await bytes_response(req, parts(), "application/x-tar")

    path = "/v1/jobs/{job_id}/output"
    service.route("GET", path, output, reply=NodeOutput, summary="output")
    service.route("GET", f"{path}.tar", archive, stream=True, summary="archive")
    await service.start("127.0.0.1")
    service.ready()
    node = a_node(node_id, service.url)
    await client.call("POST", "/v1/nodes", node, reply=RegisteredNode)
    try:
        yield
        await client.call("POST", f"/v1/nodes/{node_id}/leave", {"incarnation": 1})
    finally:
        await service.stop(0.2)


async def test_output_is_found_on_the_nodes_that_live_and_told_where_it_is_lost(
    sqlite_url: str,
) -> None:
    async with gcs(sqlite_url) as (_, client):
        job = await client.call("POST", "/v1/jobs", SubmitJob(entrypoint="true"), reply=Job)
        ended = FinishJob(state=JobState.SUCCEEDED, exit_code=0, node_id="n_2")
        await client.call("POST", f"/v1/jobs/{job.job_id}/finish", ended, reply=Job)
        path = f"/v1/jobs/{job.job_id}/output"

        async def nodes_of(path: str) -> list[str]:
            found = await client.call("GET", path, reply=JobOutput)
            return [*(node.node_id for node in found.nodes), found.lost]

        async with a_nodelet(client, "n_1"):
            async with a_nodelet(client, "n_2"):
                assert await nodes_of(path) == ["n_2", "n_1", ""], "the driver's node first"
                assert await client.call("GET", f"{path}.tar", raw=True) == b"tar of n_2"
                query = {"node_id": "n_1"}
                other = await client.call("GET", f"{path}.tar", query=query, raw=True)
                assert other == b"tar of n_1"
            first, lost = await nodes_of(path)
            assert first == "n_1"
            assert "n_2 is dead" in lost
        with pytest.raises(NotFoundError, match=r"(?s)n_2 is dead.*STOKER_JOB_OUTPUT_ROOT"):
            await client.call("GET", f"{path}.tar", raw=True)
        with pytest.raises(NotFoundError, match="job_unknown"):
            await nodes_of("/v1/jobs/job_unknown/output")
        async with a_nodelet(client, "n_3", shared=True), a_nodelet(client, "n_4", shared=True):
            # What all nodes share is listed once, and outlives the driver's node.
            assert await nodes_of(path) == ["n_3", ""]


async def test_stopping_a_job_tells_its_driver(client: Client) -> None:
    job = await attach(client)
    session = await client.ws(f"/v1/jobs/{job.job_id}/session")
    for _ in range(2):
        stopped = await client.call("POST", f"/v1/jobs/{job.job_id}/stop", reply=Job)
        assert stopped.state is JobState.STOPPED
    while (message := await session.receive(timeout=40)).type is WSMsgType.TEXT:
        continue
    assert (message.data, message.extra) == (JOB_IS_OVER, "it is STOPPED: stopped")


async def test_a_submitted_job_is_launched_once_and_ends_with_its_process(
    client: Client, fake: FakeScheduler
) -> None:
    await register(client)
    fake.held_back.clear()
    body = SubmitJob(entrypoint="python x.py", resources={"CPU": 1.0})
    job = await client.call("POST", "/v1/jobs", body, reply=Job, idempotency_key="same")

    async def says_why() -> bool:
        found = await client.call("GET", f"/v1/jobs/{job.job_id}", reply=Job)
        return found.message == "3 demands wait before it"

    await eventually(says_why, "the pending job says why it waits")
    why = await client.call("GET", f"/v1/jobs/{job.job_id}/explain", reply=Explanation)
    assert (why.summary, why.queue_position) == ("driver waits for 99 CPUs", 2)
    fake.held_back.set()

    async def runs() -> bool:
        return (await client.call("GET", f"/v1/jobs/{job.job_id}", reply=Job)).lease_id != ""

    await eventually(runs, "the driver is launched")
    again = await client.call("POST", "/v1/jobs", body, reply=Job, idempotency_key="same")
    assert again.job_id == job.job_id
    now = await client.call("GET", f"/v1/jobs/{job.job_id}", reply=Job)
    assert (now.state, now.node_id) == (JobState.RUNNING, "n_1")
    attached = await attach(client, job.job_id)
    assert attached.token
    known = await client.call("GET", f"/v1/jobs/{job.job_id}", reply=Job)
    assert msgspec.structs.replace(attached, token="") == known
    other = WorkerExit(worker_id="w_77", node_id="n_1", job_id=job.job_id, lease_id="l_77")
    await client.call("POST", "/v1/workers/exited", WorkersExited(exits=(other,)))
    driver = WorkerExit(
        worker_id="w_1",
        node_id="n_1",
        job_id=job.job_id,
        lease_id=now.lease_id,
        exit_code=3,
        last_log_lines=("ValueError: no",),
    )
    for _ in range(2):
        await client.call("POST", "/v1/workers/exited", WorkersExited(exits=(driver,)))
    ended = await client.call("GET", f"/v1/jobs/{job.job_id}", reply=Job)
    assert (ended.state, ended.exit_code) == (JobState.FAILED, 3)
    assert "exit code 3" in ended.message and "ValueError: no" in ended.message
    exits = await client.call(
        "GET", "/v1/events", query={"kind": "worker.exited"}, reply=Page[Event]
    )
    assert [event.subject for event in exits.items] == ["w_77", "w_1"]
    query = {"kind": "job.", "subject": job.job_id}
    told = await client.call("GET", "/v1/events", query=query, reply=Page[Event])
    kinds = [event.kind for event in told.items]
    assert kinds.count("job.started") == 1, "it starts once, though its driver says hello as well"
    assert kinds.count("job.changed") == 1


async def test_exits_of_an_earlier_incarnation_change_nothing(client: Client) -> None:
    for _ in range(2):
        await register(client)
    for incarnation, worker_id in ((1, "w_old"), (2, "w_new")):
        gone = WorkerExit(worker_id=worker_id, node_id="n_1", signal=9, cause="killed by SIGKILL")
        body = WorkersExited(exits=(gone,), incarnation=incarnation)
        await client.call("POST", "/v1/workers/exited", body)
    query = {"kind": "worker.exited"}
    exits = await client.call("GET", "/v1/events", query=query, reply=Page[Event])
    assert [event.subject for event in exits.items] == ["w_new"]


async def test_a_key_used_for_another_job_is_refused_and_a_chosen_id_is_unique(
    client: Client,
) -> None:
    body = SubmitJob(entrypoint="one")
    await client.call("POST", "/v1/jobs", body, reply=Job, idempotency_key="k")
    with pytest.raises(IdempotencyError):
        other = SubmitJob(entrypoint="two")
        await client.call("POST", "/v1/jobs", other, reply=Job, idempotency_key="k")
    named = SubmitJob(entrypoint="one", job_id="job_mine")
    await client.call("POST", "/v1/jobs", named, reply=Job)
    with pytest.raises(ConflictError, match="job_mine already"):
        await client.call("POST", "/v1/jobs", named, reply=Job)
    with pytest.raises(BadRequestError, match="not a job id"):
        wrong = SubmitJob(entrypoint="one", job_id="mine")
        await client.call("POST", "/v1/jobs", wrong, reply=Job)


async def test_an_actor_lives_restarts_and_dies_of_a_cause(
    client: Client, fake: FakeScheduler
) -> None:
    await register(client)
    job = await attach(client)
    body = an_actor(job.job_id, max_restarts=1)
    assert (await create(client, body)).state is ActorState.PENDING
    assert (await create(client, body)).actor_id == "a_1"
    waiting = asyncio.ensure_future(actor(client, wait_s=30))
    first = await placed(client)
    assert first.address is not None and first.state is ActorState.PENDING
    for _ in range(2):
        await report(client, first)
    assert (await waiting).state is ActorState.ALIVE
    for _ in range(2):
        await exit_of(client, first)
    second = await placed(client, incarnation=1)
    assert (second.state, second.restarts) == (ActorState.RESTARTING, 1)
    with pytest.raises(FencedError, match="is at incarnation 1"):
        await report(client, first)
    await report(client, second)
    await exit_of(client, second)
    dead = await actor(client)
    assert dead.state is ActorState.DEAD
    assert dead.death_cause is not None
    assert "killed by SIGSEGV" in dead.death_cause.message
    assert dead.death_cause.extra["signal"] == 11
    assert {request.request_id for request in fake.requests} == {"r_a_1.0", "r_a_1.1"}
    story = await client.call("GET", "/v1/actors/a_1/explain", reply=Explanation)
    assert [event.kind for event in story.events] == [
        "actor.created",
        "actor.placed",
        "actor.started",
        "actor.restarting",
        "actor.placed",
        "actor.started",
        "actor.died",
    ]


async def test_a_fast_constructor_may_report_before_its_grant_is_written(
    client: Client, fake: FakeScheduler
) -> None:
    job = await attach(client)
    fake.held_back.clear()
    made = await create(client, an_actor(job.job_id))
    early = asyncio.ensure_future(report(client, made))
    fake.held_back.set()
    alive = await early
    assert alive.state is ActorState.ALIVE
    assert alive.address is not None


async def test_an_infeasible_actor_dies_with_the_explanation(
    client: Client, fake: FakeScheduler
) -> None:
    job = await attach(client)
    fake.infeasible.add("huge")
    await create(client, an_actor(job.job_id, demand_name="huge"))
    dead = await actor(client, wait_s=30)
    assert dead.state is ActorState.DEAD
    assert dead.death_cause is not None
    assert (dead.death_cause.code, dead.death_cause.message) == (
        "infeasible",
        "no node has 99 CPUs; the largest has 4",
    )


async def test_names_are_unique_among_the_living(client: Client, fake: FakeScheduler) -> None:
    job = await attach(client)
    first = await create(client, an_actor(job.job_id, name="cache"))
    assert first.namespace == job.namespace
    with pytest.raises(ConflictError, match="'cache' is taken"):
        await create(client, an_actor(job.job_id, "a_2", name="cache"))
    same = an_actor(job.job_id, "a_3", name="cache", get_if_exists=True)
    assert (await create(client, same)).actor_id == "a_1"
    path = f"/v1/named-actors/{job.namespace}/cache"
    assert (await client.call("GET", path, reply=Actor)).actor_id == "a_1"
    now = await placed(client)
    for _ in range(2):
        await client.call("POST", "/v1/actors/a_1/kill", KillActor(reason="enough"), reply=Actor)

    async def released() -> bool:
        return now.lease_id in fake.released

    await eventually(released, "the lease is given back")
    with pytest.raises(NotFoundError):
        await client.call("GET", path, reply=Actor)
    assert (await create(client, an_actor(job.job_id, "a_4", name="cache"))).actor_id == "a_4"


async def test_the_end_of_a_job_ends_all_that_was_its_own(
    served: tuple[Running, Client], fake: FakeScheduler
) -> None:
    running, client = served
    await register(client)
    job = await attach(client)
    await create(client, an_actor(job.job_id))
    await create(client, an_actor(job.job_id, "a_2", detached=True, name="keep", namespace="ns"))
    await placed(client)
    kept = await placed(client, "a_2")
    task = TaskRecord(
        task_id="t_1", attempt=0, state=TaskState.RUNNING, job_id=job.job_id, name="f"
    )
    await client.call("POST", "/v1/tasks/report", ReportTasks(records=(task,)))
    body = FinishJob(state=JobState.SUCCEEDED)
    await client.call("POST", f"/v1/jobs/{job.job_id}/finish", body, reply=Job)
    dead = await actor(client, wait_s=30)

    async def is_dead() -> bool:
        return (await actor(client)).state is ActorState.DEAD

    await eventually(is_dead, "the job's actor is dead")
    dead = await actor(client)
    assert dead.death_cause is not None and job.job_id in dead.death_cause.message

    async def task_ended() -> bool:
        found = await client.call("GET", "/v1/tasks/t_1", reply=TaskRecord)
        return found.state is TaskState.FAILED

    await eventually(task_ended, "the open task is closed")
    assert (await actor(client, "a_2")).lease_id == kept.lease_id
    rows = await running.app.state.store.select(schema.LEASES, columns=("lease_id",))
    assert [row["lease_id"] for row in rows] == [kept.lease_id]
    late = msgspec.structs.replace(task, state=TaskState.FINISHED, ended_at_s=9.0)
    await client.call("POST", "/v1/tasks/report", ReportTasks(records=(late, task)))
    found = await client.call("GET", "/v1/tasks/t_1", reply=TaskRecord)
    assert found.state is TaskState.FINISHED, "what a process reports beats what we inferred"
    with pytest.raises(ConflictError, match="has ended"):
        await create(client, an_actor(job.job_id, "a_9"))


async def test_the_death_of_a_node_restarts_or_ends_its_actors(
    client: Client, fake: FakeScheduler
) -> None:
    node = await register(client)
    job = await attach(client)
    await create(client, an_actor(job.job_id, max_restarts=-1))
    await create(client, an_actor(job.job_id, "a_2"))
    await placed(client)
    await placed(client, "a_2")
    leave = {"incarnation": node.incarnation}
    await client.call("POST", "/v1/nodes/n_1/leave", leave)
    await register(client)
    again = await placed(client, incarnation=1)
    assert again.state is ActorState.RESTARTING
    dead = await actor(client, "a_2", wait_s=30)
    assert dead.death_cause is not None and dead.death_cause.code == "node_died"


@pytest.mark.parametrize("comes_back", [False, True], ids=["dies", "starts again"])
async def test_an_actor_whose_grant_is_recorded_after_the_end_of_its_node_is_placed_anew(
    client: Client, fake: FakeScheduler, comes_back: bool
) -> None:
    node = await register(client)
    job = await attach(client)
    await create(client, an_actor(job.job_id, max_restarts=-1))
    await placed(client)
    fake.delivers.clear()
    await create(client, an_actor(job.job_id, "a_late", max_restarts=-1))

    async def granted() -> bool:
        return "l_2" in fake.granted

    await eventually(granted, "the grant is on its way")
    if comes_back:
        await register(client)
    else:
        await client.call("POST", "/v1/nodes/n_1/leave", {"incarnation": node.incarnation})

    async def what_it_had_is_ended() -> bool:
        return (await actor(client)).state is ActorState.RESTARTING

    await eventually(what_it_had_is_ended, "what was on the node is ended")
    fake.delivers.set()

    async def is_lost() -> bool:
        return (await actor(client, "a_late")).incarnation == 1

    await eventually(is_lost, "the actor is not left on the node that is gone")
    if not comes_back:
        await register(client)
    again = await placed(client, "a_late", incarnation=1)
    assert again.death_cause is not None and again.death_cause.code == "node_died"


async def test_an_actor_whose_worker_exited_before_its_grant_was_recorded_starts_again(
    served: tuple[Running, Client], fake: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, client = served
    store = running.app.state.store
    select, failed = store.select, asyncio.Event()

    async def fails_once(table: Table, where: Any = None, **how: Any) -> list[Row]:
        if table is schema.EVENTS and where == its_exit and not failed.is_set():
            failed.set()
            raise UnavailableError("the database is away")
        return await select(table, where or {}, **how)

    its_exit = {"subject": "w_1", "kind": EventKind.WORKER_EXITED.value}
    monkeypatch.setattr(store, "select", fails_once)
    job = await attach(client)
    fake.delivers.clear()
    made = await create(client, an_actor(job.job_id, max_restarts=1))

    async def granted() -> bool:
        return "l_1" in fake.granted

    await eventually(granted, "the grant is on its way")
    await exit_of(client, msgspec.structs.replace(made, worker_id="w_1", lease_id="l_1"))
    fake.delivers.set()
    again = await placed(client, incarnation=1)
    assert failed.is_set() and again.worker_id == "w_2"
    assert again.death_cause is not None and "SIGSEGV" in again.death_cause.message
