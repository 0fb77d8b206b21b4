"""Reports of this process's metrics to the nodelet of its node, soon after they change."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from stoker.exceptions import StokerError
from stoker.runtime.process.metric_values import TABLE
from stoker_wire.messages.node_api import ReportMetrics

if TYPE_CHECKING:
    from stoker.runtime.job import JobContext
    from stoker.runtime.net.clients import ClusterClients
    from stoker.runtime.process.identity import Identity
    from stoker.runtime.process.io_thread import IoThread

EVERY_S = 2.0
AGAIN_S = 60.0
"""A report without news says that this process still is."""
_SEND_S = 2.0

_log = logging.getLogger(__name__)


class MetricReports:
    """The reporter of one process (loop thread)."""

    def __init__(
        self, identity: Identity, io: IoThread, clients: ClusterClients, job: JobContext
    ) -> None:
        self._node = None if identity.is_foreign else identity.node
        self._process = identity.peer_id
        self._io = io
        self._clients = clients
        self._job = job
        self._sent_s = 0.0
        self._lock = asyncio.Lock()

    def tick(self) -> None:
        """Start a report if one is due."""
        if not TABLE or self._node is None or self._lock.locked():
            return
        if time.monotonic() - self._sent_s >= (EVERY_S if TABLE.changed else AGAIN_S):
            self._sent_s = time.monotonic()
            self._io.background.spawn(self.flush(), name="metric-report")

    async def flush(self) -> None:
        """Report what there is; what the nodelet does not take now stays for the next time."""
        if not TABLE or self._node is None:
            return
        async with self._lock:
            metrics = TABLE.take()
            report = ReportMetrics(
                process=self._process, job_id=self._job.job_id or "", metrics=metrics
            )
            client = self._clients.client_of(self._node.url)
            try:
                await client.call("POST", "/v1/metrics", report, timeout_s=_SEND_S)
            except StokerError as error:
                if error.status < 500:
                    _log.warning("the nodelet refused the metrics of this process: %s", error)
                else:
                    TABLE.give_back(metrics)
