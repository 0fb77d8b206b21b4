"""The work of a node beside running calls, for timelines: transfers, spills, starts of workers, GPUs in use.

The newest entries are kept in memory, and end with the nodelet: they explain, and nothing depends on them.
An entry is of a thing that takes a request or a disk at least, so its own cost does not show.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from stoker_wire.messages.control import Page
from stoker_wire.messages.node_api import ActivityKind, NodeActivity

if TYPE_CHECKING:
    from stoker_wire.messages.queries import ActivityQuery

MAX_ENTRIES = 10_000


class ActivityLog:
    """The newest entries of one node, numbered from 1."""

    def __init__(self) -> None:
        self._entries: deque[NodeActivity] = deque(maxlen=MAX_ENTRIES)
        self._last = 0
        self._gpus = 0.0

    def add(
        self,
        kind: ActivityKind,
        began_at_s: float,
        *,
        name: str = "",
        job_id: str = "",
        peer: str = "",
        nbytes: int = 0,
        amount: float = 0.0,
    ) -> None:
        """Add what has just ended."""
        self._last += 1
        self._entries.append(
            NodeActivity(
                number=self._last,
                kind=kind,
                began_at_s=began_at_s,
                ended_at_s=max(began_at_s, time.time()),
                name=name,
                job_id=job_id,
                peer=peer,
                nbytes=nbytes,
                amount=amount,
            )
        )

    def gpus(self, amount: float) -> None:
        """Add how many GPUs are in use, if that has changed."""
        if amount != self._gpus:
            self._gpus = amount
            self.add(ActivityKind.GPUS, time.time(), amount=amount)

    def page(self, query: ActivityQuery) -> Page[NodeActivity]:
        """Return entries of a job and a time, oldest first."""
        after = int(query.cursor or 0)
        first = self._last - len(self._entries)
        left = max(0, after - first)
        chosen = (
            one
            for one in islice(self._entries, left, None)
            if query.job_id in ("", one.job_id)
            and one.ended_at_s >= query.since_s
            and one.began_at_s <= query.until_s
        )
        items = tuple(islice(chosen, query.limit + 1))
        shown = items[: query.limit]
        cursor = str(shown[-1].number) if len(items) > len(shown) else ""
        return Page(items=shown, next_cursor=cursor)
