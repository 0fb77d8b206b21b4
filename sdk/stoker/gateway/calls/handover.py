"""Connections that one process hands to another of its machine, with what was read of them already.

The descriptor goes over a Unix socket that only this user may open (``SCM_RIGHTS``), and the bytes behind it.
The receiver has the very connection of the client then, and the sender is out of its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from stoker_wire.http.server.unix_socket import private_socket

if TYPE_CHECKING:
    from stoker_wire.process.background import Background

OnConnection = Callable[[socket.socket, bytes], object]
_READ_NBYTES = 1 << 16
_WITHIN_S = 10.0
_BACKLOG = 1024
_FULL_S = 0.1
"""The pause where this process has as many files open as it may."""


def connection_of(transport: asyncio.Transport) -> socket.socket:
    """Return another descriptor of a transport's connection, which stays open when the transport closes."""
    return socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))


async def hand_over(path: str, connection: socket.socket, came: bytes) -> None:
    """Give a connection, which nobody reads at present, to who listens at ``path``.

    ``came`` is what was read of it, and is not empty. OSError if nobody listens, or takes it within 10 s.
    The descriptor stays the caller's to close.
    """
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as line:
        line.setblocking(False)
        async with asyncio.timeout(_WITHIN_S):
            await loop.sock_connect(line, path)
        sent = socket.send_fds(line, [came], [connection.fileno()])
        # The connection is the receiver's by now, and ends with it.
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_WITHIN_S):
                await loop.sock_sendall(line, came[sent:])


class Receiver:
    """A listener at ``path`` for connections that are handed over; each is given to ``on_connection``."""

    def __init__(self, path: str, on_connection: OnConnection, background: Background) -> None:
        self.path = path
        self._on_connection = on_connection
        self._background = background
        self._accepting: asyncio.Task[None]

    def start(self) -> None:
        """Listen. OSError if the path is no place for a socket."""
        listener = private_socket(self.path)
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._accepting = self._background.spawn(self._accept(listener), name="connections")

    def close(self) -> None:
        """Listen no more."""
        self._accepting.cancel()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    line, _ = await loop.sock_accept(listener)
                except OSError:  # no descriptor is free
                    await asyncio.sleep(_FULL_S)
                    continue
                self._background.spawn(self._receive(line), name="connection handed over")

    async def _receive(self, line: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        fds: list[int] = []
        with line:
            line.setblocking(False)
            try:
                async with asyncio.timeout(_WITHIN_S):
                    came, fds = await _first(line)
                    while more := await loop.sock_recv(line, _READ_NBYTES):
                        came += more
            except (OSError, TimeoutError):  # who sent it has ended meanwhile
                for fd in fds:
                    os.close(fd)
                return
        for fd in fds:
            connection = socket.socket(fileno=fd)
            connection.setblocking(False)
            self._on_connection(connection, came)


async def _first(line: socket.socket) -> tuple[bytes, list[int]]:
    """Return the first bytes, and the descriptor that comes with them."""
    loop = asyncio.get_running_loop()
    while True:
        with contextlib.suppress(BlockingIOError):
            came, fds, _, _ = socket.recv_fds(line, _READ_NBYTES, 1, socket.MSG_CMSG_CLOEXEC)
            return came, fds
        readable = loop.create_future()
        loop.add_reader(line, readable.set_result, None)
        try:
            await readable
        finally:
            loop.remove_reader(line)
