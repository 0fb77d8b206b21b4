"""The connections of a world that stay: ordered, as TCP's are, until one end closes, dies or is cut off."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
from aiohttp import WSMsgType

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from tests.sim.world.loop import Process
    from tests.sim.world.network import Network


WINDOW = 4
"""So many messages fit into the buffers of a connection."""
DRAIN_S = 0.1


class _Message(NamedTuple):
    """A message on a WebSocket."""

    data: str
    type = WSMsgType.TEXT


class _Failure(NamedTuple):
    """What a client of a WebSocket is told of an error at the other end."""

    data: Exception
    type = WSMsgType.ERROR


class _Close(NamedTuple):
    """The last message on a WebSocket: why it ends."""

    data: int
    extra: str
    type = WSMsgType.CLOSE


class _Done:
    """What is done already, to be awaited."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


class Link:
    """One end of a connection: what the other sends arrives here in order, or the connection breaks."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process
        self._arrived: deque[Any] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._last_s = 0.0
        self.other: Link
        self.closed = self.is_broken = False
        self.is_socket = False
        """Whether this is the client's end of a WebSocket."""
        self.close_code: int | None = None
        self.stalled: list[Any] = []
        """What could not be delivered yet: the hosts are cut off each other."""
        self.gone_since_s: float | None = None
        self.on_item: Callable[[Any], None] | None = None
        self.on_closed: Callable[[], None] | None = None
        process.at_death.append(self._died)

    @classmethod
    def pair(cls, network: Network, one: Process, two: Process) -> tuple[Link, Link]:
        """Return the two ends of a new connection."""
        ends = cls(network, one), cls(network, two)
        ends[0].other, ends[1].other = ends[1], ends[0]
        network.links.append(ends[0])
        return ends

    def send(self, item: Any) -> None:
        """Send to the other end."""
        if not self.closed:
            self._network.pass_on(self, item)

    def disturb(self) -> None:
        """Note at both ends that what is sent may come too late."""
        self._process.disturb()
        self.other._process.disturb()

    def arrive(self, item: Any) -> None:
        """Take what the other end has sent; None is the end of the connection."""
        if self.closed:
            return
        if item is None:
            self._end()
        elif self.on_item is not None:
            asyncio.get_running_loop().call_soon(
                self._hand_over, item, context=self._process.context
            )
        else:
            self._arrived.append(item)
        self._wake_up()

    def _hand_over(self, item: Any) -> None:
        if self.on_item is not None:
            self.on_item(item)

    def _end(self) -> None:
        self.closed = True
        self._network.forget(self)
        if self.on_closed is not None and not self._process.dead:
            asyncio.get_running_loop().call_soon(self.on_closed, context=self._process.context)

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next item, or None at the end."""
        while not self._arrived:
            if self.closed:
                return None
            self._wake = asyncio.get_running_loop().create_future()
            async with asyncio.timeout(timeout_s):
                await self._wake
        item = self._arrived.popleft()
        if isinstance(item, _Close):
            self.close_code = item.data
            self.close()
        if self.is_socket and isinstance(item, Exception):
            return _Failure(item)
        return item

    def close(self, code: int = 0, message: bytes = b"") -> Awaitable[None]:
        """Close this end; the other learns it."""
        if not self.closed and not self._network.loop.is_closed():
            if code:
                self._network.pass_on(self, _Close(code, message.decode()))
            self._network.pass_on(self, None)
            self._end()
            self._wake_up()
        return _Done()

    def _died(self) -> None:
        if not self.closed:
            self._network.pass_on(self, None)
            self.closed = True
            self._network.forget(self)

    async def drain(self) -> None:
        """Wait while the other end reads nothing, and the buffers between are full."""
        while not self.closed and len(self.other._arrived) + len(self.stalled) > WINDOW:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_S)

    async def send_str(self, text: str) -> None:
        """Send a message of a WebSocket."""
        if self.closed:
            raise aiohttp.ClientConnectionResetError("closed")
        self.send(_Message(text))

    async def __aenter__(self) -> Link:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Link:
        return self

    async def __anext__(self) -> Any:
        item = await self.receive()
        if item is None:
            raise StopAsyncIteration
        return item
