"""Changes as the open pages of the dashboard hear of them: how many of which kind, not the records.

A page then asks for what it shows, so an open one costs the same at ten and at a thousand events a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from typing import TYPE_CHECKING

from stoker_gcs.state import schema
from stoker_wire.errors import CompactedError, StokerError
from stoker_wire.messages.control import Event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from stoker_gcs.registry.jobs.training import TrainingRuns
    from stoker_gcs.registry.task_history import TaskHistory
    from stoker_gcs.state.event_log import EventLog
    from stoker_gcs.store.changes import Row
    from stoker_gcs.store.protocol import Store

CHANGE = "change"
"""The kind of what a page is sent: its payload counts the ``kinds`` of events, the ``tasks``
and the ``reports`` of training."""
TURN_S = 0.25
"""The time between two messages to a page."""
OTHERS_S = 2.0
"""How often it is looked whether other replicas have stored records, while a page is open."""


class StoredRecords:
    """Counts that grow with the records of tasks and the reports of training that are stored.

    At once with those that this replica stores. That others have stored some shows by sums over
    all, which are looked at now and then.
    """

    def __init__(self, store: Store, history: TaskHistory, training: TrainingRuns) -> None:
        self._store = store
        self._history, self._training = history, training
        self._looked_s = -math.inf
        self._tasks: list[Row] = []
        self._reports: list[Row] = []
        self._elsewhere = (0, 0)

    async def count(self) -> tuple[int, int]:
        """Return the counts of records and of reports."""
        now_s = time.monotonic()
        if self._store.shared and now_s - self._looked_s > OTHERS_S:
            self._looked_s = now_s
            with contextlib.suppress(StokerError):  # of a database that is away for the moment
                await self._look()
        records, reports = self._elsewhere
        return self._history.accepted + records, self._training.accepted + reports

    async def _look(self) -> None:
        tasks = await self._store.grouped(schema.TASK_COUNTS, ("state",), ("count",))
        sums = ("count", "newest_at_s")
        reports = await self._store.grouped(schema.TRAINING_METRICS, ("metric",), sums)
        before = self._elsewhere
        self._elsewhere = before[0] + (tasks != self._tasks), before[1] + (reports != self._reports)
        self._tasks, self._reports = tasks, reports


async def changes(
    log: EventLog, records: StoredRecords, since: int, sees: Callable[[Event], bool]
) -> AsyncIterator[Event]:
    """Yield at most one change a turn: how many events of each kind there were, records of tasks,
    and reports of training.

    The first one covers all from ``since`` on, and comes at once; of what is not kept any more it says
    nothing, as whoever begins with it looks at everything anyway.
    """
    since = log.last if since < 0 else since
    known = await records.count()
    first = True
    while True:
        kinds: Counter[str] = Counter()
        at_s = 0.0
        try:
            while events := await log.read(since):
                kinds.update(event.kind for event in events if sees(event))
                since, at_s = events[-1].seq, events[-1].at_s
        except CompactedError:
            since = log.last
        now = await records.count()
        tasks, reports = (a - b for a, b in zip(now, known, strict=True))
        known = now
        if kinds or tasks or reports or first:
            payload = {"kinds": dict(kinds), "tasks": tasks, "reports": reports}
            yield Event(seq=since, at_s=at_s, kind=CHANGE, subject="", payload=payload)
        first = False
        await asyncio.sleep(TURN_S)
