"""The state at an earlier time on every store: what is rebuilt is what the tables were then."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stoker_gcs.app import GcsApp, build_app
from stoker_gcs.ephemeral.memory import MemoryEphemeralStore
from stoker_gcs.history import snapshots
from stoker_gcs.history.moments import ROUNDED_S, Moment
from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.state import schema
from stoker_gcs.store.opening import open_store
from stoker_wire.errors import BadRequestError, CompactedError, StokerError
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.messages.cluster import Demand, Device, Heartbeat, RegisterNode, WorkerExit
from stoker_wire.messages.events import EventKind, PastState
from stoker_wire.messages.groups import Bundle, CreatePlacementGroup
from stoker_wire.messages.objects import CreateDetachedObject
from stoker_wire.messages.queues import ChangeQueue, CreateQueue
from stoker_wire.messages.schedules import CreateSchedule
from stoker_wire.messages.work import (
    ActorState,
    AttachDriver,
    CreateActor,
    FinishJob,
    JobArray,
    JobState,
    KillActor,
    ReportActor,
    SubmitJob,
)
from stoker_wire.process.background import Background
from tests.contract.gcs_support import PATIENT, a_node, attach, gcs, migrate, register

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stoker_gcs.store.changes import Change
    from stoker_gcs.store.protocol import Store
    from stoker_wire.http.client.client import Client

STEPS = 250
STORES = ("memory", "sqlite", "postgres")
SOURCES = {
    "nodes": schema.NODES,
    "jobs": schema.JOBS,
    "actors": schema.ACTORS,
    "placement_groups": schema.PLACEMENT_GROUPS,
    "detached_objects": schema.DETACHED_OBJECTS,
    "queues": schema.QUEUES,
    "schedules": schema.SCHEDULES,
}
ALL_AT_ONCE = msgspec.structs.replace(
    PATIENT, keep_jobs_s=1e-6, keep_actors_s=1e-6, keep_placement_groups_s=1e-6, keep_nodes_s=1e-6
)
Tables = dict[str, dict[str, bytes]]


@pytest.fixture(params=STORES)
async def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return "memory://"
    made: str = request.getfixturevalue(f"{request.param}_url")
    await migrate(made)
    return made


async def tables_of(store: Store) -> Tables:
    """The records of all tables, as they are."""
    found: Tables = {}
    for name, table in SOURCES.items():
        (key,) = table.key
        rows = await store.select(table, limit=10_000)
        found[name] = {row[key]: bytes(row["record"]) for row in rows}
    return found


class Recorded:
    """What the tables were after each commit, by the number of its last event."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._commit = store.commit
        self.by_seq: dict[int, Tables] = {}

    async def commit(self, changes: list[Change]) -> Any:
        result = await self._commit(changes)
        _, last = await self._store.bounds()
        self.by_seq[last] = await tables_of(self._store)
        return result


@asynccontextmanager
async def app_on(url: str) -> AsyncIterator[tuple[GcsApp, Recorded]]:
    """The parts of a gcs without its loops, over a store that is watched."""
    store = open_store(url)
    await store.start()
    recorded = Recorded(store)
    store.commit = recorded.commit  # type: ignore[method-assign]
    try:
        async with Background("work") as work, Background("writers") as writers:
            app = build_app(store, MemoryEphemeralStore(), ALL_AT_ONCE, TokenSigner("token"), work)
            writers.spawn(app.state.writer.changes.run(), name="changes")
            await app.load()
            work.spawn(app.follow_log(), name="follow")
            yield app, recorded
    finally:
        await store.stop()


async def act(app: GcsApp, rng: random.Random) -> None:
    """Do one thing that somebody might ask for; refusals are part of it."""
    node, actor, group, queue, schedule = (
        f"{prefix}{rng.randrange(3)}" for prefix in ("n_", "a_", "pg_", "q", "s")
    )
    job = f"job_{rng.randrange(6)}"
    demand = Demand(job_id=job, resources={})
    restart = rng.random() < 0.5
    ended = rng.choice([JobState.SUCCEEDED, JobState.FAILED])
    exit_ = WorkerExit(worker_id=f"w_{rng.randrange(9)}", node_id=node, actor_id=actor, signal=9)
    devices = (Device(index=0, uuid="u", name="gpu", quarantine=rng.choice(["", "hot"])),)
    work = SubmitJob(entrypoint="x")
    match rng.randrange(21):
        case 0:
            await app.nodes.register(_registration(node))
        case 1:
            beat = Heartbeat(incarnation=rng.randrange(1, 4), devices=devices)
            await app.nodes.heartbeat(node, beat)
        case 2:
            await app.nodes.leave(node, None)
        case 3 | 4:
            retries = rng.randrange(2)
            body = SubmitJob(entrypoint="x", job_id=job, retries=retries)
            await app.jobs.submit(body, key=None)
        case 5:
            array = JobArray(indices=(1, 2))
            body = SubmitJob(entrypoint="x", job_id=f"job_array{rng.randrange(2)}", array=array)
            await app.jobs.submit(body, key=None)
        case 6:
            await app.jobs.attach(AttachDriver(job_id=job, pid=rng.randrange(9)), key=None)
        case 7:
            await app.jobs.finish(job, FinishJob(state=ended))
        case 8 | 9:
            await app.actors.create(
                CreateActor(
                    actor_id=actor,
                    demand=demand,
                    class_name="C",
                    payload=b"",
                    name=rng.choice(["", "same"]),
                    max_restarts=rng.randrange(-1, 3),
                )
            )
        case 10:
            found = await app.state.get(ACTORS, actor)
            state = rng.choice([ActorState.ALIVE, ActorState.DEAD])
            if found.lease_id or state is ActorState.DEAD:
                report = ReportActor(state=state, incarnation=rng.randrange(2))
                await app.actors.report(actor, report)
        case 11:
            await app.actors.kill(actor, KillActor(no_restart=not restart))
        case 12:
            await app.worker_exits.record((exit_,))
        case 13:
            bundles = (Bundle(resources={"CPU": 1.0}),)
            asked = CreatePlacementGroup(group_id=group, job_id=job, bundles=bundles)
            await app.groups.create(asked)
        case 14:
            await app.groups.remove(group, "removed")
        case 15:
            await rng.choice(
                [
                    lambda: app.queues.create(CreateQueue(name=queue)),
                    lambda: app.queues.change(queue, ChangeQueue(weight=rng.random() + 0.1)),
                    lambda: app.queues.remove(queue),
                ]
            )()
        case 16:
            create = CreateSchedule(name=schedule, cron="* * * * *", job=work)
            await rng.choice(
                [
                    lambda: app.schedules.create(create),
                    lambda: app.schedules.pause(schedule, restart),
                    lambda: app.schedules.delete(schedule),
                ]
            )()
        case 17:
            await app.jobs.delete(rng.choice([job, f"job_array{rng.randrange(2)}"]))
        case 18 | 19:
            thing = f"o_detached_{rng.randrange(3)}"
            value = rng.choice([None, b"v"])
            body = CreateDetachedObject(object_id=thing, nbytes=1, name="same", value=value)
            await rng.choice(
                [
                    lambda: app.objects.create(body),
                    lambda: app.objects.placed(thing, {node}),
                    lambda: app.objects.lost(thing, "all are dead"),
                    lambda: app.objects.free(thing),
                ]
            )()
        case _:
            if rng.random() < 0.3:
                await app.retention.enforce()


async def one_of_each(app: GcsApp) -> None:
    """Add something to each table, and have retention remove an actor and a group."""
    await app.nodes.register(_registration("n_0"))
    await app.queues.create(CreateQueue(name="q0"))
    job = SubmitJob(entrypoint="x", job_id="job_0")
    await app.jobs.submit(job, key=None)
    schedule = CreateSchedule(name="s0", cron="* * * * *", job=SubmitJob(entrypoint="x"))
    await app.schedules.create(schedule)
    await app.objects.create(CreateDetachedObject(object_id="o_detached_0", nbytes=1, value=b"v"))
    for number in (0, 1):
        actor = CreateActor(
            actor_id=f"a_{number}",
            demand=Demand(job_id="job_0", resources={}),
            class_name="C",
            payload=b"",
        )
        await app.actors.create(actor)
        bundles = (Bundle(resources={"CPU": 1.0}),)
        group = CreatePlacementGroup(group_id=f"pg_{number}", job_id="job_0", bundles=bundles)
        await app.groups.create(group)
    await app.actors.kill("a_0", KillActor())
    await app.groups.remove("pg_0", "removed")
    await app.retention.enforce()


def _registration(node_id: str) -> RegisterNode:
    return msgspec.structs.replace(a_node(node_id), url=f"http://{node_id[2:]}.invalid:9")


async def act_often(app: GcsApp, rng: random.Random, steps: int) -> None:
    for _ in range(steps):
        try:
            await act(app, rng)
        except StokerError:
            continue


async def rebuilt(app: GcsApp, seq: int) -> Tables:
    compacted, last = await app.state.store.bounds()
    heads = [one for one in await app.snapshots.heads() if one.seq >= compacted]
    state = await app.time_machine.rebuild(Moment(seq=seq), heads, compacted=compacted, last=last)
    assert state.seq <= seq
    return {name: dict(records) for name, records in state.tables.items()}


async def test_what_is_rebuilt_of_a_random_history_is_what_the_tables_were(
    url: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "READ", 2)
    monkeypatch.setattr(snapshots, "PART_NBYTES", 2000)
    rng = random.Random(seed)
    async with app_on(url) as (app, recorded):
        await one_of_each(app)
        await act_often(app, rng, STEPS // 2)
        # The tables change while a snapshot reads them.
        async with asyncio.TaskGroup() as group:
            acting = group.create_task(act_often(app, rng, STEPS // 4))
            base = (await app.snapshots.take()).seq
            while not acting.done():
                await app.snapshots.take()
        await act_often(app, rng, STEPS // 4)
        by_seq = dict(recorded.by_seq)
        _, last = await app.state.store.bounds()
        assert await rebuilt(app, last) == await tables_of(app.state.store)
        wrong = [seq for seq, tables in by_seq.items() if await rebuilt(app, seq) != tables]
        assert not wrong, wrong
        assert all(any(tables[name] for tables in by_seq.values()) for name in SOURCES)
        kinds = {event.kind for event in await app.state.store.events(0, 10_000)}
        assert EventKind.RECORDS_REMOVED in kinds
        # Without the first events those from the snapshot on are left, and no others.
        await app.state.log.compact(last - base)
        await app.snapshots.keep_up()
        for seq, tables in by_seq.items():
            if seq >= base:
                assert await rebuilt(app, seq) == tables
            else:
                with pytest.raises(CompactedError, match=f"at={base}"):
                    await rebuilt(app, seq)


async def state_at(client: Client, **query: object) -> PastState:
    return await client.call("GET", "/v1/state", reply=PastState, query=query)


async def test_the_route_gives_records_and_counts_of_a_moment(url: str) -> None:
    async with gcs(url) as (running, client):
        await register(client, "n_1")
        job = await attach(client)
        then = running.app.state.log.last
        finished = FinishJob(state=JobState.SUCCEEDED)
        await client.call("POST", f"/v1/jobs/{job.job_id}/finish", finished)
        await register(client, "n_2")
        now, before = await state_at(client), await state_at(client, at=str(then))
        assert now.counts["nodes"] == {"ALIVE": 2}
        assert now.counts["jobs"] == {"SUCCEEDED": 1}
        assert (before.seq, before.counts["nodes"]) == (then, {"ALIVE": 1})
        assert [(one.job_id, one.state) for one in before.jobs] == [(job.job_id, JobState.RUNNING)]
        assert [one.node_id for one in before.nodes] == ["n_1"]
        at_that_time = await state_at(client, at=repr(before.at_s))
        assert (at_that_time.counts, at_that_time.seq) == (before.counts, then)
        assert not (await state_at(client, at="1970-01-02T00:00:00Z")).nodes
        empty = await state_at(client, at="0")
        assert (empty.seq, empty.nodes, empty.jobs) == (0, (), ())


async def test_pages_of_one_kind_hold_each_record_once(stored: Client) -> None:
    for number in range(7):
        await register(stored, f"n_{number}")
    seen: list[str] = []
    cursor, at = "", str((await state_at(stored)).seq)
    await register(stored, "n_later")
    while True:
        page = await state_at(stored, kind="nodes", limit=3, cursor=cursor, at=at)
        seen += [one.node_id for one in page.nodes]
        assert page.counts == {"nodes": {"ALIVE": 7}}
        cursor = page.next_cursor
        if not cursor:
            break
    assert seen == [f"n_{number}" for number in range(7)]
    assert (await state_at(stored, limit=3)).more == ("nodes",)
    assert (await state_at(stored, kind="nodes", state="DEAD")).nodes == ()


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("999999", "there is no event 999999 yet"),
        ("99999999999", "is in the future"),
        ("2999-01-01", "is in the future"),
        ("yesterday", "is no moment"),
    ],
)
async def test_what_is_no_moment_that_was_is_refused(client: Client, at: str, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        await state_at(client, at=at)


async def test_beyond_retention_the_error_names_the_oldest_that_is_left(url: str) -> None:
    async with gcs(url) as (running, client):
        for number in range(5):
            await register(client, f"n_{number}")
        head = await running.app.snapshots.take()
        time.sleep(max(0.0, head.at_s + 2 * ROUNDED_S - time.time()))  # noqa: ASYNC251 (2 ms, for the rounding)
        await register(client, "n_late")
        await running.app.state.log.compact(1)
        with pytest.raises(CompactedError) as caught:
            await state_at(client, at=str(head.seq - 1))
        assert caught.value.status == 410
        assert caught.value.extra["oldest_seq"] == head.seq
        text = str(caught.value)
        assert f"at={head.seq}," in text
        named = text.rpartition("at=")[2]
        assert len((await state_at(client, at=named)).nodes) == 5
        oldest = await state_at(client, at=str(head.seq))
        assert (oldest.oldest_seq, oldest.counts["nodes"]) == (head.seq, {"ALIVE": 5})
        with pytest.raises(CompactedError, match=f"at={head.seq},"):
            await state_at(client, at="1000.5")


async def test_snapshots_come_and_go_with_the_events(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "EVERY_S", 3600.0)
    settings = msgspec.structs.replace(PATIENT, snapshot_events=10, keep_events=40)
    async with gcs(url, settings=settings) as (running, client):
        app: GcsApp = running.app
        for number in range(60):
            await register(client, f"n_{number % 3}")
            await app.snapshots.keep_up()
        before = [one.seq for one in await app.snapshots.heads()]
        assert len(before) in (6, 7)
        await app.retention.enforce()
        await app.snapshots.keep_up()
        compacted, last = await app.state.store.bounds()
        after = [one.seq for one in await app.snapshots.heads()]
        assert after == [seq for seq in before if seq >= compacted]
        assert compacted >= last - 40
        assert (await state_at(client, at=str(after[0]))).counts["nodes"] == {"ALIVE": 3}
        parts = await app.state.store.select(schema.SNAPSHOTS, columns=("seq",))
        assert {row["seq"] for row in parts} == set(after)


async def test_a_snapshot_that_was_interrupted_is_none(url: str) -> None:
    async with gcs(url) as (running, client):
        app: GcsApp = running.app
        await register(client)
        real, writer = app.state.writer.apply, app.state.writer
        parts = 0

        async def broken(change: Change) -> Any:
            nonlocal parts
            parts += any(one.table is schema.SNAPSHOTS for one in change.operations)
            if parts == 3:
                raise BadRequestError("the gcs ended here")
            return await real(change)

        writer.apply = broken  # type: ignore[method-assign]
        with pytest.raises(BadRequestError):
            await app.snapshots.take()
        writer.apply = real  # type: ignore[method-assign]
        assert await app.snapshots.heads() == []
        assert (await state_at(client)).counts["nodes"] == {"ALIVE": 1}
        await app.snapshots.take()
        assert len(await app.snapshots.heads()) == 1
        assert (await state_at(client)).counts["nodes"] == {"ALIVE": 1}
