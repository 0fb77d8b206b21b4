"""A connection from outside until it is known what it is for: the head of its first request, and no more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from stoker.gateway.requests import refusal
from stoker_wire.data.keep_alive import keep_alive
from stoker_wire.errors import BadRequestError, PayloadTooLargeError, StokerError
from stoker_wire.http.gateway.protocol import HEAD_END, HEAD_NBYTES, RequestHead, parse_request

if TYPE_CHECKING:
    from stoker_wire.http.server.connections import Connections

OnRequest = Callable[["Door", RequestHead], object]


class Door(asyncio.Protocol):
    """The protocol of one connection; ``on_request`` is called once with its first request.

    Of a connection that a caller gave back ``came`` is what was read of that request.
    """

    def __init__(self, connections: Connections, on_request: OnRequest, came: bytes = b"") -> None:
        self._connections = connections
        self._on_request = on_request
        self.transport: asyncio.Transport
        self.data = came
        """All that came, the head included."""
        self._asked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it among those that have shown nothing."""
        self.transport = cast("asyncio.Transport", transport)
        keep_alive(transport.get_extra_info("socket"))
        self._connections.made(self, self.transport)
        if self.data:
            self.data_received(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._connections.proved(self)

    def data_received(self, data: bytes) -> None:
        """Read up to the end of the head."""
        self.data += data
        if self._asked:
            return
        head, found, _ = self.data.partition(HEAD_END)
        try:
            if len(head) > HEAD_NBYTES:
                raise PayloadTooLargeError(f"the request's head is larger than {HEAD_NBYTES} bytes")
            if not found:
                return
            request = parse_request(head)
        except (PayloadTooLargeError, BadRequestError) as error:
            self._asked = True
            self.refuse(error)
            return
        self._asked = True
        self.transport.pause_reading()
        self._on_request(self, request)

    @property
    def behind(self) -> bytes:
        """The bytes that came behind the head."""
        return self.data.partition(HEAD_END)[2]

    def proved(self) -> None:
        """Do not count it among those that have shown nothing any more."""
        self._connections.proved(self)

    def answer(self, status: str, headers: dict[str, str], body: bytes = b"") -> None:
        """Send an answer; the connection stays."""
        lines = "".join(f"{name}: {text}\r\n" for name, text in headers.items())
        self.transport.write(f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body)

    def refuse(self, error: StokerError) -> None:
        """Send an error, and close."""
        self.transport.write(refusal(error))
        self.transport.close()
