"""The bytes of an object: what is written is read, aligned."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_wire.arena import Arena, ObjectHead, pack_head, read_head, split
from stoker_wire.errors import ObjectLostError
from tests.unit.wire.arena.conftest import free_names, laid_out, write


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


def test_a_damaged_object_is_never_read_as_a_shorter_one() -> None:
    start, total = pack_head("o_1", ObjectHead("job_1", "p_1", 1.0, 3, (100, 5)))
    whole = start.ljust(total, b"x")
    assert [view.nbytes for view in split(memoryview(whole))[1]] == [100, 5]
    for damaged in (whole[:-1], whole[: len(start)], whole.replace(b"job_1", b"job\xff1")):
        with pytest.raises(ObjectLostError, match="damaged"):
            split(memoryview(damaged))
    for head in (
        ObjectHead("job_1", "p_1", 1.0, 3, (100, -5)),
        ObjectHead("job_1", "p_1", 1.0, -3, ()),
    ):
        with pytest.raises(ValueError, match="not a stored object"):
            read_head(pack_head("o_1", head)[0])
    other_total = whole[:76] + bytes(8) + whole[84:]
    with pytest.raises(ValueError, match="another length"):
        read_head(other_total)
