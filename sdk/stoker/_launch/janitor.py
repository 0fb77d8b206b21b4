"""Cleans up after a head that was killed: a tiny process that outlives it by a moment.

The head forks it first of all (one thread, nothing imported), and holds the only writing end of a
pipe to it. However the head dies, the pipe closes; then the janitor removes the paths that the head
had named and leaves. Of a head that died before it could name any, ``sweep`` has to find them. It
must import nothing beyond the standard library's basics.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_END_S = 4.0  # workers may write into the arena until the fork server has killed them
_POLL_S = 0.02


class Janitor:
    """The head's end of the pipe."""

    def __init__(self, write_fd: int) -> None:
        self._write_fd = write_fd

    def remove_at_end(self, path: str) -> None:
        """Name a file or folder that must not outlive the head."""
        os.write(self._write_fd, os.fsencode(path) + b"\0")


def start_janitor(sweep: Callable[[], object]) -> Janitor:
    """Fork the janitor. Call while the process has one thread.

    ``sweep`` removes what dead processes left; it is called in the janitor, if the head dies early.
    """
    read_fd, write_fd = os.pipe()
    head = os.getpid()
    if os.fork() == 0:
        try:
            _stay_until_the_end(read_fd, head, sweep)
        finally:
            os._exit(0)
    os.close(read_fd)
    return Janitor(write_fd)


def _stay_until_the_end(read_fd: int, head: int, sweep: Callable[[], object]) -> None:
    os.setsid()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != read_fd:
            with contextlib.suppress(OSError):
                os.close(int(name))
    named = bytearray()
    while chunk := os.read(read_fd, 4096):
        named += chunk
    paths = [Path(os.fsdecode(name)) for name in bytes(named).split(b"\0") if name]
    deadline_s = time.monotonic() + _END_S
    if not paths:
        # Its owner is dead only once its parent has taken note of that.
        while Path(f"/proc/{head}").exists() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        sweep()
    while paths and time.monotonic() < deadline_s:
        paths = [path for path in paths if not _removed(path)]
        if paths:
            time.sleep(_POLL_S)


def _removed(path: Path) -> bool:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        return True
    return not path.exists()
