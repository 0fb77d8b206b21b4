"""An empty arena, and what its tests write to and read from one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stoker_wire.arena import Arena, ByteQuota, ObjectHead
from stoker_wire.arena.extents import FREE, QUOTA

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 64 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return laid_out(tmp_path)


def laid_out(path: Path, limit_bytes: int = LIMIT) -> Path:
    (path / FREE).mkdir()
    ByteQuota(path / QUOTA, limit_bytes).close()
    return path


def write(arena: Arena, object_id: str, *buffers: bytes, data: bytes = b"stream") -> int:
    lengths = tuple(len(b) for b in buffers)
    head = ObjectHead("j_1", "p_1", 0.0, len(data), lengths)
    return arena.write(object_id, head, data, [memoryview(b) for b in buffers])


def read(arena: Arena, object_id: str) -> tuple[bytes, list[bytes]]:
    data, buffers = arena.read(object_id)
    return bytes(data), [bytes(b) for b in buffers]


def free_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / FREE).iterdir())
