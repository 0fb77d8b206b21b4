"""Everything that makes objects and lets them go, in rounds, and what a cluster holds after them."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import psutil

import stoker
from stoker.exceptions import TaskCancelledError
from stoker.runtime.current import runtime
from stoker.runtime.table_sizes import table_sizes
from tests.e2e.conftest import WAIT_S, Cluster, get
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGE = 300_000
ROUND_CYCLES = 1000
"""Put, submit, get and drop cycles of one round, about."""
FILES = 100
"""A process may keep so many more open: mappings of extents, and connections that wait for use."""


class Refused(Exception):
    def __init__(self, box: list[Any]) -> None:
        super().__init__("no")
        self.box = box


@stoker.remote
def same(value: Any) -> Any:
    return value


@stoker.remote
def large(nbytes: int) -> bytes:
    return b"x" * nbytes


@stoker.remote
def lends(value: Any) -> list[Any]:
    return [stoker.put(value), {"deep": stoker.put([stoker.put(value)])}]


@stoker.remote
def refuses(value: Any) -> None:
    raise Refused([stoker.put(value)])


@stoker.remote
def reads(box: list[Any]) -> int:
    return len(stoker.get(box))


@stoker.remote(cache=True)
def cached(value: int) -> int:
    return value


@stoker.remote
def items(count: int, nbytes: int) -> Iterator[list[Any]]:
    for _ in range(count):
        yield [stoker.put(b"x" * nbytes)]


@stoker.remote
def sizes_of_worker() -> dict[str, int]:
    gc.collect()
    return table_sizes(runtime())


@stoker.remote(num_cpus=0)
class Keeper:
    def __init__(self) -> None:
        self.box: list[Any] = []

    def keep(self, box: list[Any]) -> int:
        self.box = box
        return len(box)

    async def read(self, box: list[Any]) -> int:
        return len([await ref for ref in box])

    def sizes(self) -> dict[str, int]:
        gc.collect()
        return table_sizes(runtime())


def one_round(keeper: Any) -> None:
    """About a thousand cycles, in all the ways there are."""
    for number in range(250):
        assert get(stoker.put(number)) == number
    for number in range(5):
        ref = stoker.put(bytes([number]) * LARGE)
        assert get(ref)[-1] == get(same.remote(ref))[-1] == number
    assert get([same.remote(n) for n in range(200)]) == list(range(200))
    unread = [same.remote(n) for n in range(50)] + [large.remote(LARGE) for _ in range(3)]
    del unread
    assert all(len(v) == LARGE for v in get([same.remote(b"x" * LARGE) for _ in range(3)]))
    puts = [stoker.put(n) for n in range(50)]
    assert get([reads.remote(puts[n : n + 10]) for n in range(0, 50, 10)]) == [10] * 5
    chain = puts[0]
    for _ in range(50):
        chain = same.remote(chain)
    assert get(chain) == 0
    for nbytes in (10, LARGE):
        for small, deep in get([lends.remote(b"x" * nbytes) for _ in range(5)]):
            assert len(get(small)) == len(get(get(deep["deep"])[0])) == nbytes
    for nbytes in (10, LARGE):
        for ref in [refuses.remote(b"x" * nbytes) for _ in range(10)]:
            try:
                get(ref)
            except Refused as error:
                assert len(get(error.box[0])) == nbytes
    waiting = [same.remote(n) for n in range(100)]
    while waiting:
        _, waiting = stoker.wait(waiting, num_returns=min(10, len(waiting)), timeout=WAIT_S)
    for ref in [large.remote(LARGE) for _ in range(10)]:
        stoker.cancel(ref)
        try:
            get(ref)
        except TaskCancelledError:
            continue
    for nbytes in (10, LARGE):
        whole, part = items.remote(10, nbytes), items.remote(10, nbytes)
        assert sum(len(get(get(ref)[0])) for ref in whole) == 10 * nbytes
        next(part)
        del part
    assert get([cached.remote(n % 20) for n in range(100)])[99] == 19
    assert get([keeper.read.remote(puts[n : n + 5]) for n in range(0, 50, 5)]) == [5] * 10
    assert get([keeper.keep.remote([stoker.put(b"x" * LARGE)]) for _ in range(5)]) == [1] * 5
    get(keeper.keep.remote([]))


def processes() -> list[psutil.Process]:
    """This process and all that it started, but for what ends meanwhile."""
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def resident_mb() -> dict[int, float]:
    """Memory of each process that there is."""
    found = {}
    for process in processes():
        try:
            found[process.pid] = process.memory_info().rss / 2**20
        except psutil.NoSuchProcess:
            continue
    return found


def open_files() -> dict[int, int]:
    """File descriptors of each process that there is."""
    found = {}
    for process in processes():
        try:
            found[process.pid] = process.num_fds()
        except psutil.NoSuchProcess:
            continue
    return found


def no_more_files(before: dict[int, int]) -> None:
    """Check that no process opens more and more files."""
    more = {p: (before[p], n) for p, n in open_files().items() if n > before.get(p, n) + FILES}
    assert not more, f"open files before and after, by process: {more}"


def left(cluster: Cluster, keeper: Any) -> dict[str, Any]:
    """What any process still holds of the rounds; {} if they left nothing."""
    gc.collect()
    mine = {k: n for k, n in table_sizes(runtime()).items() if n}
    if mine.get("objects") == len(runtime().tasks.cache):
        del mine["objects"]
    if len(runtime().actors.handle_marks) != 1:  # the keeper's
        mine["actors"] = len(runtime().actors.handle_marks)
    found: dict[str, Any] = {"driver": mine, "arena": sorted(cluster.stored())}
    # The call that asks is the one that runs.
    theirs = [get(sizes_of_worker.remote()), get(keeper.sizes.remote())]
    for name, sizes in zip(("worker", "actor"), theirs, strict=True):
        found[name] = {k: n for k, n in sizes.items() if n and (k, n) != ("running", 1)}
    return {who: what for who, what in found.items() if what}


def nothing_left(cluster: Cluster, keeper: Any) -> None:
    """Wait until all is let go, and say what is not."""
    last: dict[str, Any] = {}

    def is_clean() -> bool:
        last.clear()
        last.update(left(cluster, keeper))
        return not last

    try:
        until(is_clean, WAIT_S, "everything is let go")
    except TimeoutError:
        kept = sorted(runtime().objects.table.entries)
        raise AssertionError(f"still held: {last}; objects: {kept}") from None
    until(cluster.is_idle, WAIT_S, "all leases went back")
