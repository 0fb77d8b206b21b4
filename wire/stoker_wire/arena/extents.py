"""Extents: files on tmpfs that hold one object at a time, and are used again while their pages are warm.

::

    <arena>/<object id>                  a sealed object
    <arena>/<name>.tmp                   being written
    <arena>/free/<capacity>-<inode>      recycled: anybody may claim it, by renaming it
    <arena>/spill/<object id>            a sealed object on disk (``spill`` is a link to a folder)

The kernel counts the readers. A reader holds a shared ``flock`` for as long as its mapping
lives (the lock belongs to the open file, which the mapping keeps open); a writer that reuses an
extent must get the exclusive lock first. So an extent is filled again only after the last view is
gone, and a process that dies, however it dies, releases its views and what it was writing.

First touches of pages cost ten times a copy. So a process keeps its mappings of extents that it has
filled more than once: to put into one of these again is one ``memcpy``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stoker_wire.arena.byte_quota import ByteQuota
from stoker_wire.arena.in_place import HEAD_ROOM, POPULATE_WRITE, InPlaceBuffers
from stoker_wire.arena.layout import PREFIX_NBYTES, ObjectHead, id_of, pack_head, parts_of, split
from stoker_wire.arena.views import Views
from stoker_wire.errors import ArenaFullError, ObjectLostError

FREE = "free"
SPILL = "spill"
QUOTA = ".quota"

_PAGE = mmap.PAGESIZE
_SLACK = 64 * 1024
_CLAIMS = 4
"""Recycled extents that are tried before a fresh one is made: a view may still be on each."""
_MAPPINGS = 64
_REMEMBERED = 256
_WORTH_ASKING = 1 << 20
_SLICE = 16 << 20
"""Bytes copied at once: between slices other threads may have the interpreter."""
_NEVER = object()
_BUSY_S = 2.0
_AGAIN_S = 0.002


class Extent:
    """A file that this process alone may fill. It ends by ``seal`` or ``discard``."""

    def __init__(self, arena: Arena, fd: int, path: str, inode: int, capacity: int) -> None:
        self.inode, self.capacity = inode, capacity
        self.mapping: mmap.mmap | None = None
        """Where this process has it mapped already."""
        self._arena, self._fd, self._path = arena, fd, path

    def pwrite(self, part: Any, offset: int) -> None:
        """Write bytes at an offset: through a warm mapping where there is one."""
        view = memoryview(part)
        if self.mapping is not None:
            for begin in range(0, view.nbytes, _SLICE):
                piece = view[begin : begin + _SLICE]
                at = offset + begin
                self.mapping[at : at + piece.nbytes] = piece
            return
        while view.nbytes:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    @property
    def fd(self) -> int:
        """The open file, for callers that have the kernel fill it; this object closes it."""
        return self._fd

    def seal(self, object_id: str) -> None:
        """Publish it as a complete object, in place of an earlier one of that name.

        A task that is tried again makes its results again; readers of the first ones go on with them.
        """
        self._rename(object_id)
        self.close()

    def publish(self, object_id: str) -> None:
        """Seal it, and keep a shared lock on it until :meth:`close`, as a view does."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        self._rename(object_id)

    def _rename(self, object_id: str) -> None:
        final = os.path.join(self._arena.path, object_id)
        if os.path.exists(final):
            self._arena.recycle(object_id)
        os.rename(self._path, final)

    def discard(self) -> None:
        """Recycle it, filled or not. Nothing happens if it has ended already."""
        if self._fd >= 0:
            self._arena.recycle_file(self._path)
            self.close()

    def close(self) -> None:
        """Give the lock up."""
        fd, self._fd = self._fd, -1
        # A mapping made of this file keeps it open: without this it would keep the lock too.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


class Arena:
    """One node's arena, as every process that shares its memory uses it. All methods: any thread."""

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        self._free = os.path.join(directory, FREE)
        self._quota: ByteQuota | None = None
        self._names = itertools.count()
        self._lock = threading.Lock()
        self._views = Views()
        self._in_place = InPlaceBuffers()
        self._recycled: dict[int, int] = {}
        """Inode -> capacity of what this process recycled last; some may be taken by now."""
        self._filled: OrderedDict[int, Any] = OrderedDict()
        """Inodes of extents that this process has filled -> their mapping, from the second time on.

        What falls out is unmapped once no writer uses it."""

    def close(self) -> None:
        """Drop the mappings; views that were read stay."""
        with self._lock:
            self._filled.clear()
        self._views.clear()
        self._in_place.close()
        if self._quota is not None:
            self._quota.close()
            self._quota = None

    @property
    def quota(self) -> ByteQuota:
        """The count of bytes in use, and their limit."""
        if self._quota is None:
            self._quota = ByteQuota(self.path / QUOTA)
        return self._quota

    # -- writing ---------------------------------------------------------------------------------

    def write(
        self,
        object_id: str,
        head: ObjectHead,
        data: Any,
        buffers: Sequence[memoryview],
        reclaim: Callable[[], bool] | None = None,
    ) -> int:
        """Store an object; return its length. Raises :class:`ArenaFullError`, and has then no effect.

        ``reclaim`` as for :meth:`create`.
        """
        total = self._in_place.publish(object_id, head, data, buffers)
        if total:
            return total
        start, total = pack_head(object_id, head)
        extent = self.create(total, reclaim)
        try:
            for offset, part in parts_of(start, data, buffers):
                extent.pwrite(part, offset)
            extent.seal(object_id)
        except BaseException:
            extent.discard()
            raise
        return total

    def write_to_disk(
        self, object_id: str, head: ObjectHead, data: Any, buffers: Sequence[memoryview]
    ) -> int:
        """Store an object on disk at once, among the spilled ones; return its length.

        Raises OSError, and has then no effect.
        """
        start, total = pack_head(object_id, head)
        final = self.path / SPILL / object_id
        temporary = final.with_name(os.path.basename(self._temporary()))
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, total)  # a full disk is an error before anything is written
            for offset, part in parts_of(start, data, buffers):
                view = memoryview(part)
                while view.nbytes:
                    written = os.pwrite(fd, view[:_SLICE], offset)
                    view, offset = view[written:], offset + written
            os.rename(temporary, final)
            self.recycle(object_id)  # what an earlier attempt at the same task has made
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return total

    def drop_from_disk(self, object_id: str) -> None:
        """Delete an object that was written to disk and that no nodelet knows of."""
        (self.path / SPILL / object_id).unlink(missing_ok=True)

    def allocate(self, nbytes: int, reclaim: Callable[[], bool] | None = None) -> memoryview:
        """Return writable memory that :meth:`write` need not copy if an object's first buffer begins there.

        Once it is stored and :meth:`settle_in_place` was called, what is written to it changes nothing for
        readers. ``reclaim`` as for :meth:`create`. Raises :class:`ArenaFullError`.
        """
        return self._in_place.add(self._obtain(HEAD_ROOM + nbytes, reclaim), nbytes)

    def settle_in_place(self) -> None:
        """Give what was stored in place to its readers alone; call it before any can learn of it."""
        self._in_place.settle()

    def create(self, nbytes: int, reclaim: Callable[[], bool] | None = None) -> Extent:
        """Return an extent of at least ``nbytes`` to fill: a warm one, or fresh memory.

        ``reclaim`` frees what the caller can free at once and returns whether it freed anything; it
        is called before so much memory is touched that this costs more than asking.
        """
        extent = self._obtain(nbytes, reclaim)
        try:
            extent.mapping = self._mapping_of(extent)
        except BaseException:  # an interrupt, or the cancellation of a task
            extent.discard()
            raise
        return extent

    def _obtain(self, nbytes: int, reclaim: Callable[[], bool] | None) -> Extent:
        extent = self._claim(nbytes)
        if extent is None and nbytes >= _WORTH_ASKING and reclaim is not None and reclaim():
            extent = self._claim(nbytes)
        return extent or self._fresh(nbytes)

    def _mapping_of(self, extent: Extent) -> mmap.mmap | None:
        """Return the cached mapping of an extent; one is made at its second filling."""
        with self._lock:
            mapping: Any = self._filled.pop(extent.inode, _NEVER)
            if mapping is None:
                with contextlib.suppress(OSError):
                    mapping = mmap.mmap(extent.fd, extent.capacity)
                    mapping.madvise(POPULATE_WRITE)
            self._filled[extent.inode] = None if mapping is _NEVER else mapping
            if len(self._filled) > _MAPPINGS:
                self._filled.popitem(last=False)
        return mapping if isinstance(mapping, mmap.mmap) else None

    def _claim(self, nbytes: int) -> Extent | None:
        """Take a recycled extent without readers; warm mappings first, then the smallest.

        What this process recycled itself is tried before it looks at what there is: looking costs
        as much as copying a megabyte.
        """
        for own in (self._recycled.copy(), None):
            capacities = own if own is not None else dict(map(_parsed, _names_in(self._free)))
            most = nbytes + nbytes // 4 + _SLACK
            fitting = sorted(
                (self._filled.get(inode) is None, capacity, inode)
                for inode, capacity in capacities.items()
                if nbytes <= capacity <= most
            )
            for _, capacity, inode in fitting[:_CLAIMS]:
                self._recycled.pop(inode, None)
                extent = self._take(f"{capacity}-{inode}", nbytes)
                if extent is not None:
                    return extent
        return None

    def _take(self, name: str, nbytes: int) -> Extent | None:
        free, path = os.path.join(self._free, name), self._temporary()
        try:
            os.rename(free, path)
        except FileNotFoundError:
            return None  # another process was faster
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            status = os.fstat(fd)  # the name may be that of an extent which lay there before
            if status.st_size >= nbytes and _try_lock(fd, fcntl.LOCK_EX):
                return Extent(self, fd, path, status.st_ino, status.st_size)
        except BaseException:
            os.rename(path, free)
            if fd >= 0:
                os.close(fd)
            raise
        os.close(fd)
        os.rename(path, os.path.join(self._free, f"{status.st_size}-{status.st_ino}"))
        return None

    def _fresh(self, nbytes: int) -> Extent:
        capacity = capacity_for(nbytes)
        if not self.quota.take(capacity):
            raise ArenaFullError(
                f"no room for {nbytes} bytes in {self.path.name}\n"
                f"{self.quota.used_bytes} of {self.quota.limit_bytes} bytes are in use"
            )
        path = self._temporary()
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.ftruncate(fd, capacity)  # who counts the arena's bytes now counts these
            # All of it, now: a full tmpfs must be an error here, not a SIGBUS later.
            os.posix_fallocate(fd, 0, capacity)
            inode = os.fstat(fd).st_ino
        except BaseException as error:
            self.quota.give(capacity)
            if fd >= 0:
                os.unlink(path)
                os.close(fd)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise ArenaFullError(
                    f"no room for {nbytes} bytes\nthe file system of {self.path} is full"
                ) from None
            raise
        return Extent(self, fd, path, inode, capacity)

    def _temporary(self) -> str:
        return os.path.join(self.path, f"{os.getpid()}-{id(self):x}-{next(self._names)}.tmp")

    # -- reading ---------------------------------------------------------------------------------

    def open(self, object_id: str) -> int:
        """Return a descriptor of an object's file under a shared lock, in memory or spilled.

        The lock goes with the last descriptor and mapping of it. Raises :class:`ObjectLostError`.
        """
        deadline_s = time.monotonic() + _BUSY_S
        while True:
            there = False
            for path in (self.path / object_id, self.path / SPILL / object_id):
                try:
                    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                there = True
                if _try_lock(fd, fcntl.LOCK_SH) and _holds(fd, object_id):
                    return fd
                os.close(fd)
            if not there or time.monotonic() > deadline_s:
                break
            time.sleep(_AGAIN_S)  # it is looked at, freed or spilled in this moment
        raise ObjectLostError(f"{object_id} is no longer in this node's shared memory")

    def read(self, object_id: str) -> tuple[memoryview, list[memoryview]]:
        """Return the stream and the buffers of an object, as read-only views of shared memory."""
        return split(self._views.view(object_id, self.path / object_id, self.open))

    def mapping(self, object_id: str, fd: int) -> mmap.mmap:
        """Return a read-only mapping of the file that :meth:`open` opened, which must stay open in use.

        It is cached: the pages of a new one are found one fault at a time.
        """
        return self._views.mapping(self.path / object_id, fd)

    def read_here(self) -> list[tuple[str, int]]:
        """Return the objects that this process has views of, with their bytes, the largest first."""
        return self._views.living()

    # -- freeing ---------------------------------------------------------------------------------

    def recycle(self, object_id: str) -> bool:
        """Free an object: its extent may be claimed once its last view is gone. False if unknown."""
        return self.recycle_file(os.path.join(self.path, object_id))

    def recycle_file(self, path: str) -> bool:
        """Move a file to the recycled ones; False if it is gone already."""
        try:
            status = os.stat(path)
            os.rename(path, os.path.join(self._free, f"{status.st_size}-{status.st_ino}"))
        except FileNotFoundError:
            return False
        self._recycled[status.st_ino] = status.st_size
        if len(self._recycled) > _REMEMBERED:
            with contextlib.suppress(KeyError, StopIteration, RuntimeError):
                del self._recycled[next(iter(self._recycled))]
        return True

    def in_use(self, path: Path) -> bool:
        """Return whether some process reads or writes this file now."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not _try_lock(fd, fcntl.LOCK_EX)
        finally:
            os.close(fd)

    def delete(self, path: Path) -> int:
        """Delete a recycled file unless it is read; return the bytes that this freed."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            if not _try_lock(fd, fcntl.LOCK_EX):
                return 0
            status = os.fstat(fd)
            try:
                os.unlink(path)
            except FileNotFoundError:
                return 0  # claimed: its writer waits for nothing and tries the next
            # Mappings that writers cache would keep the pages.
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)
        self.quota.give(status.st_size)
        with self._lock:
            self._filled.pop(status.st_ino, None)
        self._views.forget((status.st_dev, status.st_ino))
        return status.st_size


def capacity_for(nbytes: int) -> int:
    """Return the bytes that a fresh extent for ``nbytes`` takes.

    Sizes that differ by little shall fit the same extent: it is rounded up to eighths of the power
    of two below.
    """
    step = max(_PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holds(fd: int, object_id: str) -> bool:
    """Return whether the file is this object, and not yet another's."""
    return id_of(os.pread(fd, PREFIX_NBYTES, 0)) == object_id


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _parsed(name: str) -> tuple[int, int]:
    """Return (inode, capacity)."""
    capacity, _, inode = name.partition("-")
    return int(inode), int(capacity)
