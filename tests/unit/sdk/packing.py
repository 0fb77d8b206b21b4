"""Packed values laid where a reader finds them: in an arena, or in a message."""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.runtime.serialization.pickling import Packed, pack, unpack
from stoker_wire.arena import Arena, ByteQuota, ObjectHead
from stoker_wire.arena.extents import FREE, QUOTA

if TYPE_CHECKING:
    from collections.abc import Callable


def store(packed: Packed, folder: Path) -> Arena:
    """Write a value as ``o_1`` into a new arena."""
    (folder / FREE).mkdir()
    ByteQuota(folder / QUOTA, 1 << 30).close()
    arena = Arena(folder)
    lengths = tuple(b.nbytes for b in packed.buffers)
    head = ObjectHead("j_1", "p_1", 0.0, len(packed.data), lengths)
    arena.write("o_1", head, packed.data, packed.buffers)
    return arena


def stored(packed: Packed) -> list[memoryview]:
    """The buffers as an arena gives them to a reader."""
    with tempfile.TemporaryDirectory() as folder:
        arena = store(packed, Path(folder))
        views = arena.read("o_1")[1]
        arena.close()
    return views


def protected(packed: Packed) -> list[memoryview]:
    """The buffers as views of memory where a write would end the process."""
    views = []
    for buffer in packed.buffers:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(buffer) or b"\0")
            file.flush()
            whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        views.append(whole[: buffer.nbytes])
    return views


def inline(packed: Packed) -> list[memoryview]:
    """The buffers as they travel inside a message."""
    return [memoryview(bytes(b)) for b in packed.buffers]


def travel(value: Any, lay: Callable[[Packed], list[memoryview]] = stored) -> Any:
    """Pack a value and read it where ``lay`` puts its buffers."""
    packed = pack(value, what="value")
    return unpack(packed.data, lay(packed), what="value")
