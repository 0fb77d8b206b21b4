"""The network of a world: requests and connections between its processes, late, lost, doubled and cut.

What crosses it are the real messages in the real encoding; routes, deadlines, retries, idempotency and errors
are those of the product (:mod:`tests.sim.world.server`, :mod:`tests.sim.world.wire`). Connections that stay
are :mod:`tests.sim.world.links`. A message is lost with its connection, or in a cut without a sign.
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import TYPE_CHECKING, Any

import aiohttp

from stoker_wire.http.client.liveness import ANSWER_S
from stoker_wire.http.client.refusal import AGAIN_S
from tests.sim.world.links import Link
from tests.sim.world.loop import CURRENT

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from stoker_wire.settings import Settings
    from tests.sim.world.loop import Process, VirtualLoop
    from tests.sim.world.server import Server
    from tests.sim.world.wire import Wire

_LATENCY_S = (0.0002, 0.002)
_CONNECT_S = 5.0
"""A client gives up a connection that is not answered (``sock_connect`` of the product's client)."""
RETRANSMIT_S = 0.3
KEEP_ALIVE_S = 10.0


class Faults:
    """The rates of the network's faults, per message; all zero in calm."""

    def __init__(self) -> None:
        self.loss = self.double = self.late = 0.0

    def stop(self) -> None:
        """Heal the network."""
        self.loss = self.double = self.late = 0.0


class Network:
    """All connections of a world, and what goes wrong on them."""

    def __init__(
        self,
        loop: VirtualLoop,
        random: Random,
        settings: Settings,
        record: Callable[..., None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.loop, self._random, self.settings = loop, random, settings
        self._record, self._fail = record, fail
        self.faults = Faults()
        self.servers: dict[str, Server] = {}
        self.down: set[str] = set()
        """Hosts without power: nobody answers there, not even with a refusal."""
        self.cuts: set[tuple[str, str]] = set()
        """Pairs of hosts between which nothing passes."""
        self.links: list[Link] = []
        self.messages = 0
        self.disturbed = self.held_up = 0
        """How often something was lost, late or doubled, or could not pass because of a cut."""
        self.balanced: dict[str, list[str]] = {}
        """URLs of proxies: those of the replicas behind each."""

    # Facts

    def reaches(self, one: str, two: str) -> bool:
        """Return whether messages pass from one host to the other."""
        if one == two:
            return True
        return one not in self.down and two not in self.down and (one, two) not in self.cuts

    def cut(self, one: str, two: str) -> None:
        """Cut two hosts off each other, both ways."""
        self.cuts |= {(one, two), (two, one)}

    def heal(self) -> None:
        """Heal all cuts."""
        self.cuts.clear()

    async def refuses(self, url: str) -> bool:
        """Return whether the host of a URL lives and has nobody there."""
        process = CURRENT.get()
        assert process is not None
        for pause_s in (self.latency(), AGAIN_S):
            await asyncio.sleep(pause_s)
            server = self.servers.get(url)
            if server is None or not self.reaches(process.host, server.process.host):
                return False
            if not server.process.dead:
                return False
        return True

    async def answers(self, url: str, _: object) -> bool:
        """Return whether the process at a URL runs and is within reach."""
        process = CURRENT.get()
        assert process is not None
        await asyncio.sleep(self.latency())
        server = self.servers.get(url)
        if (
            server is not None
            and not server.process.dead
            and not server.process.frozen
            and self.reaches(process.host, server.process.host)
        ):
            return True
        if server is None or not server.process.dead:
            await asyncio.sleep(ANSWER_S)
        return False

    def crashed(self, server: Server, wire: Wire, error: BaseException) -> None:
        """End the run for a bug in a handler."""
        crash = AssertionError(f"{server.url} {wire.method} {wire.path} crashed: {error!r}")
        crash.__cause__ = error
        self._fail(crash)

    def count(self, where: str, what: str, subject: str) -> None:
        """Count and record one message."""
        self.messages += 1
        self._record(where, what, subject)

    def latency(self) -> float:
        """Return how long the next message takes."""
        low, high = _LATENCY_S
        random = self._random.random
        if self.faults.late and random() < self.faults.late:
            self.disturbed += 1
            return random() ** 3 * 2.0
        return low + (high - low) * random()

    def _lost(self) -> bool:
        is_lost = self.faults.loss > 0 and self._random.random() < self.faults.loss
        self.disturbed += is_lost
        return is_lost

    def _server(self, process: Process, url: str) -> Server | None:
        replicas = self.balanced.get(url)
        if replicas is None:
            return self.servers.get(url)
        for replica in replicas:  # a proxy sends to those that pass their check
            server = self.servers.get(replica)
            if (
                server is not None
                and not server.process.dead
                and not server.process.frozen
                and server.is_ready
            ):
                return server
        return self.servers.get(replicas[0])

    # Requests

    async def exchange(self, process: Process, url: str, wire: Wire) -> tuple[int, bytes]:
        """Send a request and return the status and body of its reply."""
        self.count(url, wire.method, wire.path)
        server = self._server(process, url)
        done: asyncio.Future[tuple[int, bytes]] = self.loop.create_future()

        def broken(text: str) -> None:
            if not done.done() and not process.dead:
                done.set_exception(aiohttp.ClientConnectionError(text))

        def reply(status: int, body: bytes) -> None:
            assert server is not None
            self.count(url, "reply", wire.path)
            if not self.reaches(server.process.host, process.host):
                self.held_up += 1
                return
            if self._lost():
                self.loop.call_later(self.latency(), broken, "the reply was lost", context=_WORLD)
            else:
                self.loop.call_later(self.latency(), arrive, status, body, context=_WORLD)

        def arrive(status: int, body: bytes) -> None:
            if not done.done():
                done.set_result((status, body))

        def deliver(answered: Callable[[int, bytes], None], first: bool) -> None:
            if server is None or server.process.dead:
                if first:
                    broken(f"{url} refuses connections")
                return
            if first:
                server.process.at_death.append(hang_up)
            server.process.spawn(server.answer(wire, answered))

        def hang_up() -> None:
            # The kernel of a host that lives closes the connections of a process that died.
            if (
                not done.done()
                and server is not None
                and self.reaches(server.process.host, process.host)
            ):
                self.loop.call_later(self.latency(), broken, "reset", context=_WORLD)

        if server is not None and not self.reaches(process.host, server.process.host):
            self.held_up += 1  # no answer ever comes
        elif self._lost():
            if self._random.random() < 0.5:  # the connection breaks while it is answered
                self.loop.call_later(self.latency(), deliver, _ignored, False, context=_WORLD)
            late_s = self.latency() + self._random.random() ** 2 * 0.05
            self.loop.call_later(late_s, broken, "the connection broke", context=_WORLD)
        else:
            self.loop.call_later(self.latency(), deliver, reply, True, context=_WORLD)
            if self.faults.double and self._random.random() < self.faults.double:
                self.count(url, "double", wire.path)
                self.disturbed += 1
                late_s = self.latency() + self._random.random() ** 4
                self.loop.call_later(late_s, deliver, _ignored, False, context=_WORLD)
        try:
            return await done
        finally:
            if server is not None and hang_up in server.process.at_death:
                server.process.at_death.remove(hang_up)

    # Connections

    async def connect(self, process: Process, url: str, wire: Wire) -> Link:
        """Open a connection that stays."""
        self.count(url, "connect", wire.path)
        server = self._server(process, url)
        await asyncio.sleep(self.latency())
        if server is not None and not self.reaches(process.host, server.process.host):
            self.held_up += 1
            await asyncio.sleep(_CONNECT_S)
            raise aiohttp.ClientConnectionError(f"{url} does not answer")
        if server is None or server.process.dead or self._lost():
            raise aiohttp.ClientConnectionError(f"{url} refuses connections")
        mine, theirs = Link.pair(self, process, server.process)
        server.process.spawn(server.serve_link(wire, theirs))
        return mine

    def pass_on(self, link: Link, item: Any) -> None:
        """Carry an item to the other end of a connection, or break it."""
        if link.is_broken:
            return  # nothing overtakes what was lost
        if link.stalled or not self.reaches(link._process.host, link.other._process.host):
            if not link.stalled:
                self.held_up += 1
                self.loop.call_later(RETRANSMIT_S, self._retransmit, link, context=_WORLD)
            link.stalled.append(item)
            link.disturb()
        elif item is not None and self._lost():
            self.break_link(link)
        else:
            link._last_s = at_s = max(self.loop.now_s + self.latency(), link._last_s)
            self.loop.call_at(at_s, self._arrive, link, item, context=_WORLD)

    def _arrive(self, link: Link, item: Any) -> None:
        if link.other.closed and item is not None:
            link.arrive(None)  # its kernel knows of no such connection
        else:
            link.other.arrive(item)

    def _retransmit(self, link: Link) -> None:
        link.disturb()
        if not self.reaches(link._process.host, link.other._process.host):
            if not link.closed or None in link.stalled:
                self.loop.call_later(RETRANSMIT_S, self._retransmit, link, context=_WORLD)
            return
        items, link.stalled = link.stalled, []
        for item in items:
            self.pass_on(link, item)

    def keep_alive(self) -> None:
        """Break the connections whose other end the kernels find to be gone."""
        for link in list(self.links):
            for end in (link, link.other):
                if end.closed or not end.other.closed:
                    continue
                link.disturb()
                if self.reaches(end._process.host, end.other._process.host):
                    end.arrive(None)
                elif end.gone_since_s is None:
                    end.gone_since_s = self.loop.now_s
                elif self.loop.now_s - end.gone_since_s > KEEP_ALIVE_S:
                    end.arrive(None)

    def break_link(self, link: Link) -> None:
        """Reset a connection: both ends learn it, and nothing more arrives."""
        link.disturb()
        for end in (link, link.other):
            end.is_broken = True
            self.loop.call_later(self.latency(), end.arrive, None, context=_WORLD)

    def forget(self, link: Link) -> None:
        """Drop a connection whose ends have closed."""
        if link.other.closed:
            for end in (link, link.other):
                if end in self.links:
                    self.links.remove(end)
        at_death = link._process.at_death
        if not link._process.dead and link._died in at_death:
            at_death.remove(link._died)


def _ignored(status: int, body: bytes) -> None:
    """Drop the reply to a second copy."""


_WORLD = Context()
