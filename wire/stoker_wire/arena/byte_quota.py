"""The bytes of shared memory that an arena's files take, counted where every process of the node sees it.

The count never passes the limit: a process that wants fresh memory takes it from the quota first, and
whoever deletes files gives it back. The nodelet owns the file and recounts it from time to time, for
processes that died in between.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_FORM = struct.Struct("<QQ")
_LOCK_S = 0.1
_AGAIN_S = 0.0005


class ByteQuota:
    """Bytes in use and their limit, in a mapped file of 16 bytes."""

    def __init__(self, path: Path, limit_bytes: int | None = None) -> None:
        """Open the quota at ``path``; with ``limit_bytes`` make it, with nothing in use."""
        self._fd = -1
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if limit_bytes is not None else 0)
        self._fd = os.open(path, flags, 0o600)
        try:
            if limit_bytes is not None:
                # Not only its length: on a full file system a write to the map would be a SIGBUS.
                os.posix_fallocate(self._fd, 0, _FORM.size)
            self._map = mmap.mmap(self._fd, _FORM.size)
        except BaseException:
            os.close(self._fd)
            self._fd = -1
            raise
        self._thread_lock = threading.Lock()
        if limit_bytes is not None:
            _FORM.pack_into(self._map, 0, 0, limit_bytes)

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._map.close()
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    @property
    def used_bytes(self) -> int:
        """Bytes that files of the arena take, recycled ones among them."""
        return int(_FORM.unpack_from(self._map)[0])

    @property
    def limit_bytes(self) -> int:
        """Bytes that files of the arena may take."""
        return int(_FORM.unpack_from(self._map)[1])

    def take(self, nbytes: int) -> bool:
        """Count ``nbytes`` more, if that stays within the limit; return whether it does."""
        with self._locked():
            used, limit = _FORM.unpack_from(self._map)
            if used + nbytes > limit:
                return False
            _FORM.pack_into(self._map, 0, used + nbytes, limit)
            return True

    def give(self, nbytes: int) -> None:
        """Count ``nbytes`` less."""
        with self._locked():
            used, limit = _FORM.unpack_from(self._map)
            _FORM.pack_into(self._map, 0, max(0, used - nbytes), limit)

    def recount(self, used_bytes: int, before_bytes: int) -> None:
        """Set the count to ``used_bytes``, unless it has changed from ``before_bytes`` meanwhile."""
        with self._locked():
            if self.used_bytes == before_bytes:
                _FORM.pack_into(self._map, 0, used_bytes, self.limit_bytes)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude others for a bounded time: a process stopped in here must not stop all the rest."""
        with self._thread_lock:
            deadline = time.monotonic() + _LOCK_S
            while True:
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(_AGAIN_S)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
