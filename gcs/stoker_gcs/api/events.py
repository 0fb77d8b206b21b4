"""Watches over the event log: filters, and the check that no event before the cursor is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_wire.http.paging import bad_cursor
from stoker_wire.http.server import Request, watch_response
from stoker_wire.messages.control import Event, EventQuery, Order, Page

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aiohttp import web

    from stoker_gcs.state.records import Truth

SKIPPED_BEFORE_BOOKMARK = 500
READS_PER_PAGE = 20


def matcher(kinds: str, subjects: str = "") -> Callable[[Event], bool]:
    """Whether an event's kind and subject start with one of these (comma-separated) prefixes."""
    wanted_kinds = tuple(part for part in kinds.split(",") if part)
    wanted_subjects = tuple(part for part in subjects.split(",") if part)

    def matches(event: Event) -> bool:
        return (not wanted_kinds or event.kind.startswith(wanted_kinds)) and (
            not wanted_subjects or event.subject.startswith(wanted_subjects)
        )

    return matches


async def watch(
    truth: Truth, req: Request, since: int, matches: Callable[[Event], bool], bookmark_s: float
) -> web.StreamResponse:
    """Stream matching events after ``since``; CompactedError (410) if some of them are gone."""
    await truth.log.read(since, 1)
    source = _matching(truth, since, matches)
    return await watch_response(req, source, since=since, bookmark_s=bookmark_s)


async def _matching(
    truth: Truth, since: int, matches: Callable[[Event], bool]
) -> AsyncIterator[Event]:
    told = since
    async for events in truth.log.follow(since):
        for event in events:
            if matches(event):
                told = event.seq
                yield event
        last = events[-1]
        if last.seq - told > SKIPPED_BEFORE_BOOKMARK:
            # So that a reader who comes back does not start before what is kept by then.
            told = last.seq
            yield Event(seq=last.seq, at_s=last.at_s, kind="bookmark", subject="")


async def page(truth: Truth, query: EventQuery) -> Page[Event]:
    """One page of the log behind the cursor: from ``since`` on, or with ``order=desc`` back to it.

    One page reads a bounded part of the log, so it may be short, or empty, with a next cursor.
    """
    matches = matcher(query.kind, query.subject)
    last, first = truth.log.last, max(query.since, truth.log.compacted)
    if query.cursor and not (query.cursor.isascii() and query.cursor.isdecimal()):
        raise bad_cursor(query.cursor)
    backwards = query.order is Order.DESC
    at = int(query.cursor) if query.cursor else (last + 1 if backwards else first)
    found: list[Event] = []
    more = True
    for _ in range(READS_PER_PAGE):
        events = await (truth.log.read_back(at, first) if backwards else truth.log.read(at))
        for event in events:
            at = event.seq
            if matches(event):
                found.append(event)
                if len(found) == query.limit:
                    break
        more = bool(events)
        if not events or len(found) == query.limit:
            break
    left = more and (at > first + 1 if backwards else at < last)
    # Of filtered events nobody knows how many there are without reading them all.
    total = None if query.kind or query.subject or not query.count else last - first
    return Page(
        items=tuple(found),
        next_cursor=str(at) if left else "",
        seq=last,
        total=total,
        # Numbers of transactions that were rolled back are missing where several replicas write.
        total_exact=not truth.store.shared,
    )
