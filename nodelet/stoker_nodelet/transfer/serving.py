"""Sends ranges of objects straight from the arena's files to sockets.

The event loop takes the request and writes the reply's head; a thread then sends the bytes on the
connection's own socket, so neither the loop nor the interpreter's lock is held meanwhile. A range
of one chunk at most carries its XXH3, which is computed once per chunk however many ask, and not
at all by a node that received the chunk itself.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web

from stoker_nodelet.transfer.chunk_map import Incoming, count_chunks, span_of
from stoker_nodelet.transfer.mapped_range import Window
from stoker_wire.data.range_reader import CHECKSUM_HEADER, CHUNK_NBYTES
from stoker_wire.errors import BadRequestError, NotFoundError, ObjectLostError, UnavailableError
from stoker_wire.http.codec import BYTES

if TYPE_CHECKING:
    from stoker_nodelet.objects.index import Objects
    from stoker_nodelet.transfer.fair_limiter import Turns
    from stoker_nodelet.transfer.io_pool import TransferThreads
    from stoker_wire.http.server import Request

_FLUSH_TRIES = 2000
_FLUSH_AGAIN_S = 0.001
_CHECKSUMS = 10_000
"""Chunks whose checksums are remembered."""


class Serving:
    """The bytes of this node's objects, whole ones and those that are still coming in."""

    def __init__(
        self,
        objects: Objects,
        incoming: Callable[[str], Incoming | None],
        turns: Turns,
        threads: TransferThreads,
    ) -> None:
        self._objects = objects
        self._incoming = incoming
        self._turns = turns
        self._threads = threads
        self._checksums: OrderedDict[tuple[str, float, int], int] = OrderedDict()
        self.sent_nbytes = 0

    async def send(self, req: Request) -> web.StreamResponse:
        """``GET /v1/objects/{id}``: an object, or the part of it that ``Range`` names."""
        object_id = req.path["id"]
        nbytes = self._nbytes_of(object_id)
        begin, end = _wanted(req, nbytes)
        flow = f"{object_id} {req.peer}"
        alone = end - begin <= CHUNK_NBYTES
        connection: socket.socket | None = None
        response = web.StreamResponse()
        try:
            for offset in range(begin, end, CHUNK_NBYTES):
                until = min(end, offset + CHUNK_NBYTES)
                async with self._turns.turn(flow, until - offset):
                    window = await self._window(object_id, offset, until, checked=alone)
                    if connection is None:
                        response = _head_of(req, begin, end, nbytes, window.checksum)
                        await response.prepare(req.http)
                        connection = await _flushed_socket(req.http)
                    await self._send(connection, window)
        finally:
            if connection is not None:
                connection.close()
        await response.write_eof()
        return response

    def _nbytes_of(self, object_id: str) -> int:
        coming = self._incoming(object_id)
        return self._objects.get(object_id).nbytes if coming is None else coming.nbytes

    async def _window(self, object_id: str, begin: int, end: int, *, checked: bool) -> Window:
        """Return these bytes of an object, at most a chunk, with their checksum if wanted."""
        chunk = begin // CHUNK_NBYTES
        is_chunk = (begin, end - begin) == span_of(chunk, self._nbytes_of(object_id))
        coming = self._incoming(object_id)
        if coming is not None:
            checksum = coming.checksums[chunk] if is_chunk else None
            if checksum is None:
                raise UnavailableError(
                    f"{object_id} is still on its way to this node\n"
                    f"{coming.ready} chunks of {CHUNK_NBYTES} bytes are here, and one at a time "
                    "can be had"
                )
            return Window(coming.fd, begin, end, checksum)
        known = self._checksums.get(self._key(object_id, chunk)) if is_chunk else None

        def open_window() -> Window:
            try:
                fd = self._objects.arena.open(object_id)
            except ObjectLostError as error:
                raise NotFoundError(str(error)) from None
            try:
                window = Window(fd, begin, end, known)
            finally:
                os.close(fd)
            if checked:
                window.check()
            return window

        window = await self._threads.run(open_window)
        if is_chunk and window.checksum is not None:
            self._remember(object_id, chunk, window.checksum)
        return window

    def _remember(self, object_id: str, chunk: int, checksum: int) -> None:
        key = self._key(object_id, chunk)
        self._checksums[key] = checksum
        self._checksums.move_to_end(key)
        if len(self._checksums) > _CHECKSUMS:
            self._checksums.popitem(last=False)

    def _key(self, object_id: str, chunk: int) -> tuple[str, float, int]:
        """A task that is tried again makes another object of the same name."""
        return object_id, self._objects.made_at_s(object_id), chunk

    def remember(self, object_id: str, coming: Incoming) -> None:
        """Keep the checksums of an object that has come in whole."""
        for chunk, checksum in enumerate(coming.checksums):
            if checksum is not None:
                self._remember(object_id, chunk, checksum)

    async def _send(self, connection: socket.socket, window: Window) -> None:
        try:
            await self._threads.run(
                lambda: window.send(connection), abort=lambda: _shut(connection)
            )
        except OSError as error:
            raise UnavailableError(f"the receiver went away\n{error}") from None
        self.sent_nbytes += window.nbytes

    def ready_chunks(self, object_id: str) -> int | None:
        """Return how many chunks of a whole object there are; None if it is not whole here."""
        if object_id not in self._objects:
            return None
        return count_chunks(self._objects.get(object_id).nbytes)


def _wanted(req: Request, nbytes: int) -> tuple[int, int]:
    """Return (begin, end) of what the request asks for."""
    try:
        asked = req.http.http_range
    except ValueError:
        raise BadRequestError("Range: expected bytes=<first>-<last>", field="Range") from None
    begin, end, _ = asked.indices(nbytes)
    if begin >= end:
        raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{nbytes}"})
    return begin, end


def _head_of(
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
