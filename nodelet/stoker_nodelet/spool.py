"""Carries task history from workers to the gcs, at least once, through any absence of the gcs.

A report is accepted into memory and answered at once; a loop forwards what is there every
``FLUSH_S``. When the gcs has not answered after ``SPILL_S``, everything not yet acknowledged goes to
a file, and what comes meanwhile goes there too (so memory stays bounded); the file is deleted when
the gcs has acknowledged all of it. A nodelet that starts forwards the files of dead nodelets first.

Guarantee: nothing is lost while the nodelet lives, nor when it is stopped; SIGKILL loses at most
what came within the last ``FLUSH_S + SPILL_S`` (0.2 s) and was not forwarded. There is no fsync:
the files survive the process, not the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stoker_nodelet import proctree
from stoker_wire.errors import StokerError
from stoker_wire.messages.work import TaskRecord

FLUSH_S = 0.05
SPILL_S = 0.15
BATCH = 2000
_MEMORY_RECORDS = 20_000
_AWAY_S = 0.5  # pause between tries while the gcs is away
_HEAD = struct.Struct("!I")

Forward = Callable[[tuple[TaskRecord, ...]], Awaitable[None]]

_log = logging.getLogger("stoker.nodelet.spool")


@dataclass(slots=True)
class Spool:
    """One nodelet's history on its way. ``folder`` is shared by the nodelets of a session."""

    folder: Path
    node_id: str
    forward: Forward
    pending: list[TaskRecord] = field(default_factory=list)
    forwarded: int = 0
    _away: bool = False
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def path(self) -> Path:
        """The file of what waits for the gcs; its name says whose it is."""
        pid = os.getpid()
        return self.folder / f"{self.node_id}.{pid}.{proctree.start_time(pid)}.spool"

    def add(self, records: tuple[TaskRecord, ...]) -> None:
        """Accept a report. While the gcs is away it is in the file when this returns."""
        if self._away:
            self._spill(records)
            return
        self.pending.extend(records)
        if len(self.pending) > _MEMORY_RECORDS:
            self._spill(self.pending)
            self.pending = []
        self._wake.set()

    async def run(self) -> None:
        """Forward for ever."""
        await self._resend_left()
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(FLUSH_S)
            if not await self.flush():
                await asyncio.sleep(_AWAY_S)
                self._wake.set()

    async def flush(self) -> bool:
        """Forward everything; return False (and keep it on disk) if the gcs does not take it."""
        try:
            if self.path.exists():
                await self._send_file(self.path)
            self._away = False
            while self.pending:
                batch = tuple(self.pending[:BATCH])
                async with asyncio.timeout(SPILL_S):
                    await self.forward(batch)
                del self.pending[: len(batch)]
                self.forwarded += len(batch)
        except (StokerError, TimeoutError, OSError) as error:
            if isinstance(error, StokerError) and not self._away:
                _log.warning("task history waits on disk: %s", error)
            self._away = True
            self._spill(self.pending)
            self.pending = []
            return False
        return True

    async def close(self, timeout_s: float) -> None:
        """Forward what is left, or leave it on disk for the next nodelet."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.flush()
        self._spill(self.pending)
        self.pending = []

    def _spill(self, records: list[TaskRecord] | tuple[TaskRecord, ...]) -> None:
        if not records:
            return
        body = msgspec.msgpack.encode(records)
        with self.path.open("ab") as file:
            file.write(_HEAD.pack(len(body)) + body)

    async def _send_file(self, path: Path) -> None:
        """Forward a file's records; it may grow meanwhile, and is deleted when all is told."""
        told = 0
        while True:
            for chunk, end in _chunks(path, told):
                for start in range(0, len(chunk), BATCH):
                    batch = chunk[start : start + BATCH]
                    await self.forward(batch)
                    self.forwarded += len(batch)
                told = end
            if _delete_if_told(path, told):
                return

    async def _resend_left(self) -> None:
        """Forward the files that dead nodelets have left in the folder."""
        for path in _abandoned(self.folder):
            sent = False
            while not sent:
                try:
                    await self._send_file(path)
                    sent = True
                except FileNotFoundError:
                    sent = True  # another nodelet of the session was quicker
                except (StokerError, OSError):
                    await asyncio.sleep(_AWAY_S)


def _abandoned(folder: Path) -> list[Path]:
    found = []
    for path in sorted(folder.glob("*.spool")):
        _, pid, started, _ = path.name.rsplit(".", 3)
        if proctree.start_time(int(pid)) != int(started):
            found.append(path)
    return found


def _delete_if_told(path: Path, told: int) -> bool:
    """Delete the file unless whole chunks have come behind ``told`` (a torn one counts as none)."""
    if any(True for _ in _chunks(path, told)):
        return False
    path.unlink()
    return True


def _chunks(path: Path, offset: int) -> Iterator[tuple[tuple[TaskRecord, ...], int]]:
    """Yield the chunks of a spool file from ``offset``; a torn last one is left out."""
    decode = msgspec.msgpack.Decoder(tuple[TaskRecord, ...]).decode
    with path.open("rb") as file:
        file.seek(offset)
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            (nbytes,) = _HEAD.unpack(head)
            body = file.read(nbytes)
            if len(body) < nbytes:
                return
            yield decode(body), file.tell()
