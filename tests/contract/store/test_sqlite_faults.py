"""SQLite on a full disk, a locked file and a damaged one: named, and retryable where that is true."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import pytest

from stoker_gcs.store import sqlite as store
from stoker_wire.errors import DatabaseError, UnavailableError
from stoker_wire.messages.control import KvEntry
from tests.contract.gcs_support import gcs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker_wire.http.client.client import Client

SIZE = "8m"
VALUE = b"v" * 40_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of ``SIZE``."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Use up the disk to the last byte, for a while."""
    files = [disk / "large", disk / "small"]
    for file, nbytes in zip(files, (1 << 16, 512), strict=True):
        with pytest.raises(OSError, match="No space left"), file.open("wb", buffering=0) as out:
            while True:
                out.write(bytes(nbytes))
    try:
        yield
    finally:
        for file in files:
            file.unlink()


async def put(client: Client, key: str, *, retry: bool = False) -> KvEntry:
    path = f"/v1/kv/ns/{key}"
    return await client.call("PUT", path, VALUE, reply=KvEntry, retry=retry, timeout_s=30)


@pytest.mark.logs(r"its disk is full")
async def test_a_full_disk_is_named_loses_nothing_and_is_waited_for(small_disk: Path) -> None:
    async with gcs(f"sqlite:///{small_disk}/gcs.sqlite3") as (_, client):
        await put(client, "before")
        with filled(small_disk):
            for key in ("a", "b"):
                with pytest.raises(
                    UnavailableError, match=r"(?s)gcs\.sqlite3.*disk is full"
                ) as raised:
                    while True:  # a page or two may still fit
                        await put(client, key)
                assert raised.value.retryable
            assert await client.call("GET", "/v1/kv/ns/before", raw=True) == VALUE
            waiting = asyncio.ensure_future(put(client, "waiting", retry=True))
            await asyncio.wait([waiting], timeout=0.5)
            assert not waiting.done()
        assert (await waiting).key == "waiting"
        assert (await put(client, "after")).key == "after"


@pytest.mark.logs(r"locked by another process")
async def test_a_file_that_another_process_has_locked_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "BUSY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(store.SqliteStore._connection, "__defaults__", (0.1,))
    path = tmp_path / "gcs.sqlite3"
    async with gcs(f"sqlite:///{path}") as (_, client):
        await put(client, "before")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(UnavailableError, match="is locked by another process"):
                await put(client, "a")
            assert await client.call("GET", "/v1/kv/ns/before", raw=True) == VALUE
            other.execute("ROLLBACK")
        await put(client, "a")


async def test_a_damaged_file_is_named_and_is_not_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "gcs.sqlite3"
    made = store.SqliteStore(str(path), url=f"sqlite:///{path}")
    await made.start()
    await made.stop()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
    again = store.SqliteStore(str(path), url=f"sqlite:///{path}")
    with pytest.raises(DatabaseError, match=r"(?s)gcs\.sqlite3.*malformed|damaged") as raised:
        await again.start()
        await again.fetch("SELECT * FROM jobs ORDER BY job_id", {})
    assert not raised.value.retryable
    await again.stop()
