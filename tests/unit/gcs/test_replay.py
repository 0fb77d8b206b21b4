"""``replay(events) == state``: the log alone gives back every node, job and actor."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from stoker_gcs.app import Parts, assemble
from stoker_gcs.ephemeral.memory import MemoryHot
from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.registry.nodes.rules import NODES
from stoker_gcs.store.memory import MemoryStore
from stoker_wire.errors import StokerError
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


async def act(parts: Parts, rng: random.Random) -> None:
    """Do one thing that somebody might ask for; refusals are part of it."""
    node, job, actor = (f"{prefix}_{rng.randrange(3)}" for prefix in ("n", "job", "a"))
    body: Any
    match rng.randrange(11):
        case 0:
            body = RegisterNode(
                node_id=node, url="u", unix="", hostname="h", host_id="h", pid=1, resources={}
            )
            await parts.nodes.register(body)
        case 1:
            beat = Heartbeat(incarnation=rng.randrange(1, 4))
            await parts.nodes.heartbeat(node, beat)
        case 2:
            await parts.nodes.leave(node, None)
        case 3:
            await parts.ledger.submit(SubmitJob(entrypoint="x", job_id=job), key=None)
        case 4:
            await parts.ledger.attach(AttachDriver(job_id=job, pid=rng.randrange(9)), key=None)
        case 5 if rng.random() < 0.3:
            state = rng.choice([JobState.SUCCEEDED, JobState.FAILED])
            await parts.ledger.finish(job, FinishJob(state=state))
        case 6:
            body = CreateActor(
                actor_id=actor,
                demand=Demand(job_id=job, resources={}),
                class_name="C",
                payload=b"",
                name=rng.choice(["", "same"]),
                max_restarts=rng.randrange(-1, 3),
            )
            await parts.actors.create(body)
        case 7:
            found = await parts.truth.get(ACTORS, actor)
            state = rng.choice([ActorState.ALIVE, ActorState.DEAD])
            if found.lease_id or state is ActorState.DEAD:
                body = ReportActor(state=state, incarnation=rng.randrange(2))
                await parts.actors.report(actor, body)
        case 8:
            await parts.actors.kill(actor, KillActor(no_restart=rng.random() < 0.5))
        case 9:
            await parts.actors.worker_exited(
                WorkerExit(worker_id="w", node_id=node, actor_id=actor, signal=9)
            )
        case _:
            cause = ErrorInfo(code="actor_died", message="lost")
            await parts.actors.lose(actor, cause, lease_id="", restart=True, release=False)


async def test_replaying_the_log_gives_the_state(seed: int) -> None:
    rng = random.Random(seed)
    store = MemoryStore()
    async with Background("work") as work, Background("lanes") as lanes:
        parts = assemble(store, MemoryHot(), Settings(), "token", work)
        lanes.spawn(parts.truth.journal.changes.run(), name="changes")
        await parts.load()
        work.spawn(parts.observe(), name="observe")
        for _ in range(STEPS):
            try:
                await act(parts, rng)
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
        for shelf, entity in ((NODES, "node"), (JOBS, "job"), (ACTORS, "actor")):
            kept = {
                row[shelf.table.key[0]]: msgspec.msgpack.decode(row["record"])
                for row in await store.select(shelf.table)
            }
            assert kept == replayed[entity]
        views = {n.node_id: n.state for n in await parts.truth.all(NODES)}
        while parts.observed < parts.truth.log.last:
            await parts.truth.log.wait_beyond(parts.truth.log.last - 1)
            await _turn()
        assert {node_id: node.state for node_id, node in parts.nodes.view.items()} == views
        assert set(views.values()) <= set(NodeState)


async def _turn() -> None:
    import asyncio

    await asyncio.sleep(0)
