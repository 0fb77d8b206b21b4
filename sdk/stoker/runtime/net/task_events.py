"""The task history's rows on their way to SQL: written once a turn of the loop, never waited for.

A worker records the attempts that it ran, the owner those that never ran. Rows go to a file in the
spool folder of this process's node, from where the nodelet takes them, so that nothing is lost
with this process; a driver without a nodelet posts them to the gcs itself. Reports of training go with them.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from stoker.exceptions import StokerError
from stoker.runtime.process.training_reports import REPORTS
from stoker_wire.data.spool import (
    MAX_UNWRITTEN_BYTES,
    SpoolWriter,
    frames_of,
    is_refusal,
    row_of,
    rows_in_frames,
    spool_folder,
)
from stoker_wire.data.training import report_frames
from stoker_wire.messages.data import Inline, Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.runtime.net.clients import ClusterClients
    from stoker.runtime.process.identity import Identity
    from stoker.runtime.process.io_thread import IoThread
    from stoker_wire.data.spool import TaskRow
    from stoker_wire.http.client.client import Client
    from stoker_wire.messages.data import Location
    from stoker_wire.messages.work import TaskRecord

_FLUSH_EVERY_S = 0.2
_REPORT_EVERY_S = 1.0
_SEND_S = 30.0


def nbytes_of(location: Location) -> int:
    """Return the size of a packed value, wherever it is."""
    if isinstance(location, Inline):
        return len(location.data) + sum(
            memoryview(buffer.view).nbytes for buffer in location.buffers
        )
    return location.nbytes if isinstance(location, Stored) else 0


class TaskEvents:
    """The writer of a process's rows (loop thread)."""

    def __init__(
        self, identity: Identity, io: IoThread, clients: ClusterClients, *, enabled: bool
    ) -> None:
        self._node = identity.node
        self._io = io
        self._clients = clients
        self._enabled = enabled
        self._rows: list[TaskRow] = []
        self._write_scheduled = False
        self._reported_at_s = 0.0
        self._wake = asyncio.Event()
        node = identity.node
        folder = None
        if node is not None and node.session_dir:
            folder = spool_folder(node.session_dir, node.node_id)
        self._sink: SpoolWriter | _GcsSink = (
            SpoolWriter(folder, identity.peer_id)
            if folder is not None and folder.is_dir()
            else _GcsSink(clients.gcs)
        )

    @property
    def dropped(self) -> int:
        """The number of records lost: 0, unless a disk was full or the gcs away for very long."""
        return self._sink.dropped

    def tick(self) -> None:
        """Write the reports of training that have come, if it is a while since that was done."""
        if REPORTS and time.monotonic() - self._reported_at_s > _REPORT_EVERY_S:
            self.write_reports()

    def add(self, record: TaskRecord) -> None:
        """Add a record, to be written at the end of this turn of the loop."""
        self.add_row(row_of(record))
        if not self._write_scheduled:
            self._write_scheduled = True
            self._io.loop.call_soon(self.write_rows)

    def add_row(self, row: TaskRow) -> None:
        """Add a row; call :meth:`write` before others may act on what it records."""
        if self._enabled:
            self._rows.append(row)

    def write(self) -> None:
        """Write all that was added: the end of this process does not lose it any more."""
        self.write_rows()
        self.write_reports()

    def write_rows(self) -> None:
        """Write the added rows."""
        self._write_scheduled = False
        if self._rows:
            rows, self._rows = self._rows, []
            self._sink.write(rows)
            if self._sink.waits:
                self._wake.set()

    def write_reports(self) -> None:
        """Write the reports of training, if there is room for them."""
        if REPORTS and not self._sink.is_full:
            self._reported_at_s = time.monotonic()
            self._sink.write(REPORTS.take(), report_frames)
            if self._sink.waits:
                self._wake.set()

    async def run(self) -> None:
        """Post rows, or retry what the disk refused, for as long as the runtime lives."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(_FLUSH_EVERY_S)
            await self.flush()

    async def flush(self) -> None:
        """Write or post all rows; those that cannot go now stay."""
        self.write()
        self._wake.clear()
        if isinstance(self._sink, _GcsSink):
            await self._sink.post()
        else:
            self._sink.flush()
        if self._sink.waits:
            self._wake.set()

    def close(self) -> None:
        """Write the rows since the last :meth:`flush`, and close the file."""
        self.write()
        if isinstance(self._sink, SpoolWriter):
            self._sink.close()

    async def forward(self) -> None:
        """Return once all that was recorded on this node so far is in SQL."""
        await self.flush()
        if self._node is not None:
            client = self._clients.client_of(self._node.url)
            await client.call("POST", "/v1/tasks/flush", timeout_s=_SEND_S)


class _GcsSink:
    """The sink of a driver without a nodelet: rows that the gcs has not taken yet wait in memory."""

    def __init__(self, gcs: Client) -> None:
        self.dropped = 0
        self._gcs = gcs
        self._waiting = bytearray()
        self._post_lock = asyncio.Lock()
        self._dropped_unreported = 0

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    @property
    def is_full(self) -> bool:
        return len(self._waiting) > MAX_UNWRITTEN_BYTES

    def write(
        self, rows: Sequence[Any], pack: Callable[[Sequence[Any], int], bytes] = frames_of
    ) -> None:
        if self.is_full:
            self.dropped += len(rows)
            self._dropped_unreported += len(rows)
        else:
            self._waiting += pack(rows, self._dropped_unreported)
            self._dropped_unreported = 0

    async def post(self) -> None:
        async with self._post_lock:
            body = bytes(self._waiting)
            if not body:
                return
            try:
                await self._gcs.call("POST", "/v1/tasks/spooled", body, timeout_s=_SEND_S)
            except StokerError as error:
                if not is_refusal(error):
                    return
                lost = rows_in_frames(body)
                self.dropped += lost
                self._dropped_unreported += lost
            del self._waiting[: len(body)]
