"""Fate sharing, decided from what SQL keeps: also for what ended while no gcs looked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from stoker_gcs.app import build_app
from stoker_gcs.ephemeral.memory import MemoryEphemeralStore
from stoker_gcs.registry.actors import rules
from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.registry.ownership import Ownership
from stoker_gcs.state.records import Transition
from stoker_gcs.store.memory import MemoryStore
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.messages.cluster import Demand, RegisterNode, WorkerExit
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.work import (
    Actor,
    ActorState,
    CreateActor,
    KillActor,
    Owner,
    SubmitJob,
    SupplyArguments,
)
from stoker_wire.process.background import Background
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stoker_gcs.app import GcsApp

OWNER = Owner(peer_id="w_1", node_id="n_1", node_incarnation=1, actor_id="a_1")
TASK = Owner(peer_id="w_1", node_id="n_1", node_incarnation=1)


@pytest.fixture
async def app() -> AsyncIterator[GcsApp]:
    async with Background("work") as work, Background("writers") as writers:
        made = build_app(
            MemoryStore(), MemoryEphemeralStore(), Settings(), TokenSigner("token"), work
        )
        writers.spawn(made.state.writer.changes.run(), name="changes")
        await made.load()
        await made.jobs.submit(SubmitJob(entrypoint="x", job_id="job_1"), key=None)
        await register(made)
        await create(made, "a_1", max_restarts=1)
        yield made


async def register(app: GcsApp) -> None:
    body = RegisterNode(
        node_id="n_1",
        url="http://host:7620",
        unix="",
        hostname="h",
        host_id="h",
        pid=1,
        resources={},
    )
    await app.nodes.register(body)


async def create(app: GcsApp, actor_id: str, **more: object) -> None:
    demand = Demand(job_id="job_1", resources={})
    body = CreateActor(actor_id=actor_id, demand=demand, class_name="C", payload=b"", **more)  # type: ignore[arg-type]
    await app.actors.create(body)


ENDS = {
    "killed": "its owner, actor C a_1, died: killed by stoker.kill()",
    "restarted": "its owner, actor C a_1, died: killed by stoker.kill()",
    "exited": "its owner, worker w_1, died: its worker w_1 ended: signal 9",
    "node again": "its owner, worker w_1, died: node n_1 started again",
    "node gone": "its owner, worker w_1, died: node n_1 died",
}


async def end(app: GcsApp, how: str) -> None:
    match how:
        case "killed" | "restarted":
            await app.actors.kill("a_1", KillActor(no_restart=how == "killed"))
        case "exited":
            gone = WorkerExit(worker_id="w_1", node_id="n_1", job_id="job_1", signal=9)
            await app.worker_exits.record((gone,))
        case "node again":
            await register(app)
        case "node gone":
            await app.nodes.leave("n_1", None)


@pytest.mark.parametrize("how", sorted(ENDS))
async def test_what_ended_decides_whenever_it_is_looked_at(app: GcsApp, how: str) -> None:
    owner = OWNER if how in ("killed", "restarted") else TASK
    await create(app, "a_2", owner=owner)
    await create(app, "a_3", owner=owner, detached=True)
    await create(app, "a_4", owner=Owner(peer_id="p_1"))
    await create(app, "a_5", owner=Owner(peer_id="w_2", node_id="n_9", actor_id="a_9"))
    ownership, ids = Ownership(app.state, app.actors, app.groups), ["a_2", "a_3", "a_4", "a_5"]
    assert [await ownership.end_if_orphaned(i) for i in ids] == [False] * 4
    await end(app, how)
    assert [await ownership.end_if_orphaned(i) for i in ids] == [True, False, False, False]
    found = await app.state.get(ACTORS, "a_2")
    assert found.state is ActorState.DEAD
    assert found.death_cause is not None
    assert found.death_cause.message == ENDS[how]
    assert [await ownership.end_if_orphaned(i) for i in ids] == [False] * 4


async def placed(app: GcsApp, actor_id: str) -> None:
    """It lives on a worker."""

    def rule(actor: Actor) -> Transition[Actor]:
        alive = replace(actor, state=ActorState.ALIVE, lease_id="l_1", node_id="n_2")
        return Transition(alive, EventKind.ACTOR_STARTED)

    await app.state.change(ACTORS, actor_id, rule)


@pytest.mark.parametrize("lives", [False, True], ids=["waits", "lives"])
@pytest.mark.parametrize("how", sorted(ENDS))
async def test_an_end_that_no_gcs_saw_is_found_when_one_starts(
    app: GcsApp, how: str, lives: bool
) -> None:
    owner = OWNER if how in ("killed", "restarted") else TASK
    await create(app, "a_2", owner=owner)
    if lives:
        await placed(app, "a_2")
    await create(app, "a_3", owner=Owner(peer_id="w_3", node_id="n_1", actor_id="a_2"))
    await end(app, how)
    async with Background("reconciler") as work:
        work.spawn(app.reconciler.run(), name="run")
        for actor_id in ("a_2", "a_3"):
            found = await app.state.wait_for(
                ACTORS, actor_id, lambda actor: actor.state is ActorState.DEAD, 20.0
            )
            assert found.state is ActorState.DEAD
            assert found.death_cause is not None
            assert found.death_cause.message.startswith("its owner, ")


async def test_an_actor_waits_for_its_arguments_before_it_is_placed(app: GcsApp) -> None:
    await create(app, "a_2", awaits_arguments=True)
    assert not rules.waits(await app.state.get(ACTORS, "a_2"))
    for payload in (b"arguments", b"later ones"):
        found = await app.actors.supply("a_2", SupplyArguments(payload=payload))
        assert rules.waits(found)
        spec = await app.actors.spec("a_2")
        assert (spec.payload, spec.awaits_arguments) == (b"arguments", False)
    await create(app, "a_3", awaits_arguments=True, max_restarts=1)
    await app.actors.kill("a_3", KillActor(no_restart=False))
    found = await app.state.get(ACTORS, "a_3")
    assert (found.state, found.restarts, rules.waits(found)) == ("RESTARTING", 1, False)
    await app.actors.kill("a_3", KillActor(no_restart=False))
    found = await app.actors.supply("a_3", SupplyArguments(payload=b"late"))
    assert (found.state, rules.waits(found)) == ("DEAD", False)
