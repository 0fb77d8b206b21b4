"""What this process knows of an actor, and in which order it learns it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from stoker.runtime.actors.connection import ActorConnection, ActorConnector
from stoker_wire.messages.work import Actor, ActorState


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
