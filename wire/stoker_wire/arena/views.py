"""Read-only views of objects: mapped once for each extent, pinned one by one.

The pages of a mapping are found one fault at a time (10 GB/s); a cached mapping has been
through that. But a cached mapping does not say who reads: so each view of an object holds a
descriptor of its own, with the shared lock, for as long as anything refers to its bytes. What can
hold both is an array of numpy's; a process that has not loaded numpy gets a mapping for each view,
made from the locked file, and pays the faults.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from pathlib import Path

_MAPPINGS = 64
_UNMAPPABLE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class Pin:
    """An open file that is under a shared lock for as long as this lives."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        """Return the open file: a mapping made of it holds the lock too."""
        return self._fd

    def __del__(self) -> None:
        os.close(self._fd)


class Views:
    """The views of one arena in this process. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mappings: OrderedDict[tuple[int, int], mmap.mmap] = OrderedDict()
        self._living: WeakValueDictionary[str, Any] = WeakValueDictionary()
        """Object id -> the array that all views of the object in this process share."""
        self._array_type: Any = None

    def clear(self) -> None:
        """Drop the cached mappings; those that are read stay."""
        with self._lock:
            self._mappings.clear()

    def forget(self, inode: tuple[int, int]) -> None:
        """Drop the cached mapping of a file, (device, inode), that is deleted: it would keep it open."""
        with self._lock:
            self._mappings.pop(inode, None)

    def living(self) -> list[tuple[str, int]]:
        """Return (object id, bytes) of what this process has views of, the largest first."""
        sizes = [(object_id, array.nbytes) for object_id, array in list(self._living.items())]
        return sorted(sizes, key=lambda size: (-size[1], size[0]))

    def view(self, object_id: str, path: Path, open_locked: Callable[[str], int]) -> memoryview:
        """Return the bytes of an object. ``open_locked`` opens it under a shared lock."""
        living = self._living.get(object_id)
        if living is not None and _inode_of(path) == living.inode:
            return memoryview(living)
        fd = open_locked(object_id)
        numpy = sys.modules.get("numpy")
        if not hasattr(numpy, "frombuffer"):  # not loaded, or not to its end
            return _mapped_for_one(fd)
        try:
            array = numpy.frombuffer(self.mapping(path, fd), numpy.uint8)  # type: ignore[union-attr]
        except OSError as error:
            if error.errno not in _UNMAPPABLE:
                os.close(fd)
                raise
            return _mapped_for_one(fd)
        if self._array_type is None:
            self._array_type = type("PinnedArray", (numpy.ndarray,), {})  # type: ignore[union-attr]
        array = array.view(self._array_type)
        array.pin, array.inode = Pin(fd), _inode_of(fd)
        self._living[object_id] = array
        return memoryview(array)

    def mapping(self, path: Path, fd: int) -> mmap.mmap:
        """Return a mapping of an open file of the object at ``path``; it does not hold the file's lock."""
        inode = _inode_of(fd)
        assert inode is not None
        keep = inode == _inode_of(path)  # not of a spilled object: it would keep the disk's space
        with self._lock:
            mapping = self._mappings.pop(inode, None)
            if mapping is None:
                # Of another open file than the locked one, which it would keep locked.
                unlocked = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    mapping = mmap.mmap(unlocked, 0, prot=mmap.PROT_READ)
                finally:
                    os.close(unlocked)
            if keep:
                self._mappings[inode] = mapping
            if len(self._mappings) > _MAPPINGS:
                self._mappings.popitem(last=False)
        return mapping


def _inode_of(file: Path | int) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _mapped_for_one(fd: int) -> memoryview:
    """Map a file for one view; where the process has no room for one more mapping, read it.

    Copy-on-write, beneath a view that is read-only: tensors over it may be written to.
    """
    try:
        return memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)).toreadonly()
    except OSError as error:
        if error.errno not in _UNMAPPABLE:
            raise
        return memoryview(os.pread(fd, os.fstat(fd).st_size, 0))
    finally:
        os.close(fd)
