"""Retention on every store: what has ended leaves by the policies, in batches, and nothing that lives."""

from __future__ import annotations

import asyncio
import hashlib
import random
from typing import TYPE_CHECKING

import msgspec
import pytest

from stoker_gcs.controllers import retention
from stoker_gcs.controllers.reconcile import Reconciler
from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.registry.groups.rules import GROUPS
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.registry.leases import upsert_lease_row
from stoker_gcs.registry.nodes.rules import NODES, registered
from stoker_gcs.state import schema
from stoker_gcs.store.changes import Change, Delete
from stoker_wire.data.spool import row_of
from stoker_wire.errors import CompactedError, ConflictError, NameTakenError, NotFoundError
from stoker_wire.messages.cluster import Demand, Lease, LeaseKind, Node, NodeState
from stoker_wire.messages.common import RuntimeEnv
from stoker_wire.messages.control import KvEntry, Page, RetentionStatus
from stoker_wire.messages.groups import (
    Bundle,
    BundlePlacement,
    GroupState,
    GroupStrategy,
    PlacementGroup,
)
from stoker_wire.messages.work import (
    Actor,
    ActorState,
    CreateActor,
    Dependency,
    FinishJob,
    Job,
    JobState,
    KillActor,
    Owner,
    ReportTasks,
    SubmitJob,
    TaskHistoryStatus,
    TaskRecord,
    TaskState,
)
from tests.contract.gcs_support import PATIENT, a_node, attach, eventually, gcs, migrate, register

if TYPE_CHECKING:
    from stoker_wire.http.client.client import Client

AGE_S = 1000.0
FOR_EVER = msgspec.structs.replace(
    PATIENT,
    keep_events=0,
    keep_tasks=0,
    keep_tasks_s=0.0,
    keep_jobs_s=0.0,
    keep_actors_s=0.0,
    keep_placement_groups_s=0.0,
    keep_nodes_s=0.0,
    keep_blobs_s=0.0,
)
AT_ONCE = msgspec.structs.replace(
    FOR_EVER,
    keep_tasks_s=0.01,
    keep_jobs_s=0.01,
    keep_actors_s=0.01,
    keep_placement_groups_s=0.01,
    keep_nodes_s=0.01,
    keep_blobs_s=0.01,
)
AGED = msgspec.structs.replace(
    FOR_EVER,
    keep_tasks_s=AGE_S,
    keep_jobs_s=AGE_S,
    keep_actors_s=AGE_S,
    keep_placement_groups_s=AGE_S,
    keep_nodes_s=AGE_S,
    keep_blobs_s=AGE_S,
)
STORES = ("memory", "sqlite", "postgres")


@pytest.fixture(params=STORES)
async def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return "memory://"
    made: str = request.getfixturevalue(f"{request.param}_url")
    await migrate(made)
    return made


@pytest.fixture(autouse=True)
def no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave it to the test when the policies are enforced."""
    monkeypatch.setattr(retention, "EVERY_S", (3600.0, 3600.0))


async def report(client: Client, *records: TaskRecord) -> None:
    await client.call(
        "POST", "/v1/tasks/report", ReportTasks(records=records), reply=TaskHistoryStatus
    )


def task(
    task_id: str, state: TaskState = TaskState.FINISHED, at_s: float = 1.0, **more: object
) -> TaskRecord:
    given: dict[str, object] = {"attempt": 0, "job_id": "job_1", "name": "f", "ended_at_s": at_s}
    return TaskRecord(task_id=task_id, state=state, **{**given, **more})  # type: ignore[arg-type]


async def listed(client: Client, path: str) -> list[str]:
    types: dict[str, type] = {"jobs": Job, "actors": Actor, "nodes": Node, "tasks": TaskRecord}
    kind = types.get(path, PlacementGroup)
    page = await client.call("GET", f"/v1/{path}", reply=Page[kind], query={"limit": 1000})  # type: ignore[valid-type]
    name = {"placement-groups": "group_id"}.get(path, f"{path[:-1]}_id")
    return [getattr(one, name) for one in page.items]


async def leave(client: Client, node_id: str) -> None:
    await client.call("POST", f"/v1/nodes/{node_id}/leave", {"incarnation": 1})


async def finished(client: Client) -> Job:
    job = await attach(client)
    body = FinishJob(state=JobState.SUCCEEDED)
    return await client.call("POST", f"/v1/jobs/{job.job_id}/finish", body, reply=Job)


async def actor(client: Client, actor_id: str, job_id: str, **more: object) -> Actor:
    body = CreateActor(
        actor_id=actor_id,
        demand=Demand(job_id=job_id, resources={}),
        class_name="C",
        payload=b"",
        **more,  # type: ignore[arg-type]
    )
    return await client.call("POST", "/v1/actors", body, reply=Actor)


async def kill(client: Client, actor_id: str) -> None:
    await client.call("POST", f"/v1/actors/{actor_id}/kill", KillActor(), reply=Actor)


async def test_what_has_ended_leaves_the_lists_and_is_not_found(url: str) -> None:
    async with gcs(url, settings=AT_ONCE) as (running, client):
        await register(client, "n_1")
        await register(client, "n_2")
        await leave(client, "n_2")
        ended, live = await finished(client), await attach(client)
        await actor(client, "a_dead", live.job_id)
        await actor(client, "a_alive", live.job_id)
        await kill(client, "a_dead")
        await report(
            client,
            task("t_done", job_id=live.job_id),
            task("t_runs", TaskState.RUNNING, job_id=live.job_id),
            task("t_of_ended", job_id=ended.job_id),
            task("t_again", TaskState.FAILED, job_id=live.job_id),
            task("t_again", TaskState.RUNNING, job_id=live.job_id, attempt=1),
        )

        async def gone() -> bool:
            await running.app.retention.enforce()
            return (
                await listed(client, "nodes") == ["n_1"]
                and await listed(client, "jobs") == [live.job_id]
                and await listed(client, "actors") == ["a_alive"]
            )

        await eventually(gone, "only what lives is listed")
        assert await listed(client, "tasks") == ["t_again", "t_again", "t_runs"]
        for path, type_ in (
            ("nodes/n_2", Node),
            (f"jobs/{ended.job_id}", Job),
            ("actors/a_dead", Actor),
            ("tasks/t_done", TaskRecord),
        ):
            with pytest.raises(NotFoundError):
                await client.call("GET", f"/v1/{path}", reply=type_)
        shown = await client.call("GET", "/v1/retention", reply=RetentionStatus)
        kept = {one.kind: (one.count, one.removed) for one in shown.kinds}
        assert (kept["nodes"], kept["jobs"], kept["actors"]) == ((0, 1), (0, 1), (0, 1))
        assert kept["tasks"][0] == 3
        assert "n_2" not in running.app.nodes.view


async def test_zero_keeps_for_ever(url: str) -> None:
    async with gcs(url, settings=FOR_EVER) as (running, client):
        await register(client, "n_1")
        await leave(client, "n_1")
        job = await finished(client)
        await report(client, task("t_1"))
        await put_function(client, b"code")
        before = await running.app.state.store.bounds()
        assert not any((await running.app.retention.enforce()).values())
        assert await listed(client, "nodes") == ["n_1"]
        assert await listed(client, "jobs") == [job.job_id]
        assert await listed(client, "tasks") == ["t_1"]
        assert (await running.app.state.store.bounds())[0] == before[0] == 0


async def test_of_many_tasks_the_newest_stay_whole(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCH", 10)
    limited = msgspec.structs.replace(FOR_EVER, keep_tasks=20)
    async with gcs(url, settings=limited) as (running, client):
        await attach(client)
        await report(client, task("t_000", TaskState.RUNNING))
        for first in range(1, 101, 20):
            await report(client, *(task(f"t_{i:03}") for i in range(first, first + 20)))
        sizes = []
        apply = running.app.state.writer.apply

        async def watched(change: Change) -> object:
            sizes.extend(
                len(one.where["task_id"])  # type: ignore[arg-type]
                for one in change.operations
                if isinstance(one, Delete)
                and "task_id" in one.where  # a snapshot may be dropped, too
            )
            return await apply(change)

        monkeypatch.setattr(running.app.state.writer, "apply", watched)
        removed = await running.app.retention.enforce()
        assert removed["tasks"] == 81
        assert len(sizes) > 8 and max(sizes) <= 10, "each transaction is of one batch"
        assert await listed(client, "tasks") == ["t_000", *(f"t_{i:03}" for i in range(82, 101))]
        assert (await running.app.retention.enforce())["tasks"] == 0


async def test_events_leave_in_batches_and_a_deleted_jobs_id_stays_taken(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCH", 7)
    limited = msgspec.structs.replace(FOR_EVER, keep_events=5)
    async with gcs(url, settings=limited) as (running, client):
        body = SubmitJob(entrypoint="true", job_id="job_mine")
        await client.call("POST", "/v1/jobs", body, reply=Job)
        await client.call("POST", "/v1/jobs/job_mine/stop", reply=Job)
        await client.call("DELETE", "/v1/jobs/job_mine", reply=Job)
        for i in range(50):
            await client.call("PUT", f"/v1/kv/ns/{i}", b"v", reply=KvEntry)
        store = running.app.state.store
        steps, compact = [], store.compact

        async def watched(keep_after: int) -> None:
            steps.append(keep_after)
            await compact(keep_after)

        monkeypatch.setattr(store, "compact", watched)
        await running.app.retention.enforce()
        compacted, last = await store.bounds()
        assert last - compacted == 5
        assert len(steps) >= 7
        assert all(b - a <= 7 for a, b in zip([0, *steps], steps, strict=False))
        rows = await store.select(schema.EVENTS, {"subject": "job_mine"})
        assert rows == [], "no event knows the job any more"
        with pytest.raises(NameTakenError, match="which is deleted"):
            await client.call("POST", "/v1/jobs", body, reply=Job)


async def test_a_job_leaves_with_its_rows_but_not_before_its_detached_actor(url: str) -> None:
    async with gcs(url, settings=FOR_EVER) as (running, client):
        job = await attach(client)
        await actor(client, "a_stays", job.job_id, detached=True, name="x")
        await actor(client, "a_ends", job.job_id)
        await kill(client, "a_ends")
        await report(client, *(task(f"t_{i:04}", job_id=job.job_id) for i in range(1200)))
        body = FinishJob(state=JobState.SUCCEEDED)
        await client.call("POST", f"/v1/jobs/{job.job_id}/finish", body, reply=Job)
        with pytest.raises(ConflictError, match=r"a_stays of job .* is detached and lives"):
            await client.call("DELETE", f"/v1/jobs/{job.job_id}", reply=Job)
        await kill(client, "a_stays")
        await client.call("DELETE", f"/v1/jobs/{job.job_id}", reply=Job)
        store = running.app.state.store
        for table in (schema.JOBS, schema.ACTORS, schema.TASKS):
            assert await store.select(table) == [], table.name
        # A report that comes late is no task that runs for ever.
        await report(client, task("t_late", TaskState.RUNNING, job_id=job.job_id))
        (late,) = (await client.call("GET", "/v1/tasks", reply=Page[TaskRecord])).items
        assert late.state is TaskState.FAILED


async def put_function(client: Client, blob: bytes) -> str:
    path = f"/v1/functions/{hashlib.sha256(blob).hexdigest()}"
    await client.call("PUT", path, blob)
    return path


async def exists(client: Client, path: str) -> bool:
    try:
        await client.call("GET", path, raw=True)
    except NotFoundError:
        return False
    return True


async def test_a_blob_stays_while_something_may_use_it(url: str) -> None:
    settings = msgspec.structs.replace(AT_ONCE, keep_jobs_s=0.0)
    async with gcs(url, settings=settings) as (running, client):
        before = await put_function(client, b"1")
        await asyncio.sleep(0.05)  # Its age, which no event tells.
        job = await attach(client)
        during = await put_function(client, b"2")
        await actor(client, "a_1", job.job_id, detached=True)
        named = await put_function(client, b"3")
        await running.app.retention.enforce()
        for path, there in ((before, False), (during, True), (named, True)):
            assert await exists(client, path) is there
        body = FinishJob(state=JobState.SUCCEEDED)
        await client.call("POST", f"/v1/jobs/{job.job_id}/finish", body, reply=Job)
        await running.app.retention.enforce()
        assert await exists(client, during), "the actor came while it was used"
        await kill(client, "a_1")

        async def gone() -> bool:
            await running.app.retention.enforce()
            return not await running.app.state.store.select(schema.BLOBS)

        await eventually(gone, "nothing is left that could use them")
        await put_function(client, b"2")
        assert await client.call("GET", during, raw=True) == b"2"


class World:
    """Nodes, jobs, actors, groups, tasks and leases of random age and state that refer to one another."""

    def __init__(self, seed: int, now_s: float) -> None:
        self.dice = random.Random(seed)
        self.now_s = now_s
        self.nodes = [self._node(i) for i in range(12)]
        self.jobs = [self._job(i) for i in range(20)]
        live = [job for job in self.jobs if not job.state.terminal]
        for index, job in enumerate(self.jobs):
            if job in live and self.dice.random() < 0.5:
                other = self.dice.choice(self.jobs[:index] or [job])
                after = (Dependency(job_id=other.job_id),) if other is not job else ()
                self.jobs[index] = msgspec.structs.replace(job, after=after)
        self.actors = [self._actor(i) for i in range(40)]
        self.groups = [self._group(i) for i in range(15)]
        self.tasks = [self._task(i, attempt) for i in range(60) for attempt in range(2)]
        self.leases = [
            Lease(
                lease_id=f"l_{i}",
                owner_id="gcs",
                job_id="",
                kind=LeaseKind.ACTOR,
                node_id=self.dice.choice(self.nodes).node_id,
                node_incarnation=1,
                resources={},
            )
            for i in range(3)
        ]

    def at_s(self) -> float:
        """Return a time that is beyond its age, or not."""
        return self.now_s - self.dice.choice((0.5, 2.0)) * AGE_S

    def _node(self, index: int) -> Node:
        at_s = self.at_s()
        return msgspec.structs.replace(
            registered(a_node(f"n_{index}"), None, at_s - 1),
            state=self.dice.choice(tuple(NodeState)),
            # A living node is heard of; nobody is to be given up here.
            heartbeat_at_s=at_s,
        )

    def _job(self, index: int) -> Job:
        state = self.dice.choice(tuple(JobState))
        at_s = self.at_s()
        return Job(
            job_id=f"job_{index:02}",
            name="",
            entrypoint="x",
            state=state,
            submitted=False,
            namespace="",
            runtime_env=RuntimeEnv(),
            metadata={},
            resources={},
            created_at_s=at_s - 1,
            started_at_s=at_s - 1,
            ended_at_s=at_s if state.terminal else None,
            node_id=self.dice.choice(self.nodes).node_id if self.dice.random() < 0.5 else "",
        )

    def _owner(self, index: int) -> Owner | None:
        if self.dice.random() < 0.5:
            return None
        return Owner(
            peer_id=f"w_{index}",
            node_id=self.dice.choice(self.nodes).node_id,
            actor_id=f"a_{self.dice.randrange(40):02}" if self.dice.random() < 0.5 else "",
        )

    def _actor(self, index: int) -> Actor:
        state = self.dice.choice((ActorState.ALIVE, ActorState.DEAD, ActorState.DEAD))
        at_s = self.at_s()
        return Actor(
            actor_id=f"a_{index:02}",
            job_id=self.dice.choice(self.jobs).job_id,
            class_name="C",
            state=state,
            detached=self.dice.random() < 0.3,
            node_id=self.dice.choice(self.nodes).node_id,
            lease_id=f"l_{self.dice.randrange(20)}",
            created_at_s=at_s - 1,
            ended_at_s=at_s if state is ActorState.DEAD else None,
            owner=self._owner(index),
        )

    def _group(self, index: int) -> PlacementGroup:
        state = self.dice.choice((GroupState.CREATED, GroupState.REMOVED))
        at_s = self.at_s()
        placed = BundlePlacement(
            lease_id=f"l_g{index}",
            node_id=self.dice.choice(self.nodes).node_id,
            node_incarnation=1,
        )
        return PlacementGroup(
            group_id=f"pg_{index}",
            job_id=self.dice.choice(self.jobs).job_id,
            state=state,
            strategy=GroupStrategy.PACK,
            bundles=(Bundle(resources={"CPU": 1.0}),),
            detached=self.dice.random() < 0.3,
            placements={0: placed} if state is GroupState.CREATED else {},
            created_at_s=at_s - 1,
            removed_at_s=at_s if state is GroupState.REMOVED else None,
            owner=self._owner(100 + index),
        )

    def _task(self, index: int, attempt: int) -> TaskRecord:
        state = self.dice.choice((TaskState.FINISHED, TaskState.FAILED, TaskState.RUNNING))
        return task(
            f"t_{index:02}",
            state,
            self.at_s(),
            attempt=attempt,
            job_id=self.dice.choice(self.jobs).job_id,
            node_id=self.dice.choice(self.nodes).node_id,
        )

    def must_stay(self, gone_jobs: set[str]) -> set[str]:
        """Return what lives, and what it refers to; and what is young."""
        stay: set[str] = set()
        young_s = self.now_s - AGE_S
        for node in self.nodes:
            if node.state is not NodeState.DEAD or node.heartbeat_at_s >= young_s:
                stay.add(node.node_id)
        for job in self.jobs:
            if not job.state.terminal:
                stay |= {job.job_id, job.node_id, *(after.job_id for after in job.after)}
            elif (job.ended_at_s or 0.0) >= young_s:
                stay.add(job.job_id)
        held = {lease.lease_id for lease in self.leases}
        for one in (*self.actors, *self.groups):
            is_actor = isinstance(one, Actor)
            own_id = one.actor_id if isinstance(one, Actor) else one.group_id
            lives = one.state not in (ActorState.DEAD, GroupState.REMOVED)
            if lives:
                stay |= {own_id, one.job_id}
                if one.owner is not None:
                    stay |= {one.owner.actor_id, one.owner.node_id}
                if isinstance(one, Actor):
                    stay.add(one.node_id)
                else:
                    stay |= {placed.node_id for placed in one.placements.values()}
            ended = one.ended_at_s if isinstance(one, Actor) else one.removed_at_s
            if not lives and (ended or 0.0) >= young_s:
                stay.add(own_id)
            if is_actor and one.lease_id in held:  # type: ignore[union-attr]
                stay.add(own_id)
        stay |= {lease.node_id for lease in self.leases}
        for record in self.tasks:
            if not record.state.terminal or (record.ended_at_s or 0.0) >= young_s:
                stay.add(record.task_id)
            if not record.state.terminal and record.job_id not in gone_jobs:
                stay.add(record.node_id)
        return stay - {""}


TABLES = (
    (schema.NODES, "node_id"),
    (schema.JOBS, "job_id"),
    (schema.ACTORS, "actor_id"),
    (schema.PLACEMENT_GROUPS, "group_id"),
    (schema.TASKS, "task_id"),
)


@pytest.mark.parametrize("seed", range(6))
async def test_what_lives_and_what_it_refers_to_stays_and_all_else_goes(
    url: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a job that goes, what is young goes with it: that is the one thing that may leave early."""

    async def idle(_: Reconciler) -> None:
        await asyncio.Event().wait()  # It would end those of the world whose owners are dead.

    monkeypatch.setattr(Reconciler, "run", idle)
    async with gcs(url, settings=AGED) as (running, _):
        app = running.app
        world = World(seed, app.state.now())
        lease_rows = [upsert_lease_row(lease, job_id="") for lease in world.leases]
        operations = (
            *(NODES.insert(node) for node in world.nodes),
            *(JOBS.insert(job) for job in world.jobs),
            *(ACTORS.insert(one, spec=b"") for one in world.actors),
            *(GROUPS.insert(group) for group in world.groups),
            *lease_rows,
        )
        await app.state.writer.apply(Change(operations))
        await app.state.writer.put_tasks([row_of(record) for record in world.tasks])
        await app.nodes.load()
        await app.jobs.load()
        await app.retention.enforce()
        left = {
            row[name]
            for table, name in TABLES
            for row in await app.state.store.select(table, columns=(name,), limit=1000)
        }
        gone_jobs = {job.job_id for job in world.jobs} - left
        stay = world.must_stay(gone_jobs)
        with_jobs = {
            *(one.actor_id for one in world.actors if one.job_id in gone_jobs),
            *(one.group_id for one in world.groups if one.job_id in gone_jobs),
            *(one.task_id for one in world.tasks if one.job_id in gone_jobs),
        }
        living = {one.actor_id for one in world.actors if one.state is not ActorState.DEAD}
        living |= {one.group_id for one in world.groups if one.state is not GroupState.REMOVED}
        assert living - left == set()
        assert stay - left <= with_jobs
        all_ids = {
            *(one.node_id for one in world.nodes),
            *(one.job_id for one in world.jobs),
            *(one.actor_id for one in world.actors),
            *(one.group_id for one in world.groups),
            *(one.task_id for one in world.tasks),
        }
        assert left - stay == set(), "what nothing keeps is gone"
        assert gone_jobs and all_ids - left - with_jobs, "the world had something to remove"


async def test_other_replicas_forget_nodes_and_refuse_watches_of_events_that_are_gone(
    postgres_url: str,
) -> None:
    await migrate(postgres_url)
    settings = msgspec.structs.replace(FOR_EVER, keep_nodes_s=0.01, keep_events=3)
    async with (
        gcs(postgres_url, settings=settings) as (first, a),
        gcs(postgres_url, settings=settings) as (second, b),
    ):
        await register(a, "n_1")
        await leave(a, "n_1")
        for i in range(20):
            await a.call("PUT", f"/v1/kv/ns/{i}", b"v", reply=KvEntry)

        async def known() -> bool:
            node = second.app.nodes.view.get("n_1")
            return node is not None and node.state is NodeState.DEAD

        await eventually(known, "the other replica has heard of the node")
        await first.app.retention.enforce()

        async def forgotten() -> bool:
            return "n_1" not in second.app.nodes.view

        await eventually(forgotten, "the other replica has forgotten the node")
        second.app.state.log._floor = second.app.state.log.last  # Its ring would still have them.
        with pytest.raises(CompactedError):
            async for _ in b.watch("/v1/events", 1, {}):
                break


async def test_open_tasks_of_a_deleted_or_ended_job_are_closed_behind_any_number_of_others(
    sqlite_url: str,
) -> None:
    async with gcs(sqlite_url, settings=FOR_EVER) as (running, client):
        live, ended = await attach(client), await finished(client)
        rows = [
            row_of(task(f"t_{i:06}", TaskState.RUNNING, job_id=live.job_id)) for i in range(100_000)
        ]
        rows.append(row_of(task("t_z", TaskState.RUNNING, job_id=ended.job_id)))
        await running.app.state.store.put_tasks(rows)
    async with gcs(sqlite_url, settings=FOR_EVER) as (_, client):

        async def closed() -> bool:
            record = await client.call("GET", "/v1/tasks/t_z", reply=TaskRecord)
            return record.state is TaskState.FAILED

        await eventually(closed, "the task of the ended job is closed")
