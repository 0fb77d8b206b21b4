"""The arena's folder: private to its owner, and removed by others only when the owner is dead."""

from __future__ import annotations

import os
import socket
import stat
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from stoker_nodelet.objects import arena

if TYPE_CHECKING:
    from pathlib import Path


def test_an_arena_is_private_and_swept_only_when_its_owner_is_dead(tmp_path: Path) -> None:
    mine = arena.arena_path(tmp_path / "a session", "n_1", tmp_path)
    assert mine.name == "stoker-a_session-n_1"
    arena.create_owned(mine)
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700
    dead = tmp_path / "stoker-dead"
    arena.create_owned(dead)
    namespace, pid, started = (dead / ".owner").read_text().split()
    (dead / ".owner").write_text(f"{namespace} {pid} {int(started) - 1}")
    foreign = tmp_path / "stoker-foreign"
    arena.create_owned(foreign)
    (foreign / ".owner").write_text(f"123 {pid} {int(started) - 1}")
    (tmp_path / "stoker-unmarked").mkdir()
    assert arena.sweep(tmp_path) == [dead]
    assert mine.exists()
    assert foreign.exists()
    assert (tmp_path / "stoker-unmarked").exists()


@pytest.mark.parametrize("step", ["write_text", "rename"])
def test_a_folder_whose_maker_was_killed_before_it_was_marked_is_swept(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), step, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            arena.create_owned(tmp_path / "stoker-a")
    [left] = tmp_path.iterdir()
    assert arena.sweep(tmp_path) == [], "its maker lives"
    monkeypatch.setattr("stoker_wire.process.process_tree.start_time", lambda pid: 1)
    assert arena.sweep(tmp_path) == [left]


def test_in_a_shared_folder_only_the_sockets_that_nobody_hears_are_removed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as heard, socket.socket(socket.AF_UNIX) as deaf:
        heard.bind(os.fspath(tmp_path / "heard.sock"))
        heard.listen()
        deaf.bind(os.fspath(tmp_path / "deaf.sock"))
        (tmp_path / "other").touch()
        arena.remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heard.sock", "other"]
