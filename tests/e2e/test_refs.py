"""Refs that travel, end to end: who owns, who borrows, and when what they name goes."""

from __future__ import annotations

import dataclasses
import gc
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import (
    OwnerDiedError,
)
from tests.e2e.conftest import WAIT_S, Cluster, get
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
