"""Views: they keep their bytes, and where none can be mapped the bytes are copied."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.arena import Arena, views
from stoker_wire.arena.extents import FREE
from stoker_wire.errors import ObjectLostError
from tests.unit.wire.arena.conftest import free_names, read, write

if TYPE_CHECKING:
    from pathlib import Path


def test_a_view_keeps_its_bytes_and_its_extent(folder: Path) -> None:
    arena = Arena(folder)
    write(arena, "o_1", b"a" * 500_000)
    view = arena.read("o_1")[1][0]
    arena.recycle("o_1")
    with pytest.raises(ObjectLostError, match="o_1"):
        arena.read("o_1")
    write(arena, "o_2", b"b" * 500_000)
    assert bytes(view) == b"a" * 500_000
    assert len(free_names(folder)) == 1, "o_2 lies elsewhere, o_1's extent waits for its reader"
    held = folder / FREE / free_names(folder)[0]
    assert arena.delete(held) == 0
    inode = held.stat().st_ino
    del view
    write(arena, "o_3", b"c" * 500_000)
    assert (folder / "o_3").stat().st_ino == inode
    assert read(arena, "o_2")[1] == [b"b" * 500_000]


def test_where_no_more_can_be_mapped_it_is_copied(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "too many mappings")

    arena = Arena(folder)
    write(arena, "o_1", b"x" * 200_000)
    monkeypatch.setattr(views.mmap, "mmap", exhausted)
    assert read(arena, "o_1") == (b"stream", [b"x" * 200_000])
