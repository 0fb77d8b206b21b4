"""The channels of a world's runtimes: links of the network, opened and accepted as the product's are."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from stoker_wire.data.channel import Channel
from stoker_wire.errors import UnavailableError
from tests.sim.world.links import Link

if TYPE_CHECKING:
    from stoker_wire.messages.common import Address
    from tests.sim.world.runtime.runtime import Runtime

_UNREACHABLE_S = 10.0


class SimChannel(Channel):
    """A channel over a link of the world."""

    def __init__(self, link: Link, peer: Address) -> None:
        self.link, self.peer, self.job_id = link, peer, ""
        self.closed = False
        self.templates, self.templates_sent = {}, set()

    def post(self, message: Any) -> None:
        if not self.closed:
            self.link.send(message)

    def receive_now(self) -> None:
        """All that has arrived was handled."""

    async def close(self) -> None:
        self.link.close()


class SimChannels:
    """The channels of one runtime, by peer (:class:`stoker.runtime.net.channels.Channels`)."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._by_peer: dict[str, SimChannel] = {}
        self._opening: dict[str, asyncio.Task[SimChannel]] = {}

    def open_channel(self, peer_id: str) -> SimChannel | None:
        """Return the open channel to a peer, or None."""
        channel = self._by_peer.get(peer_id)
        return channel if channel is not None and not channel.closed else None

    async def channel(self, address: Address) -> SimChannel:
        """Return a channel to a peer, opened if need be; who asks meanwhile shares it."""
        channel = self.open_channel(address.peer_id)
        if channel is not None:
            return channel
        opening = self._opening.get(address.peer_id)
        if opening is None:
            background = self._runtime.io.background
            opening = background.spawn(self._open(address), name="channel", report=False)
            self._opening[address.peer_id] = opening
            opening.add_done_callback(lambda _: self._opening.pop(address.peer_id, None))
        return await asyncio.shield(opening)

    async def _open(self, address: Address) -> SimChannel:
        runtime = self._runtime
        world, here = runtime.world, runtime.process
        await asyncio.sleep(world.network.latency())
        peer = world.peers.get(address.url)
        if peer is None or peer.process.dead:
            raise UnavailableError(f"cannot reach {address.url}")
        if not world.network.reaches(here.host, peer.process.host):
            here.disturb()
            peer.process.disturb()
            await asyncio.sleep(_UNREACHABLE_S)
            raise UnavailableError(f"{address.url} does not answer")
        near, far = Link.pair(world.network, here, peer.process)
        peer.accept(far, runtime.address)
        return self._start(near, address)

    def accept(self, link: Link, peer: Address) -> None:
        """Take a channel that a peer has opened."""
        self._start(link, peer, accepted=True)

    def _start(self, link: Link, peer: Address, *, accepted: bool = False) -> SimChannel:
        channel = SimChannel(link, peer)
        if not accepted or self.open_channel(peer.peer_id) is None:
            self._by_peer[peer.peer_id] = channel
        link.on_item = lambda message: self._received(channel, message)
        link.on_closed = lambda: self._closed(channel)
        return channel

    def _received(self, channel: SimChannel, message: Any) -> None:
        self._runtime.router.on_messages(channel, [message])
        self._runtime.world.checks.runtime_stepped(self._runtime)

    def _closed(self, channel: SimChannel) -> None:
        if not channel.closed:
            channel.closed = True
            if self._by_peer.get(channel.peer.peer_id) is channel:
                del self._by_peer[channel.peer.peer_id]
            self._runtime.router.on_lost(channel)
            self._runtime.world.checks.runtime_stepped(self._runtime)

    def lose(self, channel: SimChannel) -> None:
        """Close a channel whose peer is known to be gone."""
        channel.link.close()
        self._closed(channel)
