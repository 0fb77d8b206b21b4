"""The ways to wait, end to end: get, wait, await, futures, threads, and the end of a driver."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
from concurrent.futures import ThreadPoolExecutor, as_completed
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
    until(lambda: not cluster.stored(), 40, f"shared memory is empty: {cluster.stored()}")


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


@pytest.mark.parametrize("bad", [5, None, "ref", [1], object()], ids=lambda bad: type(bad).__name__)
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

    def why(ref: Any) -> str:
        with pytest.raises(GetTimeoutError) as caught:
            stoker.get(ref, timeout=0.1)
        assert isinstance(caught.value, TimeoutError)
        return str(caught.value)

    # A new function is stored in the gcs first, and that is said meanwhile.
    until(lambda: "3 CPU" in why(queued), WAIT_S, "it says what it waits for")
    assert "sent to worker" in why(running)
    assert "argument" in why(dependent)
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
    smuggled = cloudpickle.dumps(ref)
    stoker.free([ref])
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
        thread.join(40)
        print("alive", thread.is_alive(), said)
        """
    )
    assert "alive False" in done.stdout, done.stdout + done.stderr
    assert "shutdown" in done.stdout


def test_no_file_descriptor_is_left_by_many_objects() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    def many() -> None:
        get([same.remote(np.zeros(LARGE, np.uint8)) for _ in range(20)])

    before = count()
    for _ in range(20):
        many()
    # Of extents that were filled or read, up to 64 mappings each stay, to be used again.
    assert count() <= before + 2 * 64 + 20, "of 400 objects and results"


# -- the first failure ---------------------------------------------------------------------------------


def test_get_of_many_raises_at_the_first_failure_and_the_rest_goes_on(flags: Flags) -> None:
    @stoker.remote(num_cpus=0)
    def slow(name: str) -> str:
        flags.wait(name)
        return name

    @stoker.remote(num_cpus=0, max_retries=0)
    def fails(name: str) -> None:
        flags.wait(name)
        raise ValueError(name)

    waiting, first, second = slow.remote("free"), fails.remote("a"), fails.remote("b")
    flags.raise_("b")
    with pytest.raises(ValueError, match="ValueError: b"):
        get([waiting, first, second])
    with pytest.raises(ValueError, match="ValueError: b"):  # known already, and still the only one
        get([waiting, first, second, waiting])
    assert not waiting._entry.waiters, "nobody waits any more"
    flags.raise_("a")
    flags.raise_("free")
    assert get([waiting, waiting]) == ["free", "free"]


def test_a_call_fails_with_its_first_failed_argument(flags: Flags) -> None:
    @stoker.remote(num_cpus=0)
    def slow() -> None:
        flags.wait("later")

    @stoker.remote(num_cpus=0, max_retries=0)
    def fails(flag: str = "") -> None:
        if flag:
            flags.wait(flag)
        raise KeyError("an argument")

    @stoker.remote
    def use(*values: Any) -> None:
        pass

    @stoker.remote
    class Uses:
        def __init__(self, *values: Any) -> None:
            pass

        def use(self, *values: Any) -> None:
            pass

    pending, failed = slow.remote(), fails.remote()
    assert isinstance(caught_by(lambda: get(use.remote(pending, failed))), KeyError)
    assert isinstance(caught_by(lambda: get(use.remote(failed, pending))), KeyError)
    assert "an argument" in str(caught_by(lambda: get(Uses.remote(pending, failed).use.remote())))
    uses = Uses.remote()
    assert isinstance(caught_by(lambda: get(uses.use.remote(pending, failed))), KeyError)
    late = fails.remote("late")  # behind a missing one, and not failed yet when it is sent
    waiting = uses.use.remote(pending, late)
    flags.raise_("late")
    assert isinstance(caught_by(lambda: get(waiting)), KeyError)
    flags.raise_("later")
    get(pending)


def caught_by(work: Callable[[], Any]) -> BaseException:
    with pytest.raises(stoker.exceptions.StokerError) as caught:
        work()
    return caught.value


async def test_a_ref_as_an_asyncio_future(flags: Flags) -> None:
    @stoker.remote
    def double(x: int) -> int:
        if x < 0:
            raise ValueError("negative")
        return 2 * x

    future = double.remote(4).as_future()
    assert isinstance(future, asyncio.Future)
    assert await asyncio.wait_for(future, 40) == 8
    with pytest.raises(ValueError, match="negative"):
        await double.remote(-1).as_future()


def test_as_future_needs_a_running_loop() -> None:
    with pytest.raises(RuntimeError, match="running event loop"):
        stoker.put(1).as_future()
