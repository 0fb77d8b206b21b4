"""A runtime's view of its node's shared memory: write an object once, read it with no copy.

One object is one file in the arena's directory (on tmpfs):

::

    u32 head length | msgpack([data length, [buffer lengths]]) | data | pad | buffer 0 | pad | ...

with every buffer at a multiple of 64 bytes. Writers fill ``<id>.tmp`` and rename it, so readers see
whole objects only. Views stay valid after the file is unlinked, so freeing never hurts a reader.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.exceptions import ObjectLostError, StokerError

if TYPE_CHECKING:
    from stoker.runtime.serialization import Packed

_ALIGNMENT = 64
_LENGTH = struct.Struct("<I")


class ArenaFullError(StokerError):
    """The node's shared memory has no room for the object."""

    code = "arena_full"


class Arena:
    """The objects of one node, as files. ``directory`` is '' on a machine without a nodelet."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory) if directory else None

    def write(self, object_id: str, packed: Packed) -> int:
        """Store a packed value; return the bytes used. Raises :class:`ArenaFullError`."""
        assert self.directory is not None
        views = packed.buffers
        head = msgspec.msgpack.encode([len(packed.data), [v.nbytes for v in views]])
        parts: list[Any] = [_LENGTH.pack(len(head)), head, packed.data]
        offset = _LENGTH.size + len(head) + len(packed.data)
        for view in views:
            pad = -offset % _ALIGNMENT
            parts += (bytes(pad), view)
            offset += pad + view.nbytes
        final = self.directory / object_id
        temporary = self.directory / f"{object_id}.tmp"
        try:
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                # Reserve first: a full tmpfs must be an error here, not a SIGBUS later.
                os.posix_fallocate(fd, 0, max(1, offset))
                _write_all(fd, parts)
            finally:
                os.close(fd)
            os.rename(temporary, final)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise ArenaFullError(
                    f"no room for {offset} bytes of {object_id} in the node's shared memory"
                ) from None
            raise
        return offset

    def read(self, object_id: str) -> tuple[memoryview, list[memoryview]]:
        """Return the stream and the buffers of an object, as read-only views of shared memory."""
        assert self.directory is not None
        try:
            fd = os.open(self.directory / object_id, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ObjectLostError(
                f"{object_id} is no longer in this node's shared memory"
            ) from None
        try:
            mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        return split(memoryview(mapped))


def split(whole: memoryview) -> tuple[memoryview, list[memoryview]]:
    """Return the stream and the buffers of a stored object's bytes."""
    head_end = _LENGTH.size + _LENGTH.unpack_from(whole)[0]
    data_nbytes, lengths = msgspec.msgpack.decode(
        whole[_LENGTH.size : head_end], type=tuple[int, list[int]]
    )
    offset = head_end + data_nbytes
    data, buffers = whole[head_end:offset], []
    for nbytes in lengths:
        offset += -offset % _ALIGNMENT
        buffers.append(whole[offset : offset + nbytes])
        offset += nbytes
    return data, buffers


def _write_all(fd: int, parts: list[Any]) -> None:
    for part in parts:
        view = memoryview(part)
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        while view.nbytes:
            view = view[os.write(fd, view) :]
