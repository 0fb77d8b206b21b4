"""Reads the log files of workers and drivers: tails for forensics, pages and live lines for readers.

Files are only polled while somebody follows them. A cursor is the byte offset behind a line.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from stoker_wire.messages.control import NAME_MARK, LogLine

_POLL_S = 0.05
_KEPT = 1000
_CHUNK = 1 << 18
_LONGEST_LINE = 1 << 16
_TAIL_BYTES = 1 << 16


@dataclass(slots=True)
class LogFile:
    """One process's output. ``ended`` once the process is gone and nothing more can come."""

    worker_id: str
    path: Path
    job_id: str = ""
    name: str = ""
    pid: int = 0
    driver: bool = False
    ended: bool = False


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Which files: ``kind`` is ``worker``, ``driver`` or empty for both."""

    job_id: str = ""
    worker_id: str = ""
    kind: str = ""

    def takes(self, log: LogFile) -> bool:
        return (
            self.job_id in ("", log.job_id)
            and self.worker_id in ("", log.worker_id)
            and self.kind in ("", "driver" if log.driver else "worker")
        )


@dataclass(slots=True)
class Logs:
    """The log files of this node, by worker id; of ended ones the last thousand are known."""

    node_id: str
    _files: dict[str, LogFile] = field(default_factory=dict)

    def add(self, log: LogFile) -> None:
        """Make a new process's output known."""
        self._files[log.worker_id] = log
        for worker_id in [w for w, known in self._files.items() if known.ended][:-_KEPT]:
            del self._files[worker_id]

    def get(self, worker_id: str) -> LogFile | None:
        return self._files.get(worker_id)

    def tail(self, worker_id: str, count: int) -> tuple[str, ...]:
        """Return the last ``count`` lines of a process's output."""
        log = self._files.get(worker_id)
        return tail(log.path, count) if log else ()

    async def read(
        self, chosen: LogFilter, *, since: int = 0, follow: bool = False, last: int = 0
    ) -> AsyncIterator[list[LogLine]]:
        """Yield batches of lines, each file's in order.

        ``since`` is a cursor, of use where the filter chooses one file. ``last`` starts that many
        lines before the end of each file. With ``follow`` it goes on until the chosen processes
        have ended (for a job: until the caller stops asking).
        """
        readers: dict[str, _Reader] = {}
        while True:
            batch: list[LogLine] = []
            open_ended = not chosen.worker_id
            for log in [log for log in self._files.values() if chosen.takes(log)]:
                reader = readers.get(log.worker_id)
                if reader is None:
                    reader = readers[log.worker_id] = _Reader(self.node_id, log, since, last)
                ended = log.ended  # before the read: what comes after the end is read here
                batch += reader.lines(final=ended or not follow)
                open_ended = open_ended or not ended
            if batch:
                yield batch
                continue
            if not follow or not open_ended:
                return
            await asyncio.sleep(_POLL_S)


class _Reader:
    """A place in one file."""

    def __init__(self, node_id: str, log: LogFile, since: int, last: int) -> None:
        self._node_id = node_id
        self._log = log
        self._offset = min(since, _size_of(log.path)) or (
            _offset_of_last(log.path, last) if last else 0
        )
        self._rest = b""
        self._name = ""
        """Who prints, where the worker said so."""
        self._over = False

    def lines(self, *, final: bool) -> list[LogLine]:
        """Return what came since; with ``final`` nothing comes after what is there."""
        if self._over:
            return []
        read_to = self._offset + len(self._rest)
        if _size_of(self._log.path) <= read_to and not (final and self._rest):
            self._over = final
            return []  # asked often, and a look costs a fifth of opening the file
        try:
            with self._log.path.open("rb") as file:
                file.seek(read_to)
                chunk = file.read(_CHUNK)
        except FileNotFoundError:
            return []
        data = self._rest + chunk
        found = []
        start = 0
        now_s = time.time()
        while start < len(data):
            end = data.find(b"\n", start)
            if end < 0:
                unfinished = not final or len(chunk) == _CHUNK
                if unfinished and len(data) - start < _LONGEST_LINE:
                    break
                end = len(data) - 1
            self._offset += end + 1 - start
            text = data[start : end + 1].decode(errors="replace").rstrip("\r\n")
            if text.startswith(NAME_MARK):
                self._name = text.removeprefix(NAME_MARK)
            else:
                found.append(self._line(text, now_s))
            start = end + 1
        self._rest = data[start:]
        return found

    def _line(self, text: str, now_s: float) -> LogLine:
        log = self._log
        return LogLine(
            node_id=self._node_id,
            worker_id=log.worker_id,
            pid=log.pid,
            name=self._name or log.name,
            text=text,
            at_s=now_s,
            cursor=self._offset,
            job_id=log.job_id,
        )


def tail(path: Path, count: int) -> tuple[str, ...]:
    """Return the last ``count`` lines of a file, as far as they lie in its last 64 KiB."""
    try:
        with path.open("rb") as file:
            nbytes = file.seek(0, 2)
            file.seek(max(0, nbytes - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ()
    return tuple([line for line in lines if not line.startswith(NAME_MARK)][-count:])


def _size_of(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _offset_of_last(path: Path, count: int) -> int:
    try:
        with path.open("rb") as file:
            nbytes = file.seek(0, 2)
            start = max(0, nbytes - _TAIL_BYTES)
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return 0
    lines = data.splitlines(keepends=True)
    return nbytes - sum(len(line) for line in lines[-count:])
