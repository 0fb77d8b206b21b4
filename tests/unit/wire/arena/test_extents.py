"""Extents: bounded by the quota, whole or not there, and not used again under a reader."""

from __future__ import annotations

import contextlib
import errno
import gc
import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.arena import Arena, extents
from stoker_wire.arena.extents import FREE, QUOTA
from stoker_wire.errors import ArenaFullError, ObjectLostError
from tests.unit.wire.arena.conftest import LIMIT, free_names, laid_out, read, write

if TYPE_CHECKING:
    from collections.abc import Iterator


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


def test_a_deleted_extent_is_not_kept_open(folder: Path) -> None:
    arena = Arena(folder)
    for again in range(3):  # it is mapped from its second filling on
        write(arena, f"o_{again}", bytes(1 << 20))
        read(arena, f"o_{again}")
        arena.recycle(f"o_{again}")
    (name,) = free_names(folder)
    gc.collect()
    assert arena.delete(folder / FREE / name) > 0
    opened = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            opened.append(link.readlink().name)
    assert not [file for file in opened if file.startswith(name)]


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
