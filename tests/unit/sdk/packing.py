"""Packed values laid where a reader finds them: in mappings, or in messages."""

from __future__ import annotations

import mmap
import tempfile
from typing import TYPE_CHECKING, Any

from stoker.runtime.serialization import Packed, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Callable


def mapped(packed: Packed) -> list[memoryview]:
    """The buffers as read-only views of a private mapping: how a large object is read."""
    return _laid(packed, mmap.ACCESS_COPY)


def protected(packed: Packed) -> list[memoryview]:
    """The buffers as views of memory where a write would end the process."""
    return _laid(packed, mmap.ACCESS_READ)


def _laid(packed: Packed, access: int) -> list[memoryview]:
    views = []
    for buffer in packed.buffers:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(buffer) or b"\0")
            file.flush()
            whole = memoryview(mmap.mmap(file.fileno(), 0, access=access))
        views.append(whole.toreadonly()[: buffer.nbytes])
    return views


def inline(packed: Packed) -> list[memoryview]:
    """The buffers as they travel inside a message."""
    return [memoryview(bytes(b)) for b in packed.buffers]


def travel(value: Any, lay: Callable[[Packed], list[memoryview]] = mapped) -> Any:
    """Pack a value and read it where ``lay`` puts its buffers."""
    packed = pack(value, what="value")
    return unpack(packed.data, lay(packed), what="value")
