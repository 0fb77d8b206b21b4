"""The file of a SQLite store: its user's alone, whatever the umask."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from stoker_gcs.store.sqlite import SqliteStore

if TYPE_CHECKING:
    from pathlib import Path


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@pytest.mark.parametrize("before", [None, 0o644, 0o666])
async def test_nobody_else_reads_the_database(tmp_path: Path, before: int | None) -> None:
    path = tmp_path / "gcs.sqlite3"
    names = {"gcs.sqlite3", "gcs.sqlite3-wal", "gcs.sqlite3-shm"}
    umask = os.umask(0)
    try:
        if before is not None:
            path.touch()
            path.chmod(before)
        for _ in range(2):
            store = SqliteStore(str(path), url="sqlite")
            await store.start()
            assert modes(tmp_path) == dict.fromkeys(names, 0o600)
            await store.stop()
    finally:
        os.umask(umask)
