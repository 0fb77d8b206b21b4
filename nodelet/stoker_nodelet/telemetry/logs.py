"""The log files of workers and drivers: tails for forensics, pages and live lines for readers.

A cursor is the byte offset behind a line. The size of each file is polled twice a second, which dates
its lines, and more often while somebody follows it.
"""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from bisect import bisect_left
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stoker_wire.data.output_marks import START, Mark, read_mark
from stoker_wire.messages.control import LogLine, LogStream

_POLL_S = 0.05
_CHUNK = 1 << 18
_LONGEST_LINE = 1 << 16
_TAIL_BYTES = 1 << 16
_MARK_BYTES = 1 << 19
"""A worker repeats at least this often whose output follows (``stoker.runtime.worker.output``)."""
_TIMES = 512


class WriteTimes:
    """Times at which a file had grown to given sizes: they date its lines."""

    def __init__(self) -> None:
        self._sizes = array("q")
        self._at_s = array("d")

    def record(self, nbytes: int, at_s: float) -> None:
        """Record that the file had ``nbytes``, the last of them written at ``at_s``."""
        if self._sizes and nbytes <= self._sizes[-1]:
            return
        self._sizes.append(nbytes)
        self._at_s.append(at_s)
        if len(self._sizes) > _TIMES:  # drop every second one: lines get a slightly later time
            del self._sizes[0:-1:2], self._at_s[0:-1:2]

    def at(self, offset: int) -> float:
        """Return when the byte before ``offset`` was there, at the latest."""
        if not self._sizes:
            return 0.0
        return self._at_s[min(bisect_left(self._sizes, offset), len(self._at_s) - 1)]


@dataclass(slots=True)
class LogFile:
    """One process's output. ``ended`` once the process is gone and nothing more can come."""

    worker_id: str
    path: Path
    job_id: str = ""
    name: str = ""
    pid: int = 0
    attempt: int = 0
    """That of the job whose driver it is; 0 for a worker."""
    mark_key: bytes = b""
    """Authenticates its marks; without one no line is a mark."""
    ended: bool = False
    times: WriteTimes = field(default_factory=WriteTimes)
    hole: int = 0
    """The offset before which its bytes are dropped (:mod:`stoker_nodelet.telemetry.log_retention`)."""
    mark: Mark = field(default_factory=Mark)
    """Whose output begins there."""
    positions: dict[int, tuple[int, float]] = field(default_factory=dict)
    """How far each follower has read, and when that was, by ``time.monotonic``."""
    followers: int = 0

    def shown(self, since_s: float) -> int | None:
        """Return how far all have read that followed it since then; None if nobody did."""
        self.positions = {k: (at, s) for k, (at, s) in self.positions.items() if s >= since_s}
        return min((at for at, _ in self.positions.values()), default=None)

    def poll(self) -> int:
        """Return the file's size, and record since when it has it."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return 0
        self.times.record(status.st_size, status.st_mtime)
        return status.st_size


@dataclass(frozen=True, slots=True)
class LogFilter:
    """A choice of files: ``kind`` is ``worker``, ``driver`` or empty for both; ``attempt`` 0 is any."""

    job_id: str = ""
    worker_id: str = ""
    kind: str = ""
    attempt: int = 0

    def matches(self, log: LogFile) -> bool:
        return (
            self.job_id in ("", log.job_id)
            and self.worker_id in ("", log.worker_id)
            and self.kind in ("", "driver" if log.attempt else "worker")
            and self.attempt in (0, log.attempt)
        )

    def is_complete(self, logs: list[LogFile]) -> bool:
        """Return whether no other process can match: one was named, or a job's driver, one per attempt."""
        return bool(self.worker_id or (self.job_id and self.kind == "driver" and logs))


@dataclass(slots=True)
class Logs:
    """The log files of this node, by worker id, the oldest first."""

    node_id: str
    nbytes: int = 0
    """What they use of the disk, as last measured."""
    _files: dict[str, LogFile] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self._files)

    def add(self, log: LogFile) -> None:
        """Add the log of a new process, whose first reader may yet come."""
        log.positions[0] = (log.hole, time.monotonic())
        self._files[log.worker_id] = log

    def all(self) -> list[LogFile]:
        """Return all, the oldest first."""
        return list(self._files.values())

    def remove(self, worker_id: str) -> None:
        """Forget a log."""
        self._files.pop(worker_id, None)

    def get(self, worker_id: str) -> LogFile | None:
        return self._files.get(worker_id)

    def end(self, worker_id: str) -> None:
        """Mark a log as ended: its process is gone, with all that it started."""
        log = self._files.get(worker_id)
        if log is not None:
            log.poll()
            log.ended = True

    def poll(self) -> None:
        """Record the sizes of all files that may still grow; called twice a second."""
        for log in self._files.values():
            if not log.ended:
                log.poll()

    def tail(self, worker_id: str, count: int) -> tuple[str, ...]:
        """Return the last ``count`` lines of a process's output."""
        log = self._files.get(worker_id)
        return tail(log, count) if log else ()

    async def read(
        self,
        chosen: LogFilter,
        *,
        since: int = 0,
        cursors: Mapping[str, int] | None = None,
        follow: bool = False,
        last: int = 0,
    ) -> AsyncIterator[list[LogLine]]:
        """Yield batches of lines, each file's in order.

        ``since`` is a cursor, of use where the filter chooses one file; ``cursors`` are by worker.
        ``last`` starts that many lines before the end of each file without a cursor. With ``follow``
        it goes on until the chosen processes have ended (for a job's workers: until the caller
        stops asking); without, it ends where the files ended when it began, unfinished lines
        included.
        """
        readers: dict[str, _Reader] = {}
        while True:
            batch: list[LogLine] = []
            logs = [log for log in self._files.values() if chosen.matches(log)]
            open_ended = not chosen.is_complete(logs)
            for log in logs:
                reader = readers.get(log.worker_id)
                if reader is None:
                    start = since or (cursors or {}).get(log.worker_id, 0)
                    reader = _Reader(self.node_id, log, start, last, whole=follow)
                    readers[log.worker_id] = reader
                ended = log.ended  # before the read: what comes after the end is read here
                batch += reader.lines(final=ended or not follow)
                open_ended = open_ended or not ended
            if batch:
                yield batch
                continue
            if not follow and all(reader.at_end for reader in readers.values()):
                return
            if follow:
                if not open_ended:
                    return
                await asyncio.sleep(_POLL_S)


class _Reader:
    """A reader's position in one file. Without ``whole`` it stops where the file ends now."""

    def __init__(self, node_id: str, log: LogFile, since: int, last: int, *, whole: bool) -> None:
        self._node_id = node_id
        self._log = log
        size = log.poll()
        self._limit = None if whole else size
        from_last = _offset_of_last(log, last) if last else 0
        self._offset = min(since, size) or from_last
        self._rest = b""
        self._mark = mark_before(log, self._offset)
        self.at_end = False
        log.followers += whole
        self._number = log.followers
        if whole:
            self._tell_position()

    def _tell_position(self) -> None:
        """Let retention know what was read: nobody has seen what is behind."""
        self._log.positions[self._number] = (self._offset, time.monotonic())

    def lines(self, *, final: bool) -> list[LogLine]:
        """Return the lines since the last call; with ``final`` the file grows no more."""
        if self.at_end:
            return []
        dropped = self._skip_hole()
        if dropped:
            return dropped
        read_to = self._offset + len(self._rest)
        size = self._log.poll()
        end = size if self._limit is None else min(size, self._limit)
        if self._limit is None:
            self._tell_position()
        if end <= read_to and not (final and self._rest):
            self.at_end = final
            return []  # a poll is frequent, and costs a fifth of opening the file
        try:
            with self._log.path.open("rb") as file:
                file.seek(read_to)
                chunk = file.read(min(_CHUNK, max(0, end - read_to)))
        except FileNotFoundError:
            self.at_end = final
            return []
        return self._split(self._rest + chunk, final=final and read_to + len(chunk) >= end)

    def _skip_hole(self) -> list[LogLine]:
        """Go to the end of the hole if this is in it; return the line that says so."""
        log = self._log
        nbytes = log.hole - self._offset
        if nbytes <= 0:
            return []
        self._offset, self._rest = log.hole, b""
        self._mark = Mark(LogStream.STDERR, "stoker")
        line = self._line(
            f"{nbytes} bytes of output were here, dropped by retention: log_max_bytes"
        )
        self._mark = log.mark
        return [line]

    def _split(self, data: bytes, *, final: bool) -> list[LogLine]:
        lines = []
        start = 0
        while start < len(data):
            end = data.find(b"\n", start)
            if end < 0:
                if not final and len(data) - start < _LONGEST_LINE:
                    break
                end = len(data) - 1
            self._offset += end + 1 - start
            raw = data[start : end + 1]
            mark = read_mark(self._log.mark_key, raw)
            if mark is not None:
                self._mark = mark
            else:
                lines.append(self._line(raw.decode(errors="replace").rstrip("\r\n")))
            start = end + 1
        self._rest = data[start:]
        return lines

    def _line(self, text: str) -> LogLine:
        log = self._log
        return LogLine(
            node_id=self._node_id,
            worker_id=log.worker_id,
            pid=log.pid,
            name=self._mark.name or log.name,
            text=text,
            at_s=log.times.at(self._offset),
            cursor=self._offset,
            job_id=log.job_id,
            stream=self._mark.stream,
            cell=self._mark.cell,
        )


def tail(log: LogFile, count: int) -> tuple[str, ...]:
    """Return the last ``count`` lines of a log, as far as they are in its last 64 KiB."""
    try:
        with log.path.open("rb") as file:
            nbytes = file.seek(0, 2)
            file.seek(max(0, nbytes - _TAIL_BYTES))
            lines = _lines_of(file.read().lstrip(b"\0"))  # what retention has dropped
    except FileNotFoundError:
        return ()
    shown = [line for line in lines if read_mark(log.mark_key, line) is None][-count:]
    return tuple([line.decode(errors="replace").rstrip("\r\n") for line in shown])


def _lines_of(data: bytes) -> list[bytes]:
    """Split at line feeds alone, not at the other ends of lines that Python knows."""
    *whole, rest = data.split(b"\n")
    return [*(line + b"\n" for line in whole), *([rest] if rest else [])]


def mark_before(log: LogFile, offset: int) -> Mark:
    """Return the last mark before ``offset``, for a reader that begins there."""
    try:
        with log.path.open("rb") as file:
            data, start = b"", offset
            while start > log.hole and offset - start < _MARK_BYTES:
                end, start = start, max(log.hole, start - _TAIL_BYTES)
                file.seek(start)
                data = file.read(end - start) + data[:_TAIL_BYTES]
                mark = _last_mark(log, data, is_whole=start == log.hole)
                if mark is not None:
                    return mark
    except FileNotFoundError:
        pass
    return log.mark


def _last_mark(log: LogFile, data: bytes, *, is_whole: bool) -> Mark | None:
    """Return the last mark in a piece of a log, which with ``is_whole`` begins with a line."""
    end = len(data)
    while (at := data.rfind(b"\n" + START, 0, end)) >= 0:
        line = data[at + 1 : data.find(b"\n", at + 1) + 1 or len(data)]
        mark = read_mark(log.mark_key, line)
        if mark is not None:
            return mark
        end = at + 1
    return read_mark(log.mark_key, data.partition(b"\n")[0]) if is_whole else None


def _offset_of_last(log: LogFile, count: int) -> int:
    try:
        with log.path.open("rb") as file:
            nbytes = file.seek(0, 2)
            start = max(log.hole, nbytes - _TAIL_BYTES)
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return 0
    offset = nbytes
    for line in reversed(_lines_of(data)):
        count -= read_mark(log.mark_key, line) is None
        if count < 0:
            break
        offset -= len(line)
    return offset
