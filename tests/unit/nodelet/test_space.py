"""The arena's housekeeping: what is trimmed, spilled and swept, and what is left alone."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from stoker_nodelet.objects import eviction as space_module
from stoker_nodelet.objects.arena import remove_owned
from stoker_nodelet.objects.eviction import Space, prepare
from stoker_wire.arena import ObjectHead
from stoker_wire.errors import ArenaFullError
from stoker_wire.messages.work import ObjectInfo
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT = 10 << 20
MIB = 1 << 20


@pytest.fixture
def space(tmp_path: Path) -> Iterator[Space]:
    (tmp_path / "arena").mkdir()
    settings = Settings(arena_warm_bytes=3 * MIB)
    made = prepare(
        tmp_path / "arena", "n_1", settings, spill_dir=tmp_path / "disk", limit_bytes=LIMIT
    )
    yield made
    made.arena.close()


def put(space: Space, object_id: str, nbytes: int = MIB, *, report: bool = True) -> None:
    head = ObjectHead("j_1", "p_1", 0.0, nbytes, ())
    written = space.arena.write(object_id, head, bytes(nbytes), ())
    if report:
        space.objects.seal([ObjectInfo(object_id=object_id, nbytes=written, owner_id="p_1")])


async def test_room_is_made_of_what_is_free_before_anything_is_spilled(space: Space) -> None:
    for number in range(8):
        put(space, f"o_{number}")
    space.objects.free(["o_7"])
    await space.make_room(2 * MIB)
    assert space.recycled() == []
    assert space.objects.spilled_bytes == 0
    await space.make_room(4 * MIB)
    assert next(one.object_id for one in space.objects.in_memory()) != "o_0", "the oldest went"
    assert space.objects.spilled_bytes > MIB
    assert space.arena.quota.used_bytes <= LIMIT - 4 * MIB
    assert bytes(space.arena.read("o_0")[0]) == bytes(MIB)
    space.objects.free(["o_0"])
    assert not (space.spill_dir / "o_0").exists()


async def test_room_is_made_of_what_is_reported_a_moment_later(space: Space) -> None:
    for number in range(8):
        put(space, f"o_{number}", report=False)
    room = asyncio.ensure_future(space.make_room(4 * MIB))
    while not room.done():
        await asyncio.sleep(0)
        for one in space.arena.path.glob("o_*"):
            if one.name in space.objects:
                continue
            space.objects.seal([ObjectInfo(object_id=one.name, nbytes=MIB)])
    await room
    assert space.objects.spilled_bytes > 0


async def test_a_full_disk_is_named_with_the_holders(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for number in range(8):
        put(space, f"o_{number}")
    with monkeypatch.context() as patch:
        patch.setattr(space_module.os, "sendfile", full)
        with pytest.raises(ArenaFullError) as caught:
            await space.make_room(4 * MIB)
    for part in (f"nothing can be spilled to {space.spill_dir}: No space left", "o_0 of p_1"):
        assert part in str(caught.value)
    assert list(space.spill_dir.iterdir()) == []
    assert len(list(space.objects.in_memory())) == 8
    await space.make_room(4 * MIB)


async def test_an_object_freed_while_it_is_spilled_leaves_nothing(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(space, "o_1", 4 * MIB)
    real = space_module._copy

    def copy_then_free(fd: int, nbytes: int, final: Path) -> None:
        real(fd, nbytes, final)
        space.objects.free(["o_1"])

    monkeypatch.setattr(space_module, "_copy", copy_then_free)
    await space.make_room(8 * MIB)
    assert list(space.spill_dir.iterdir()) == []
    assert len(space.objects) == 0


async def test_an_object_made_again_is_spilled_whole(space: Space) -> None:
    put(space, "o_1", 2 * MIB)
    put(space, "o_1", 4 * MIB)
    assert len(space.objects) == 1 and 4 * MIB < space.objects.nbytes < 5 * MIB
    await space.make_room(9 * MIB)
    assert bytes(space.arena.read("o_1")[0]) == bytes(4 * MIB)
    put(space, "o_1", 1 * MIB)
    assert list(space.spill_dir.iterdir()) == [] and space.objects.spilled_bytes == 0
    await space.make_room(9 * MIB)
    assert bytes(space.arena.read("o_1")[0]) == bytes(MIB)


def test_recycled_extents_are_kept_up_to_a_size_and_an_age(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        put(space, f"o_{number}")
    space.objects.free([f"o_{number}" for number in range(6)])
    space.trim()
    kept = space.recycled()
    assert MIB < sum(nbytes for _, nbytes, _ in kept) <= 3 * MIB
    monkeypatch.setattr(space_module, "_IDLE_S", -1.0)
    view = open(kept[0][2], "rb")  # noqa: SIM115
    with view:
        space.trim()
        assert space.recycled() == []
        assert os.fstat(view.fileno()).st_size == 0, "its pages are free though it is still open"
    assert space.arena.quota.used_bytes == 0


def test_what_the_dead_left_is_found(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_module, "_ORPHAN_S", -1.0)
    monkeypatch.setattr(space_module, "_UNREPORTED_S", -1.0)
    half = space.arena.create(MIB)
    put(space, "o_unreported", report=False)
    (space.arena.path / "o_strange").write_bytes(b"not an object")
    space.arena.quota.take(MIB)  # by one who died before it made the file
    space.sweep()
    assert space.recycled() == [], "its writer lives"
    assert space.objects.get("o_unreported").owner_id == "p_1"
    assert "o_strange" not in space.objects
    found = sum(p.stat().st_size for p in space.arena.path.glob("*") if p.is_file())
    assert space.arena.quota.used_bytes == found - (space.arena.path / ".ledger").stat().st_size
    os.close(half.fd)
    space.sweep()
    assert len(space.recycled()) == 1


@pytest.mark.parametrize("over", [("j_1", ""), ("", "p_1")])
def test_what_an_ended_job_or_owner_never_reported_is_freed(
    space: Space, monkeypatch: pytest.MonkeyPatch, over: tuple[str, str]
) -> None:
    monkeypatch.setattr(space_module, "_UNREPORTED_S", -1.0)
    space.is_over = lambda job_id, owner_id: job_id == over[0] or owner_id == over[1]
    put(space, "o_1", report=False)
    space.sweep()
    assert len(space.objects) == 0 and len(space.recycled()) == 1


def test_with_the_arena_goes_what_it_spilled(space: Space) -> None:
    (space.spill_dir / "o_1").write_bytes(b"x")
    remove_owned(space.arena.path)
    assert not space.spill_dir.exists() and not space.arena.path.exists()
