"""The arena's housekeeping: what is trimmed, spilled and swept, and what is left alone."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from stoker_nodelet.objects import eviction
from stoker_nodelet.objects.arena import remove_owned
from stoker_nodelet.objects.eviction import ArenaEvictor, create_arena
from stoker_wire.arena import ObjectHead
from stoker_wire.arena.extents import QUOTA
from stoker_wire.errors import ArenaFullError, StartError
from stoker_wire.messages.objects import ObjectInfo
from stoker_wire.messages.queries import ActivityQuery
from stoker_wire.settings import Settings
from tests.services import fill, mounted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT = 10 << 20
MIB = 1 << 20


@pytest.fixture
def evictor(tmp_path: Path) -> Iterator[ArenaEvictor]:
    (tmp_path / "arena").mkdir()
    made = make(tmp_path / "arena", tmp_path / "disk")
    yield made
    made.arena.close()


def make(folder: Path, spill_dir: Path) -> ArenaEvictor:
    return create_arena(
        folder,
        "n_1",
        Settings(arena_warm_bytes=3 * MIB),
        spill_dir=spill_dir,
        limit_bytes=LIMIT,
        has_ended=lambda job_id, owner_id: False,
    )


def put(evictor: ArenaEvictor, object_id: str, nbytes: int = MIB, *, report: bool = True) -> None:
    head = ObjectHead("j_1", "p_1", 0.0, nbytes, ())
    written = evictor.arena.write(object_id, head, bytes(nbytes), ())
    if report:
        evictor.objects.seal([ObjectInfo(object_id=object_id, nbytes=written, owner_id="p_1")])


async def test_room_is_made_of_what_is_free_before_anything_is_spilled(
    evictor: ArenaEvictor,
) -> None:
    for number in range(8):
        put(evictor, f"o_{number}")
    evictor.objects.free(["o_7"])
    await evictor.make_room(2 * MIB)
    assert evictor.recycled() == []
    assert evictor.objects.spilled_bytes == 0
    await evictor.make_room(4 * MIB)
    assert next(one.object_id for one in evictor.objects.in_memory()) != "o_0", "the oldest went"
    assert evictor.objects.spilled_bytes > MIB
    entry = evictor.activity.page(ActivityQuery()).items[0]
    assert (entry.kind, entry.name) == ("spill", "o_0") and entry.nbytes > MIB
    assert evictor.arena.quota.used_bytes <= LIMIT - 4 * MIB
    assert bytes(evictor.arena.read("o_0")[0]) == bytes(MIB)
    evictor.objects.free(["o_0"])
    assert not (evictor.spill_dir / "o_0").exists()


async def test_room_is_made_of_what_is_reported_a_moment_later(evictor: ArenaEvictor) -> None:
    for number in range(8):
        put(evictor, f"o_{number}", report=False)
    room = asyncio.ensure_future(evictor.make_room(4 * MIB))
    while not room.done():
        await asyncio.sleep(0)
        for one in evictor.arena.path.glob("o_*"):
            if one.name in evictor.objects:
                continue
            evictor.objects.seal([ObjectInfo(object_id=one.name, nbytes=MIB)])
    await room
    assert evictor.objects.spilled_bytes > 0


async def test_the_limit_is_what_others_leave(tmp_path: Path) -> None:
    with mounted(tmp_path / "shm", 16 * MIB) as shm:
        (shm / "arena").mkdir()
        shared = make(shm / "arena", tmp_path / "disk")
        for number in range(5):
            put(shared, f"o_{number}")
        await shared.spill()
        assert shared.objects.spilled_bytes == 0
        fill(shm / "other")
        await shared.spill()
        assert MIB < shared.objects.spilled_bytes < 4 * MIB
        with pytest.raises(ArenaFullError, match=r"its file system has \d+ bytes free"):
            await shared.make_room(8 * MIB)
        (shm / "other").unlink()
        await shared.make_room(8 * MIB)
        assert bytes(shared.arena.read("o_0")[0]) == bytes(MIB)
        shared.arena.close()


def test_an_arena_on_a_full_file_system_is_a_named_error(tmp_path: Path) -> None:
    with mounted(tmp_path / "shm", MIB) as shm:
        (shm / "arena").mkdir()
        fill(shm / "other")
        with pytest.raises(StartError, match=r"cannot be made in .*/arena\.\nNo space"):
            make(shm / "arena", tmp_path / "disk")


async def test_a_disk_that_is_full_for_long_is_one_warning_and_is_used_again(
    tmp_path: Path, evictor: ArenaEvictor, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted(evictor.spill_dir, 3 * MIB):
        fill(evictor.spill_dir / "other")
        for number in range(8):
            put(evictor, f"o_{number}")
        put(evictor, "o_8", MIB // 2)
        for _ in range(3):
            await evictor.spill()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert f"nothing can be spilled to {evictor.spill_dir}: No space" in caplog.text
        assert len(list(evictor.objects.in_memory())) == 9
        (evictor.spill_dir / "other").unlink()
        await evictor.spill()
        assert evictor.objects.spilled_bytes > 0
        assert all(bytes(evictor.arena.read(f"o_{n}")[0]) == bytes(MIB) for n in range(8))


async def test_a_full_disk_is_named_with_the_holders(
    evictor: ArenaEvictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for number in range(8):
        put(evictor, f"o_{number}")
    with monkeypatch.context() as patch:
        patch.setattr(eviction.os, "sendfile", full)
        with pytest.raises(ArenaFullError) as caught:
            await evictor.make_room(4 * MIB)
    for part in (f"nothing can be spilled to {evictor.spill_dir}: No space left", "o_0 of p_1"):
        assert part in str(caught.value)
    assert list(evictor.spill_dir.iterdir()) == []
    assert len(list(evictor.objects.in_memory())) == 8
    await evictor.make_room(4 * MIB)


async def test_an_object_freed_while_it_is_spilled_leaves_nothing(
    evictor: ArenaEvictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(evictor, "o_1", 4 * MIB)
    real = eviction._copy

    def copy_then_free(fd: int, nbytes: int, final: Path) -> None:
        real(fd, nbytes, final)
        evictor.objects.free(["o_1"])

    monkeypatch.setattr(eviction, "_copy", copy_then_free)
    await evictor.make_room(8 * MIB)
    assert list(evictor.spill_dir.iterdir()) == []
    assert len(evictor.objects) == 0


async def test_an_object_made_again_is_spilled_whole(evictor: ArenaEvictor) -> None:
    put(evictor, "o_1", 2 * MIB)
    put(evictor, "o_1", 4 * MIB)
    assert len(evictor.objects) == 1 and 4 * MIB < evictor.objects.nbytes < 5 * MIB
    await evictor.make_room(9 * MIB)
    assert bytes(evictor.arena.read("o_1")[0]) == bytes(4 * MIB)
    put(evictor, "o_1", 1 * MIB)
    assert list(evictor.spill_dir.iterdir()) == [] and evictor.objects.spilled_bytes == 0
    await evictor.make_room(9 * MIB)
    assert bytes(evictor.arena.read("o_1")[0]) == bytes(MIB)


def test_recycled_extents_are_kept_up_to_a_size_and_an_age(
    evictor: ArenaEvictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        put(evictor, f"o_{number}")
    evictor.objects.free([f"o_{number}" for number in range(6)])
    evictor.trim()
    kept = evictor.recycled()
    assert MIB < sum(nbytes for _, nbytes, _ in kept) <= 3 * MIB
    monkeypatch.setattr(eviction, "_IDLE_S", -1.0)
    view = open(kept[0][2], "rb")  # noqa: SIM115
    with view:
        evictor.trim()
        assert evictor.recycled() == []
        assert os.fstat(view.fileno()).st_size == 0, "its pages are free though it is still open"
    assert evictor.arena.quota.used_bytes == 0


def test_what_the_dead_left_is_found(
    evictor: ArenaEvictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "_ORPHAN_S", -1.0)
    monkeypatch.setattr(eviction, "_UNREPORTED_S", -1.0)
    half = evictor.arena.create(MIB)
    put(evictor, "o_unreported", report=False)
    (evictor.arena.path / "o_strange").write_bytes(b"not an object")
    evictor.arena.quota.take(MIB)  # by one who died before it made the file
    evictor.sweep()
    assert evictor.recycled() == [], "its writer lives"
    assert evictor.objects.get("o_unreported").owner_id == "p_1"
    assert "o_strange" not in evictor.objects
    found = sum(p.stat().st_size for p in evictor.arena.path.glob("*") if p.is_file())
    assert evictor.arena.quota.used_bytes == found - (evictor.arena.path / QUOTA).stat().st_size
    os.close(half.fd)
    evictor.sweep()
    assert len(evictor.recycled()) == 1


@pytest.mark.parametrize("over", [("j_1", ""), ("", "p_1")])
def test_what_an_ended_job_or_owner_never_reported_is_freed(
    evictor: ArenaEvictor, monkeypatch: pytest.MonkeyPatch, over: tuple[str, str]
) -> None:
    monkeypatch.setattr(eviction, "_UNREPORTED_S", -1.0)
    evictor.has_ended = lambda job_id, owner_id: job_id == over[0] or owner_id == over[1]
    put(evictor, "o_1", report=False)
    evictor.sweep()
    assert len(evictor.objects) == 0 and len(evictor.recycled()) == 1


def test_with_the_arena_goes_what_it_spilled(evictor: ArenaEvictor) -> None:
    (evictor.spill_dir / "o_1").write_bytes(b"x")
    remove_owned(evictor.arena.path)
    assert not evictor.spill_dir.exists() and not evictor.arena.path.exists()
