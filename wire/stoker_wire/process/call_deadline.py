"""The deadline of the call that a worker runs, in shared memory that its nodelet reads.

A worker whose interpreter is held by C code, or which is stopped, cannot enforce ``timeout``, and neither
can an owner that is silent itself. So a worker writes, before it starts a task with a timeout, until when it
will have ended it by its own means, and before it leaves because of a task, until when it will have left; if
it has not by then, its nodelet kills it. No message is sent, and nobody has to answer one. The worker alone
writes its file, the nodelet removes it with the worker. Calls of actors are not written: none is worth the
state of the others.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

FOLDER = "deadlines"
"""The folder of these files, in the node's shared memory; a nodelet that reads none makes none."""
_AT = struct.Struct("d")
_CALL = struct.Struct("d112p")
_NBYTES = _AT.size + _CALL.size


class CallDeadline(NamedTuple):
    """A call that runs, its timeout (0: its worker leaves), and the monotonic time by which that is done."""

    task_id: str
    timeout_s: float
    at_s: float


class DeadlineCell:
    """The file of one worker, as the worker sees it. Made with its first call that has a timeout.

    A process without ``arena_dir`` makes none: the owner of a call enforces its timeout.
    """

    def __init__(self, arena_dir: str, worker_id: str) -> None:
        self._path = cell_path(Path(arena_dir), worker_id) if arena_dir else None
        self._memory: mmap.mmap | None = None
        self._at_s = 0.0

    def arm(self, task_id: str, timeout_s: float, grace_s: float) -> None:
        """Begin a call: it ends ``grace_s`` after its timeout at the latest."""
        memory = self._memory or self._make()
        if memory is not None:
            _CALL.pack_into(memory, _AT.size, timeout_s, task_id.encode())
            self._write(memory, time.monotonic() + timeout_s + grace_s)

    def leave(self, task_id: str, within_s: float) -> None:
        """Leave because of a call, within so long from now, or by its deadline if that is later."""
        memory = self._memory or self._make()
        if memory is not None:
            if not self._at_s:
                _CALL.pack_into(memory, _AT.size, 0.0, task_id.encode())
            self._write(memory, max(self._at_s, time.monotonic() + within_s))

    def disarm(self) -> None:
        """End the call."""
        if self._memory is not None:
            self._write(self._memory, 0.0)

    def _write(self, memory: mmap.mmap, at_s: float) -> None:
        _AT.pack_into(memory, 0, at_s)
        self._at_s = at_s

    def _make(self) -> mmap.mmap | None:
        if self._path is None:
            return None
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(
                    fd, bytes(_NBYTES), 0
                )  # a page that is not there yet may find no room later
                self._memory = mmap.mmap(fd, _NBYTES)
            finally:
                os.close(fd)
        except OSError:
            return None  # no folder, or no room: the owner enforces the timeout
        return self._memory


def cell_path(arena_dir: Path, worker_id: str) -> Path:
    """Return the path of a worker's file."""
    return arena_dir / FOLDER / worker_id


def read_deadline(path: Path) -> CallDeadline | None:
    """Return the deadline of the call that a worker runs; None if it runs none with a timeout."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < _NBYTES:
        return None
    (at_s,) = _AT.unpack_from(data)
    timeout_s, task_id = _CALL.unpack_from(data, _AT.size)
    return CallDeadline(task_id.decode(errors="replace"), timeout_s, at_s) if at_s else None
