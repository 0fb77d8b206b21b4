"""A persistent, authenticated, two-way channel between two runtimes: data frames over a WebSocket.

Opened (:func:`connect`) and accepted (:func:`accept`) by the sdk's runtimes. Messages are posted and
handled in order. Those of one turn of the loop leave as one frame, so a burst costs one system call;
a frame is handed over as one list, so a burst costs one wake-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from stoker_wire import version
from stoker_wire.data.frames import FrameCodec
from stoker_wire.errors import ProtocolError, StokerError, UnavailableError
from stoker_wire.messages.data import DataMessage, Hello, Template

if TYPE_CHECKING:
    from aiohttp import ClientSession

    from stoker_wire.messages.common import Address

_log = logging.getLogger(__name__)
PATH = "/v1/channel"
_HANDSHAKE_S = 10.0
_TCP_HEARTBEAT_S = 10.0


class Channel:
    """A channel to one peer. ``post`` from the loop's thread only."""

    def __init__(
        self,
        socket: aiohttp.ClientWebSocketResponse | web.WebSocketResponse,
        peer: Address,
        job_id: str,
    ) -> None:
        self.peer = peer
        self.job_id = job_id
        self.closed = False
        self.templates: dict[int, Template] = {}
        """Templates received on this channel, by number."""
        self.templates_sent: set[int] = set()
        """Numbers of the templates sent on it."""
        self.socket = socket
        self._codec = FrameCodec()
        self._reader_codec = FrameCodec()
        self._outbox: list[DataMessage] = []
        self._wake = asyncio.Event()

    def post(self, message: DataMessage) -> None:
        """Send ``message`` with all others of this turn of the loop. Lost if the channel is closed."""
        self._outbox.append(message)
        if not self._wake.is_set():
            self._wake.set()

    async def run(self, on_messages: Callable[[Channel, list[DataMessage]], None]) -> None:
        """Send and receive messages until the channel closes; then return."""
        try:
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._write(), name="channel.write")
                async for message in self.socket:
                    if message.type is not aiohttp.WSMsgType.BINARY:
                        break
                    on_messages(self, self._reader_codec.decode(message.data))
                writer.cancel()
        finally:
            self.closed = True
            await self.socket.close()

    async def close(self) -> None:
        """Send the posted messages, then close."""
        if self._outbox and not self.closed:
            messages, self._outbox = self._outbox, []
            with contextlib.suppress(OSError, aiohttp.ClientError, TimeoutError):
                await asyncio.wait_for(self.socket.send_bytes(self._codec.encode(messages)), 2.0)
        self.closed = True
        await self.socket.close()

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                messages, self._outbox = self._outbox, []
                if messages:
                    await self.socket.send_bytes(self._codec.encode(messages))
        except (OSError, aiohttp.ClientError):
            await self.socket.close()


def usable_path(address: Address, host_id: str) -> str:
    """Return the Unix path to reach ``address`` from a process on ``host_id``, or ''."""
    return address.unix if address.unix and address.host_id == host_id else ""


async def connect(
    session: ClientSession, url: str, *, me: Address, job_id: str, token: str, over_tcp: bool
) -> Channel:
    """Open a channel over ``session`` (which decides Unix or TCP) and shake hands."""
    try:
        socket = await session.ws_connect(
            url + PATH,
            headers={"Authorization": f"Bearer {token}"},
            max_msg_size=0,
            compress=0,
            heartbeat=_TCP_HEARTBEAT_S if over_tcp else None,
            timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
        )
    except aiohttp.WSServerHandshakeError as error:
        raise StokerError(f"{url} refused the data channel: HTTP {error.status}") from None
    except (OSError, aiohttp.ClientError) as error:
        raise UnavailableError(f"cannot reach {url} for the data channel\n{error}") from None
    return await _shake_hands(socket, me, job_id)


async def accept(
    request: web.Request, *, me: Address, job_id: str
) -> tuple[web.WebSocketResponse, Channel | None]:
    """Accept an incoming channel (already authenticated) and shake hands.

    None in place of the channel if the peer left meanwhile, as one does that is killed as it connects.
    """
    over_tcp = request.transport is not None and isinstance(
        request.transport.get_extra_info("peername"), tuple
    )
    socket = web.WebSocketResponse(
        max_msg_size=0,
        compress=False,
        heartbeat=_TCP_HEARTBEAT_S if over_tcp else None,
        timeout=1.0,
    )
    await socket.prepare(request)
    try:
        return socket, await _shake_hands(socket, me, job_id)
    except UnavailableError as error:
        _log.debug("a peer left as it connected: %s", error)
        return socket, None


async def _shake_hands(
    socket: aiohttp.ClientWebSocketResponse | web.WebSocketResponse, me: Address, job_id: str
) -> Channel:
    codec = FrameCodec()
    hello = Hello(peer=me, job_id=job_id, protocol=version.PROTOCOL)
    try:
        await socket.send_bytes(codec.encode([hello]))
        first = await asyncio.wait_for(socket.receive_bytes(), _HANDSHAKE_S)
        (answer,) = codec.decode(first)
    except (OSError, aiohttp.ClientError, TimeoutError, TypeError, ValueError) as error:
        await socket.close()
        raise UnavailableError(f"the data channel's handshake failed\n{error!r}") from None
    if not isinstance(answer, Hello):
        await socket.close()
        raise UnavailableError("the data channel's handshake failed\nno Hello came first")
    ours = version.PROTOCOL
    if answer.protocol[0] != ours[0] or abs(answer.protocol[1] - ours[1]) > 1:
        await socket.close()
        raise ProtocolError(
            f"{answer.peer.peer_id} speaks protocol {answer.protocol}, this process {ours}\n"
            "they must be at most one minor version apart"
        )
    return Channel(socket, answer.peer, answer.job_id)
