"""The metrics of a gcs, and whether it is ready."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from stoker_wire.errors import StokerError
from stoker_wire.messages.cluster import NodeState

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker_gcs.ephemeral.redis import RedisEphemeralStore
    from stoker_gcs.registry.jobs.registry import JobRegistry
    from stoker_gcs.registry.nodes.registry import NodeRegistry
    from stoker_gcs.registry.task_history import TaskHistory
    from stoker_gcs.state.records import StateStore
    from stoker_gcs.store.group_commit import BatchQueue
    from stoker_wire.http.server.service import Service

_log = logging.getLogger(__name__)
PING_EVERY_S = 1.0
PING_S = 2.0


class Maintenance:
    """The metrics of a gcs beside those of its tasks, and the look at its database."""

    def __init__(
        self,
        service: Service,
        state: StateStore,
        *,
        nodes: NodeRegistry,
        jobs: JobRegistry,
        history: TaskHistory,
        leads: Callable[[], bool],
    ) -> None:
        self._state = state
        self._nodes = nodes
        self._service = service
        self._show = show = service.metrics.show
        log = state.log
        show("stoker_leader", lambda: int(leads()))
        show("stoker_nodes", self._count_nodes)
        show("stoker_jobs_live", lambda: len(jobs.live))
        show("stoker_events_total", lambda: log.kinds)
        show("stoker_event_log_sequence", lambda: log.last)
        show("stoker_event_watchers", lambda: log.watchers)
        show("stoker_task_records_total", lambda: history.accepted)
        show("stoker_task_records_dropped_total", lambda: history.dropped)
        show("stoker_task_records_unreadable_total", lambda: history.unreadable)
        show("stoker_database_up", lambda: int(not service.obstacle))
        self._show_queues()

    def _count_nodes(self) -> dict[str, int]:
        states = Counter(node.state for node in self._nodes.view.values())
        return {state.value: states[state] for state in NodeState}

    def _show_queues(self) -> None:
        """Show the transactions of the writer's two queues."""
        writer = self._state.writer
        queues: dict[str, BatchQueue[Any, Any]] = {
            "changes": writer.changes,
            "tasks": writer.tasks,
        }

        def show(name: str, read: Callable[[BatchQueue[Any, Any]], Any]) -> None:
            self._show(name, lambda: {queue: read(one) for queue, one in queues.items()})

        show("stoker_sql_transactions_total", lambda queue: queue.batches)
        show("stoker_sql_failures_total", lambda queue: queue.failures)
        show("stoker_sql_writes_total", lambda queue: queue.items)
        show("stoker_sql_transaction_seconds", lambda queue: queue.seconds)
        show("stoker_sql_queue_length", lambda queue: queue.waiting)

    def show_redis(self, redis: RedisEphemeralStore) -> None:
        """Show whether Redis answers, and how often it did."""
        self._show("stoker_redis_up", lambda: int(not redis.degraded))
        self._show("stoker_redis_round_trips_total", lambda: redis.round_trips)
        self._show("stoker_redis_failures_total", lambda: redis.failures)

    async def watch_database(self) -> None:
        """Have ``/readyz`` say whether the database answers, until cancelled.

        A load balancer then leaves a replica alone that could only refuse.
        """
        service = self._service
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
