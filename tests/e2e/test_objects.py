"""Objects end to end: put, get, wait, refs inside values, who keeps what alive, and what is freed."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import (
    BadRequestError,
    GetTimeoutError,
    ObjectFreedError,
    OwnerDiedError,
    SerializationError,
)
from stoker.runtime.serialization import pack
from tests.e2e.conftest import WAIT_S, Cluster, Flags, get
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable

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
    until(lambda: not cluster.stored(), 5, f"shared memory is empty: {cluster.stored()}")


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
    until(cluster.is_idle, 10, "the task has ended")
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


# -- refs that travel --------------------------------------------------------------------------------


def test_refs_inside_objects_keep_what_they_name(cluster: Cluster) -> None:
    outer = stoker.put({"box": Box([stoker.put(np.ones(LARGE, np.uint8))])})
    gc.collect()
    assert get(get(outer)["box"].inside[0]).sum() == LARGE
    del outer
    nothing_stored(cluster)


def test_refs_made_by_a_worker_can_be_read_by_the_driver(cluster: Cluster) -> None:
    small, large = get(puts.remote(LARGE))
    assert get(small) == LARGE
    assert get(large).sum() == 3 * LARGE
    del small, large
    nothing_stored(cluster)


def test_refs_made_by_a_worker_outlive_its_lease(cluster: Cluster) -> None:
    small, large = get(puts.remote(LARGE))
    until(cluster.is_idle, 10, "the lease went back")
    # Others use the same worker meanwhile.
    get([same.remote(i) for i in range(200)])
    assert get(small) == LARGE
    assert get(large).sum() == 3 * LARGE
    del small, large
    nothing_stored(cluster)


def test_refs_made_by_a_worker_outlive_its_idleness(driver: Callable[..., Any]) -> None:
    done = driver(
        """
        import gc, os, time
        import stoker
        stoker.init(num_cpus=2, num_gpus=0)

        @stoker.remote
        def puts():
            return os.getpid(), stoker.put(b"y" * 300_000), stoker.put(5)

        @stoker.remote
        def pid():
            return os.getpid()

        owner, large, small = stoker.get(puts.remote(), timeout=20)

        def lives(pid):
            try:
                return open(f"/proc/{pid}/stat").read().split()[2] != "Z"
            except FileNotFoundError:
                return False

        def until(condition, seconds):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if condition():
                    return True
                time.sleep(0.02)
            return False

        other = [p for p in stoker.get([pid.remote() for _ in range(50)], timeout=20) if p != owner]
        assert not until(lambda: not lives(owner), 1.5), "reaped with borrowed objects"
        assert (len(stoker.get(large, timeout=5)), stoker.get(small, timeout=5)) == (300_000, 5)
        del large, small
        gc.collect()
        assert until(lambda: not lives(owner), 10), "not reaped when nothing was borrowed"
        print("fine")
        """,
        STOKER_WORKER_IDLE_S="0.3",
    )
    assert "fine" in done.stdout, done.stdout + done.stderr


def test_a_chain_of_borrowers(cluster: Cluster) -> None:
    @stoker.remote
    def deeper(box: list[Any], depth: int) -> Any:
        if depth == 0:
            return [int(stoker.get(box[0]).sum()), box[0]]
        return stoker.get(deeper.remote([box[0]], depth - 1))

    ref = stoker.put(np.ones(LARGE, np.uint8))
    total, back = get(deeper.remote([ref], 3))
    assert total == LARGE
    assert back == ref
    del ref
    gc.collect()
    assert get(back).sum() == LARGE, "the returned ref keeps it"
    del back
    nothing_stored(cluster)


def test_an_actor_keeps_a_ref_alive_that_it_was_given(cluster: Cluster) -> None:
    @stoker.remote
    class Keeper:
        def keep(self, box: list[Any]) -> None:
            self.box = box

        def total(self) -> int:
            return int(stoker.get(self.box[0]).sum())

        def drop(self) -> None:
            self.box = []

    keeper = Keeper.remote()
    ref = stoker.put(np.ones(LARGE, np.uint8))
    get(keeper.keep.remote([ref]))
    del ref
    gc.collect()
    until(cluster.is_idle, 10, "nothing is under way")
    assert get(keeper.total.remote()) == LARGE
    assert len(cluster.stored()) == 1
    get(keeper.drop.remote())
    nothing_stored(cluster)
    stoker.kill(keeper)


def test_a_dead_borrower_holds_nothing(cluster: Cluster) -> None:
    @stoker.remote
    class Keeper:
        def keep(self, box: list[Any]) -> None:
            self.box = box

    keeper = Keeper.remote()
    ref = stoker.put(np.ones(LARGE, np.uint8))
    get(keeper.keep.remote([ref]))
    del ref
    stoker.kill(keeper)
    nothing_stored(cluster)


def test_objects_of_a_dead_owner_are_lost_with_a_clear_error(cluster: Cluster) -> None:
    @stoker.remote
    class Owner:
        def make(self) -> list[Any]:
            return [same.remote(1), stoker.put(2), forever.remote()]

    @stoker.remote(num_cpus=0)
    def forever() -> None:
        import threading

        threading.Event().wait(WAIT_S)

    owner = Owner.remote()
    *_, pending = get(owner.make.remote())
    stoker.kill(owner)
    with pytest.raises(OwnerDiedError, match="owner"):
        get(pending)
    until(cluster.is_idle, 10, "its tasks ended with it")


def test_refs_are_equal_by_what_they_name() -> None:
    ref = stoker.put(1)
    (again,) = get(same.remote([ref]))
    assert again == ref
    assert hash(again) == hash(ref)
    assert ref != stoker.put(1)
    assert {ref: "x"}[again] == "x"


# -- wait --------------------------------------------------------------------------------------------


def test_wait_returns_what_is_there_in_the_order_given(flags: Flags) -> None:
    @stoker.remote(num_cpus=0)
    def late() -> int:
        flags.wait("go")
        return 9

    slow, one, two = late.remote(), stoker.put(1), stoker.put(2)
    assert stoker.wait([slow, one, two], num_returns=2, timeout=WAIT_S) == ([one, two], [slow])
    assert stoker.wait([two, slow, one]) == ([two], [slow, one])
    assert stoker.wait([slow], timeout=0) == ([], [slow])
    assert stoker.wait([slow], timeout=0.01) == ([], [slow])
    assert stoker.wait([slow, one], num_returns=2, timeout=0.01) == ([one], [slow])
    flags.raise_("go")
    assert stoker.wait([slow, one], num_returns=2, timeout=WAIT_S) == ([slow, one], [])


def test_wait_counts_failed_tasks_as_there() -> None:
    @stoker.remote
    def fail() -> None:
        raise ValueError

    ref = fail.remote()
    assert stoker.wait([ref], timeout=WAIT_S) == ([ref], [])


@pytest.mark.parametrize(
    ("refs", "count", "said"),
    [
        (lambda r: [r, r], 1, "twice"),
        (lambda r: [r], 2, "between 1 and the 1"),
        (lambda r: [r], 0, "between 1"),
        (lambda r: [], 1, "between 1"),
        (lambda r: [r, 3], 1, "item 1 is a int"),
        (lambda r: 7, 1, "not int"),
        (lambda r: "text", 1, "not str"),
    ],
)
def test_wait_refuses_what_makes_no_sense(
    refs: Callable[[Any], Any], count: int, said: str
) -> None:
    with pytest.raises(BadRequestError, match=said):
        stoker.wait(refs(stoker.put(1)), num_returns=count)


def test_wait_with_fetch_local_and_borrowed_refs() -> None:
    refs = get(puts.remote(LARGE))
    assert stoker.wait(refs, num_returns=2, timeout=WAIT_S, fetch_local=False) == (refs, [])


# -- get ---------------------------------------------------------------------------------------------


def test_get_takes_refs_and_sequences_of_them() -> None:
    one, two = stoker.put(1), stoker.put(2)
    assert get([one, two, one]) == [1, 2, 1]
    assert get((one,)) == [1]
    assert get([]) == []
    assert get(r for r in (one, two)) == [1, 2]


@pytest.mark.parametrize("bad", [5, None, "ref", [1], object()], ids=repr)
def test_get_of_something_else_says_what_it_takes(bad: Any) -> None:
    with pytest.raises(BadRequestError, match="ObjectRef"):
        stoker.get(bad)


def test_a_get_that_runs_out_of_time_says_what_it_waits_for(flags: Flags) -> None:
    @stoker.remote(num_cpus=4)
    def late() -> int:
        flags.raise_("runs")
        flags.wait("go")
        return 1

    @stoker.remote(num_cpus=3)
    def behind() -> int:
        return 2

    running = late.remote()
    flags.wait("runs")
    queued = behind.remote()
    dependent = same.remote(running)
    for ref, said in ((running, "sent to worker"), (queued, "3 CPU"), (dependent, "argument")):
        with pytest.raises(GetTimeoutError, match=said) as caught:
            stoker.get(ref, timeout=0.3)
        assert isinstance(caught.value, TimeoutError)
    with pytest.raises(GetTimeoutError, match="2 of 3 objects"):
        stoker.get([stoker.put(1), running, queued], timeout=0.05)
    with pytest.raises(GetTimeoutError):
        stoker.get(running, timeout=0)
    flags.raise_("go")
    assert get([running, queued, dependent]) == [1, 2, 1]


def test_put_of_a_ref_is_refused_with_the_way_out() -> None:
    with pytest.raises(SerializationError, match="list that contains it"):
        stoker.put(stoker.put(1))


def test_a_freed_ref_says_so() -> None:
    import cloudpickle

    ref = stoker.put(1)
    name = ref.id
    smuggled = cloudpickle.dumps(ref)  # nobody is told of this copy
    del ref
    gc.collect()
    stoker.get(same.remote(0), timeout=WAIT_S)
    with pytest.raises(ObjectFreedError, match=name):
        get(cloudpickle.loads(smuggled))

    @stoker.remote
    def look(smuggled: bytes) -> Any:
        return stoker.get(cloudpickle.loads(smuggled))

    with pytest.raises(ObjectFreedError, match=name):
        get(look.remote(smuggled))


def test_a_ref_of_another_cluster_says_so(driver: Callable[..., Any], tmp_path: Any) -> None:
    import cloudpickle

    out = tmp_path / "ref"
    done = driver(
        """
        import sys, cloudpickle, stoker
        stoker.init(num_cpus=1, num_gpus=0)
        open(sys.argv[1], "wb").write(cloudpickle.dumps(stoker.put(1)))
        """,
        str(out),
    )
    assert done.returncode == 0, done.stderr
    with pytest.raises(OwnerDiedError, match="within one cluster"):
        get(cloudpickle.loads(out.read_bytes()))
    with pytest.raises(OwnerDiedError, match="within one cluster"):
        get(same.remote(cloudpickle.loads(out.read_bytes())))


# -- other ways to wait ------------------------------------------------------------------------------


def test_refs_are_awaited_by_coroutines_of_the_driver() -> None:
    async def main() -> list[int]:
        first = await same.remote(1)
        rest = await asyncio.gather(*(same.remote(i) for i in range(50)))
        return [first, *rest]

    assert asyncio.run(main()) == [1, *range(50)]


def test_awaiting_raises_the_tasks_error_and_can_be_given_up(flags: Flags) -> None:
    @stoker.remote
    def fail() -> None:
        raise LookupError("awaited")

    @stoker.remote
    def late() -> int:
        flags.wait("go")
        return 3

    async def main() -> int:
        with pytest.raises(LookupError, match="awaited"):
            await fail.remote()
        ref = late.remote()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_value(ref), 0.05)
        flags.raise_("go")
        return await ref

    assert asyncio.run(main()) == 3


async def _value(ref: Any) -> Any:
    return await ref


def test_refs_are_awaited_in_async_actors() -> None:
    @stoker.remote
    class Sums:
        async def sum(self, refs: list[Any]) -> int:
            return sum(await asyncio.gather(*refs))

    sums = Sums.remote()
    assert get([sums.sum.remote([same.remote(i) for i in range(5)]) for _ in range(3)]) == [10] * 3
    stoker.kill(sums)


def test_refs_as_futures() -> None:
    @stoker.remote
    def fail() -> None:
        raise LookupError("of a future")

    futures = [same.remote(i).future() for i in range(10)]
    assert sorted(f.result() for f in as_completed(futures, timeout=WAIT_S)) == list(range(10))
    with pytest.raises(LookupError, match="of a future"):
        fail.remote().future().result(WAIT_S)
    assert isinstance(fail.remote().future().exception(WAIT_S), LookupError)
    assert stoker.put(np.ones(LARGE)).future().result(WAIT_S).sum() == LARGE


def test_many_threads_put_and_get_at_once(cluster: Cluster) -> None:
    def work(seed: int) -> int:
        refs = [stoker.put(np.full(LARGE, seed, np.uint8)) for _ in range(5)]
        return int(sum(a[0] for a in stoker.get(refs, timeout=WAIT_S)))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(16))) == [5 * i for i in range(16)]
    nothing_stored(cluster)


def test_get_while_the_driver_shuts_down_does_not_hang(driver: Callable[..., Any]) -> None:
    done = driver(
        """
        import threading, time
        import stoker
        stoker.init(num_cpus=1, num_gpus=0)

        @stoker.remote
        def forever():
            time.sleep(60)

        said = []
        def wait():
            try:
                stoker.get(forever.remote())
            except stoker.exceptions.StokerError as error:
                said.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        stoker.wait([forever.remote()], timeout=0.3)
        stoker.shutdown()
        thread.join(10)
        print("alive", thread.is_alive(), said)
        """
    )
    assert "alive False" in done.stdout, done.stdout + done.stderr
    assert "shutdown" in done.stdout


def test_no_file_descriptor_is_left_by_many_objects() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    get([same.remote(np.zeros(LARGE, np.uint8)) for _ in range(4)])
    before = count()
    for _ in range(5):
        get([same.remote(np.zeros(LARGE, np.uint8)) for _ in range(20)])
    assert count() <= before + 4
