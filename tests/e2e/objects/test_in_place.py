"""Arrays filled in shared memory: stored without a copy, and what others read never changes."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

import stoker

NBYTES = 4 << 20


@stoker.remote
def filled(count: int) -> Any:
    array = stoker.empty(count, numpy.uint8)
    array[:] = 7
    return array


@pytest.mark.usefixtures("cluster")
class TestInPlace:
    @pytest.mark.parametrize("count", [0, 1, 1000, NBYTES])
    def test_a_result(self, count: int) -> None:
        value = stoker.get(filled.remote(count))
        assert value.shape == (count,)
        assert (value == 7).all()

    def test_a_put_is_as_it_was_whatever_is_written_later(self) -> None:
        array = stoker.empty((2, NBYTES // 16), float)
        array[:] = 1.5
        ref = stoker.put(array)
        array[:] = 0.0
        assert (stoker.get(ref) == 1.5).all()
        again = stoker.put(array)
        assert (stoker.get(again) == 0.0).all()
        assert (stoker.get(ref) == 1.5).all()

    def test_nothing_is_copied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from stoker.runtime import current
        from stoker_wire.arena.extents import Arena

        monkeypatch.setattr(Arena, "create", None)
        assert current.runtime().objects.values.arena is not None
        array = stoker.empty(NBYTES, numpy.uint8)
        array[:] = 3
        assert (stoker.get(stoker.put(array)) == 3).all()

    def test_an_actor_that_keeps_its_array_changes_no_result(self) -> None:
        actor = Keeper.remote()
        first = stoker.get(actor.fill.remote(1))
        second = stoker.get(actor.fill.remote(2))
        assert (first == 1).all()
        assert (second == 2).all()

    def test_a_tensor_over_it(self) -> None:
        torch = pytest.importorskip("torch")
        tensor = torch.from_numpy(stoker.empty((64, 1024), numpy.float32))
        tensor.fill_(2.0)
        got = stoker.get(stoker.put({"weights": tensor, "more": list(range(10))}))
        assert torch.equal(got["weights"], tensor)

    def test_what_is_dropped_is_free_again(self) -> None:
        from stoker.runtime import current

        arena = current.runtime().objects.values.arena
        for _ in range(3):
            stoker.empty(NBYTES, numpy.uint8)
        used = arena.quota.used_bytes
        for _ in range(50):
            stoker.empty(NBYTES, numpy.uint8)
        assert arena.quota.used_bytes == used

    def test_types_with_python_objects_and_odd_shapes(self) -> None:
        assert stoker.empty(100_000, object)[5] is None
        assert stoker.empty((), float).shape == ()
        assert stoker.empty((0, 7)).shape == (0, 7)
        assert stoker.empty(numpy.int64(NBYTES), numpy.int8).shape == (NBYTES,)
        assert stoker.empty((numpy.int32(3), NBYTES)).shape == (3, NBYTES)
        assert stoker.empty([2, NBYTES]).shape == (2, NBYTES)
        assert stoker.empty(numpy.array([2, NBYTES])).shape == (2, NBYTES)
        with pytest.raises(ValueError, match="negative"):
            stoker.empty((-1,))
        with pytest.raises(ValueError, match="negative"):
            stoker.empty((-NBYTES, -1))
        with pytest.raises(TypeError):
            stoker.empty((NBYTES, 1.5))  # type: ignore[list-item]
        with pytest.raises((ValueError, MemoryError)):
            stoker.empty((1 << 62, 1 << 62))


@stoker.remote
class Keeper:
    def __init__(self) -> None:
        self.array = stoker.empty(NBYTES, numpy.uint8)

    def fill(self, value: int) -> Any:
        self.array[:] = value
        return self.array
