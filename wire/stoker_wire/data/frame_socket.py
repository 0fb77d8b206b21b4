"""Frames over a stream socket: each behind its length, small ones gathered, large ones never copied.

::

    u64 frame length | frame | u64 frame length | frame | ...

Used by :mod:`stoker_wire.data.channel`, on the thread of one event loop. It knows nothing of what is in
a frame. Reads and writes are made where the socket is ready, straight from and into the frames' own
memory (``sendmsg``, ``recv_into``). A :class:`~stoker_wire.tls.socket.TlsSocket` does as a plain one does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

from stoker_wire.errors import UnavailableError
from stoker_wire.tls.socket import TlsSocket

Frame = bytes | memoryview
_log = logging.getLogger(__name__)
_LENGTH = struct.Struct("<Q")
_BUFFER_NBYTES = 1 << 18
_OWN_MEMORY_NBYTES = 1 << 16
"""A frame from this size on is received into memory of its own."""
MAX_FRAME_NBYTES = 1 << 36
"""The largest frame: a process without an arena sends a value of any size in one."""
_MAX_PARTS = 512
"""Buffers of one ``sendmsg`` (the system takes 1024)."""
_READS = 8
"""Calls of ``recv_into`` at a time: a large frame must not hold up the loop's other work."""


def length_prefix(nbytes: int) -> bytes:
    """Return what goes before a frame of ``nbytes``."""
    return _LENGTH.pack(nbytes)


class FrameSocket:
    """A connected, non-blocking socket that carries frames both ways.

    ``received`` is what was read from it before. Frames that arrive before :meth:`start` wait for
    :meth:`receive`.
    """

    def __init__(self, sock: socket.socket | TlsSocket, received: bytes = b"") -> None:
        self._sock = sock
        self._tls = sock if isinstance(sock, TlsSocket) else None
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(_BUFFER_NBYTES)
        self._view = memoryview(self._buffer)
        self._begin = 0
        self._end = len(received)
        self._view[: self._end] = received
        self._large: memoryview | None = None
        """A frame that is being received into its own memory, and how much of it is there."""
        self._large_end = 0
        self._unsent: deque[memoryview] = deque()
        self._frames: deque[Frame] = deque()
        self._arrived: asyncio.Future[None] | None = None
        self._on_frames: Callable[[list[Frame]], None] | None = None
        self._on_closed: Callable[[], None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self.closed = False
        self._deliver(self._parse())
        self._loop.add_reader(sock, self.read)
        self._read_on_if_more()

    def start(
        self, on_frames: Callable[[list[Frame]], None], on_closed: Callable[[], None]
    ) -> None:
        """Hand all frames over from now on, and say once that the socket is closed."""
        self._on_frames, self._on_closed = on_frames, on_closed
        if self._frames:
            waiting, self._frames = list(self._frames), deque()
            on_frames(waiting)
        if self.closed:
            on_closed()

    async def receive(self) -> Frame:
        """Return the next frame, before :meth:`start`. UnavailableError if the socket closes."""
        while not self._frames:
            if self.closed:
                raise UnavailableError("the connection was closed")
            self._arrived = self._loop.create_future()
            await self._arrived
        return self._frames.popleft()

    # -- sending ---------------------------------------------------------------------------------

    def send(self, parts: Sequence[Frame]) -> None:
        """Send buffers one behind the other; what the socket does not take now follows by itself.

        They must not change until they have left. Lost where the socket is closed.
        """
        if self.closed:
            return
        if self._unsent:
            self._unsent.extend(memoryview(part) for part in parts if len(part))
            return
        try:
            sent = self._sock.sendmsg(parts[:_MAX_PARTS])
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close()
            return
        if len(parts) == 1 and sent == len(parts[0]):
            return
        self._unsent.extend(memoryview(part) for part in parts if len(part))
        self._drop(sent)
        if self._unsent:
            self._loop.add_writer(self._sock, self._write)

    def _drop(self, sent: int) -> None:
        """Take ``sent`` bytes off what waits."""
        unsent = self._unsent
        while sent:
            first = unsent[0]
            if sent < first.nbytes:
                unsent[0] = first[sent:]
                return
            sent -= first.nbytes
            unsent.popleft()

    def _write(self) -> None:
        parts = [part for part, _ in zip(self._unsent, range(_MAX_PARTS), strict=False)]
        try:
            self._drop(self._sock.sendmsg(parts))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        if not self._unsent:
            self._loop.remove_writer(self._sock)
            if self._drained is not None and not self._drained.done():
                self._drained.set_result(None)

    async def drain(self) -> None:
        """Return once all that was sent has left, or the socket is closed."""
        if self._unsent and not self.closed:
            self._drained = self._loop.create_future()
            await self._drained

    # -- receiving -------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 once it is closed."""
        return self._sock.fileno()

    def pause_reading(self) -> None:
        """Leave it to the caller to :meth:`read` when the socket is readable."""
        if not self.closed:
            self._loop.remove_reader(self._sock)

    def resume_reading(self) -> None:
        """Have the loop read again."""
        if not self.closed:
            self._loop.add_reader(self._sock, self.read)

    def read(self) -> None:
        """Hand over the frames that the socket has now; close where its other end has."""
        frames: list[Frame] = []
        try:
            for _ in range(_READS):
                large = self._large
                if large is None:
                    nbytes = self._sock.recv_into(self._view[self._end :])
                    self._end += nbytes
                    full = self._end == _BUFFER_NBYTES
                    frames += self._parse()
                else:
                    nbytes = self._sock.recv_into(large[self._large_end :])
                    self._large_end += nbytes
                    full = True
                    if self._large_end == large.nbytes:
                        frames.append(large.toreadonly())
                        self._large = None
                if not nbytes:
                    self._deliver(frames)
                    self.close()
                    return
                if not full:
                    break
            else:
                self._read_on_if_more()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._deliver(frames)
            self.close()
            return
        self._deliver(frames)

    def _read_on_if_more(self) -> None:
        """Have what TLS has received and not handed over read soon: no readiness will tell of it."""
        if self._tls is not None and self._tls.has_more:
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if not self.closed:
            self.read()

    def _parse(self) -> list[Frame]:
        """Return the whole frames in the buffer; a large one that has begun goes on in its own memory."""
        view, begin, end = self._view, self._begin, self._end
        frames: list[Frame] = []
        while end - begin >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(view, begin)
            here = begin + _LENGTH.size
            if nbytes > MAX_FRAME_NBYTES:
                self._refuse(
                    "a data frame of %d bytes was announced: no frame is that long", nbytes
                )
                break
            if end - here >= nbytes:
                frames.append(bytes(view[here : here + nbytes]))
                begin = here + nbytes
            elif nbytes >= _OWN_MEMORY_NBYTES:
                try:
                    self._large = memoryview(bytearray(nbytes))
                except MemoryError:
                    self._refuse("there is no memory for a data frame of %d bytes", nbytes)
                    break
                self._large_end = end - here
                self._large[: self._large_end] = view[here:end]
                begin = end
            else:
                break
        if begin == end:
            begin = end = 0
        elif _BUFFER_NBYTES - begin < _OWN_MEMORY_NBYTES + _LENGTH.size:
            view[: end - begin] = bytes(view[begin:end])
            begin, end = 0, end - begin
        self._begin, self._end = begin, end
        return frames

    def _refuse(self, why: str, nbytes: int) -> None:
        _log.warning(why, nbytes)
        self._loop.call_soon(self.close)  # behind the frames before it

    def _deliver(self, frames: list[Frame]) -> None:
        if not frames:
            return
        if self._on_frames is not None:
            self._on_frames(frames)
            return
        self._frames.extend(frames)
        self._wake()

    def _wake(self) -> None:
        for future in (self._arrived, self._drained if self.closed else None):
            if future is not None and not future.done():
                future.set_result(None)

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the socket at once; what has not left is lost."""
        if self.closed:
            return
        self.closed = True
        for remove in (self._loop.remove_reader, self._loop.remove_writer):
            # Closed by others, it has no descriptor; uvloop closes one for good as its reader is removed.
            with contextlib.suppress(ValueError):
                remove(self._sock)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._unsent.clear()
        self._wake()
        if self._on_closed is not None:
            self._on_closed()
