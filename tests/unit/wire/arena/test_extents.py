"""The arena by itself: what is written is read, and no extent is used again under a reader."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import multiprocessing
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_wire.arena import Arena, ByteQuota, Extent, ObjectHead, extents, views
from stoker_wire.arena import in_place as in_place_module
from stoker_wire.arena.extents import FREE, QUOTA
from stoker_wire.errors import ArenaFullError, ObjectLostError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT = 64 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return laid_out(tmp_path)


def laid_out(path: Path, limit_bytes: int = LIMIT) -> Path:
    (path / FREE).mkdir()
    ByteQuota(path / QUOTA, limit_bytes).close()
    return path


def write(arena: Arena, object_id: str, *buffers: bytes, data: bytes = b"stream") -> int:
    lengths = tuple(len(b) for b in buffers)
    head = ObjectHead("j_1", "p_1", 0.0, len(data), lengths)
    return arena.write(object_id, head, data, [memoryview(b) for b in buffers])


def read(arena: Arena, object_id: str) -> tuple[bytes, list[bytes]]:
    data, buffers = arena.read(object_id)
    return bytes(data), [bytes(b) for b in buffers]


def free_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / FREE).iterdir())


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


def test_a_freed_extent_is_used_again_for_a_like_size_only(folder: Path) -> None:
    arena = Arena(folder)
    write(arena, "o_1", bytes(1 << 20))
    arena.recycle("o_1")
    (name,) = free_names(folder)
    write(arena, "o_2", bytes(100))
    assert free_names(folder) == [name], "a megabyte is not spent on a hundred bytes"
    write(arena, "o_3", bytes((1 << 20) - 1000))
    assert free_names(folder) == []
    assert (folder / "o_3").stat().st_ino == int(name.partition("-")[2])


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


def test_the_quota_bounds_what_is_taken(folder: Path) -> None:
    arena = Arena(folder)
    kept = 0
    with pytest.raises(ArenaFullError, match=f"of {LIMIT} bytes are in use"):
        for kept in range(100):
            write(arena, f"o_{kept}", bytes(4 << 20))
    assert 12 <= kept <= 16
    assert sum(p.stat().st_size for p in folder.glob("o_*")) == arena.quota.used_bytes <= LIMIT
    assert not list(folder.glob("*.tmp"))
    arena.recycle("o_0")
    write(arena, "o_again", bytes(4 << 20))
    arena.recycle("o_1")
    (name,) = free_names(folder)
    before = arena.quota.used_bytes
    assert arena.delete(folder / FREE / name) == before - arena.quota.used_bytes > 4 << 20


def test_a_full_file_system_is_an_error_without_effect(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    arena = Arena(folder)
    monkeypatch.setattr(extents.os, "posix_fallocate", full)
    with pytest.raises(ArenaFullError, match="file system"):
        write(arena, "o_1", bytes(1000))
    assert arena.quota.used_bytes == 0
    assert {p.name for p in folder.iterdir()} == {FREE, QUOTA}


def test_a_write_that_fails_leaves_no_object(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(folder)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(extents.Extent, "pwrite", lambda *_: (_ for _ in ()).throw(RuntimeError()))
        write(arena, "o_1", bytes(100_000))
    assert len(free_names(folder)) == 1
    write(arena, "o_1", bytes(100_000))
    assert read(arena, "o_1")[1] == [bytes(100_000)]


def test_where_no_more_can_be_mapped_it_is_copied(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "too many mappings")

    arena = Arena(folder)
    write(arena, "o_1", b"x" * 200_000)
    monkeypatch.setattr(views.mmap, "mmap", exhausted)
    assert read(arena, "o_1") == (b"stream", [b"x" * 200_000])


def test_an_object_made_again_takes_the_place_of_the_first(folder: Path) -> None:
    arena = Arena(folder)
    write(arena, "o_1", b"a" * 200_000)
    view = arena.read("o_1")[1][0]
    write(arena, "o_1", b"b" * 300_000)
    assert read(arena, "o_1")[1] == [b"b" * 300_000]
    assert bytes(view) == b"a" * 200_000
    assert len(free_names(folder)) == 1, (
        "the first one's extent is counted and waits for its reader"
    )


def test_an_extent_under_a_wrong_name_is_taken_for_what_it_is(folder: Path) -> None:
    arena = Arena(folder)
    write(arena, "o_1", b"a" * 200_000)
    arena.recycle("o_1")
    (name,) = free_names(folder)
    write(arena, "o_2", b"b" * 200_000)  # claims it
    write(arena, "o_3", b"c" * 200_000)
    other = (folder / "o_3").stat().st_ino
    os.rename(folder / "o_3", folder / FREE / name)  # as a late rename of the first would
    view = arena.read("o_2")[1][0]
    write(arena, "o_4", b"d" * 200_000)
    assert (folder / "o_4").stat().st_ino == other
    assert bytes(view) == b"b" * 200_000
    assert read(arena, "o_4")[1] == [b"d" * 200_000]


def test_memory_that_is_being_touched_is_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = os.posix_fallocate, []

    def slow(fd: int, offset: int, nbytes: int) -> None:
        seen.append(sum(path.stat().st_size for path in folder.glob("*.tmp")))
        real(fd, offset, nbytes)

    arena = Arena(folder)
    monkeypatch.setattr(extents.os, "posix_fallocate", slow)
    write(arena, "o_1", bytes(1 << 20))
    assert seen == [arena.quota.used_bytes]


@pytest.mark.parametrize("where", ["posix_fallocate", "fstat", "open"])
def test_an_interrupt_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    arena = Arena(folder)
    if where != "posix_fallocate":
        write(arena, "o_1", bytes(1 << 20))
        arena.recycle("o_1")
    before = arena.quota.used_bytes
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(extents.os, where, interrupted)
        write(arena, "o_2", bytes(1 << 20))
    assert arena.quota.used_bytes == before
    assert not list(folder.glob("*.tmp"))
    write(arena, "o_2", bytes(1 << 20))


def test_a_spilled_object_is_read_from_where_it_lies(folder: Path, tmp_path: Path) -> None:
    arena = Arena(folder)
    write(arena, "o_1", b"x" * 200_000)
    (tmp_path / "disk").mkdir()
    (folder / "spill").symlink_to(tmp_path / "disk")
    os.rename(folder / "o_1", tmp_path / "disk" / "o_1")
    assert read(arena, "o_1") == (b"stream", [b"x" * 200_000])


def test_a_quota_whose_lock_is_stuck_goes_on(folder: Path) -> None:
    quota = ByteQuota(folder / QUOTA)
    with open(folder / QUOTA) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert quota.take(10)
    assert quota.used_bytes == 10
    quota.recount(5, before_bytes=11)
    assert quota.used_bytes == 10, "it changed during the count"
    quota.recount(5, before_bytes=10)
    assert quota.used_bytes == 5


# -- many processes ------------------------------------------------------------------------------------


def churn(folder: Path, seed: int, rounds: int, wrong: Any) -> None:
    """Write, read, keep views of and free objects, one's own and others'; check every view."""
    arena, random_ = Arena(folder), random.Random(seed)
    mine: list[str] = []
    views: list[tuple[int, memoryview]] = []
    for number in range(rounds):
        mark = random_.randrange(256)
        object_id = f"o_{seed}.{number}.{mark}"
        nbytes = random_.choice((50_000, 60_000, 200_000))
        with contextlib.suppress(ArenaFullError):
            write(arena, object_id, bytes([mark]) * nbytes)
            mine.append(object_id)
        for name in random_.sample(os.listdir(folder), 3):
            if not name.startswith("o_"):
                continue
            with contextlib.suppress(ObjectLostError):
                views.append((int(name.rpartition(".")[2]), arena.read(name)[1][0]))
        while len(mine) > 4:
            arena.recycle(mine.pop(random_.randrange(len(mine))))
        while len(views) > 12:
            views.pop(random_.randrange(len(views)))
        for mark, view in views:
            if bytes(view) != bytes([mark]) * view.nbytes:
                wrong.value += 1
    for object_id in mine:
        arena.recycle(object_id)


@pytest.fixture
def started() -> Iterator[list[Any]]:
    processes: list[Any] = []
    yield processes
    for process in processes:
        process.kill()
        process.join()


def test_no_extent_is_used_again_under_a_reader(
    tmp_path: Path, seed: int, started: list[Any]
) -> None:
    folder = laid_out(tmp_path, 8 << 20)
    fork = multiprocessing.get_context("fork")
    wrong = fork.Value("i", 0)
    for number in range(3):
        started.append(fork.Process(target=churn, args=(folder, seed + number, 250, wrong)))
        started[-1].start()
    for process in started:
        process.join(60)
        assert process.exitcode == 0
    assert wrong.value == 0
    arena = Arena(folder)
    assert not list(folder.glob("o_*")) and not list(folder.glob("*.tmp"))
    freed = sum(arena.delete(folder / FREE / name) for name in free_names(folder))
    assert freed > 0 and arena.quota.used_bytes == 0


def test_the_churn_finds_reuse_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = laid_out(tmp_path, 8 << 20)
    monkeypatch.setattr(extents, "_try_lock", lambda *_: True)
    wrong = type("Count", (), {"value": 0})()
    churn(folder, 1, 60, wrong)
    assert wrong.value > 0


def hold(folder: Path, ready: Any) -> None:
    arena = Arena(folder)
    view = arena.read("o_1")[1][0]
    extent = arena.create(1_000_000)
    extent.pwrite(b"half", 0)
    ready.set()
    signal.pause()
    del view


def test_a_killed_process_lets_go_of_all(folder: Path, started: list[Any]) -> None:
    arena = Arena(folder)
    write(arena, "o_1", b"x" * 500_000)
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    started.append(fork.Process(target=hold, args=(folder, ready)))
    started[0].start()
    assert ready.wait(30)
    arena.recycle("o_1")
    (name,) = free_names(folder)
    (half,) = folder.glob("*.tmp")
    assert arena.delete(folder / FREE / name) == 0
    assert arena.in_use(half)
    started[0].kill()
    started[0].join()
    assert not arena.in_use(half)
    assert arena.delete(folder / FREE / name) > 500_000


def in_place(arena: Arena, nbytes: int) -> memoryview:
    memory = arena.allocate(nbytes)
    memory[:] = os.urandom(nbytes)
    return memory


def store(arena: Arena, object_id: str, memory: memoryview) -> None:
    head = ObjectHead("j_1", "p_1", 0.0, 6, (memory.nbytes,))
    arena.write(object_id, head, b"stream", [memory])


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 70_000, 1 << 20])
@pytest.mark.parametrize("more", [0, 1, 3])
def test_what_is_filled_in_place_is_stored_as_it_is(folder: Path, nbytes: int, more: int) -> None:
    arena = Arena(folder)
    memory = in_place(arena, nbytes)
    expected = bytes(memory)
    others = [os.urandom(100 + i) for i in range(more)]
    buffers = [memory, *map(memoryview, others)]
    head = ObjectHead("j_1", "p_1", 0.0, 6, tuple(b.nbytes for b in buffers))
    arena.write("o_1", head, b"stream", buffers)
    data, got = Arena(folder).read("o_1")
    assert bytes(data).startswith(b"stream")
    assert [bytes(b) for b in got] == [expected, *others]
    copied = any(path.suffix == ".tmp" for path in folder.iterdir())
    assert not copied or more, "others may be too long for the rest of the extent"


def test_what_is_written_after_it_was_stored_is_seen_by_nobody_else(folder: Path) -> None:
    arena = Arena(folder)
    memory = in_place(arena, 100_000)
    expected = bytes(memory)
    store(arena, "o_1", memory)
    arena.settle_in_place()
    memory[:] = bytes(100_000)
    assert bytes(Arena(folder).read("o_1")[1][0]) == expected
    assert bytes(memory) == bytes(100_000)


def test_a_stored_extent_is_not_used_again_while_its_maker_holds_the_array(folder: Path) -> None:
    arena = Arena(folder)
    memory = in_place(arena, 100_000)
    expected = bytes(memory)
    store(arena, "o_1", memory)
    arena.settle_in_place()
    arena.recycle("o_1")
    write(Arena(folder), "o_2", bytes(100_000))
    assert bytes(memory) == expected
    del memory
    name = free_names(folder)[0]
    write(Arena(folder), "o_3", bytes(100_000))
    assert name not in free_names(folder)


def test_a_buffer_that_is_never_stored_is_recycled(folder: Path) -> None:
    arena = Arena(folder)
    memory = in_place(arena, 100_000)
    assert not free_names(folder)
    del memory
    assert len(free_names(folder)) == 1


def test_a_fork_does_not_end_its_parents_buffers(folder: Path) -> None:
    arena = Arena(folder)
    memory = in_place(arena, 100_000)
    expected = bytes(memory)
    pid = os.fork()
    if not pid:
        del memory
        os._exit(0)
    os.waitpid(pid, 0)
    write(Arena(folder), "o_2", bytes(100_000))
    assert bytes(memory) == expected
    store(arena, "o_1", memory)
    assert bytes(Arena(folder).read("o_1")[1][0]) == expected


def test_a_stream_too_long_for_the_room_before_it_is_stored_all_the_same(folder: Path) -> None:
    arena = Arena(folder)
    memory = in_place(arena, 10_000)
    expected, stream = bytes(memory), os.urandom(5000)
    arena.write("o_1", ObjectHead("j_1", "p_1", 0.0, 5000, (10_000,)), stream, [memory])
    assert read(Arena(folder), "o_1") == (stream, [expected])


def test_a_part_that_begins_later_is_copied(folder: Path) -> None:
    arena = Arena(folder)
    memory = in_place(arena, 10_000)
    part = memory[64:]
    arena.write("o_1", ObjectHead("j_1", "p_1", 0.0, 6, (part.nbytes,)), b"stream", [part])
    memory[:] = bytes(10_000)
    assert bytes(Arena(folder).read("o_1")[1][0]) != bytes(part.nbytes)


def test_a_mapping_that_nobody_has_any_more_is_warm_for_the_next(folder: Path) -> None:
    arena = Arena(folder)
    expected = []
    for turn in range(5):
        memory = in_place(arena, 100_000)
        expected.append(bytes(memory))
        store(arena, f"o_{turn}", memory)
        del memory
        arena.settle_in_place()
        assert bytes(Arena(folder).read(f"o_{turn}")[1][0]) == expected[-1]
        assert len(arena._in_place._warm) == 1
        arena.recycle(f"o_{turn}")
    assert len(free_names(folder)) == 1, "each took the extent of the one before"


def test_one_that_was_made_private_is_not(folder: Path) -> None:
    arena = Arena(folder)
    memory = in_place(arena, 100_000)
    store(arena, "o_1", memory)
    arena.settle_in_place()
    del memory
    assert not arena._in_place._warm


def test_threads_that_store_at_once_settle_each_others(folder: Path) -> None:
    """Nobody returns from settling while what it stored can still be changed by its maker."""
    arena, seed = Arena(folder), random.randrange(1 << 30)
    wrong: list[str] = []

    def work(number: int) -> None:
        dice = random.Random(seed + number)
        for turn in range(60):
            memory = in_place(arena, dice.choice((5000, 70_000, 300_000)))
            expected, name = bytes(memory), f"o_{number}_{turn}"
            store(arena, name, memory)
            if dice.random() < 0.5:
                del memory
                arena.settle_in_place()
            else:
                arena.settle_in_place()
                memory[:] = bytes(memory.nbytes)
            if bytes(Arena(folder).read(name)[1][0]) != expected:
                wrong.append(name)
            arena.recycle(name)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not wrong
    assert not arena._in_place._unsettled


def test_an_array_may_be_dropped_by_the_collector_at_any_instant(folder: Path) -> None:
    arena = Arena(folder)
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for turn in range(50):
            cycle: list[Any] = [in_place(arena, 10_000)]
            cycle.append(cycle)
            del cycle
            memory = in_place(arena, 10_000)
            store(arena, f"o_{turn}", memory)
            arena.settle_in_place()
    finally:
        gc.set_threshold(*thresholds)


def test_what_could_not_be_stored_is_still_filled_in_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(folder)
    memory = in_place(arena, 100_000)
    with monkeypatch.context() as patched:
        patched.setattr(Extent, "publish", broken_publish)
        with pytest.raises(OSError, match="no such disk"):
            store(arena, "o_1", memory)
    arena.settle_in_place()
    memory[:] = expected = os.urandom(100_000)
    store(arena, "o_1", memory)
    assert bytes(Arena(folder).read("o_1")[1][0]) == expected


def broken_publish(self: Extent, object_id: str) -> None:
    raise OSError("no such disk")


def test_a_mapping_that_cannot_be_made_private_fails_what_was_stored_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(folder)
    memory = in_place(arena, 100_000)
    store(arena, "o_1", memory)
    with monkeypatch.context() as patched:
        patched.setattr(in_place_module, "_make_private", no_memory)
        with pytest.raises(OSError, match="no memory"):
            arena.settle_in_place()
    arena.settle_in_place()
    other = in_place(arena, 100_000)
    store(arena, "o_2", other)
    arena.settle_in_place()


def no_memory(mapping: Any, fd: int) -> None:
    raise OSError("no memory")
