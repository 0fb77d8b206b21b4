"""The folders of a nodelet that starts by itself: private, or it does not start."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from stoker_nodelet.objects import arena
from stoker_nodelet.service import _make_folders
from stoker_wire.errors import StartError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_session_folder_that_others_can_read_is_taken_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "SOCKETS", tmp_path)  # with a long path they are not in the session
    session = tmp_path / "session"
    (session / "logs").mkdir(parents=True)
    for folder in (session, session / "logs"):
        folder.chmod(0o777)
    made, sockets = _make_folders(session, "n_1")
    folders = (made, made / "logs", sockets)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700] * 3


def test_the_sockets_folder_of_a_dead_nodelet_of_the_same_name_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "SOCKETS", tmp_path)
    session = tmp_path / ("long" * 30)
    _, sockets = _make_folders(session, "n_1")
    assert sockets == tmp_path / "stoker-sock-n_1"
    (sockets / "w_1.sock").touch()
    namespace, pid, started = (sockets / ".owner").read_text().split()
    (sockets / ".owner").write_text(f"{namespace} {pid} {int(started) - 1}")
    _make_folders(session, "n_1")
    assert [path.name for path in sockets.iterdir()] == [".owner"]
    with pytest.raises(OSError, match="not empty"):
        _make_folders(session, "n_1")


def test_a_session_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    session = tmp_path / "session"
    session.mkdir(mode=0o700)
    os.chown(session, 65534, 65534)
    with pytest.raises(StartError, match="belongs to another user"):
        _make_folders(session, "n_1")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(StartError, match="belongs to another user"):
        _make_folders(tmp_path / "link", "n_1")
