"""What a gcs does for its own health: metrics, and forgetting events that are very old."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from stoker_gcs.app import COMPACT_EVERY_S, KEEP_EVENTS
from stoker_wire.errors import StokerError

if TYPE_CHECKING:
    from stoker_gcs.app import Parts
    from stoker_wire.http.server import Service

_log = logging.getLogger("stoker.gcs")
MEASURE_EVERY_S = 1.0


class Upkeep:
    """See the module."""

    def __init__(self, service: Service, parts: Parts) -> None:
        self._parts = parts
        metrics = service.metrics
        self._seq = metrics.gauge("events_seq", "Sequence number of the newest event.")
        self._nodes = metrics.gauge("nodes", "Nodes, by state.", ("state",))
        self._jobs = metrics.gauge("jobs_live", "Jobs that have not ended.")
        self._tasks = metrics.gauge("task_records", "Task records accepted since the start.")
        self._dropped = metrics.gauge("task_records_dropped", "Task records lost: must be 0.")
        self._commits = metrics.gauge("commits", "Transactions since the start.")
        self._changes = metrics.gauge("changes", "Changes in those transactions.")
        self._degraded = metrics.gauge("hot_store_degraded", "1 while Redis does not answer.")

    async def measure(self) -> None:
        """Set the gauges, forever."""
        while True:
            parts = self._parts
            self._seq.set(parts.truth.log.last)
            states = [node.state for node in parts.nodes.view.values()]
            for state in ("ALIVE", "SUSPECT", "DEAD"):
                self._nodes.labels(state).set(states.count(state))  # type: ignore[arg-type]
            self._jobs.set(len(parts.ledger.live))
            self._tasks.set(parts.history.accepted)
            self._dropped.set(parts.history.dropped)
            self._commits.set(parts.truth.journal.changes.batches)
            self._changes.set(parts.truth.journal.changes.items)
            self._degraded.set(int(parts.hot.degraded))
            await asyncio.sleep(MEASURE_EVERY_S)

    async def compact(self) -> None:
        """The leading replica: forget old events now and then."""
        while True:
            await asyncio.sleep(COMPACT_EVERY_S)
            try:
                await self._parts.truth.log.compact(KEEP_EVENTS)
            except StokerError as error:
                _log.warning("compaction waits: %s", error)
