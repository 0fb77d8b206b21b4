"""Two connections joined to one: what either receives the other sends, as fast as that takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

_BUFFER_NBYTES = 1 << 20
"""What a slow end may have before the other is read no further."""


class Joint:
    """A pair of joined connections; ``on_end`` is called once, when both are closed."""

    def __init__(self, on_end: Callable[[Joint], object]) -> None:
        self._on_end = on_end
        self._ends: list[_End] = []
        self._open = 2

    def join(self, one: asyncio.Transport, other: asyncio.Transport) -> None:
        """Join two connections, of which neither is read at present."""
        self._ends = [_End(self, one), _End(self, other)]
        self._ends[0].other, self._ends[1].other = self._ends[1], self._ends[0]
        for end in self._ends:
            end.transport.set_write_buffer_limits(high=_BUFFER_NBYTES)
            end.transport.set_protocol(end)
        for end in self._ends:
            if end.transport.is_closing():  # before it had a protocol that it could tell
                self.abort()
            elif not end.transport.is_reading():
                end.transport.resume_reading()

    def abort(self) -> None:
        """End both connections at once."""
        for end in self._ends:
            if not end.lost:
                end.transport.abort()

    def ended(self) -> None:
        """Count one end that is closed."""
        self._open -= 1
        if not self._open:
            self._on_end(self)


class _End(asyncio.Protocol):
    """One of two joined connections."""

    other: _End

    def __init__(self, joint: Joint, transport: asyncio.Transport) -> None:
        self._joint = joint
        self.transport = transport
        self.lost = False
        self._at_end = False

    def data_received(self, data: bytes) -> None:
        """Have the other end send it."""
        self.other.transport.write(data)

    def eof_received(self) -> bool:
        """Tell the other end that no more comes; return whether this one may still send."""
        self._at_end = True
        other = self.other.transport
        # TLS ends in both directions at once.
        if self.other._at_end or not other.can_write_eof() or not self.transport.can_write_eof():
            return False
        if not other.is_closing():
            other.write_eof()
        return True

    def pause_writing(self) -> None:
        """Read the other end no further."""
        if not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        """Read the other end again."""
        if not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the other end, once it has sent what it has."""
        self.lost = True
        if exc is not None and not self.other.lost:
            self.other.transport.abort()
        else:
            self.other.transport.close()
        self._joint.ended()


class Held(asyncio.Protocol):
    """A connection to be joined, which is not read until then; what came before that is in ``data``."""

    def __init__(self, on_lost: Callable[[], object] = lambda: None) -> None:
        self._on_lost = on_lost
        self.transport: asyncio.Transport
        self.data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Read nothing yet."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        """Keep what was read already."""
        self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell who waits to join it."""
        self._on_lost()
