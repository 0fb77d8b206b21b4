"""One connection from outside whose requests go, one after another, to whoever is to answer them.

A client uses one connection for all of an address. Behind it are several services, the gcs and callers
(:mod:`stoker.gateway.calls`): each request's head says which is meant. The connection stays with one of them
until a request comes that is for another, which HTTP/1.1 clients send once they have the answer before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from stoker.gateway.requests import Part, RequestReader, refusal
from stoker_wire.errors import StokerError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from stoker.gateway.admission import Holder
    from stoker_wire.http.gateway.protocol import RequestHead

_BUFFER_NBYTES = 1 << 20
"""What a slow end may have before the other is read no further."""


class Destination(NamedTuple):
    """A connection to who answers, and by what it is open."""

    transport: asyncio.Transport
    by: Holder


class Exchange(asyncio.Protocol):
    """The connection of one client, and the one with who answers its present request."""

    def __init__(
        self,
        key_of: Callable[[RequestHead], Hashable],
        dial: Callable[[RequestHead], Awaitable[Destination]],
        spawn: Callable[[Awaitable[None]], object],
        on_end: Callable[[Exchange], object],
    ) -> None:
        self._key_of = key_of
        self._dial = dial
        self._spawn = spawn
        self._on_end = on_end
        self._reader = RequestReader()
        self._client: asyncio.Transport
        self._far: _Far | None = None
        self._key: Hashable = None
        self._waiting: list[Part] = []
        """What came while the connection to who answers is being made."""
        self._is_dialing = False
        self._ended = self._at_end = False

    def begin(self, client: asyncio.Transport, data: bytes) -> None:
        """Take over a connection that is not read at present, with what came on it."""
        self._client = client
        client.set_write_buffer_limits(high=_BUFFER_NBYTES)
        client.set_protocol(self)
        if client.is_closing():
            self.connection_lost(None)
            return
        client.resume_reading()
        self.data_received(data)

    def abort(self) -> None:
        """End both connections at once."""
        if not self._ended:
            self._client.abort()

    # -- the client's side -----------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Pass on what is for who answers now; make another connection where it is for another."""
        try:
            self._waiting += self._reader.feed(data)
        except StokerError as error:
            self._refuse(error)
            return
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting and not self._is_dialing and not self._ended:
            head = self._waiting[0].head
            if head is not None and (self._far is None or self._key_of(head) != self._key):
                self._is_dialing = True
                self._pause(self._client)
                self._spawn(self._move(head))
                return
            if self._far is None:  # who answered has closed, and this connection is about to
                self._waiting.clear()
                return
            self._far.transport.write(self._waiting.pop(0).data)

    async def _move(self, head: RequestHead) -> None:
        """Leave who answered before, and connect with who answers this request."""
        self._leave()
        try:
            transport, by = await self._dial(head)
        except StokerError as error:
            self._refuse(error)
            return
        if self._ended:
            transport.abort()
            return
        self._is_dialing, self._key = False, self._key_of(head)
        self._far = _Far(self, transport, by)
        by.open.add(self)
        # The head is for this one: it is passed on whatever the next key says.
        transport.write(self._waiting.pop(0).data)
        self._far.begin()
        self._pass_on()
        if not self._is_dialing and not self._client.is_closing():
            self._client.resume_reading()
        if self._at_end:
            self._far.end()

    def eof_received(self) -> bool:
        """Tell who answers that no more comes; return whether the answer may still be sent."""
        self._at_end = True
        if self._is_dialing:
            return self._client.can_write_eof()
        return self._far is not None and self._client.can_write_eof() and self._far.end()

    def pause_writing(self) -> None:
        """Read who answers no further."""
        if self._far is not None:
            self._pause(self._far.transport)

    def resume_writing(self) -> None:
        """Read who answers again."""
        if self._far is not None and not self._far.transport.is_closing():
            self._far.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the other connection too."""
        self._ended = True
        self._leave(quietly=exc is None)
        self._waiting.clear()
        self._on_end(self)

    # -- the side of who answers -----------------------------------------------------------------

    def far_received(self, far: _Far, data: bytes) -> None:
        """Have the client get a part of an answer."""
        if far is self._far:
            self._client.write(data)

    def far_lost(self, far: _Far, exc: Exception | None) -> None:
        """Close the client's connection once it has all, unless it is with another by now."""
        if far is not self._far:
            return
        far.by.open.discard(self)
        self._far = None
        self._client.abort() if exc is not None else self._client.close()

    def far_ready(self, far: _Far, ready: bool) -> None:
        """Read the client further, or no further."""
        if far is self._far and not self._client.is_closing() and not self._is_dialing:
            self._client.resume_reading() if ready else self._client.pause_reading()

    def _leave(self, *, quietly: bool = True) -> None:
        far, self._far = self._far, None
        if far is not None:
            far.by.open.discard(self)
            far.transport.close() if quietly else far.transport.abort()

    @staticmethod
    def _pause(transport: asyncio.Transport) -> None:
        if not transport.is_closing():
            transport.pause_reading()

    def _refuse(self, error: StokerError) -> None:
        if not self._client.is_closing():
            self._client.write(refusal(error))
            self._client.close()


class _Far(asyncio.Protocol):
    """The connection with who answers."""

    def __init__(self, exchange: Exchange, transport: asyncio.Transport, by: Holder) -> None:
        self._exchange = exchange
        self.transport = transport
        self.by = by

    def begin(self) -> None:
        """Have the answer read; the connection is not read until then."""
        self.transport.set_write_buffer_limits(high=_BUFFER_NBYTES)
        self.transport.set_protocol(self)
        if self.transport.is_closing():  # before it had a protocol that it could tell
            self._exchange.far_lost(self, None)
        else:
            self.transport.resume_reading()

    def end(self) -> bool:
        """Say that no more comes; return whether that is possible without closing."""
        if not self.transport.can_write_eof():
            return False
        if not self.transport.is_closing():
            self.transport.write_eof()
        return True

    def data_received(self, data: bytes) -> None:
        """Have the client get it."""
        self._exchange.far_received(self, data)

    def pause_writing(self) -> None:
        """Read the client no further."""
        self._exchange.far_ready(self, False)

    def resume_writing(self) -> None:
        """Read the client again."""
        self._exchange.far_ready(self, True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the exchange."""
        self._exchange.far_lost(self, exc)
