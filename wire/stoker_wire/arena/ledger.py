"""How many bytes of shared memory the arena's files take, counted where every process sees it.

A process that wants fresh memory takes it from the ledger first; whoever deletes files gives it
back. The nodelet counts anew from time to time, for those that died in between.
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


class Ledger:
    """Bytes in use and the limit, in a mapped file of 16 bytes."""

    def __init__(self, path: Path, limit_bytes: int | None = None) -> None:
        """Open the ledger at ``path``; with ``limit_bytes`` make it, empty."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if limit_bytes is not None else 0)
        self._fd = os.open(path, flags, 0o600)
        if limit_bytes is not None:
            os.ftruncate(self._fd, _FORM.size)
        self._map = mmap.mmap(self._fd, _FORM.size)
        self._thread_lock = threading.Lock()
        if limit_bytes is not None:
            _FORM.pack_into(self._map, 0, 0, limit_bytes)

    def close(self) -> None:
        """Let go of the file."""
        self._map.close()
        os.close(self._fd)

    @property
    def used_bytes(self) -> int:
        """Bytes that files of the arena take, objects and recycled ones alike."""
        return int(_FORM.unpack_from(self._map)[0])

    @property
    def limit_bytes(self) -> int:
        """Bytes that they may take."""
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
        """Replace the count by what was found, unless it is no longer what it was before the search."""
        with self._locked():
            if self.used_bytes == before_bytes:
                _FORM.pack_into(self._map, 0, used_bytes, self.limit_bytes)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude others, but not for ever: a process stopped in here must not stop all the rest."""
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
