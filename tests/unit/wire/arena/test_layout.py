"""The bytes of an object: what is written is read, aligned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_wire.arena import Arena
from tests.unit.wire.arena.conftest import free_names, laid_out, write

if TYPE_CHECKING:
    import pytest


@settings(max_examples=50, deadline=None)
@given(buffers=st.lists(st.binary(max_size=300), max_size=5), data=st.binary(max_size=300))
def test_what_is_written_is_read_aligned_and_read_only(
    buffers: list[bytes], data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    arena = Arena(laid_out(tmp_path_factory.mktemp("arena")))
    for number in range(3):  # fresh, written again, written through the mapping
        nbytes = write(arena, f"o_{number}", *buffers, data=data)
        found, views = arena.read(f"o_{number}")
        assert bytes(found) == data
        assert [bytes(v) for v in views] == buffers
        assert all(v.readonly for v in views)
        assert nbytes <= (arena.path / f"o_{number}").stat().st_size
        del found, views
        assert arena.recycle(f"o_{number}")
        assert len(free_names(arena.path)) == 1
    arena.close()
