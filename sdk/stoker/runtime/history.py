"""Reports what happened to tasks: collected here, sent in batches, never waited for.

A worker reports the attempts that it ran, the owner those that never ran. Batches go to the node's
nodelet, which spools them; a driver without a nodelet sends them to the gcs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from stoker.exceptions import StokerError
from stoker_wire.messages.work import ReportTasks, TaskRecord

if TYPE_CHECKING:
    from stoker.runtime.runtime import Runtime

_EVERY_S = 0.2
_BATCH = 2000
_SEND_S = 30.0
_MAX_WAITING = 200_000


class History:
    """Task records on their way out. ``dropped`` stays 0 while the nodelet can be reached."""

    def __init__(self, runtime: Runtime) -> None:
        self.dropped = 0
        self._runtime = runtime
        self._records: list[TaskRecord] = []
        self._wake = asyncio.Event()
        self._enabled = runtime.settings.task_history

    def add(self, record: TaskRecord) -> None:
        """Note one record (loop thread)."""
        if not self._enabled:
            return
        if len(self._records) >= _MAX_WAITING:
            self.dropped += 1
            return
        self._records.append(record)
        if not self._wake.is_set():
            self._wake.set()

    async def run(self) -> None:
        """Send batches for as long as the runtime lives."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(_EVERY_S)
            self._wake.clear()
            await self.flush()

    async def flush(self) -> None:
        """Send all that is there; what cannot be sent now stays."""
        while self._records:
            batch, self._records = self._records[:_BATCH], self._records[_BATCH:]
            node = self._runtime.node
            client = self._runtime.services.client_of(node.url) if node else self._runtime.gcs
            try:
                await client.call(
                    "POST", "/v1/tasks/report", ReportTasks(records=tuple(batch)), timeout_s=_SEND_S
                )
            except StokerError:
                self._records[:0] = batch
                self._wake.set()
                return
