"""A worker's stdout and stderr, marked with the task that printed, at no cost for those that do not.

Both go into one log file, so that their lines keep their order. A worker runs tasks of many
functions in turn: before output of another function, or to the other stream than the last, a mark
line goes into the file; the nodelet reads it as "from here on it is that one".
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING

from stoker.runtime.process.cells import CELLS
from stoker.runtime.process.current_task import current_task
from stoker_wire.data.output_marks import Mark, mark_line
from stoker_wire.messages.control import LogStream

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_MARK_AGAIN_BYTES = 1 << 18
"""After so many bytes the mark is repeated: readers look back only so far."""


class _OutputState:
    """The state that both streams share: whose output came last, and whether its line is unfinished."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.mark = Mark()
        self.open_line = False
        self.nbytes = 0
        """Written since the last mark."""
        self.lost_nbytes = 0
        """Not written, because the disk was full; a line says so when there is room again."""


class _MarkedFile(io.BufferedWriter):
    """A file that marks whose output follows. Unbuffered: a worker may be killed once its result left."""

    def __init__(self, fd: int, which: LogStream, printed: _OutputState) -> None:
        super().__init__(io.FileIO(fd, "w", closefd=False))
        self._which = which
        self._printed = printed

    def write(self, data: ReadableBuffer, /) -> int:
        """Write, after a mark if another task prints now, or to the other stream than before."""
        info, printed = current_task.get(), self._printed
        name = info.name if info is not None and not info.actor_id else printed.mark.name
        mark = Mark(self._which, name, CELLS.of_output(printed.mark.cell))
        data = bytes(data)
        if mark != printed.mark or printed.nbytes > _MARK_AGAIN_BYTES:
            marked = b"\n" * printed.open_line + mark_line(printed.key, mark) + data
        else:
            marked = data
        if self._put(marked) and marked is not data:
            printed.mark, printed.nbytes = mark, 0
        if data:
            printed.nbytes += len(data)
            printed.open_line = not data.endswith(b"\n")
        return len(data)

    def _put(self, data: bytes) -> bool:
        """Write all; where the disk is full the rest is lost: that is no reason for a task to fail."""
        printed = self._printed
        try:
            if printed.lost_nbytes:
                note = f"\n[{printed.lost_nbytes} bytes of output were lost: the disk was full]\n"
                self._put_raw(note.encode())
                printed.lost_nbytes = 0
            data = data[self._put_raw(data) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        printed.lost_nbytes += len(data)
        return not data

    def _put_raw(self, data: bytes) -> int:
        """Write as much as the disk takes, and raise if that is nothing; return how much it was."""
        done = os.write(self.fileno(), data)
        while done < len(data):
            try:
                done += os.write(self.fileno(), data[done:])
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                break
        return done


class MarkedOutput(io.TextIOWrapper):
    """A line-buffered text stream over such a file."""

    def __init__(self, fd: int, which: LogStream, printed: _OutputState) -> None:
        super().__init__(
            _MarkedFile(fd, which, printed),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        self.has_open_line = False
        """Whether something was printed whose end of line is missing."""

    def write(self, text: str, /) -> int:
        """Write a text."""
        if text:
            self.has_open_line = not text.endswith("\n")
        return super().write(text)

    def close(self) -> None:
        """Flush, and stay open: the next task of this worker prints here as well."""
        self.flush()


def mark_output(key: bytes) -> None:
    """Mark all output of this process from now on with the task that printed it."""
    printed = _OutputState(key)
    for which in LogStream:
        stream = getattr(sys, which)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            setattr(sys, which, MarkedOutput(stream.fileno(), which, printed))


def flush_output() -> None:
    """Write out unfinished lines: whoever gets a result may read the output next."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, MarkedOutput) and stream.has_open_line:
            stream.flush()
