"""Arrays filled in place: stored as they are, and never changed for those who read them."""

from __future__ import annotations

import gc
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.arena import Arena, Extent, ObjectHead
from stoker_wire.arena import in_place as in_place_module
from tests.unit.wire.arena.conftest import free_names, read, write

if TYPE_CHECKING:
    from pathlib import Path


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


def test_the_collector_may_find_a_dropped_array_while_others_are_settled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, settled = Arena(folder), threading.Event()
    memory = in_place(arena, 100_000)
    store(arena, "o_1", memory)
    cycle: list[Any] = [in_place(arena, 10_000)]
    cycle.append(cycle)
    dropped = [cycle]
    del cycle

    def collect(mapping: Any, fd: int) -> None:
        dropped.clear()
        gc.collect()
        assert len(free_names(folder)) == 1

    def settle() -> None:
        arena.settle_in_place()
        settled.set()

    monkeypatch.setattr(in_place_module, "_make_private", collect)
    threading.Thread(target=settle, daemon=True).start()
    assert settled.wait(40), "it waits for its own lock"


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
