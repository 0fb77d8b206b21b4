"""Memory of commits that others on the machine can map: newcomers read their state out of it.

A segment is an anonymous file in memory (``memfd_create``): it has no name to leak, and is gone with the
last process that maps it. Only processes of the same user in the same PID namespace can open it; others get
the state over their process group.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ("Buffer", "Mapped", "Place", "Segment", "allocate")

_ALIGNMENT = 64
_CAN_SHARE = hasattr(os, "memfd_create")


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's place for other processes: the open file ``fd`` of process ``pid``, from ``offset`` on."""

    pid: int
    fd: int
    inode: int
    file_nbytes: int
    offset: int
    boot_id: str = ""
    """The machine, as long as it is up: another one may have a process and a file of these numbers, too."""


@functools.cache
def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


class Segment:
    """An anonymous file of ``nbytes`` in this process's memory, all of its pages there."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("stoker-commit", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, nbytes)
        self.inode = os.fstat(self.fd).st_ino
        # At once: page by page, as they are first written to, takes many times as long.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.memory = mmap.mmap(self.fd, nbytes, flags=flags)

    def place(self, offset: int) -> Place:
        """Return the place at ``offset``."""
        return Place(os.getpid(), self.fd, self.inode, self.nbytes, offset, _boot_id())


@dataclass(slots=True)
class Buffer:
    """Memory for a tensor; ``segment`` is where others find it, None where they cannot."""

    tensor: torch.Tensor
    segment: Segment | None = None
    offset: int = 0

    @property
    def place(self) -> Place | None:
        """The place for other processes."""
        return None if self.segment is None else self.segment.place(self.offset)


def allocate(tensors: Sequence[torch.Tensor]) -> list[Buffer]:
    """Return a buffer for each tensor, of its shape and type, on its device; one segment for the CPU's."""
    sizes = [
        -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT if _CAN_SHARE and not tensor.is_cuda else 0
        for tensor in tensors
    ]
    if not sum(sizes):
        return [Buffer(torch.empty_like(tensor)) for tensor in tensors]
    segment, offset = Segment(sum(sizes)), 0
    buffers = []
    for tensor, size in zip(tensors, sizes, strict=True):
        if not size:
            buffers.append(Buffer(torch.empty_like(tensor)))
            continue
        part = _tensor(segment.memory, offset, tensor.dtype, tensor.shape)
        buffers.append(Buffer(part, segment, offset))
        offset += size
    return buffers


class Mapped:
    """Segments of other processes, mapped to be read; none of it may be written to."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], mmap.mmap] = {}

    def tensor(self, place: Place, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor at a place of another process. OSError if this process cannot reach it."""
        if place.boot_id != _boot_id():
            raise FileNotFoundError(f"process {place.pid} is on another machine")
        key = place.pid, place.fd
        if key not in self._files:
            fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                found = os.fstat(fd)
                if (found.st_ino, found.st_size) != (place.inode, place.file_nbytes):
                    raise FileNotFoundError(f"process {place.pid} is another one")
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                self._files[key] = mmap.mmap(fd, place.file_nbytes, flags=flags)
            finally:
                os.close(fd)
        return _tensor(self._files[key], place.offset, dtype, shape)


def _tensor(
    memory: mmap.mmap, offset: int, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Return memory as a tensor, with a storage of its own: ``torch.save`` writes the whole of one."""
    count = math.prod(shape)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))
