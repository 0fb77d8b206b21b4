"""Refs that travel, end to end: who owns, who borrows, and when what they name goes."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import ActorDiedError, ObjectFreedError, OwnerDiedError
from stoker.runtime.current import runtime
from tests.e2e.conftest import WAIT_S, Cluster, Flags, get
from tests.leaks import alive
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
    until(lambda: not cluster.stored(), WAIT_S, f"shared memory is empty: {cluster.stored()}")


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
    until(cluster.is_idle, WAIT_S, "the lease went back")
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

        owner, large, small = stoker.get(puts.remote(), timeout=40)

        def lives(pid):
            try:
                return open(f"/proc/{pid}/stat").read().split()[2] != "Z"
            except OSError:
                return False

        def until(condition, seconds):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if condition():
                    return True
                time.sleep(0.02)
            return False

        other = [p for p in stoker.get([pid.remote() for _ in range(50)], timeout=40) if p != owner]
        assert not until(lambda: not lives(owner), 1.5), "reaped with borrowed objects"
        assert (len(stoker.get(large, timeout=40)), stoker.get(small, timeout=40)) == (300_000, 5)
        del large, small
        gc.collect()
        assert until(lambda: not lives(owner), 40), "not reaped when nothing was borrowed"
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
    until(cluster.is_idle, WAIT_S, "nothing is under way")
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
    until(cluster.is_idle, WAIT_S, "its tasks ended with it")


def test_refs_are_equal_by_what_they_name() -> None:
    ref = stoker.put(1)
    (again,) = get(same.remote([ref]))
    assert again == ref
    assert hash(again) == hash(ref)
    assert ref != stoker.put(1)
    assert {ref: "x"}[again] == "x"


class Refused(Exception):
    def __init__(self, box: list[Any]) -> None:
        super().__init__("no")
        self.box = box


def test_refs_inside_exceptions_keep_what_they_name(cluster: Cluster) -> None:
    @stoker.remote
    def refuses() -> None:
        raise Refused([stoker.put(np.ones(LARGE, np.uint8))])

    @stoker.remote
    def passes_on(box: list[Any]) -> None:
        stoker.get(box[0])

    ref = refuses.remote()
    depends = passes_on.remote([ref])
    for failed in (ref, depends):
        with pytest.raises(Refused) as caught:
            get(failed)
        gc.collect()
        assert get(caught.value.box[0]).sum() == LARGE
    del caught, ref, depends, failed
    nothing_stored(cluster)


def test_refs_that_a_function_closes_over_live_as_long_as_its_calls(cluster: Cluster) -> None:
    def made() -> Any:
        ref = stoker.put(np.ones(LARGE, np.uint8))

        @stoker.remote
        def total() -> int:
            return int(stoker.get(ref).sum())

        return total

    total = made()
    assert get([total.remote() for _ in range(10)]) == [LARGE] * 10
    last = total.remote()
    del total
    gc.collect()
    assert get(last) == LARGE
    nothing_stored(cluster)


def test_refs_that_an_actors_class_closes_over_survive_its_restart(cluster: Cluster) -> None:
    def made(ref: Any) -> Any:
        @stoker.remote(max_restarts=1, max_task_retries=1)
        class Adds:
            def __init__(self, box: list[Any]) -> None:
                self.box = box

            def total(self) -> int:
                return int(stoker.get(ref).sum() + stoker.get(self.box[0]).sum())

            def end(self) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

            def pid(self) -> int:
                return os.getpid()

        return Adds

    big = np.ones(LARGE, np.uint8)
    actor = made(stoker.put(big)).remote([stoker.put(big)])
    gc.collect()
    assert get(actor.total.remote()) == 2 * LARGE
    os.kill(get(actor.pid.remote()), signal.SIGKILL)
    assert get(actor.total.remote()) == 2 * LARGE
    del actor
    nothing_stored(cluster)


def test_large_arguments_of_a_constructor_go_with_the_actor(cluster: Cluster) -> None:
    @stoker.remote
    class Holds:
        def __init__(self, big: Any, more: Any) -> None:
            self.nbytes = len(big) + len(more)

        def size(self) -> int:
            return self.nbytes

    kept = Holds.remote(np.ones(LARGE, np.uint8), zeros.remote(LARGE))
    assert get(kept.size.remote()) == 2 * LARGE
    stoker.kill(kept)
    dropped = Holds.remote(np.ones(LARGE, np.uint8), zeros.remote(LARGE))
    assert get(dropped.size.remote()) == 2 * LARGE
    del dropped
    nothing_stored(cluster)
    del kept


def test_refs_in_a_stream_are_kept_until_they_are_taken(cluster: Cluster) -> None:
    @stoker.remote
    def stream(count: int) -> Any:
        for i in range(count):
            yield [stoker.put(np.full(LARGE, i, np.uint8))]

    items = [get(item)[0] for item in stream.remote(5)]
    gc.collect()
    assert [int(get(i)[0]) for i in items] == [0, 1, 2, 3, 4]
    del items
    nothing_stored(cluster)


def test_a_long_stream_of_refs_is_released_as_it_goes(cluster: Cluster) -> None:
    @stoker.remote(num_cpus=0, max_concurrency=4)
    class Gate:
        def __init__(self) -> None:
            self.event = threading.Event()

        def wait(self) -> None:
            self.event.wait(WAIT_S)

        def open(self) -> None:
            self.event.set()

    @stoker.remote
    def slow_stream(gate: Any) -> Any:
        for _ in range(8):
            yield [stoker.put(np.ones(LARGE, np.uint8))]
        yield None
        stoker.get(gate.wait.remote())

    gate = Gate.remote()
    running = slow_stream.remote(gate)
    for _ in range(9):
        item = next(running)
        get(item)
        del item
    nothing_stored(cluster)
    get(gate.open.remote())
    assert list(running) == []
    stoker.kill(gate)


def test_what_an_abandoned_generator_has_yielded_goes(cluster: Cluster) -> None:
    @stoker.remote
    def stream() -> Any:
        for _ in range(50):
            yield np.ones(LARGE, np.uint8)

    items = stream.remote()
    next(items)
    del items
    until(cluster.is_idle, WAIT_S, "it was stopped")
    nothing_stored(cluster)


def test_results_that_come_too_late_go(cluster: Cluster, flags: Flags) -> None:
    @stoker.remote
    def late(flags: Flags) -> Any:
        flags.raise_("began")
        flags.wait("go")
        return np.ones(LARGE, np.uint8)

    ref = late.remote(flags)
    flags.wait("began")
    del ref
    gc.collect()
    flags.raise_("go")
    until(cluster.is_idle, WAIT_S, "it ended")
    nothing_stored(cluster)


def test_a_large_result_outlives_the_worker_that_made_it(cluster: Cluster) -> None:
    @stoker.remote(num_returns=2, max_calls=1)
    def made_apart() -> Any:
        return os.getpid(), np.ones(LARGE, np.uint8)

    pid, ones = made_apart.remote()
    dead = get(pid)
    until(lambda: not alive(dead), WAIT_S, "its worker ended")
    assert get(ones).sum() == LARGE
    del pid, ones
    nothing_stored(cluster)


def test_a_killed_borrower_passes_on_what_it_was_given(cluster: Cluster) -> None:
    """A gives B's ref to C and is killed: C still has it, and when C drops it, it goes."""

    @stoker.remote(num_cpus=0)
    class Keeper:
        def keep(self, box: list[Any]) -> None:
            self.box = box

        def pass_on(self, other: Any) -> None:
            stoker.get(other.keep.remote(self.box))

        def total(self) -> int:
            return int(stoker.get(self.box[0]).sum())

        def pid(self) -> int:
            return os.getpid()

    first, second = Keeper.remote(), Keeper.remote()
    ref = stoker.put(np.ones(LARGE, np.uint8))
    get(first.keep.remote([ref]))
    del ref
    get(first.pass_on.remote(second))
    os.kill(get(first.pid.remote()), signal.SIGKILL)
    assert get(second.total.remote()) == LARGE
    get(second.keep.remote([]))
    nothing_stored(cluster)
    for one in (first, second):
        stoker.kill(one)


def test_a_chain_of_objects_goes_at_once(cluster: Cluster) -> None:
    chain = stoker.put([None, np.ones(LARGE, np.uint8)])
    for _ in range(100):
        chain = stoker.put([chain, b""])
    del chain
    # One level a second, as loans of the dead end, would take a hundred.
    until(lambda: not cluster.stored(), 30, "all levels are freed")
    # Marks of actors' handles that the tests before had go when their messages are through.
    until(lambda: not runtime().objects.table.entries, 30, "no entry is left")


def test_refs_in_odd_places(cluster: Cluster) -> None:
    ref = stoker.put(np.ones(LARGE, np.uint8))
    held = functools.partial(stoker.get, ref)
    odd = {
        ("key", ref): {ref},
        "partial again": functools.partial(held),
        "partial": held,
        "deep": [[[[[[[[[[ref]]]]]]]]]],
    }
    back = get(same.remote(odd))
    del odd, ref, held
    gc.collect()
    assert back["partial again"]().sum() == back["partial"]().sum() == LARGE
    (inside,) = next(v for v in back.values() if isinstance(v, set))
    assert get(inside).sum() == LARGE
    del back, inside
    nothing_stored(cluster)


@stoker.remote(num_cpus=0)
class Remembers:
    def keep(self, box: list[Any]) -> int:
        return len(box)


def test_actors_that_are_not_called_are_forgotten_and_found_again() -> None:
    keepers = [Remembers.options(name=f"keeper-{n}").remote() for n in range(3)]
    handles = [stoker.get_actor(f"keeper-{n}") for n in range(3)]
    others = get([borrows.remote(h) for h in handles])
    assert others == [1, 1, 1]
    assert get([k.keep.remote([1]) for k in keepers]) == [1, 1, 1]
    for keeper in keepers:  # what is dead owes nothing
        stoker.kill(keeper)
    until(lambda: not links_that_stay(), WAIT_S, "no link is left")
    for keeper in keepers:
        with pytest.raises(ActorDiedError):
            get(keeper.keep.remote([]))


@stoker.remote
def borrows(handle: Any) -> int:
    """Calls an actor of another, whose link this worker forgets at once."""
    count = 0
    for _ in range(5):
        count = get(handle.keep.remote([1]))
        assert not links_that_stay()
    return count


def links_that_stay() -> int:
    """Have this process forget the actors that it does not call now; return how many it calls."""
    calls = runtime().actors

    async def forget() -> int:
        calls._max_connections = 0
        calls.flush()
        return len(calls.connections())

    return runtime().io.run(forget(), WAIT_S)


@stoker.remote(num_cpus=0)
class Borrower:
    def __init__(self, refs: list[Any]) -> None:
        self.refs = refs
        self.read: list[Any] = []

    def look(self, index: int) -> int:
        self.read.append(stoker.get(self.refs[index]))
        return int(self.read[-1].sum())

    def sum_again(self) -> int:
        return sum(int(one.sum()) for one in self.read)

    def free(self) -> None:
        stoker.free(self.refs)

    def pid(self) -> int:
        return os.getpid()


@pytest.mark.parametrize("size", [10, LARGE])
def test_a_ref_that_another_process_has_borrowed_can_be_freed_by_its_owner_alone(
    size: int, cluster: Cluster
) -> None:
    refs = [stoker.put(np.ones(size, np.uint8)) for _ in range(2)]
    borrower = Borrower.remote(refs)
    assert get(borrower.look.remote(0)) == size
    with pytest.raises(ValueError, match=f"belongs to {runtime().identity.peer_id}"):
        get(borrower.free.remote())
    stoker.free(refs)
    assert get(borrower.sum_again.remote()) == size, "it keeps the view that it has"
    with pytest.raises(ObjectFreedError, match="was freed by stoker"):
        get(borrower.look.remote(1))
    with pytest.raises(ObjectFreedError, match="was freed by stoker"):
        get(same.remote(refs[0]))
    if size == LARGE:
        with pytest.raises(ObjectFreedError, match="was freed by stoker"):
            get(borrower.look.remote(0))
    pid = get(borrower.pid.remote())
    del borrower
    until(lambda: not alive(pid), WAIT_S, "the borrower is gone")
    nothing_stored(cluster)
