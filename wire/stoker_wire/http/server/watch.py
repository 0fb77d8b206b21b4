"""Streaming replies: watches of events with a cursor (NDJSON or SSE), items as NDJSON, and bytes.

Called by handlers of routes with ``?watch=1`` or ``?follow=1``. A stream ends when its source ends,
when the reader goes away, or when the service stops; it has no deadline, but a watch is never
silent for longer than the bookmark interval, so that both sides notice a dead connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from aiohttp import ClientConnectionResetError, web

from stoker_wire.errors import InternalError, StokerError, UnavailableError
from stoker_wire.http.codec import EVENT_STREAM, NDJSON, encode_json
from stoker_wire.http.problems import problem_of
from stoker_wire.messages.control import Event
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from stoker_wire.http.server.request import Request

T = TypeVar("T")
_LOOK_S = 1.0, 2.0
"""Between two looks at whether the reader is there: at random, as many begin to wait at once."""

BOOKMARK = "bookmark"
"""Kind of an event that only moves the cursor."""
FAILED = "error"
"""Kind of the last event of a watch that failed; its payload is a problem document."""


async def watch_response(
    req: Request, source: AsyncIterator[Event], *, since: int = 0, bookmark_s: float | None = None
) -> web.StreamResponse:
    """Send the events of ``source`` as NDJSON, or as SSE if the reader accepts that.

    ``source`` must be checked for compaction before (raise CompactedError in the handler, so that
    the reader gets status 410); an error in mid-stream is sent as a last event of kind ``error``.
    A source may itself yield events of kind ``bookmark`` to move the cursor over what it filtered.
    """
    interval_s = req.settings.bookmark_s if bookmark_s is None else bookmark_s
    sse = EVENT_STREAM in req.http.headers.get("Accept", "")
    encode: Callable[[Event], bytes] = _sse if sse else _line
    req.lift_deadline()
    response = await _open(req, EVENT_STREAM if sse else NDJSON)
    seq = since
    try:
        async with contextlib.aclosing(_with_keepalives(req, source, interval_s)) as events:
            async for event in events:
                if event is None:
                    event = Event(seq=seq, at_s=time.time(), kind=BOOKMARK, subject="")
                seq = max(seq, event.seq)
                await response.write(encode(event))
    except Exception as error:
        if _left(error):
            return response
        await _send_failure(req, response, error, seq, encode)
    with contextlib.suppress(ConnectionError, ClientConnectionResetError):
        await response.write_eof()
    return response


def _left(error: Exception) -> bool:
    """Return whether the reader went away; a StokerError is of a peer behind the source."""
    gone = isinstance(error, (ConnectionError, ClientConnectionResetError))
    return gone and not isinstance(error, StokerError)


async def stream_response(req: Request, source: AsyncIterator[T]) -> web.StreamResponse:
    """Send each item of ``source`` as a line of JSON; empty lines keep it alive."""
    response = await _open(req, NDJSON)
    try:
        async with contextlib.aclosing(
            _with_keepalives(req, source, req.settings.bookmark_s)
        ) as items:
            async for item in items:
                await response.write(b"\n" if item is None else _line(item))
    except Exception as error:
        if _left(error):
            return response
        raise
    with contextlib.suppress(ConnectionError, ClientConnectionResetError):
        await response.write_eof()
    return response


async def bytes_response(
    req: Request, parts: AsyncIterator[bytes], content_type: str
) -> web.StreamResponse:
    """Send ``parts`` as one body, as they come; an error in mid-stream breaks the connection."""
    response = await _open(req, content_type)
    try:
        async for part in parts:
            if part:
                await response.write(part)
        await response.write_eof()
    except Exception as error:
        # A source may fail with a ConnectionError too: only a reader that is gone is no error.
        if _left(error) and _has_left(req):
            return response
        raise
    return response


async def while_read(req: Request, work: Awaitable[T]) -> T:
    """Return what ``work`` does; cancel it when the reader goes away or this service stops."""

    async def outcome() -> tuple[T | None, Exception | None]:
        try:
            return await work, None
        except Exception as error:
            return None, error

    async with asyncio.TaskGroup() as group:
        working, stopping = group.create_task(outcome()), group.create_task(req.stopping.wait())
        while not working.done():
            await asyncio.wait(
                {working, stopping},
                timeout=random.uniform(*_LOOK_S),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not working.done() and (_has_left(req) or stopping.done()):
                working.cancel()
                break
        stopping.cancel()
    if working.cancelled():
        raise UnavailableError("nobody waits for it any more")
    result, error = working.result()
    if error is not None:
        raise error
    return cast("T", result)


def _has_left(req: Request) -> bool:
    return req.http.transport is None or req.http.transport.is_closing()


async def _open(req: Request, content_type: str) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": content_type, "Cache-Control": "no-store"}
    )
    await response.prepare(req.http)
    return response


async def _with_keepalives(
    req: Request, source: AsyncIterator[T], interval_s: float
) -> AsyncGenerator[T | None, None]:
    """Yield the items of ``source``, and None after each ``interval_s`` of silence.

    Ends when the service stops or the reader goes away, and closes the source.
    """
    background = Background(f"watch {req.request_id}")
    stopping = background.spawn(req.stopping.wait(), name="stopping")
    pending: asyncio.Task[T | _End] | None = None
    try:
        while not stopping.done():
            if pending is None:
                pending = background.spawn(_next(source), name="next", report=False)
            await asyncio.wait(
                (pending, stopping), timeout=interval_s, return_when=asyncio.FIRST_COMPLETED
            )
            if req.http.transport is None:
                return
            if pending.done():
                done, pending = pending, None
                item = done.result()
                if isinstance(item, _End):
                    if item.error is not None:
                        raise item.error
                    return
                yield item
            elif not stopping.done():
                yield None
    finally:
        await background.close()
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a source: a value, so that it need not be fetched from a task that is dropped."""

    error: Exception | None


async def _next(source: AsyncIterator[T]) -> T | _End:
    try:
        return await anext(source)
    except StopAsyncIteration:
        return _End(None)
    except Exception as error:
        return _End(error)


async def _send_failure(
    req: Request,
    response: web.StreamResponse,
    error: Exception,
    seq: int,
    encode: Callable[[Event], bytes],
) -> None:
    if not isinstance(error, StokerError):
        req.log.error("watch crashed", exc_info=error)
        error = InternalError(f"the watch failed\nsee request id {req.request_id} in the log")
    problem = problem_of(error, request_id=req.request_id)
    event = Event(
        seq=seq,
        at_s=time.time(),
        kind=FAILED,
        subject=req.http.path,
        payload={"code": problem.code, "detail": problem.detail, "extra": problem.extra},
    )
    await response.write(encode(event))


def _line(item: object) -> bytes:
    return encode_json(item) + b"\n"


def _sse(event: Event) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (
        event.seq,
        event.kind.encode(),
        encode_json(event),
    )
