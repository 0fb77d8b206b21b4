"""The sending end of transfers: ranges of objects, straight from the arena's files to sockets.

The event loop takes the request and writes the reply's head; a thread then sends the bytes on the
connection's own socket, so neither the loop nor the interpreter's lock is held meanwhile. TLS is the
transport's, and with it the loop writes, in slices. A range of one chunk at most carries its XXH3, which
is computed once per chunk however many ask, and not at all by a node that received the chunk itself.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import xxhash
from aiohttp import web

from stoker_nodelet.transfer.chunk_map import ChunkMap, count_chunks, span_of
from stoker_wire.arena.views import Pin
from stoker_wire.data.range_reader import CHECKSUM_HEADER, CHUNK_NBYTES, STALL_S
from stoker_wire.errors import BadRequestError, NotFoundError, ObjectLostError, UnavailableError
from stoker_wire.http.codec import BYTES

if TYPE_CHECKING:
    import mmap

    from stoker_nodelet.objects.index import ObjectIndex
    from stoker_nodelet.transfer.fair_limiter import FairLimiter
    from stoker_nodelet.transfer.io_pool import IoPool
    from stoker_wire.http.server.service import Request

_FLUSH_TRIES = 2000
_FLUSH_AGAIN_S = 0.001
_SLICE_NBYTES = 1 << 20
_TLS_SLICE_NBYTES = 1 << 18
_CHECKSUMS = 10_000
"""The number of chunks whose checksums are remembered."""


class RangeServer:
    """Sender of this node's objects, whole ones and those that still arrive."""

    def __init__(
        self,
        objects: ObjectIndex,
        arriving: Callable[[str], ChunkMap | None],
        limiter: FairLimiter,
        io_pool: IoPool,
    ) -> None:
        self._objects = objects
        self._arriving = arriving
        self._limiter = limiter
        self._io_pool = io_pool
        self._checksums: OrderedDict[tuple[str, float, int], int] = OrderedDict()
        self.sent_nbytes = 0

    async def send(self, req: Request) -> web.StreamResponse:
        """Answer ``GET /v1/objects/{id}`` with the object, or with the part of it that ``Range`` names."""
        object_id = req.path["id"]
        nbytes = self._nbytes_of(object_id)
        begin, end = _requested_range(req, nbytes)
        key = f"{object_id} {req.peer}"
        with_checksum = end - begin <= CHUNK_NBYTES
        connection: socket.socket | None = None
        transport = req.http.transport
        is_tls = transport is not None and transport.get_extra_info("ssl_object") is not None
        response = web.StreamResponse()
        try:
            for offset in range(begin, end, CHUNK_NBYTES):
                until = min(end, offset + CHUNK_NBYTES)
                async with self._limiter.slot(key, until - offset):
                    mapped = await self._map(object_id, offset, until, with_checksum=with_checksum)
                    if offset == begin:
                        response = _response_head(req, begin, end, nbytes, mapped.checksum)
                        await response.prepare(req.http)
                        if not is_tls:
                            connection = await _flushed_socket(req.http)
                    if connection is None:
                        await self._write(response, mapped)
                    else:
                        await self._send(connection, mapped)
        finally:
            if connection is not None:
                connection.close()
        await response.write_eof()
        return response

    def _nbytes_of(self, object_id: str) -> int:
        chunks = self._arriving(object_id)
        return self._objects.get(object_id).nbytes if chunks is None else chunks.nbytes

    async def _map(
        self, object_id: str, begin: int, end: int, *, with_checksum: bool
    ) -> MappedRange:
        """Map these bytes of an object, at most a chunk, with their checksum if wanted."""
        chunk = begin // CHUNK_NBYTES
        is_chunk = (begin, end - begin) == span_of(chunk, self._nbytes_of(object_id))
        chunks = self._arriving(object_id)
        if chunks is not None:
            checksum = chunks.checksums[chunk] if is_chunk else None
            if checksum is None:
                raise UnavailableError(
                    f"{object_id} is still on its way to this node\n"
                    f"{chunks.ready} chunks of {CHUNK_NBYTES} bytes are here, and one at a time "
                    "can be had"
                )
            return MappedRange(chunks.memory, begin, end, checksum)
        known = self._checksums.get(self._key(object_id, chunk)) if is_chunk else None

        def open_range() -> MappedRange:
            try:
                fd = self._objects.arena.open(object_id)
            except ObjectLostError as error:
                raise NotFoundError(str(error)) from None
            pin = Pin(fd)
            mapping = self._objects.arena.mapping(object_id, fd)
            mapped = MappedRange(mapping, begin, end, known, pin)
            if with_checksum:
                mapped.compute_checksum()
            return mapped

        mapped = await self._io_pool.run(open_range)
        if is_chunk and mapped.checksum is not None:
            self._remember(object_id, chunk, mapped.checksum)
        return mapped

    def _remember(self, object_id: str, chunk: int, checksum: int) -> None:
        key = self._key(object_id, chunk)
        self._checksums[key] = checksum
        self._checksums.move_to_end(key)
        if len(self._checksums) > _CHECKSUMS:
            self._checksums.popitem(last=False)

    def _key(self, object_id: str, chunk: int) -> tuple[str, float, int]:
        """Return the key of a checksum: a task that is retried makes another object of the same id."""
        return object_id, self._objects.made_at_s(object_id), chunk

    def remember(self, object_id: str, chunks: ChunkMap) -> None:
        """Keep the checksums of an object that has arrived whole."""
        for chunk, checksum in enumerate(chunks.checksums):
            if checksum is not None:
                self._remember(object_id, chunk, checksum)

    async def _send(self, connection: socket.socket, mapped: MappedRange) -> None:
        try:
            await self._io_pool.run(
                lambda: mapped.send(connection), abort=lambda: _shut(connection)
            )
        except OSError as error:
            raise UnavailableError(f"the receiver went away\n{error}") from None
        self.sent_nbytes += mapped.nbytes

    async def _write(self, response: web.StreamResponse, mapped: MappedRange) -> None:
        try:
            for part in mapped.slices():
                async with asyncio.timeout(STALL_S):
                    await response.write(part)
        except OSError as error:
            raise UnavailableError(f"the receiver went away\n{error}") from None
        self.sent_nbytes += mapped.nbytes

    def ready_chunks(self, object_id: str) -> int | None:
        """Return how many chunks of a whole object there are; None if it is not whole here."""
        if object_id not in self._objects:
            return None
        return count_chunks(self._objects.get(object_id).nbytes)


class MappedRange:
    """Bytes ``begin`` to ``end`` of a mapped file, which ``pin`` keeps open, and so its lock.

    ``checksum`` is the XXH3, if it has been computed. The methods block: they are for threads.

    ``send`` from a mapping and not ``sendfile``: the kernel packs copied bytes into large buffers, where
    ``sendfile`` hands over one page at a time, which costs both ends more than the copy (ADR 0008).
    """

    def __init__(
        self,
        mapping: mmap.mmap,
        begin: int,
        end: int,
        checksum: int | None = None,
        pin: Pin | None = None,
    ) -> None:
        self.checksum = checksum
        self._view = memoryview(mapping)[begin:end]
        self._pin = pin

    @property
    def nbytes(self) -> int:
        """The length of the range."""
        return self._view.nbytes

    def compute_checksum(self) -> None:
        """Compute the checksum, unless it is known."""
        if self.checksum is None:
            self.checksum = xxhash.xxh3_64_intdigest(self._view)

    def slices(self) -> Iterator[memoryview]:
        """Yield the bytes in parts that the event loop can encrypt without holding up its other work."""
        for begin in range(0, self.nbytes, _TLS_SLICE_NBYTES):
            yield self._view[begin : begin + _TLS_SLICE_NBYTES]

    def send(self, connection: socket.socket, stall_s: float = STALL_S) -> None:
        """Send all to a non-blocking socket; OSError if it accepts no byte for ``stall_s``."""
        writable = select.poll()
        writable.register(connection, select.POLLOUT)
        sent = 0
        while sent < self._view.nbytes:
            try:
                sent += connection.send(self._view[sent : sent + _SLICE_NBYTES])
            except BlockingIOError:
                if not writable.poll(stall_s * 1000):
                    raise TimeoutError(f"the receiver took no byte for {stall_s:g} s") from None


def _requested_range(req: Request, nbytes: int) -> tuple[int, int]:
    """Return (begin, end) of what the request asks for."""
    try:
        asked = req.http.http_range
    except ValueError:
        raise BadRequestError("Range: expected bytes=<first>-<last>", field="Range") from None
    begin, end, _ = asked.indices(nbytes)
    if begin >= end:
        raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{nbytes}"})
    return begin, end


def _response_head(
    req: Request, begin: int, end: int, nbytes: int, checksum: int | None
) -> web.StreamResponse:
    headers = {"Content-Type": BYTES, "Accept-Ranges": "bytes"}
    partial = "Range" in req.http.headers
    if partial:
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{nbytes}"
    if checksum is not None:
        headers[CHECKSUM_HEADER] = f"{checksum:016x}"
    response = web.StreamResponse(status=206 if partial else 200, headers=headers)
    response.content_length = end - begin
    return response


async def _flushed_socket(http: web.Request) -> socket.socket:
    """Wait until the reply's head has left the transport; return a socket of its connection.

    From then on, and until the reply ends, nobody writes to the transport.
    """
    transport = http.transport
    if transport is None:
        raise UnavailableError("the receiver went away")
    for tries in range(_FLUSH_TRIES):
        if transport.is_closing():
            raise UnavailableError("the receiver went away")
        if not transport.get_write_buffer_size():
            return socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        await asyncio.sleep(_FLUSH_AGAIN_S if tries else 0)
    raise UnavailableError("the receiver did not take the head of the reply")


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it is gone already
