"""What this process knows of an actor, and in which order it learns it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.runtime.actors.connection import ActorConnection, ActorConnector
from stoker_wire.messages.common import Address
from stoker_wire.messages.work import Actor, ActorState
from stoker_wire.process.background import Background


class Channel:
    """A channel with an answer in its socket that nobody has read."""

    closed = False

    def __init__(self, connection: ActorConnection) -> None:
        self.connection = connection

    def receive_now(self) -> None:
        self.connection.sent.clear()


def test_an_answer_that_was_sent_before_the_end_is_not_overtaken_by_it() -> None:
    lost: list[Any] = []

    def spawn(coroutine: Any, **_: Any) -> None:
        lost.append(list(connection.sent))
        coroutine.close()

    connection = ActorConnection("a_1", "Actor", -1)
    connection.channel = Channel(connection)  # type: ignore[assignment]
    connection.incarnation = 0
    connection.sent["t_1"] = object()  # type: ignore[assignment]
    io: Any = SimpleNamespace(background=SimpleNamespace(spawn=spawn))
    calls: Any = SimpleNamespace(get=lambda _: connection)
    connector = ActorConnector(io, None, None, calls)  # type: ignore[arg-type]
    dead = Actor(actor_id="a_1", job_id="j_1", class_name="Actor", state=ActorState.DEAD)
    connector._on_actor_update(dead)
    assert lost == [[]]
    assert connection.channel is None


@pytest.mark.parametrize(
    ("restarts", "oom_restarts", "said"),
    [(4, 3, (True, False)), (5, 3, (False, False)), (6, 5, (False, True)), (6, 4, (False, False))],
)
def test_calls_are_charged_by_what_ended_their_actor_however_often_that_was(
    restarts: int, oom_restarts: int, said: tuple[bool, bool]
) -> None:
    charged: list[tuple[bool, bool]] = []

    def retry_or_fail(*_: Any, may_have_run: bool, preempted: bool, oom: bool) -> None:
        assert may_have_run
        charged.append((preempted, oom))

    connection = ActorConnection("a_1", "Actor", -1)
    connection.incarnation, connection.restarts, connection.oom_restarts = 6, 4, 3
    now = Actor(
        actor_id="a_1",
        job_id="j_1",
        class_name="Actor",
        state=ActorState.ALIVE,
        incarnation=8,
        restarts=restarts,
        oom_restarts=oom_restarts,
        last_alive=7,
    )

    async def look_up(_: ActorConnection) -> Actor:
        return now

    io: Any = SimpleNamespace(running=True, loop=SimpleNamespace(time=lambda: 0.0))
    calls: Any = SimpleNamespace(retry_or_fail=retry_or_fail, send=lambda _: None)
    connector = ActorConnector(io, None, None, calls)  # type: ignore[arg-type]
    connector._look_up = look_up  # type: ignore[assignment]
    asyncio.run(connector._recover(connection))
    assert charged == [said]


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_process_that_keeps_a_new_channel_lives_and_its_calls_go_on(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    monkeypatch.setattr("stoker.runtime.actors.connection._LIVES_S", 0.05)
    monkeypatch.setattr("stoker.runtime.actors.connection._DEATH_NOTICE_S", 3.0 if keeps else 0.6)
    retried: list[str] = []

    class Channels:
        async def channel(self, _: Address) -> Any:
            return SimpleNamespace(closed=not keeps)

    async def look_up(_: ActorConnection) -> Actor:
        return now

    connection = ActorConnection("a_1", "Actor", -1)
    connection.incarnation = 1
    now = Actor(
        actor_id="a_1",
        job_id="j_1",
        class_name="Actor",
        state=ActorState.ALIVE,
        incarnation=1,
        address=Address("w_1", "n_1", "h", "", "http://node:1"),
    )
    calls: Any = SimpleNamespace(
        retry_or_fail=lambda _, __, how, *___, **____: retried.append(how), send=lambda _: None
    )
    async with Background("test") as background:
        loop = asyncio.get_running_loop()
        io: Any = SimpleNamespace(running=True, loop=loop, background=background)
        connector = ActorConnector(io, Channels(), None, calls)  # type: ignore[arg-type]
        connector._look_up = look_up  # type: ignore[assignment]
        began_s = loop.time()
        await connector._recover(connection)
        took_s = loop.time() - began_s
    assert retried == ["lost the connection to this process"]
    assert took_s < 3.0 if keeps else took_s >= 0.6


def test_a_gcs_that_does_not_answer_is_named_before_the_request_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stoker.runtime.actors.connection._LATE_S", 0.01)
    connection = ActorConnection("a_1", "Actor", -1)
    connection.status_text = "it is PENDING"
    asked = asyncio.Event()

    class Gcs:
        async def call(self, *_: Any, **__: Any) -> Actor:
            asked.set()
            await asyncio.sleep(3600)
            raise AssertionError

    async def look_up() -> str:
        io: Any = SimpleNamespace(loop=asyncio.get_running_loop())
        connector = ActorConnector(io, None, Gcs(), None)  # type: ignore[arg-type]
        fetching = asyncio.create_task(connector._fetch_record(connection, until=0.0))
        async with asyncio.timeout(20):
            await asked.wait()
            while connection.status_text == "it is PENDING":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        fetching.cancel()
        return connection.status_text

    assert asyncio.run(look_up()).startswith("the gcs does not answer")
