"""The route of the event log, and the watches of all lists: both read :class:`EventLog` only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stoker_gcs.api.filters import event_filter
from stoker_wire.http.codec import without_env_vars
from stoker_wire.http.paging import bad_cursor
from stoker_wire.http.principals import READERS
from stoker_wire.http.server.routes import Route
from stoker_wire.http.server.watch import BOOKMARK, watch_response
from stoker_wire.messages.common import Role
from stoker_wire.messages.control import Event, Order, Page
from stoker_wire.messages.events import EventQuery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aiohttp import web

    from stoker_gcs.app import GcsApp
    from stoker_gcs.state.records import StateStore
    from stoker_wire.http.principals import Principal
    from stoker_wire.http.server.request import Request

SKIPPED_BEFORE_BOOKMARK = 500
READS_PER_PAGE = 20


async def list_events(app: GcsApp, req: Request) -> Any:
    query: EventQuery = req.query
    if query.watch:
        kind, _, node_id = req.peer.partition(" ")
        if kind == "nodelet":
            app.probes.watches(node_id, req.http)
        return await watch(app, req, _matches(app, req))
    matches = _matches(app, req)
    page = await _page(app.state, query, await app.access.seen(req.principal, matches))
    shown = tuple(app.access.shown(req.principal, event) for event in page.items)
    return msgspec.structs.replace(page, items=shown)


def _matches(app: GcsApp, req: Request) -> Callable[[Event], bool]:
    """Return the filter of a query: by what the caller may see of an event, or it would tell the rest."""
    matches = event_filter(req.query.kind, req.query.subject, req.query.by)
    if not req.query.by:
        return matches
    return lambda event: matches(app.access.shown(req.principal, event))


async def watch(app: GcsApp, req: Request, matches: Callable[[Event], bool]) -> web.StreamResponse:
    """Stream matching events after ``?since`` that the caller may see.

    CompactedError (410) if some of them are gone.
    """
    since: int = req.query.since
    await app.state.log.read(since, 1)
    source = _matching(app.state, since, await app.access.seen(req.principal, matches))
    if not req.principal.sees_all:
        source = _shown(app, req.principal, source)
    if req.principal.role is Role.VIEWER:
        source = _without_env_vars(source)
    return await watch_response(req, source, since=since, bookmark_s=req.settings.bookmark_s)


async def _shown(
    app: GcsApp, principal: Principal, events: AsyncIterator[Event]
) -> AsyncIterator[Event]:
    async for event in events:
        yield app.access.shown(principal, event)


async def _without_env_vars(events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    async for event in events:
        yield msgspec.structs.replace(event, payload=without_env_vars(event.payload))


async def _matching(
    state: StateStore, since: int, matches: Callable[[Event], bool]
) -> AsyncIterator[Event]:
    reported = since
    state.log.watchers += 1
    try:
        async for events in state.log.follow(since):
            for event in events:
                if matches(event):
                    reported = event.seq
                    yield event
            last = events[-1]
            if last.seq - reported > SKIPPED_BEFORE_BOOKMARK:
                # Else a reader that reconnects would start before the oldest event still stored.
                reported = last.seq
                yield Event(seq=last.seq, at_s=last.at_s, kind=BOOKMARK, subject="")
    finally:
        state.log.watchers -= 1


async def _page(
    state: StateStore, query: EventQuery, matches: Callable[[Event], bool]
) -> Page[Event]:
    """Return a page of the log behind the cursor: from ``since`` on, or with ``order=desc`` back to it.

    One page reads a bounded part of the log, so it may be short, or empty, with a next cursor.
    """
    last, first = state.log.last, max(query.since, state.log.compacted)
    given = query.cursor
    if given and not (given.isascii() and given.isdecimal() and len(given) < 19):
        raise bad_cursor(query.cursor)
    backwards = query.order is Order.DESC
    at = int(query.cursor) if query.cursor else (last + 1 if backwards else first)
    items: list[Event] = []
    more = True
    for _ in range(READS_PER_PAGE):
        events = await (state.log.read_back(at, first) if backwards else state.log.read(at))
        for event in events:
            at = event.seq
            if matches(event):
                items.append(event)
                if len(items) == query.limit:
                    break
        more = bool(events)
        if not events or len(items) == query.limit:
            break
    left = more and (at > first + 1 if backwards else at < last)
    # Filtered events cannot be counted without reading all of them.
    counted = query.count and not (query.kind or query.subject or query.by)
    total = state.log.numbering.count(first, last) if counted else None
    return Page(
        items=tuple(items),
        next_cursor=str(at) if left else "",
        seq=last,
        total=total,
        # Numbers of transactions that were rolled back are missing where several replicas write.
        total_exact=not state.store.shared,
    )


ROUTES = (
    Route(
        "GET",
        "/v1/events",
        list_events,
        query=EventQuery,
        reply=Page[Event],
        roles=READERS,
        summary="List events, or watch them from ?since on",
    ),
)
