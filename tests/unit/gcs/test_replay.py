"""``replay(events) == state``: the log alone gives back every node, job and actor."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from stoker_gcs.app import GcsApp, build_app
from stoker_gcs.ephemeral.memory import MemoryEphemeralStore
from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.registry.nodes.rules import NODES
from stoker_gcs.store.memory import MemoryStore
from stoker_wire.errors import StokerError
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.messages.cluster import Demand, Heartbeat, NodeState, RegisterNode, WorkerExit
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.work import (
    ActorState,
    AttachDriver,
    CreateActor,
    FinishJob,
    JobState,
    KillActor,
    ReportActor,
    SubmitJob,
)
from stoker_wire.process.background import Background
from stoker_wire.settings import Settings

STEPS = 300


async def act(app: GcsApp, rng: random.Random) -> None:
    """Do one thing that somebody might ask for; refusals are part of it."""
    node, job, actor = (f"{prefix}_{rng.randrange(3)}" for prefix in ("n", "job", "a"))
    body: Any
    match rng.randrange(11):
        case 0:
            body = RegisterNode(
                node_id=node, url="u", unix="", hostname="h", host_id="h", pid=1, resources={}
            )
            await app.nodes.register(body)
        case 1:
            beat = Heartbeat(incarnation=rng.randrange(1, 4))
            await app.nodes.heartbeat(node, beat)
        case 2:
            await app.nodes.leave(node, None)
        case 3:
            await app.jobs.submit(SubmitJob(entrypoint="x", job_id=job), key=None)
        case 4:
            await app.jobs.attach(AttachDriver(job_id=job, pid=rng.randrange(9)), key=None)
        case 5 if rng.random() < 0.3:
            state = rng.choice([JobState.SUCCEEDED, JobState.FAILED])
            await app.jobs.finish(job, FinishJob(state=state))
        case 6:
            body = CreateActor(
                actor_id=actor,
                demand=Demand(job_id=job, resources={}),
                class_name="C",
                payload=b"",
                name=rng.choice(["", "same"]),
                max_restarts=rng.randrange(-1, 3),
            )
            await app.actors.create(body)
        case 7:
            found = await app.state.get(ACTORS, actor)
            state = rng.choice([ActorState.ALIVE, ActorState.DEAD])
            if found.lease_id or state is ActorState.DEAD:
                body = ReportActor(state=state, incarnation=rng.randrange(2))
                await app.actors.report(actor, body)
        case 8:
            await app.actors.kill(actor, KillActor(no_restart=rng.random() < 0.5))
        case 9:
            await app.actors.worker_exited(
                WorkerExit(worker_id="w", node_id=node, actor_id=actor, signal=9)
            )
        case _:
            cause = ErrorInfo(code="actor_died", message="lost")
            await app.actors.lose_worker(actor, cause, lease_id="", restart=True, release=False)


async def test_replaying_the_log_gives_the_state(seed: int) -> None:
    rng = random.Random(seed)
    store = MemoryStore()
    async with Background("work") as work, Background("writers") as writers:
        app = build_app(store, MemoryEphemeralStore(), Settings(), TokenSigner("token"), work)
        writers.spawn(app.state.writer.changes.run(), name="changes")
        await app.load()
        work.spawn(app.follow_log(), name="apply_event")
        for _ in range(STEPS):
            try:
                await act(app, rng)
            except StokerError:
                continue
        replayed: dict[str, dict[str, object]] = {"node": {}, "job": {}, "actor": {}}
        seqs = []
        for event in await store.events(0, 10_000):
            seqs.append(event.seq)
            entity = event.kind.partition(".")[0]
            if entity in replayed:
                replayed[entity][event.subject] = event.payload
        assert seqs == list(range(1, len(seqs) + 1))
        for records, entity in ((NODES, "node"), (JOBS, "job"), (ACTORS, "actor")):
            kept = {
                row[records.table.key[0]]: msgspec.msgpack.decode(row["record"])
                for row in await store.select(records.table)
            }
            assert kept == replayed[entity]
        views = {n.node_id: n.state for n in await app.state.all(NODES)}
        while app.applied_seq < app.state.log.last:
            await app.state.log.wait_beyond(app.state.log.last - 1)
            await _turn()
        assert {node_id: node.state for node_id, node in app.nodes.view.items()} == views
        assert set(views.values()) <= set(NodeState)


async def _turn() -> None:
    import asyncio

    await asyncio.sleep(0)
