"""Objects end to end: put, get, wait, refs inside values, who keeps what alive, and what is freed."""

from __future__ import annotations

import dataclasses
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker.exceptions import (
    SerializationError,
)
from stoker.runtime.serialization.pickling import pack
from tests.e2e.conftest import Cluster, Flags, get
from tests.services import until

np = pytest.importorskip("numpy")
pytestmark = pytest.mark.usefixtures("cluster")

LARGE = 300_000
INLINE_MAX = 102_400


@dataclasses.dataclass
class Box:
    inside: Any


@stoker.remote
def same(value: Any) -> Any:
    return value


@stoker.remote
def zeros(count: int) -> Any:
    return np.zeros(count, np.uint8)


@stoker.remote
def puts(count: int) -> list[Any]:
    """Refs whose owner is the worker: one small object, one large."""
    return [stoker.put(count), stoker.put(np.full(count, 3, np.uint8))]


def nothing_stored(cluster: Cluster) -> None:
    gc.collect()
    until(lambda: not cluster.stored(), 40, f"shared memory is empty: {cluster.stored()}")


# -- values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [None, 0, "text", b"bytes", [1, [2]], {"a": (1, 2)}, {1, 2}, 1 + 2j, Box([1]), "x" * LARGE],
    ids=lambda v: type(v).__name__,
)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert get(stoker.put(value)) == value
    assert get(same.remote(value)) == value
    assert get(same.remote(stoker.put(value))) == value


@pytest.mark.parametrize(
    "empty", [np.empty(0), np.empty((0, 3), np.int32), pickle.PickleBuffer(b"")]
)
def test_empty_buffers_travel_wherever_the_head_of_a_frame_ends(empty: Any) -> None:
    for nbytes in range(64):  # one by one: calls that leave together share a frame
        text, one, (other, none) = get(same.remote(("x" * nbytes, empty, [empty, b""])))
        assert (len(text), none) == (nbytes, b"")
        for back in (one, other):
            assert memoryview(back).nbytes == 0
            assert getattr(back, "shape", None) == getattr(empty, "shape", None)


def test_arrays_are_read_only_views_without_a_copy(cluster: Cluster) -> None:
    array = np.arange(LARGE, dtype=np.int64)
    ref = stoker.put(array)
    one, two = get(ref), get(ref)
    assert (one == array).all()
    assert not one.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        one[0] = 1
    assert one.__array_interface__["data"][0] % 64 == 0
    maps = Path("/proc/self/maps").read_text()
    assert maps.count(ref.id) >= 1, "the array lies in the arena's file"
    assert not np.shares_memory(one, array)
    del two


def test_views_stay_valid_after_their_object_is_freed(cluster: Cluster) -> None:
    ref = stoker.put(np.arange(LARGE))
    view = get(ref)[10:20]
    del ref
    nothing_stored(cluster)
    assert view.tolist() == list(range(10, 20))
    # Other objects may come and go in the same memory's place.
    others = [stoker.put(np.full(LARGE, 7)) for _ in range(5)]
    assert view.tolist() == list(range(10, 20))
    del others


def test_what_was_put_does_not_change_when_the_original_does() -> None:
    for size in (10, LARGE):
        array = np.zeros(size, np.uint8)
        ref, call = stoker.put(array), same.remote(array)
        array[:] = 1
        assert get(ref).sum() == 0
        assert get(call).sum() == 0


def test_strange_arrays_travel() -> None:
    base = np.arange(LARGE).reshape(300, 1000)
    for array in (
        base[::2, ::3],
        base.T,
        np.asfortranarray(base),
        np.array([]),
        np.array(5),
        base[:0],
    ):
        found = get(same.remote(stoker.put(array)))
        assert found.shape == array.shape
        assert (found == array).all()


def test_several_megabytes_as_argument_and_result(cluster: Cluster) -> None:
    array = np.random.default_rng(1).integers(0, 255, 20_000_000, np.uint8)
    assert (get(same.remote(array)) == array).all()
    assert (get(same.remote([array, array[:5]]))[0] == array).all()
    nothing_stored(cluster)


def test_the_inline_limit_is_exact(cluster: Cluster) -> None:
    nothing_stored(cluster)
    overhead = pack(b"x" * 70_000, what="").nbytes - 70_000
    exact = INLINE_MAX - overhead

    @stoker.remote
    def block(n: int) -> bytes:
        return b"x" * n

    for size, stored in ((exact - 1, 0), (exact, 0), (exact + 1, 1)):
        for make in (lambda n: stoker.put(b"x" * n), block.remote):
            ref = make(size)
            assert len(get(ref)) == size
            assert len(cluster.stored()) == stored, size
            del ref
            nothing_stored(cluster)


# -- freeing -----------------------------------------------------------------------------------------


def test_dropping_refs_frees_shared_memory(cluster: Cluster) -> None:
    refs = [stoker.put(np.zeros(LARGE, np.uint8)), zeros.remote(LARGE)]
    get(refs)
    assert len(cluster.stored()) == 2
    del refs
    nothing_stored(cluster)


def test_a_result_nobody_waits_for_is_freed(cluster: Cluster, flags: Flags) -> None:
    @stoker.remote
    def late() -> Any:
        flags.wait("dropped")
        return np.zeros(LARGE, np.uint8)

    ref = late.remote()
    del ref
    gc.collect()
    flags.raise_("dropped")
    until(cluster.is_idle, 40, "the task has ended")
    nothing_stored(cluster)


def test_large_arguments_are_freed_after_the_call(cluster: Cluster) -> None:
    assert get(same.remote(np.zeros(5_000_000, np.uint8))).nbytes == 5_000_000
    nothing_stored(cluster)

    @stoker.remote
    def fail(array: Any) -> None:
        raise ValueError("after a large argument")

    with pytest.raises(ValueError, match="after a large"):
        get(fail.remote(np.zeros(5_000_000, np.uint8)))
    nothing_stored(cluster)


def test_a_failed_result_leaves_nothing_of_its_other_values(cluster: Cluster) -> None:
    @stoker.remote(num_returns=2)
    def half() -> Any:
        import threading

        return np.zeros(LARGE, np.uint8), threading.Lock()

    for ref in half.remote():
        with pytest.raises(SerializationError):
            get(ref)
    nothing_stored(cluster)


def test_an_object_lives_while_a_task_that_needs_it_is_pending(
    cluster: Cluster, flags: Flags
) -> None:
    @stoker.remote
    def first() -> None:
        flags.wait("go")

    @stoker.remote
    def second(_: Any, array: Any, nested: Any) -> int:
        return int(array.sum() + stoker.get(nested[0]).sum())

    data, more = stoker.put(np.ones(LARGE, np.uint8)), stoker.put(np.ones(LARGE, np.uint8))
    result = second.remote(first.remote(), data, [more])
    del data, more
    gc.collect()
    flags.raise_("go")
    assert get(result) == 2 * LARGE
    del result
    nothing_stored(cluster)
