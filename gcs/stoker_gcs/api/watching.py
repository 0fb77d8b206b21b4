"""Watches over the event log: filters, and the check that no event before the cursor is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_wire.messages.control import Event, EventQuery, Page
from stoker_wire.server import Request, watch_response

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aiohttp import web

    from stoker_gcs.truth import Truth

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
    """One page of the log, oldest first, from ``since`` or the cursor on."""
    matches = matcher(query.kind, query.subject)
    last = truth.log.last
    at = int(query.cursor) if query.cursor.isdecimal() else max(query.since, truth.log.compacted)
    found: list[Event] = []
    for _ in range(READS_PER_PAGE):
        events = await truth.log.read(at)
        for event in events:
            at = event.seq
            if matches(event):
                found.append(event)
                if len(found) == query.limit:
                    break
        if not events or len(found) == query.limit:
            break
    return Page(items=tuple(found), next_cursor=str(at) if at < last else "", seq=last)
