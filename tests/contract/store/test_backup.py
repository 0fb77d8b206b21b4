"""Backups of the gcs's database: of a live one, from either kind into either, whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import math
import sqlite3
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stoker_gcs.state.schema import REVISION
from stoker_migrations.backup import Manifest, backup, restore
from stoker_migrations.command import upgrade
from stoker_wire.data.training import TrainingReport, report_frames
from stoker_wire.errors import (
    BadRequestError,
    CompactedError,
    ConflictError,
    DatabaseError,
    UnavailableError,
)
from stoker_wire.messages.cluster import RegisteredNode
from stoker_wire.messages.control import (
    Campaign,
    Event,
    KvEntry,
    Leader,
    Page,
    RetentionStatus,
)
from stoker_wire.messages.events import PastState
from stoker_wire.messages.objects import CreateDetachedObject, DetachedObject
from stoker_wire.messages.work import Job, ReportTasks, SubmitJob, TaskRecord, TaskState
from tests.contract.gcs_support import a_node, gcs, migrate, register

if TYPE_CHECKING:
    from pathlib import Path

    from stoker_wire.http.client.client import Client

KINDS = ("sqlite", "postgres")
LISTS = ("nodes", "jobs", "actors", "queues", "tasks", "detached-objects", "events", "kv/backup")


@pytest.fixture(params=KINDS)
def source(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database that has nothing, not even tables."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'target.sqlite3'}"
    server = request.getfixturevalue("postgres_server")
    name = server.create_database()
    request.addfinalizer(lambda: server.drop_database(name))
    url: str = server.url(name)
    return url


async def fill(client: Client) -> None:
    await client.call("POST", "/v1/nodes", a_node())
    for number in range(5):
        body = SubmitJob(entrypoint="true", job_id=f"job_{number}")
        await client.call("POST", "/v1/jobs", body, reply=Job)
        await client.call("PUT", f"/v1/kv/backup/k{number}", bytes([number]) * 100)
    made = CreateDetachedObject(object_id="o_detached_1", nbytes=3, name="x", value=b"abc")
    await client.call("POST", "/v1/detached-objects", made, reply=DetachedObject)
    tasks = tuple(
        TaskRecord(
            task_id=f"t_{number:04}",
            attempt=0,
            job_id="job_1",
            state=TaskState.FINISHED,
            name="näme",
            submitted_at_s=float(number),
        )
        for number in range(2500)
    )
    await client.call("POST", "/v1/tasks/report", ReportTasks(records=tasks))
    values = {1: math.inf, 2: math.nan, 3: 0.5}
    reports = [
        TrainingReport("job_1", "", "default", step, step + 0.5, {"loss": value})
        for step, value in values.items()
    ]
    await client.call("POST", "/v1/tasks/spooled", report_frames(reports))


async def state_of(client: Client) -> dict[str, Any]:
    """What the lists of the API show, but what moves by itself."""
    shown: dict[str, Any] = {}
    for name in LISTS:
        page = await client.call("GET", f"/v1/{name}", reply=dict[str, Any], query={"limit": 1000})
        shown[name] = page["items"]
    for node in shown["nodes"]:
        node.pop("heartbeat_at_s")
    path = "/v1/training-runs/job_1/default"
    shown["curves"] = await client.call("GET", path, reply=dict[str, Any])
    return shown


async def in_thread(work: Any, *arguments: Any, **named: Any) -> Manifest:
    made: Manifest = await asyncio.to_thread(work, *arguments, **named)
    return made


async def test_what_is_restored_is_what_was(source: str, target: str, tmp_path: Path) -> None:
    await migrate(source)
    async with gcs(source) as (_, client):
        await fill(client)
        manifest = await in_thread(backup, source, tmp_path / "backup")
        before = await state_of(client)
    assert manifest.rows["tasks"] == 2500 and manifest.rows["jobs"] == 5
    assert await in_thread(restore, tmp_path / "backup", target) == manifest
    async with gcs(target) as (_, client):
        after = await state_of(client)
        events = [one for one in after.pop("events") if one["seq"] <= manifest.seq]
        assert events == [one for one in before.pop("events") if one["seq"] <= manifest.seq]
        assert after == before
        located = await client.call(
            "POST", "/v1/detached-objects/o_detached_1/locate", {}, reply=dict[str, Any]
        )
        assert located["value"]
        await client.call("PUT", "/v1/kv/backup/new", b"later")
        page = await client.call(
            "GET",
            "/v1/events",
            reply=Page[Event],
            query={"limit": 1, "kind": "kv.put", "order": "desc"},
        )
        assert page.items[0].seq > manifest.seq, "numbers go on"


async def test_what_happened_after_the_backup_is_never_taken_for_what_happens_after_the_restore(
    source: str, target: str, tmp_path: Path
) -> None:
    await migrate(source)
    async with gcs(source) as (_, client):
        await fill(client)
        lead = Campaign(holder="p_1", url="http://127.0.0.1:9", ttl_s=60.0)
        await client.call("POST", "/v1/leaders/scheduler", lead, reply=Leader)
        manifest = await in_thread(backup, source, tmp_path / "backup")
        known = await client.call("PUT", "/v1/kv/backup/k0", b"lost", reply=KvEntry)
        assert known.revision > manifest.seq
        for number in range(3):
            lead = Campaign(holder=f"p_{number + 2}", url=lead.url, ttl_s=60.0)
            leader = await client.call("POST", "/v1/leaders/scheduler", lead, reply=Leader)
            node = await register(client)
    await in_thread(restore, tmp_path / "backup", target)
    async with gcs(target) as (running, client):
        for since in (known.revision, known.revision + 1000):
            watch = client.watch("/v1/events", since)
            with pytest.raises(CompactedError, match="restored to before event"):
                async with asyncio.timeout(20), contextlib.aclosing(watch):
                    await anext(watch)
        before = await client.call("GET", "/v1/kv/backup", reply=Page[KvEntry])
        watch = client.watch("/v1/events", before.seq, {"kind": "kv."})
        async with asyncio.timeout(20), contextlib.aclosing(watch):
            put = await client.call("PUT", "/v1/kv/backup/k0", b"new", reply=KvEntry)
            assert (await anext(watch)).seq == put.revision > known.revision + 1000
        again = await client.call("POST", "/v1/leaders/scheduler", lead, reply=Leader)
        assert again.epoch > leader.epoch + 1000, "its nodelets have seen the later ones"
        body = msgspec.structs.replace(a_node(), last_incarnation=node.incarnation)
        joined = await client.call("POST", "/v1/nodes", body, reply=RegisteredNode)
        assert joined.incarnation > node.incarnation
        page = await client.call("GET", "/v1/events", reply=Page[Event], query={"count": True})
        assert page.total is not None
        assert page.total <= len(page.items) < page.total + 50, "its loops may add a few meanwhile"
        past = await client.call(
            "GET", "/v1/state", reply=PastState, query={"at": str(manifest.seq)}
        )
        assert past.seq == manifest.seq and len(past.jobs) == 5

        await running.app.state.log.compact(5)
        kept = await client.call("GET", "/v1/retention", reply=RetentionStatus)
        events = next(one for one in kept.kinds if one.kind == "events")
        assert 5 <= events.count < 50 and page.total - 5 <= events.removed < page.total + 50


async def test_a_backup_of_a_live_cluster_is_of_one_moment(source: str, tmp_path: Path) -> None:
    """Pairs of keys are written in one order, so that a backup never has the second alone."""
    await migrate(source)
    async with gcs(source) as (_, client):
        stop = asyncio.Event()
        written = 0

        async def write() -> None:
            nonlocal written
            while not stop.is_set():
                for side in ("a", "b"):
                    await client.call("PUT", f"/v1/kv/backup/{side}{written:06}", b"v")
                written += 1

        writing = asyncio.create_task(write())
        try:
            while written < 20:  # noqa: ASYNC110 (the writer tells by its count)
                await asyncio.sleep(0.01)
            await in_thread(backup, source, tmp_path / "backup")
        finally:
            stop.set()
            await writing
    copy = f"sqlite+aiosqlite:///{tmp_path / 'copy.sqlite3'}"
    manifest = await in_thread(restore, tmp_path / "backup", copy)
    async with gcs(copy) as (_, client):
        page = await client.call(
            "GET", "/v1/kv/backup", reply=dict[str, Any], query={"limit": 1000}
        )
        keys = {one["key"] for one in page["items"]}
        assert len(keys) >= 40
        assert {key for key in keys if key[0] == "b"} <= {
            f"b{key[1:]}" for key in keys if key[0] == "a"
        }
        assert all(one["revision"] <= manifest.seq for one in page["items"])


@pytest.fixture
def made(sqlite_url: str, tmp_path: Path) -> Path:
    """A backup."""

    async def make() -> None:
        async with gcs(sqlite_url) as (_, client):
            await fill(client)

    asyncio.run(make())
    backup(sqlite_url, tmp_path / "backup")
    return tmp_path / "backup"


async def test_a_database_that_is_not_empty_is_left_alone_unless_forced(
    made: Path, target: str
) -> None:
    await in_thread(restore, made, target)
    with pytest.raises(ConflictError, match="--force"):
        await in_thread(restore, made, target)
    await in_thread(restore, made, target, force=True)
    async with gcs(target) as (_, client):
        assert len((await state_of(client))["jobs"]) == 5


@pytest.mark.parametrize("damage", ["cut", "flipped", "text", "empty", "newer", "unzipped"])
def test_a_damaged_file_is_refused_and_leaves_nothing(
    made: Path, tmp_path: Path, damage: str
) -> None:
    whole = made.read_bytes()
    raw = gzip.decompress(whole)
    match damage:
        case "cut":
            made.write_bytes(gzip.compress(raw[: len(raw) // 2]))
        case "flipped":
            at = raw.rindex("näme".encode())
            made.write_bytes(gzip.compress(raw[:at] + b"X" + raw[at + 1 :]))
        case "text":
            made.write_text("no backup")
        case "empty":
            made.write_bytes(b"")
        case "newer":
            made.write_bytes(
                gzip.compress(raw.replace(b"\xa4" + REVISION.encode(), b"\xa49999", 1))
            )
        case _:
            made.write_bytes(whole[:-20])
    path = tmp_path / "target.sqlite3"
    with pytest.raises(BadRequestError):
        restore(made, f"sqlite+aiosqlite:///{path}")
    if damage in ("text", "empty", "newer"):
        assert not path.exists()
    else:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT count(*) FROM jobs").fetchone() == (0,)


def test_an_older_backup_is_brought_to_this_schema(tmp_path: Path) -> None:
    old, new = (f"sqlite+aiosqlite:///{tmp_path / name}" for name in ("old", "new"))
    upgrade(old, "0008")
    with pytest.raises(DatabaseError, match="0008"):
        backup(old, tmp_path / "backup")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stoker_migrations.backup.REVISION", "0008")
        backup(old, tmp_path / "backup")
    restore(tmp_path / "backup", new)
    with contextlib.closing(sqlite3.connect(tmp_path / "new")) as connection:
        assert connection.execute("SELECT count(*) FROM detached_objects").fetchone() == (0,)


def test_a_file_that_cannot_be_written_is_not_there(
    made: Path, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.unlink()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(gzip.GzipFile, "write", full)
    with pytest.raises(UnavailableError, match="no space left"):
        backup(sqlite_url, made)
    assert [one.name for one in made.parent.iterdir() if "backup" in one.name] == []
