"""The metrics of a gcs, and whether it is ready."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from stoker_wire.errors import StokerError
from stoker_wire.messages.cluster import NodeState

if TYPE_CHECKING:
    from stoker_gcs.registry.jobs.registry import JobRegistry
    from stoker_gcs.registry.nodes.registry import NodeRegistry
    from stoker_gcs.registry.task_history import TaskHistory
    from stoker_gcs.state.records import StateStore
    from stoker_wire.http.server.service import Service
    from stoker_wire.process.metrics import Metrics

_log = logging.getLogger(__name__)
MEASURE_EVERY_S = 1.0
PING_EVERY_S = 1.0
PING_S = 2.0


class Maintenance:
    """The gauges of a gcs, and the loop that sets them."""

    def __init__(
        self,
        metrics: Metrics,
        state: StateStore,
        *,
        nodes: NodeRegistry,
        jobs: JobRegistry,
        history: TaskHistory,
    ) -> None:
        self._state = state
        self._nodes = nodes
        self._jobs = jobs
        self._history = history
        self._seq_gauge = metrics.gauge("events_seq", "Sequence number of the newest event.")
        self._nodes_gauge = metrics.gauge("nodes", "Nodes, by state.", ("state",))
        self._jobs_gauge = metrics.gauge("jobs_live", "Jobs that have not ended.")
        self._tasks_gauge = metrics.gauge("task_records", "Task records accepted since the start.")
        self._dropped_gauge = metrics.gauge("task_records_dropped", "Task records lost: must be 0.")
        self._unreadable_gauge = metrics.gauge(
            "task_records_unreadable", "Damaged task records that lists met: must be 0."
        )
        self._commits_gauge = metrics.gauge("commits", "Transactions since the start.")
        self._changes_gauge = metrics.gauge("changes", "Changes in those transactions.")
        self._degraded_gauge = metrics.gauge("hot_store_degraded", "1 while Redis does not answer.")

    async def update_metrics(self) -> None:
        """Set the gauges, until cancelled."""
        state = self._state
        while True:
            self._seq_gauge.set(state.log.last)
            states = [node.state for node in self._nodes.view.values()]
            for node_state in NodeState:
                self._nodes_gauge.labels(node_state.value).set(states.count(node_state))
            self._jobs_gauge.set(len(self._jobs.live))
            self._tasks_gauge.set(self._history.accepted)
            self._dropped_gauge.set(self._history.dropped)
            self._unreadable_gauge.set(self._history.unreadable)
            self._commits_gauge.set(state.writer.changes.batches)
            self._changes_gauge.set(state.writer.changes.items)
            self._degraded_gauge.set(int(state.ephemeral.degraded))
            await asyncio.sleep(MEASURE_EVERY_S)

    async def watch_database(self, service: Service) -> None:
        """Have ``/readyz`` say whether the database answers, until cancelled.

        A load balancer then leaves a replica alone that could only refuse.
        """
        while True:
            await asyncio.sleep(PING_EVERY_S)
            why = ""
            try:
                async with asyncio.timeout(PING_S):
                    await self._state.store.bounds()
                    await self._state.store.end_stalled()
            except StokerError as error:
                why = error.one_line
            except TimeoutError:
                why = f"the database has not answered for {PING_S:g} s"
            if why and not service.obstacle:
                _log.warning("not ready: %s", why)
            elif service.obstacle and not why:
                _log.info("ready again")
            # Not why in detail: whoever asks needs no token.
            service.obstacle = "its database does not answer" if why else ""
