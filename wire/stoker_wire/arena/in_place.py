"""Memory of the arena that a process fills by itself, before it is an object: storing it copies nothing.

The bytes of the object lie behind room for its head, in an extent that this process alone may fill. When a
value is stored whose first buffer begins there, its head is written in front, and the file is published.
From that moment on others read it: the pages that this process has mapped become its own (copy on write), so
that what it writes later changes nothing for them. The mapping keeps the file under a shared lock, as a view
does, until the last array over it is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from stoker_wire.arena.layout import ALIGNMENT, ObjectHead, pack_head

HEAD_ROOM = 4096
"""Bytes before the buffer: a page, so that arrays begin on one."""
_FIXED = 0x10
POPULATE_WRITE = (
    23  # MADV_POPULATE_WRITE, which Python 3.11 does not name; an older kernel refuses it
)


class _Extent(Protocol):
    """A file that this process alone may fill."""

    capacity: int

    @property
    def fd(self) -> int: ...
    def pwrite(self, part: Any, offset: int) -> None: ...
    def seal(self, object_id: str, *, shared: bool = False) -> None: ...
    def discard(self) -> None: ...


class _Mapping(mmap.mmap):
    """A mapping that a weak reference can follow; arrays over it keep it alive."""


class InPlaceBuffers:
    """The buffers of this process that are filled in place and not stored yet. For any thread."""

    def __init__(self) -> None:
        self._buffers: dict[int, tuple[weakref.ref[_Mapping], _Extent]] = {}
        """The address of each buffer -> its mapping and its file."""

    def add(self, extent: _Extent, nbytes: int) -> memoryview:
        """Return the writable bytes of an extent that are to become a buffer of an object.

        The extent is discarded if the last reference to them goes before that.
        """
        try:
            mapping = _Mapping(extent.fd, extent.capacity)
        except BaseException:
            extent.discard()
            raise
        with contextlib.suppress(OSError):  # each page is then found as it is touched
            mapping.madvise(POPULATE_WRITE)
        address = _address_of(mapping) + HEAD_ROOM
        self._buffers[address] = weakref.ref(mapping), extent
        weakref.finalize(mapping, self._on_dropped, address, os.getpid())
        return memoryview(mapping)[HEAD_ROOM : HEAD_ROOM + nbytes]

    def _on_dropped(self, address: int, pid: int) -> None:
        if os.getpid() != pid:
            return  # a fork's copy: the file is its parent's
        _, extent = self._buffers.pop(address, (None, None))
        if extent is not None:
            extent.discard()

    def publish(
        self, object_id: str, head: ObjectHead, data: Any, buffers: Sequence[memoryview]
    ) -> int:
        """Store an object whose first buffer was filled in place; return its length, 0 if it was not.

        Other buffers are written behind the first one.
        """
        if not self._buffers or not buffers or not buffers[0].nbytes:
            return 0
        address = _address_of(buffers[0])
        known, extent = self._buffers.get(address, (None, None))
        mapping = known() if known is not None else None
        if mapping is None or extent is None:
            return 0
        start, total = _padded_head(object_id, head)
        if not start or len(start) + len(data) > HEAD_ROOM or total > extent.capacity:
            return 0
        if self._buffers.pop(address, None) is None:
            return 0  # another thread stores it just now
        try:
            mapping[: len(start)] = start
            mapping[len(start) : len(start) + len(data)] = data
            offset = HEAD_ROOM + buffers[0].nbytes
            for view in buffers[1:]:
                offset += -offset % ALIGNMENT
                extent.pwrite(view, offset)
                offset += view.nbytes
            _make_private(mapping, extent.fd)
            extent.seal(object_id, shared=True)
        except BaseException:
            extent.discard()
            raise
        return total


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
