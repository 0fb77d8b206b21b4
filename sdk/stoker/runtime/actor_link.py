"""One actor as this process calls it: the calls that wait, those that were sent, and the line."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

    from stoker.runtime.calls import PendingTask
    from stoker_wire.channel import Channel
    from stoker_wire.messages.data import Failed


class ActorLink:
    """The calls of this process to one actor."""

    def __init__(self, actor_id: str, name: str, max_pending: int) -> None:
        self.actor_id = actor_id
        self.name = name
        self.max_pending = max_pending
        self.waiting: deque[PendingTask] = deque()
        self.sent: dict[str, PendingTask] = {}
        self.open: set[str] = set()
        """The ids of all unsettled calls, from the moment of ``.remote()`` on."""
        self.line: Channel | None = None
        self.incarnation = -1
        self.dead: Failed | None = None
        self.connecting = False
        self.may_come = False
        """Whether its creator, in this job, may not have created it yet."""
        self.note = "it is being created"
        self.created: asyncio.Task[Any] | None = None
        """The request that creates it, while this process makes it."""
        self.drained: asyncio.Event | None = None
        self.held: PendingTask | None = None
        """Keeps the refs among the constructor's arguments alive, for restarts."""

    def die(self, failed: Failed) -> None:
        """It will never run again: remember why, and let its constructor's arguments go."""
        self.dead, self.held = failed, None

    def settled(self, task_id: str) -> None:
        """One of the calls is settled: tell whoever waits for the last."""
        self.open.discard(task_id)
        if self.drained is not None:
            self.drained.set()
