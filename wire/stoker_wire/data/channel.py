"""A persistent, authenticated, two-way channel between two runtimes: data frames over a socket.

It begins as an HTTP request that upgrades the connection; from then on both sides send frames behind
their length. Opened (:func:`connect`) and accepted (:func:`accept`) by the sdk's runtimes. Messages are
posted and handled in order. Those of one turn of the loop leave as one frame, so a burst costs one
system call; what arrives at once is handed over as one list, so a burst costs one wake-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from aiohttp import web

from stoker_wire import version
from stoker_wire.data.frame_socket import Frame, FrameSocket, length_prefix
from stoker_wire.data.frames import FrameCodec
from stoker_wire.data.keep_alive import keep_alive
from stoker_wire.errors import (
    BadRequestError,
    ForbiddenError,
    ProtocolError,
    StokerError,
    UnavailableError,
)
from stoker_wire.http.client.port_owner import check_port_owner
from stoker_wire.messages.data import DataMessage, Hello, Template
from stoker_wire.tls.contexts import context_for, tls_error
from stoker_wire.tls.socket import TlsSocket, client_socket

if TYPE_CHECKING:
    from stoker_wire.http.gateway.route import GatewayRoute
    from stoker_wire.messages.common import Address
    from stoker_wire.tls.files import TlsFiles

_log = logging.getLogger(__name__)
PATH = "/v1/channel"
UPGRADE = "stoker-frames"
_HANDSHAKE_S = 10.0
_DRAIN_S = 2.0
_JOINED_NBYTES = 1 << 14
"""A frame up to this size is sent from one buffer: that is cheaper than many parts."""
_HEAD_NBYTES = 1 << 14


class Channel:
    """A channel to one peer. ``post`` from the loop's thread only."""

    def __init__(self, frames: FrameSocket, peer: Address, job_id: str) -> None:
        self.frames = frames
        self.peer = peer
        self.job_id = job_id
        self.closed = False
        self.templates: dict[int, Template] = {}
        """Templates received on this channel, by number."""
        self.templates_sent: set[int] = set()
        """Numbers of the templates sent on it."""
        self._at_turn_end: Callable[[Callable[[], None]], object]
        self._encoder = FrameCodec()
        self._decoder = FrameCodec()
        self._outbox: list[DataMessage] = []
        self._flush_scheduled = False
        self._on_messages: Callable[[Channel, list[DataMessage]], None]
        self._on_closed: Callable[[Channel], None]

    def start(
        self,
        on_messages: Callable[[Channel, list[DataMessage]], None],
        on_closed: Callable[[Channel], None],
        at_turn_end: Callable[[Callable[[], None]], object],
    ) -> None:
        """Hand over all messages from now on, and say once that the channel is closed.

        ``at_turn_end`` calls a function when the present turn of the loop ends.
        """
        self._on_messages, self._on_closed = on_messages, on_closed
        self._at_turn_end = at_turn_end
        self.frames.start(self._receive, self._end)

    def post(self, message: DataMessage) -> None:
        """Send ``message`` with all others of this turn of the loop. Lost if the channel is closed."""
        self._outbox.append(message)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._at_turn_end(self._flush)

    def receive_now(self) -> None:
        """Handle what has arrived: before news from elsewhere that it was sent ahead of."""
        if not self.closed:
            self.frames.read()

    def _flush(self) -> None:
        self._flush_scheduled = False
        messages, self._outbox = self._outbox, []
        if messages:
            self.frames.send(_sendable(self._encoder, messages))

    def _receive(self, frames: list[Frame]) -> None:
        decode = self._decoder.decode
        try:
            messages = decode(frames[0])
            for frame in frames[1:]:
                messages += decode(frame)
        except BadRequestError as error:
            _log.warning("%s sent what is no frame: %s", self.peer.peer_id, error)
            self.frames.close()
            return
        self._on_messages(self, messages)

    def _end(self) -> None:
        self.closed = True
        self._on_closed(self)

    async def close(self) -> None:
        """Send what is posted, then close."""
        self._flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                await self.frames.drain()
        self.closed = True
        self.frames.close()


def _sendable(codec: FrameCodec, messages: list[DataMessage]) -> list[Frame]:
    """Return a frame of messages behind its length, in as many parts as are worth it."""
    parts: list[Frame] = list(codec.encode_parts(messages))
    nbytes = sum(map(len, parts))
    prefix = length_prefix(nbytes)
    if nbytes <= _JOINED_NBYTES:
        return [b"".join((prefix, *parts))]
    return [prefix, *parts]


def usable_path(address: Address, host_id: str) -> str:
    """Return the Unix path to reach ``address`` from a process on ``host_id``, or ''."""
    return address.unix if address.unix and address.host_id == host_id else ""


async def connect(
    address: Address,
    *,
    path: str,
    me: Address,
    job_id: str,
    authorization: str,
    tls: TlsFiles,
    gateway: GatewayRoute | None = None,
) -> Channel:
    """Open a channel to ``address``, by its Unix ``path``, the gateway or TCP (and TLS), and shake hands."""
    where = path or address.url
    sock: socket.socket | TlsSocket
    try:
        sock = await _connected(path, address.url, tls, gateway)
    except OSError as error:
        if isinstance(error, StokerError):
            raise
        raise tls_error(error, "the data channel", where) or UnavailableError(
            f"cannot reach {where} for the data channel\n{error}"
        ) from None
    try:
        rest = await _upgrade(sock, where, authorization)
        return await _shake_hands(FrameSocket(sock, rest), me, job_id)
    except BaseException:
        sock.close()
        raise


async def _connected(
    path: str, url: str, tls: TlsFiles, gateway: GatewayRoute | None
) -> socket.socket | TlsSocket:
    loop = asyncio.get_running_loop()
    context, parts = None, urlsplit(url)
    if gateway is not None and not path:
        return await gateway.open_socket(parts.hostname or "", parts.port or 80)
    if path:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: str | tuple[object, ...] = path
    else:
        context = context_for(url, tls)
        found = await loop.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
        family, _, _, _, target = found[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        keep_alive(sock)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, target)
        if context is None:
            check_port_owner(sock)
        if context is not None:
            secured = client_socket(sock, context, parts.hostname or "")
            async with asyncio.timeout(_HANDSHAKE_S):
                await secured.shake_hands()
            return secured
    except BaseException:
        sock.close()
        raise
    return sock


async def _send_all(sock: socket.socket | TlsSocket, data: bytes) -> None:
    if isinstance(sock, TlsSocket):
        await sock.send_all(data)
    else:
        await asyncio.get_running_loop().sock_sendall(sock, data)


async def _receive(sock: socket.socket | TlsSocket) -> bytes:
    if isinstance(sock, TlsSocket):
        return await sock.receive(_HEAD_NBYTES)
    return await asyncio.get_running_loop().sock_recv(sock, _HEAD_NBYTES)


async def _upgrade(sock: socket.socket | TlsSocket, where: str, authorization: str) -> bytes:
    """Turn an HTTP connection into one of frames; return what the peer sent behind its answer."""
    request = (
        f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {authorization}\r\n"
        f"Connection: Upgrade\r\nUpgrade: {UPGRADE}\r\n\r\n"
    )
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            await _send_all(sock, request.encode())
            answer = b""
            while b"\r\n\r\n" not in answer and len(answer) < _HEAD_NBYTES:
                data = await _receive(sock)
                if not data:
                    raise UnavailableError(f"{where} closed the connection as it was opened")
                answer += data
    except (OSError, TimeoutError) as error:
        # A certificate that the peer refuses shows here: after the client's end of TLS's own handshake.
        raise tls_error(error, "the data channel", where) or UnavailableError(
            f"the data channel's handshake failed\n{error!r}"
        ) from None
    head, _, rest = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if status == [b"401"]:
        raise ForbiddenError(
            f"{where} takes no channel of this job: it is of another user's\n"
            "jobs of two users meet in a namespace that both may use: stoker token create --namespace"
        )
    if status != [b"101"]:
        said = status[0].decode(errors="replace") if status else "nothing that is HTTP"
        raise StokerError(f"{where} refused the data channel: HTTP {said}")
    return rest


async def accept(request: web.Request, *, me: Address, job_id: str) -> Channel | None:
    """Take over an incoming connection (already authenticated) and shake hands.

    None where the peer left meanwhile, as those do that are ended as they connect. The connection is
    none of the HTTP server's any more.
    """
    if request.headers.get("Upgrade", "").lower() != UPGRADE:
        raise web.HTTPUpgradeRequired(
            headers={"Upgrade": UPGRADE}, text=f"send 'Upgrade: {UPGRADE}'"
        )
    transport = request.transport
    if transport is None:
        return None
    plain = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
    sock: socket.socket | TlsSocket = plain
    if (tls := transport.get_extra_info("ssl_object")) is not None:
        sock = TlsSocket(plain, tls, tls.incoming, tls.outgoing)
    transport.abort()  # closes the server's own descriptor; the connection stays
    try:
        plain.setblocking(False)
        keep_alive(plain)
        answer = (
            f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n\r\n"
        )
        await _send_all(sock, answer.encode())
        return await _shake_hands(FrameSocket(sock), me, job_id)
    except (UnavailableError, OSError) as error:
        sock.close()
        _log.debug("a peer left as it connected: %s", error)
        return None
    except BaseException:
        sock.close()
        raise


async def _shake_hands(frames: FrameSocket, me: Address, job_id: str) -> Channel:
    codec = FrameCodec()
    hello = Hello(peer=me, job_id=job_id, protocol=version.PROTOCOL)
    frames.send(_sendable(codec, [hello]))
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            (theirs,) = codec.decode(await frames.receive())
    except (TimeoutError, ValueError, StokerError) as error:
        frames.close()
        raise UnavailableError(f"the data channel's handshake failed\n{error!r}") from None
    except BaseException:  # cancelled: the loop must not go on to wait for a socket that is closed
        frames.close()
        raise
    if not isinstance(theirs, Hello):
        frames.close()
        raise UnavailableError("the data channel's handshake failed\nno Hello came first")
    ours = version.PROTOCOL
    if theirs.protocol[0] != ours[0] or abs(theirs.protocol[1] - ours[1]) > 1:
        frames.close()
        raise ProtocolError(
            f"{theirs.peer.peer_id} speaks protocol {theirs.protocol}, this process {ours}\n"
            "they must be at most one minor version apart"
        )
    return Channel(frames, theirs.peer, theirs.job_id)
