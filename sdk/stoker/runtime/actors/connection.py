"""One actor as this process calls it: the calls that wait, those that were sent, and the line."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from stoker.exceptions import ActorDiedError, NotFoundError, StokerError
from stoker.runtime.actors.call_order import CallOrder
from stoker.runtime.serialization.exceptions import failed_with
from stoker_wire.messages.data import Failed
from stoker_wire.messages.work import Actor, ActorState

if TYPE_CHECKING:
    from stoker.runtime.runtime import Runtime
    from stoker.runtime.tasks.task_spec import PendingTask
    from stoker_wire.data.channel import Channel


_LOOK_UP_S = 10.0


class ActorLink:
    """The calls of this process to one actor."""

    def __init__(
        self, actor_id: str, name: str, max_pending: int, unordered: Collection[str] = ()
    ) -> None:
        self.actor_id = actor_id
        self.name = name
        self.max_pending = max_pending
        self.calls: CallOrder[PendingTask] = CallOrder(unordered)
        """Those that are not under way."""
        self.sent: dict[str, PendingTask] = {}
        self.open: set[str] = set()
        """The ids of all unsettled calls, from the moment of ``.remote()`` on."""
        self.line: Channel | None = None
        self.incarnation = -1
        self.dead: Failed | None = None
        self.killed = False
        """Whether this process ended it: what its calls say of that is no news."""
        self.connecting = False
        self.may_come = False
        """Whether its creator, in this job, may not have created it yet."""
        self.note = "it is being created"
        self.owned = False
        """Whether this process created it, so that it lives only as long as this process."""
        self.created: asyncio.Task[Any] | None = None
        """The requests that create it, while this process makes it."""
        self.registered = asyncio.Event()
        """Set once the gcs knows it, or will not, if this process makes it."""
        self.news: Actor | None = None
        """The latest that the gcs said of it."""
        self.told = asyncio.Event()
        """Set when the gcs had something to say about it."""
        self.held: PendingTask | None = None
        """Keeps the refs among the constructor's arguments alive, for restarts."""

    @property
    def is_idle(self) -> bool:
        """Whether this process owes it nothing: no call, and no argument for a restart."""
        creating = self.created is not None and not self.created.done()
        return not (self.open or self.connecting or creating or (self.held and not self.dead))

    @property
    def is_over(self) -> bool:
        """Whether the actor is known to be dead for good."""
        return self.dead is not None or (
            self.news is not None and self.news.state is ActorState.DEAD
        )

    @property
    def lost_owner(self) -> str:
        """The process that owns it, if that cannot be reached any more: handles borrow from it."""
        for call in self.calls:
            for ref in call.spec.refs:
                if ref._entry.owner is not None and isinstance(ref._entry.place, Failed):
                    return ref._entry.owner.peer_id
        return ""

    def die(self, failed: Failed) -> None:
        """It will never run again: remember why, and let its constructor's arguments go."""
        self.dead, self.held = failed, None

    def hear(self, actor: Actor) -> None:
        """The gcs said what it is now, or what it was a moment ago."""
        if self.news is None or _progress(actor) >= _progress(self.news):
            self.news = actor
            self.told.set()

    async def until_told(self, timeout_s: float) -> bool:
        """Wait until the gcs says something about it; False if the time is over first."""
        try:
            await asyncio.wait_for(self.told.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def given_up(self, actor: Actor) -> bool:
        """Whether the life that our line leads to is over, as the gcs sees it."""
        if self.line is None:
            return False
        ended = actor.state is ActorState.DEAD and actor.incarnation == self.incarnation
        return ended or actor.incarnation > self.incarnation

    def settled(self, task_id: str) -> None:
        """One of the calls is settled."""
        self.open.discard(task_id)


def _progress(actor: Actor) -> tuple[int, int, bool]:
    """Orders what is said of one actor by when it was true."""
    stage = {ActorState.ALIVE: 1, ActorState.DEAD: 2}.get(actor.state, 0)
    return actor.incarnation, stage, actor.address is not None


async def look_up(
    runtime: Runtime, link: ActorLink, gate: asyncio.Semaphore, *, until: float
) -> Actor | None:
    """Ask the gcs where the actor is.

    None if the gcs cannot say now, or if it does not know the actor: that is the actor's end, but
    not before ``until`` on the loop's clock.
    """
    try:
        async with gate:
            return await runtime.gcs.call(
                "GET", f"/v1/actors/{link.actor_id}", reply=Actor, timeout_s=_LOOK_UP_S
            )
    except NotFoundError as error:
        if link.calls and (owner := link.lost_owner):
            text = f"actor {link.name} was never created\nits owner {owner} died before it had created it"
            link.die(failed_with(ActorDiedError(text)))
            return None
        link.note = "its creator has not created it yet"
        if link.incarnation < 0 and runtime.loop.time() < until:
            return None
        link.die(failed_with(ActorDiedError(f"actor {link.name} is not known\n{error.message}")))
    except StokerError as error:
        if error.retryable or error.status >= 500:
            link.note = f"the gcs does not answer: {error.one_line}"
            return None
        link.die(failed_with(ActorDiedError(f"actor {link.name} is not known\n{error.message}")))
    return None
