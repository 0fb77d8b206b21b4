"""The lines to actors: opened where the gcs says that they are, given up when it says so.

:class:`stoker.runtime.actors.calls.ActorCalls` owns the calls; this module decides when there is a line
to send them on, and what becomes of those that were under way when a line closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from stoker.exceptions import StokerError
from stoker.runtime.actors.connection import look_up
from stoker.runtime.actors.watch import ActorNews
from stoker_wire.messages.work import Actor, ActorState

if TYPE_CHECKING:
    from stoker.runtime.actors.calls import ActorCalls
    from stoker.runtime.actors.connection import ActorLink
    from stoker.runtime.runtime import Runtime
    from stoker_wire.data.channel import Channel

_REQUESTS = 12
"""How many actors may be created or looked up at once: each takes a connection to the gcs."""
_UNTOLD_S = 5.0
"""How long to rely on the news alone."""
_SETTLE_S = 15.0
"""How long the gcs may take to notice that an actor's process ended."""
_CREATED_S = 60.0
"""A handle may travel faster than its actor is created, whose arguments may come late."""
_POLL_S = 0.03


class ActorLines:
    """Opens and gives up the lines of a process's actor links (loop thread)."""

    def __init__(self, runtime: Runtime, calls: ActorCalls) -> None:
        self._runtime = runtime
        self._calls = calls
        self.gate = asyncio.Semaphore(_REQUESTS)
        self.news = ActorNews(runtime, self._changed, self._check_all)

    def open(self, link: ActorLink) -> None:
        """Have the link's line opened, unless that is under way."""
        if not link.connecting:
            link.connecting = True
            self._runtime.background.spawn(self._connect(link), name="actor")

    async def _connect(self, link: ActorLink) -> None:
        """Find out where the actor is, and open the line to it."""
        try:
            if link.created is not None:
                await link.registered.wait()
                if link.dead is not None:
                    self._calls.fail_all(link, link.dead)
            await self.news.begin()
            until = self._runtime.loop.time() + (_CREATED_S if link.may_come else 0.0)
            while link.calls and link.dead is None and self._runtime.running:
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
            if link.line is not None and not link.line.closed:
                self._calls.send(link)

    async def _reach(self, link: ActorLink, actor: Actor) -> bool:
        """Take the line to an actor that lives.

        To one whose constructor runs it is only opened: then it is there in time.
        """
        if actor.address is None or actor.incarnation < link.incarnation:
            return False
        line = await self._runtime.peers.line(actor.address)
        if actor.state is not ActorState.ALIVE:
            return False
        link.line, link.incarnation = line, actor.incarnation
        link.note = "it is ALIVE"
        return True

    async def line_to(self, link: ActorLink) -> Channel | None:
        """Return a line to an actor that perhaps only others have called; None if it is not up."""
        if link.line is not None and not link.line.closed:
            return link.line
        if link.dead is not None or (link.created is not None and not link.registered.is_set()):
            return None
        actor = await self._lookup(link)
        if actor is None or actor.state is not ActorState.ALIVE or actor.address is None:
            return None
        return await self._runtime.peers.line(actor.address)

    async def _lookup(self, link: ActorLink, *, until: float = 0.0) -> Actor | None:
        actor = await look_up(self._runtime, link, self.gate, until=until)
        if actor is None and link.dead is not None:
            self._calls.fail_all(link, link.dead)
        return actor

    # -- losing them -----------------------------------------------------------------------------

    def lost(self, links: Iterable[ActorLink], line: Channel) -> None:
        """A line closed: the actors behind it died, restart, or moved."""
        for link in links:
            if link.line is line:
                self._lose(link)

    def _lose(self, link: ActorLink) -> None:
        link.line = None
        link.note = "the connection to it was lost"
        if link.dead is None:
            link.connecting = True  # calls made meanwhile go behind those that are tried again
            self._runtime.background.spawn(self._after_loss(link), name="actor-lost")

    def _changed(self, actor: Actor) -> None:
        """The gcs said something of an actor; the line to one given up may look well for long."""
        link = self._calls.known(actor.actor_id)
        if link is not None:
            link.hear(actor)
            if link.given_up(actor):
                self._lose(link)

    def _check_all(self) -> None:
        for link in self._calls.all_links():
            if link.line is not None:
                self._runtime.background.spawn(self._check(link), name="actor-check")

    async def _check(self, link: ActorLink) -> None:
        actor = await self._lookup(link)
        if actor is not None:
            self._changed(actor)

    async def _after_loss(self, link: ActorLink) -> None:
        """Ask the gcs what became of the actor; retry or fail the calls that it had."""
        lost = list(link.sent.values())
        link.sent.clear()
        seen = link.incarnation
        deadline = self._runtime.loop.time() + _SETTLE_S
        actor: Actor | None = None
        while self._runtime.running and self._runtime.loop.time() < deadline:
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
