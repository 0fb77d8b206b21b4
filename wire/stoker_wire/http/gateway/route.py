"""The way to a cluster's processes by its gateway, for a process that reaches nothing else of it.

Each connection is one of its own to the gateway, which joins it with one inside: the clients of HTTP, of
objects and of channels use it in the place of a direct one. With TLS it is secured as far as the gateway,
whose name and certificate are checked; from there on the gateway does what the cluster does.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from stoker_wire.data.keep_alive import keep_alive
from stoker_wire.errors import StokerError, UnavailableError
from stoker_wire.http.client.port_owner import check_port_owner
from stoker_wire.http.gateway.protocol import (
    ACCEPT_PATH,
    DIAL_S,
    HEAD_NBYTES,
    LISTEN_PATH,
    URL_HEADER,
    AnswerReader,
    connect_request,
    upgrade_request,
)
from stoker_wire.tls.contexts import context_for, tls_error
from stoker_wire.tls.socket import client_socket

if TYPE_CHECKING:
    import ssl

    from stoker_wire.http.auth import Credential
    from stoker_wire.tls.files import TlsFiles
    from stoker_wire.tls.socket import TlsSocket

P = TypeVar("P", bound=asyncio.Protocol)

_ANSWER_S = DIAL_S + 5.0
"""The gateway says earlier what it could not reach."""


class GatewayRoute:
    """Connections by the gateway at ``url``, with the token that ``credential`` has at the time."""

    def __init__(self, url: str, credential: Credential, tls: TlsFiles) -> None:
        self.url = url
        self._credential = credential
        self._tls = tls
        parts = urlsplit(url)
        self._netloc = parts.netloc
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def token(self) -> str:
        """The token that is shown to the gateway now."""
        return self._credential.token

    def leads_to(self, url: str) -> bool:
        """Return whether ``url`` is reached by the gateway, and is not the gateway itself."""
        return urlsplit(url).netloc != self._netloc

    def _context(self) -> ssl.SSLContext | None:
        return context_for(self.url, self._tls)

    async def create_connection(
        self, make: Callable[[], P], host: str, port: int
    ) -> tuple[asyncio.Transport, P]:
        """Return a transport to ``host``:``port`` inside, and the protocol that ``make`` made for it.

        Raises the error that the gateway sent; UnavailableError if it does not answer.
        """
        request = connect_request(host, port, self._credential.token)
        transport, opening = await self._open(request)
        return transport, opening.hand_over(transport, make)

    async def accept(
        self, make: Callable[[], P], connection_id: str
    ) -> tuple[asyncio.Transport, P]:
        """Take the connection that a line of :meth:`listen` has named."""
        request = upgrade_request(
            ACCEPT_PATH, self._credential.token, self._netloc, id=connection_id
        )
        transport, opening = await self._open(request)
        return transport, opening.hand_over(transport, make)

    async def listen(
        self, make: Callable[[], P], peer_id: str, port: int
    ) -> tuple[asyncio.Transport, P, str]:
        """Have the gateway listen for ``peer_id``, on ``port`` if that is free (0: any).

        Returns the URL by which the cluster reaches it, and the connection on which a line comes for each
        connection there: its id.
        """
        request = upgrade_request(
            LISTEN_PATH, self._credential.token, self._netloc, peer_id=peer_id, port=port
        )
        transport, opening = await self._open(request)
        url = opening.reader.headers.get(URL_HEADER.lower(), "")
        return transport, opening.hand_over(transport, make), url

    async def _open(self, request: bytes) -> tuple[asyncio.Transport, _Opening]:
        loop = asyncio.get_running_loop()
        context = self._context()
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(_ANSWER_S):
                transport, opening = await loop.create_connection(
                    lambda: _Opening(self.url),
                    self._host,
                    self._port,
                    ssl=context,
                    server_hostname=self._host if context else None,
                )
                line = transport.get_extra_info("socket")
                if context is None:
                    check_port_owner(line)
                keep_alive(line)
                transport.write(request)
                await opening.answered
        except BaseException as error:
            if transport is not None:
                transport.abort()
            raise self._explained(error) from None
        return transport, opening

    async def open_socket(self, host: str, port: int) -> socket.socket | TlsSocket:
        """Return a non-blocking socket to ``host``:``port`` inside, for who waits for it by himself."""
        loop = asyncio.get_running_loop()
        context = self._context()
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(_ANSWER_S):
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                family, _, _, _, target = found[0]
                sock = socket.socket(family, socket.SOCK_STREAM)
                sock.setblocking(False)
                await loop.sock_connect(sock, target)
                keep_alive(sock)
                reader = AnswerReader(self.url)
                request = connect_request(host, port, self._credential.token)
                if context is None:
                    check_port_owner(sock)
                    await loop.sock_sendall(sock, request)
                    while reader.feed(await loop.sock_recv(sock, HEAD_NBYTES)) is None:
                        pass
                    return sock
                secured = client_socket(sock, context, self._host)
                await secured.shake_hands()
                await secured.send_all(request)
                while reader.feed(await secured.receive(HEAD_NBYTES)) is None:
                    pass
                return secured
        except BaseException as error:
            if sock is not None:
                sock.close()
            raise self._explained(error) from None

    def open_blocking(self, host: str, port: int, timeout_s: float) -> socket.socket:
        """Return a blocking socket to ``host``:``port`` inside, for a thread."""
        context = self._context()
        sock: socket.socket | None = None
        try:
            sock = socket.create_connection((self._host, self._port), timeout_s)
            if context is None:
                check_port_owner(sock)
            else:
                sock = context.wrap_socket(sock, server_hostname=self._host)
            sock.settimeout(_ANSWER_S)
            sock.sendall(connect_request(host, port, self._credential.token))
            reader = AnswerReader(self.url)
            while reader.feed(sock.recv(HEAD_NBYTES)) is None:
                pass
            sock.settimeout(timeout_s)
        except BaseException as error:
            if sock is not None:
                sock.close()
            raise self._explained(error) from None
        return sock

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, StokerError) or not isinstance(error, OSError):
            return error
        if (refused := tls_error(error, "the gateway", self.url)) is not None:
            return refused
        why = "it does not answer" if isinstance(error, TimeoutError) else error.strerror or error
        return UnavailableError(f"the gateway at {self.url} cannot be reached\n{why}")


class _Opening(asyncio.Protocol):
    """The protocol of a connection until the gateway has answered and another takes it over."""

    def __init__(self, url: str) -> None:
        self.reader = AnswerReader(url)
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._behind = b""
        """What came behind the answer."""

    def data_received(self, data: bytes) -> None:
        """Take a part of the answer, or what is behind it."""
        if self.answered.done():
            self._behind += data
            return
        try:
            behind = self.reader.feed(data)
        except StokerError as error:
            self.answered.set_exception(error)
        else:
            if behind is not None:
                self._behind = behind
                self.answered.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail, if the answer has not come."""
        self.data_received(b"")

    def hand_over(self, transport: asyncio.Transport, make: Callable[[], P]) -> P:
        """Return the protocol that has the connection from now on."""
        if transport.is_closing():
            raise UnavailableError(f"the gateway at {self.reader.url} closed a connection")
        protocol = make()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._behind:
            protocol.data_received(self._behind)
        return protocol
