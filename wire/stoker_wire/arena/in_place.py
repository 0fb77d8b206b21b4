"""Memory of the arena that a process fills by itself, before it is an object: storing it copies nothing.

The bytes of the object are behind room for its head, in an extent that this process alone may fill. When a
value is stored whose first buffer begins there, its head is written in front, and the file is published. As
long as an array over it lives the file is under a shared lock, as under a view.

What this process writes to it later must change nothing for others. :meth:`InPlaceBuffers.settle` sees to
that before anybody can learn of the object: an array that somebody still has gets its pages for itself (copy
on write). Where nobody has, as after a task that returned it, the mapping stays warm for the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from stoker_wire.arena.layout import ALIGNMENT, ObjectHead, pack_head

HEAD_ROOM = 4096
"""Bytes before the buffer: a page, so that arrays begin on one."""
POPULATE_WRITE = (
    23  # MADV_POPULATE_WRITE, which Python 3.11 does not name; an older kernel refuses it
)
_FIXED = 0x10
_WARM = 16
"""Mappings that are kept for the next buffers."""


class _Extent(Protocol):
    """A file that this process alone may fill."""

    inode: int
    capacity: int

    @property
    def fd(self) -> int: ...
    def pwrite(self, part: Any, offset: int) -> None: ...
    def publish(self, object_id: str) -> None: ...
    def close(self) -> None: ...
    def discard(self) -> None: ...


class _Buffer:
    """One buffer: its file and mapping, and the array that all views of it share."""

    def __init__(self, extent: _Extent, mapping: mmap.mmap, array: Any) -> None:
        self.extent = extent
        self.mapping = mapping
        self.array = weakref.ref(array)
        self.is_published = False
        self.is_private = False


class InPlaceBuffers:
    """The buffers of this process that are filled in place. For any thread."""

    def __init__(self) -> None:
        self._buffers: dict[int, _Buffer] = {}
        """By address, from ``add`` until nobody refers to it."""
        self._unsettled: list[_Buffer] = []
        self._warm: OrderedDict[int, mmap.mmap] = OrderedDict()
        """Mappings without users, by inode."""
        self._lock = threading.RLock()
        """Reentrant: the collector may find a dropped array while this thread holds it."""
        self._array_type: Any = None

    def add(self, extent: _Extent, nbytes: int) -> memoryview:
        """Return the writable bytes of an extent that are to become a buffer of an object. Needs numpy.

        The extent is discarded if the last reference to them goes before that.
        """
        import numpy

        try:
            mapping = self._mapping(extent)
            if self._array_type is None:
                self._array_type = type("PinnedArray", (numpy.ndarray,), {})
            array = numpy.frombuffer(mapping, numpy.uint8, nbytes, HEAD_ROOM).view(self._array_type)
            address = _address_of(mapping) + HEAD_ROOM
            self._buffers[address] = _Buffer(extent, mapping, array)
            weakref.finalize(array, self._on_dropped, address, os.getpid())
        except BaseException:
            extent.discard()
            raise
        return memoryview(array)

    def _mapping(self, extent: _Extent) -> mmap.mmap:
        with self._lock:
            mapping = self._warm.pop(extent.inode, None)
        if mapping is None or len(mapping) != extent.capacity:
            # Of another open file than the locked one, which it would keep locked.
            unlocked = os.open(f"/proc/self/fd/{extent.fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                mapping = mmap.mmap(unlocked, extent.capacity)
            finally:
                os.close(unlocked)
            with contextlib.suppress(OSError):  # each page is then found as it is touched
                mapping.madvise(POPULATE_WRITE)
        return mapping

    def _on_dropped(self, address: int, pid: int) -> None:
        if os.getpid() != pid:
            return  # a fork's copy: the file is its parent's
        buffer = self._buffers.pop(address, None)
        if buffer is None:
            return
        if buffer.is_published:
            buffer.extent.close()
        else:
            buffer.extent.discard()
        if not buffer.is_private:
            with self._lock:
                self._warm[buffer.extent.inode] = buffer.mapping
                if len(self._warm) > _WARM:
                    self._warm.popitem(last=False)

    def publish(
        self, object_id: str, head: ObjectHead, data: Any, buffers: Sequence[memoryview]
    ) -> int:
        """Store an object whose first buffer was filled in place; return its length, 0 if it was not.

        Other buffers are written behind the first one. :meth:`settle` must follow.
        """
        if not self._buffers or not buffers or not buffers[0].nbytes:
            return 0
        buffer = self._buffers.get(_address_of(buffers[0]))
        if buffer is None:
            return 0
        start, total = _padded_head(object_id, head)
        extent, mapping = buffer.extent, buffer.mapping
        if not start or len(start) + len(data) > HEAD_ROOM or total > extent.capacity:
            return 0
        with self._lock:
            if buffer.is_published:
                return 0  # another thread stores it just now
            buffer.is_published = True
        try:
            mapping[: len(start)] = start
            mapping[len(start) : len(start) + len(data)] = data
            offset = HEAD_ROOM + buffers[0].nbytes
            for view in buffers[1:]:
                offset += -offset % ALIGNMENT
                extent.pwrite(view, offset)
                offset += view.nbytes
            extent.publish(object_id)
        except BaseException:
            buffer.is_published = False
            raise
        with self._lock:
            self._unsettled.append(buffer)
        return total

    def settle(self) -> None:
        """Make the pages of what was published private to this process, where it still has the array."""
        if not self._unsettled:
            return
        with self._lock:  # whoever comes meanwhile returns when this is done
            while self._unsettled:
                buffer = self._unsettled[-1]
                array = buffer.array()  # held, so that the extent stays open
                try:
                    if array is not None and not buffer.is_private:
                        _make_private(buffer.mapping, buffer.extent.fd)
                        buffer.is_private = True
                finally:
                    self._unsettled.remove(buffer)
                del array

    def close(self) -> None:
        """Drop the mappings without users."""
        with self._lock:
            self._warm.clear()


def _padded_head(object_id: str, head: ObjectHead) -> tuple[bytes, int]:
    """Return the head of an object whose first buffer is at ``HEAD_ROOM``, and the object's length.

    The stream is as long as that takes: unpickling stops at its own end.
    """
    start, _ = pack_head(object_id, _with_stream(head, HEAD_ROOM // 2))
    stream_nbytes = HEAD_ROOM - len(start)
    padded, total = pack_head(object_id, _with_stream(head, stream_nbytes))
    fits = stream_nbytes >= head.data_nbytes and len(padded) == len(start)
    return (padded, total) if fits else (b"", 0)


def _with_stream(head: ObjectHead, nbytes: int) -> ObjectHead:
    return ObjectHead(head.job_id, head.owner_id, head.created_at_s, nbytes, head.buffers_nbytes)


def _address_of(buffer: Any) -> int:
    """Return where a buffer's bytes begin; the buffer may be read-only."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        return int(numpy.frombuffer(buffer, numpy.uint8, 1).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@functools.cache
def _map() -> Callable[..., Any]:
    function: Any = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,
    )
    return function  # type: ignore[no-any-return]


def _make_private(mapping: mmap.mmap, fd: int) -> None:
    """Have what is written to the mapping from now on stay in this process."""
    address = _address_of(mapping)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    got = _map()(address, len(mapping), access, mmap.MAP_PRIVATE | _FIXED, fd, 0)
    if got != address:
        raise OSError(ctypes.get_errno(), "mmap")
