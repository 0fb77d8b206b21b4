"""The TCP port of an HTTP server with TLS: handshakes are few at a time and short, and then the server's.

A server of asyncio counts a connection from the end of its handshake on. Until then anybody could hold a
descriptor of this process for a minute, and as many as there are. So connections are accepted here: each
handshake is a task that can be counted, ends by its deadline, makes room for a newer one, and knows the
address that a failure is logged with.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import TYPE_CHECKING

from aiohttp import web

from stoker_wire.process.background import Background
from stoker_wire.tls.contexts import PEER

if TYPE_CHECKING:
    import ssl

_log = logging.getLogger(__name__)
HANDSHAKES = 256
"""More at a time end the oldest."""
HANDSHAKE_S = 10.0
_AT_ONCE = 100
"""Connections accepted in one turn of the loop."""
_PAUSE_S = 1.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class TlsSite(web.BaseSite):
    """A port of ``runner`` that speaks TLS: of ``host`` and ``port`` (0: a free one), or of ``sock``."""

    __slots__ = ("_background", "_context", "_host", "_listeners", "_shaking", "port")

    def __init__(
        self,
        runner: web.AppRunner,
        context: ssl.SSLContext,
        *,
        host: str = "",
        port: int = 0,
        sock: socket.socket | None = None,
        backlog: int = 1024,
    ) -> None:
        super().__init__(runner, backlog=backlog)
        self._context = context
        self._host = host
        self.port = port
        self._listeners: list[socket.socket] = [] if sock is None else [sock]
        self._background = Background("tls")
        self._shaking: dict[asyncio.Task[None], list[socket.socket]] = {}
        """The handshakes under way, the oldest first, and the connection while that is nobody else's."""

    @property
    def name(self) -> str:
        """The address, as aiohttp calls it."""
        return f"https://{self._host}:{self.port}"

    async def start(self) -> None:
        """Listen. OSError says why not."""
        await super().start()
        if not self._listeners:
            await self._listen()
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            listener.setblocking(False)
            loop.add_reader(listener, self._accept, listener)
        self.port = self._listeners[0].getsockname()[1]

    async def _listen(self) -> None:
        found = await asyncio.get_running_loop().getaddrinfo(
            self._host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        try:
            for family, address in dict.fromkeys((one[0], one[4]) for one in found):
                listener = socket.socket(family, socket.SOCK_STREAM)
                self._listeners.append(listener)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind(address)
                listener.listen(self._backlog)
        except OSError:
            self._close()
            raise

    async def stop(self) -> None:
        """Listen no more, and end the handshakes that are under way."""
        await super().stop()
        self._close()
        await self._background.close()

    def _close(self) -> None:
        while self._listeners:
            listener = self._listeners.pop()
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, peer = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                _log.warning("no connection can be accepted: %s", error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                loop.call_later(_PAUSE_S, self._resume, listener)
                return
            connection.setblocking(False)
            if len(self._shaking) >= HANDSHAKES:
                oldest = next((task for task in self._shaking if not task.cancelling()), None)
                if oldest is not None:
                    oldest.cancel()
            waiting = [connection]
            handshake = self._shake_hands(waiting, str(peer[0]))
            task = self._background.spawn(handshake, name="handshake")
            self._shaking[task] = waiting
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        for connection in self._shaking.pop(task, ()):
            connection.close()

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def _shake_hands(self, waiting: list[socket.socket], peer: str) -> None:
        server = self._runner.server
        if server is None:
            return
        PEER.set(peer)
        connection = waiting.pop()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                server, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError:
            return  # the log has said why, if it was for a certificate
