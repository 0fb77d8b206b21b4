"""A timeline read from the gcs page by page: no more than a page of what ran is in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.api.tracing.timeline import Timeline
from stoker.exceptions import StokerError
from stoker_wire.errors import ForbiddenError, NotFoundError

if TYPE_CHECKING:
    from stoker.api.tracing.timeline import Event, Row
    from stoker.runtime.net.http import HttpClient

_PAGE = 1000
_NEWEST_FIRST = {"sort": "created", "order": "desc"}


class _Rows(msgspec.Struct):
    items: list[dict[str, Any]]
    next_cursor: str = ""
    total: int | None = None
    total_exact: bool = True


class TimelineReader:
    """The reader of one timeline: of a job, or of all that the caller may see.

    Of attempts the newest ``limit`` are read. ``not_read`` and :attr:`timeline` say what is not in it, once
    all events were taken.
    """

    def __init__(
        self,
        client: HttpClient,
        job_id: str = "",
        *,
        limit: int,
        since_s: float = 0.0,
        until_s: float | None = None,
    ) -> None:
        self._client = client
        self._job_id = job_id
        self._limit = limit
        self._window = {"since_s": since_s} | ({} if until_s is None else {"until_s": until_s})
        self.not_read = 0
        """Older attempts that were not read; at least so many."""
        self.read = 0
        self.silent_nodes: list[str] = []
        """Nodes that did not say what they did beside."""
        self.nodes = list(self._pages("/v1/nodes", {}))
        hosts = {one["node_id"]: one.get("hostname", "") for one in self.nodes}
        self.timeline = Timeline(self._job, hosts, time.time(), **self._window)

    def events(self) -> Iterator[Event]:
        """Yield all events."""
        for task in self._attempts():
            yield from self.timeline.attempt(task)
        for node in self.nodes:
            if node["state"] != "DEAD":
                yield from self._activity(node["node_id"])
        self.timeline.close()

    def notes(self) -> list[str]:
        """Return what is not in it, in words."""
        made, notes = self.timeline, []
        if self.not_read:
            notes.append(
                f"{self.not_read} older attempts were not read: --limit {self.read + self.not_read}"
            )
        for count, what in (
            (made.not_begun, "attempts have not begun"),
            (made.spans_left_out, "spans were beyond the bounds of their attempts"),
            (made.arrows_left_out, "calls have no arrow: their callers are not in it"),
        ):
            if count:
                notes.append(f"{count} {what}")
        if self.silent_nodes:
            notes.append(f"no transfers and spills of {', '.join(self.silent_nodes)}")
        return notes

    def _attempts(self) -> Iterator[Row]:
        asked: dict[str, Any] = {**_NEWEST_FIRST, "count": True}
        if self._job_id:
            asked["job_id"] = self._job_id
        cursor, total = "", 0
        while self.read < self._limit:
            size = min(self._limit - self.read, _PAGE)
            page = self._call("/v1/tasks", {**asked, "limit": size, "cursor": cursor or None})
            total = page.total or total
            asked.pop("count", None)
            self.read += len(page.items)
            yield from page.items
            cursor = page.next_cursor
            if not cursor:
                return
        self.not_read = max(total - self.read, 1)

    def _activity(self, node_id: str) -> Iterator[Event]:
        asked: dict[str, Any] = {**self._window}
        if self._job_id:
            asked["job_id"] = self._job_id
        try:
            for one in self._pages(f"/v1/nodes/{node_id}/activity", asked):
                yield from self.timeline.activity(node_id, one)
        except StokerError:  # it has just left, or is of an older version
            self.silent_nodes.append(node_id)

    def _pages(self, path: str, asked: dict[str, Any]) -> Iterator[Row]:
        cursor = ""
        while True:
            page = self._call(path, {**asked, "limit": _PAGE, "cursor": cursor or None})
            yield from page.items
            cursor = page.next_cursor
            if not cursor:
                return

    def _call(self, path: str, query: dict[str, Any]) -> _Rows:
        return self._client.call("GET", path, reply=_Rows, query=query)

    def _job(self, job_id: str) -> Row | None:
        try:
            return self._client.call("GET", f"/v1/jobs/{job_id}", reply=dict[str, Any])
        except (NotFoundError, ForbiddenError):
            return None
