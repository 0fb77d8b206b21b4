"""One client's connection while a caller has it: for as long as its requests are for this caller.

The first request that is for somebody else goes back to the gateway, with the connection, and begins there
anew. HTTP/1.1 clients send it once they have the answer before it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from stoker.gateway.calls.handover import connection_of
from stoker.gateway.requests import RequestReader, refusal
from stoker_wire.errors import StokerError
from stoker_wire.http.gateway.protocol import RequestHead

IsOurs = Callable[[RequestHead], bool]
GiveBack = Callable[[socket.socket, bytes], object]


class Guest(asyncio.Protocol):
    """The protocol of the connection; ``server`` is that of the HTTP server, which answers."""

    def __init__(
        self, server: asyncio.Protocol, came: bytes, is_ours: IsOurs, give_back: GiveBack
    ) -> None:
        self._server = server
        self._came = came
        self._is_ours = is_ours
        self._give_back = give_back
        self._reader = RequestReader()
        self._transport: asyncio.Transport
        self._has_left = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Have the server answer what came while the gateway had the connection."""
        self._transport = cast("asyncio.Transport", transport)
        self._server.connection_made(transport)
        self.data_received(self._came)

    def data_received(self, data: bytes) -> None:
        """Pass on what is for this caller; leave with the first request that is not."""
        try:
            parts = self._reader.feed(data)
        except StokerError as error:
            self._transport.write(refusal(error))
            self._transport.close()
            return
        ours = len(parts)
        for index, part in enumerate(parts):
            if part.head is not None and not self._is_ours(part.head):
                ours = index
                break
        if ours:
            self._server.data_received(b"".join(part.data for part in parts[:ours]))
        if ours < len(parts):
            self._leave(b"".join(part.data for part in parts[ours:]) + self._reader.unread)

    def _leave(self, unread: bytes) -> None:
        self._has_left = True
        connection = connection_of(self._transport)
        self._server.connection_lost(None)
        self._transport.close()
        self._give_back(connection, unread)

    def eof_received(self) -> bool | None:
        """Tell the server."""
        return self._server.eof_received()

    def pause_writing(self) -> None:
        """Tell the server."""
        self._server.pause_writing()

    def resume_writing(self) -> None:
        """Tell the server."""
        self._server.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the server, unless it has nothing to do with the connection any more."""
        if not self._has_left:
            self._server.connection_lost(exc)
