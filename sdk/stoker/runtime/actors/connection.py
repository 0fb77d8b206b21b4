"""The connections of this process to actors: one :class:`ActorConnection` for each that it calls.

A connection is opened where the gcs says that the actor is, and given up when it says so.
:class:`stoker.runtime.actors.calls.ActorCalls` owns the calls; here it is decided when there is a
channel to send them on, and what becomes of those that were under way when a channel closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from stoker.exceptions import ActorDiedError, NotFoundError, StokerError
from stoker.runtime.actors.call_order import CallOrder
from stoker.runtime.actors.watch import ActorWatch
from stoker.runtime.serialization.exceptions import encode_error
from stoker_wire.messages.data import Failed
from stoker_wire.messages.work import Actor, ActorState

if TYPE_CHECKING:
    from stoker.runtime.net.channels import Channels
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.tasks.task_spec import PendingTask
    from stoker_wire.data.channel import Channel
    from stoker_wire.http.client.client import Client

_LOOK_UP_S = 10.0
_REQUESTS = 12
"""How many actors may be created or looked up at once: each takes a connection to the gcs."""
_UNTOLD_S = 5.0
"""How long to rely on the news alone."""
_SETTLE_S = 15.0
"""How long the gcs may take to notice that an actor's process ended."""
_CREATED_S = 60.0
"""A handle may travel faster than its actor is created, whose arguments may come late."""
_POLL_S = 0.03


class ActorConnection:
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
        self.channel: Channel | None = None
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
                if ref._entry.owner is not None and isinstance(ref._entry.location, Failed):
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
        """Whether the life that our channel leads to is over, as the gcs sees it."""
        if self.channel is None:
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


class _Calls(Protocol):
    """The calls that go through the connections."""

    def known(self, actor_id: str) -> ActorConnection | None: ...
    def all_links(self) -> Iterable[ActorConnection]: ...
    def send(self, link: ActorConnection) -> None: ...
    def died(self, link: ActorConnection, actor: Actor) -> None: ...
    def fail(self, task: PendingTask, failed: Failed) -> None: ...
    def fail_all(self, link: ActorConnection, failed: Failed) -> None: ...
    def try_again(
        self, link: ActorConnection, lost: list[PendingTask], how: str, why: str = ""
    ) -> None: ...


class ActorConnector:
    """Opens and gives up the connections of this process to actors (loop thread)."""

    def __init__(self, io: IoThread, channels: Channels, gcs: Client, calls: _Calls) -> None:
        self._io = io
        self._channels = channels
        self._gcs = gcs
        self._calls = calls
        self.gate = asyncio.Semaphore(_REQUESTS)
        self.watch = ActorWatch(io, gcs, self._changed, self._check_all)

    def open(self, link: ActorConnection) -> None:
        """Have the link's channel opened, unless that is under way."""
        if not link.connecting:
            link.connecting = True
            self._io.background.spawn(self._connect(link), name="actor")

    async def _connect(self, link: ActorConnection) -> None:
        """Find out where the actor is, and open the channel to it."""
        try:
            if link.created is not None:
                await link.registered.wait()
                if link.dead is not None:
                    self._calls.fail_all(link, link.dead)
            await self.watch.begin()
            until = self._io.loop.time() + (_CREATED_S if link.may_come else 0.0)
            while link.calls and link.dead is None and self._io.running:
                link.told.clear()
                actor = link.news or await self._lookup(link, until=until)
                if actor is None:
                    await asyncio.sleep(_POLL_S)
                    continue
                if actor.state is ActorState.DEAD:
                    self._calls.died(link, actor)
                    continue
                try:
                    if await self._reach(link, actor):
                        return
                except StokerError as error:
                    link.note = f"its worker cannot be reached: {error.one_line}"
                    link.news = None
                    await asyncio.sleep(_POLL_S)
                    continue
                link.note = actor.pending_reason or f"it is {actor.state.value}"
                if not await link.until_told(_UNTOLD_S):
                    link.news = None
        finally:
            link.connecting = False
            if link.channel is not None and not link.channel.closed:
                self._calls.send(link)

    async def _reach(self, link: ActorConnection, actor: Actor) -> bool:
        """Take the channel to an actor that lives.

        To one whose constructor runs it is only opened: then it is there in time.
        """
        if actor.address is None or actor.incarnation < link.incarnation:
            return False
        channel = await self._channels.channel(actor.address)
        if actor.state is not ActorState.ALIVE:
            return False
        link.channel, link.incarnation = channel, actor.incarnation
        link.note = "it is ALIVE"
        return True

    async def channel_to(self, link: ActorConnection) -> Channel | None:
        """Return a channel to an actor that perhaps only others have called; None if it is not up."""
        if link.channel is not None and not link.channel.closed:
            return link.channel
        if link.dead is not None or (link.created is not None and not link.registered.is_set()):
            return None
        actor = await self._lookup(link)
        if actor is None or actor.state is not ActorState.ALIVE or actor.address is None:
            return None
        return await self._channels.channel(actor.address)

    async def _lookup(self, link: ActorConnection, *, until: float = 0.0) -> Actor | None:
        actor = await self._look_up(link, until=until)
        if actor is None and link.dead is not None:
            self._calls.fail_all(link, link.dead)
        return actor

    async def _look_up(self, link: ActorConnection, *, until: float) -> Actor | None:
        """Ask the gcs where the actor is.

        None if the gcs cannot say now, or if it does not know the actor: that is the actor's end, but
        not before ``until`` on the loop's clock.
        """
        try:
            async with self.gate:
                return await self._gcs.call(
                    "GET", f"/v1/actors/{link.actor_id}", reply=Actor, timeout_s=_LOOK_UP_S
                )
        except NotFoundError as error:
            if link.calls and (owner := link.lost_owner):
                text = f"actor {link.name} was never created\nits owner {owner} died before it had created it"
                link.die(encode_error(ActorDiedError(text)))
                return None
            link.note = "its creator has not created it yet"
            if link.incarnation < 0 and self._io.loop.time() < until:
                return None
            link.die(
                encode_error(ActorDiedError(f"actor {link.name} is not known\n{error.message}"))
            )
        except StokerError as error:
            if error.retryable or error.status >= 500:
                link.note = f"the gcs does not answer: {error.one_line}"
                return None
            link.die(
                encode_error(ActorDiedError(f"actor {link.name} is not known\n{error.message}"))
            )
        return None

    # -- losing them -----------------------------------------------------------------------------

    def lost(self, links: Iterable[ActorConnection], channel: Channel) -> None:
        """A channel closed: the actors behind it died, restart, or moved."""
        for link in links:
            if link.channel is channel:
                self._lose(link)

    def _lose(self, link: ActorConnection) -> None:
        link.channel = None
        link.note = "the connection to it was lost"
        if link.dead is None:
            link.connecting = True  # calls made meanwhile go behind those that are tried again
            self._io.background.spawn(self._after_loss(link), name="actor-lost")

    def _changed(self, actor: Actor) -> None:
        """The gcs said something of an actor; the channel to one given up may look well for long."""
        link = self._calls.known(actor.actor_id)
        if link is not None:
            link.hear(actor)
            if link.given_up(actor):
                self._lose(link)

    def _check_all(self) -> None:
        for link in self._calls.all_links():
            if link.channel is not None:
                self._io.background.spawn(self._check(link), name="actor-check")

    async def _check(self, link: ActorConnection) -> None:
        actor = await self._lookup(link)
        if actor is not None:
            self._changed(actor)

    async def _after_loss(self, link: ActorConnection) -> None:
        """Ask the gcs what became of the actor; retry or fail the calls that it had."""
        lost = list(link.sent.values())
        link.sent.clear()
        seen = link.incarnation
        deadline = self._io.loop.time() + _SETTLE_S
        actor: Actor | None = None
        while self._io.running and self._io.loop.time() < deadline:
            actor = await self._lookup(link)
            if link.dead is not None:
                break
            if actor is not None and (
                actor.state in (ActorState.DEAD, ActorState.RESTARTING) or actor.incarnation > seen
            ):
                break
            await asyncio.sleep(_POLL_S)
        if actor is not None:
            link.hear(actor)
            if actor.state is ActorState.DEAD:
                self._calls.died(link, actor)
        link.connecting = False
        if link.dead is not None:
            for task in lost:
                self._calls.fail(task, link.dead)
            return
        restarts = actor is not None and actor.state is ActorState.RESTARTING
        cause = actor.death_cause if actor is not None else None
        how = "ended"
        if restarts or (actor is not None and actor.incarnation > seen):
            link.incarnation = seen + 1
        else:
            how = "lost the connection to this process"
        why = cause.message if restarts and cause is not None else ""
        self._calls.try_again(link, lost, how, why)
        self._calls.send(link)
