"""The folders of jobs on a node: private copies, their end, and output on its way to the user."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import shutil
import tarfile
import zipfile
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.jobs import unpack_output
from stoker_nodelet.core import State
from stoker_nodelet.environments import job_folders
from stoker_nodelet.environments.environments import Environments
from stoker_nodelet.environments.job_folders import JobFolders, copy_private
from stoker_nodelet.environments.retention import EnvironmentRetention
from stoker_nodelet.environments.user_folders import Folders, UserFolders
from stoker_nodelet.unix_users import UnixUser, UnixUsers
from stoker_nodelet.workers.workers import Workers
from stoker_wire.errors import (
    BadRequestError,
    NotFoundError,
    PayloadTooLargeError,
    RuntimeEnvSetupError,
    UnavailableError,
)
from stoker_wire.messages.cluster import Lease, LeaseKind, StartLease, WorkerSpec
from stoker_wire.messages.common import RuntimeEnv
from stoker_wire.process.background import Background


async def archive_of(folders: JobFolders, job_id: str) -> bytes:
    return b"".join([part async for part in await folders.archive(job_id)])


def test_a_copy_shares_no_file_with_its_source(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "tool").write_bytes(os.urandom(3_000_000))
    (source / "deep" / "tool").chmod(0o700)
    copy_private(source, tmp_path / "copy")
    copied = tmp_path / "copy" / "deep" / "tool"
    assert copied.read_bytes() == (source / "deep" / "tool").read_bytes()
    assert os.access(copied, os.X_OK)
    assert copied.stat().st_nlink == 1
    with copied.open("r+b") as file:
        file.write(b"changed in place")
    assert not (source / "deep" / "tool").read_bytes().startswith(b"changed")


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
async def test_a_jobs_folders_are_its_users_alone_whatever_the_umask(
    tmp_path: Path, umask: int
) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("main.py", "print(1)")

    async def download(_: str) -> bytes:
        return packed.getvalue()

    folders = JobFolders(tmp_path / "jobs", keep_s=0.0)
    (tmp_path / "jobs" / "job_1").mkdir(parents=True)
    (tmp_path / "jobs").chmod(0o755)
    before = os.umask(umask)
    try:
        folders.make_output_dir("job_1")
        for job_id in ("job_1", "job_2"):
            folders.make_folder(job_id)
    finally:
        os.umask(before)
    async with Background("test") as background:
        retention = EnvironmentRetention(tmp_path, 0.0, 0)
        built = Environments(tmp_path / "env", download, background, folders, retention)
        wanted = RuntimeEnv(working_dir=hashlib.sha256(packed.getvalue()).hexdigest())
        for job_id in ("job_1", "job_3"):
            await built.prepare(wanted, job_id)
    made = [tmp_path / "jobs", *(tmp_path / "jobs").glob("*"), *(tmp_path / "jobs").glob("*/*")]
    assert len(made) == 1 + 3 + 3
    assert {folder.stat().st_mode & 0o777 for folder in made} == {0o700}


async def test_a_disk_without_room_for_the_copy_fails_the_job_with_the_reason(
    tmp_path: Path,
) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("main.py", "print(1)")

    async def download(_: str) -> bytes:
        return packed.getvalue()

    background = Background("test")
    folders = JobFolders(tmp_path / "jobs", keep_s=0.0)
    environments = Environments(
        tmp_path / "env", download, background, folders, EnvironmentRetention(tmp_path, 0.0, 0)
    )
    wanted = RuntimeEnv(working_dir=hashlib.sha256(packed.getvalue()).hexdigest())
    first, second = [await environments.prepare(wanted, job_id) for job_id in ("job_1", "job_2")]
    assert first.cwd != second.cwd
    assert os.listdir(first.cwd) == os.listdir(second.cwd) == ["main.py"]
    open(tmp_path / "jobs" / "job_3", "w").close()  # noqa: ASYNC230
    with pytest.raises(RuntimeEnvSetupError, match=r"working_dir.*job_3"):
        await environments.prepare(wanted, "job_3")
    await background.close()


async def test_a_folder_goes_some_time_after_its_job_but_not_under_a_process(
    tmp_path: Path,
) -> None:
    folders = JobFolders(tmp_path, keep_s=0.0)
    for job_id in ("job_1", "job_2"):
        assert folders.make_output_dir(job_id) == str(tmp_path / job_id / "output")
    assert folders.job_ids() == {"job_1", "job_2"}
    assert folders.over(()) == []
    folders.ended("job_1")
    folders.ended("job_elsewhere")
    assert folders.over({"job_1"}) == []
    assert folders.over(()) == ["job_1"]
    await folders.remove("job_1")
    assert os.listdir(tmp_path) == ["job_2"]
    assert folders.over(()) == []
    with pytest.raises(NotFoundError, match="STOKER_JOB_DIR_KEEP_S"):
        await folders.archive("job_1")
    patient = JobFolders(tmp_path, keep_s=3600.0)
    patient.make_output_dir("job_3")
    patient.ended("job_3")
    assert patient.over(()) == []


async def test_a_folder_made_after_its_jobs_end_goes_as_well(tmp_path: Path) -> None:
    folders = JobFolders(tmp_path, keep_s=0.0)
    over, asked = {"job_late"}, []

    async def is_over(job_id: str) -> bool:
        asked.append(job_id)
        return job_id in over

    folders.ended("job_late")
    for job_id in ("job_late", "job_lives", "job_restarts"):
        folders.make_output_dir(job_id)
    for _ in range(3):
        await folders.sweep({"job_restarts"}, is_over)
    assert asked == ["job_late", "job_lives"], "once, and nobody who has a process here"
    assert sorted(os.listdir(tmp_path)) == ["job_lives", "job_restarts"]
    over.add("job_restarts")
    for in_use in (set(), {"job_lives"}, set()):
        await folders.sweep(in_use, is_over)
    assert asked[2:] == ["job_restarts", "job_lives"], "again after it has come back"
    assert os.listdir(tmp_path) == ["job_lives"]


def test_a_folder_is_kept_as_long_again_after_the_last_process_of_an_ended_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    folders = JobFolders(tmp_path, keep_s=60.0)
    folders.make_output_dir("job_1")
    folders.ended("job_1")
    now += 600.0  # its detached actor lives on, dies, and is restarted
    assert folders.over({"job_1"}) == []
    now += 59.0
    assert folders.over(()) == []
    now += 1.0
    assert folders.over(()) == ["job_1"]


async def test_a_job_whose_environment_is_being_made_is_here(tmp_path: Path) -> None:
    made = asyncio.Event()

    class Slow:
        async def prepare(self, _: RuntimeEnv, job_id: str) -> None:
            await made.wait()
            raise RuntimeEnvSetupError(f"no room for {job_id}")

    others: dict[str, Any] = dict.fromkeys(
        ("target", "kernels", "exits", "logs", "objects", "driver_reports", "background")
    )
    folders = JobFolders(tmp_path, keep_s=0.0)
    slow: Any = Slow()
    identity: Any = SimpleNamespace(log_dir=tmp_path, arena_dir=tmp_path, socket_dir=tmp_path)
    users = UserFolders(tmp_path / "users", UnixUsers("n_1"), Folders(folders, slow), slow)
    workers = Workers(identity=identity, state=State(), users=users, **others)
    workers.member.set()
    lease = Lease(
        lease_id="l_1", owner_id="gcs", job_id="job_1", kind=LeaseKind.ACTOR, node_id="n_1",
        node_incarnation=0, resources={},
    )  # fmt: skip
    order = StartLease(lease=lease, epoch=1, worker=WorkerSpec())
    async with asyncio.TaskGroup() as group:
        start = group.create_task(_refusal(workers.start_lease(order)))
        while not folders.job_ids():  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert workers.jobs_here() == {"job_1"}
        made.set()
        assert "no room for job_1" in await start
    assert workers.jobs_here() == set()


async def _refusal(start: Awaitable[object]) -> str:
    with pytest.raises(RuntimeEnvSetupError) as caught:
        await start
    return str(caught.value)


async def test_shared_output_is_told_and_never_removed(tmp_path: Path) -> None:
    folders = JobFolders(tmp_path / "jobs", keep_s=0.0, shared_output=tmp_path / "nfs")
    output = folders.make_output_dir("job_1")
    (tmp_path / "nfs" / "job_1" / "model").write_text("weights")
    assert output == str(tmp_path / "nfs" / "job_1")
    told = folders.summary("job_1", "n_1")
    assert (told.files, told.nbytes, told.shared, told.path) == (1, 7, True, output)
    folders.ended("job_1")
    await folders.remove("job_1")
    assert (tmp_path / "nfs" / "job_1" / "model").exists()


@pytest.mark.parametrize("job_id", ["../..", "job_/../x", "n_1", "job_1/.."])
async def test_only_output_of_jobs_is_sent(tmp_path: Path, job_id: str) -> None:
    (tmp_path / "output").mkdir()
    with pytest.raises(NotFoundError):
        await JobFolders(tmp_path / "jobs", keep_s=0.0).archive(job_id)


async def test_too_much_output_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_folders, "MAX_OUTPUT_BYTES", 10)
    folders = JobFolders(tmp_path, keep_s=0.0)
    folder = folders.make_output_dir("job_1")
    (tmp_path / "job_1" / "output" / "big").write_bytes(bytes(11))
    with pytest.raises(PayloadTooLargeError, match=folder):
        await folders.archive("job_1")


def test_output_of_two_nodes_is_unpacked_into_one_folder(tmp_path: Path) -> None:
    target = tmp_path / "target"
    written: list[str] = []
    for node_id in ("n_1", "n_2"):
        folders = JobFolders(tmp_path / node_id, keep_s=0.0)
        output = folders.make_output_dir("job_1")
        for name in ("log", f"of-{node_id}"):
            Path(output, name).write_text(node_id)
        archive = io.BytesIO(asyncio.run(archive_of(folders, "job_1")))
        written += unpack_output(archive, target, node_id=node_id, taken=frozenset(written))
    assert written == ["log", "of-n_1", "n_2/log", "of-n_2"]
    assert (target / "log").read_text() == "n_1"
    assert (target / "n_2" / "log").read_text() == "n_2"


async def test_a_file_that_is_gone_or_cannot_be_read_costs_the_archive_no_other(
    tmp_path: Path,
) -> None:
    folders = JobFolders(tmp_path, keep_s=0.0)
    output = Path(folders.make_output_dir("job_1"))
    for name in ("a", "checkpoint-1", "socket", "z"):
        (output / name).write_text(name)
    parts = await folders.archive("job_1")
    (output / "checkpoint-1").unlink()
    (output / "socket").unlink()
    (output / "socket").mkdir()
    whole = io.BytesIO(b"".join([part async for part in parts]))
    assert unpack_output(whole, tmp_path / "target") == ["a", "z"]
    assert (tmp_path / "target" / "z").read_text() == "z"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("x", "x/deep/y", ["x", "n_2/x/deep/y"]),
        ("x/deep/y", "x", ["x/deep/y", "n_2/x"]),
        ("x/deep", "x/deep/y", ["x/deep", "n_2/x/deep/y"]),
    ],
)
def test_a_file_on_one_node_and_a_folder_on_another_are_both_unpacked(
    tmp_path: Path, first: str, second: str, expected: list[str]
) -> None:
    written: list[str] = []
    for node_id, name in (("n_1", first), ("n_2", second)):
        folders = JobFolders(tmp_path / node_id, keep_s=0.0)
        path = Path(folders.make_output_dir("job_1"), name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(node_id)
        archive = io.BytesIO(asyncio.run(archive_of(folders, "job_1")))
        written += unpack_output(
            archive, tmp_path / "to", node_id=node_id, taken=frozenset(written)
        )
    assert written == expected
    assert [(tmp_path / "to" / name).read_text() for name in written] == ["n_1", "n_2"]
    (tmp_path / "file").touch()
    archive.seek(0)
    with pytest.raises(BadRequestError, match=r"n_2 cannot be written to .*file"):
        unpack_output(archive, tmp_path / "file", node_id="n_2")


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out", "link/out"])
def test_nothing_is_unpacked_outside_of_the_folder(tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "link").symlink_to(tmp_path)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    raw.seek(0)
    with pytest.raises(BadRequestError, match="out"):
        unpack_output(raw, target)
    assert not (tmp_path / "out").exists()


async def test_a_cut_archive_is_no_whole_one(tmp_path: Path) -> None:
    folders = JobFolders(tmp_path, keep_s=0.0)
    (tmp_path / "job_1" / "output").mkdir(parents=True)
    (tmp_path / "job_1" / "output" / "big").write_bytes(bytes(100_000))
    whole = await archive_of(folders, "job_1")
    with pytest.raises(UnavailableError, match="broke off"):
        unpack_output(io.BytesIO(whole[:50_000]), tmp_path / "target", node_id="n_1")
    assert not (tmp_path / "target" / "big").exists()


async def test_what_a_job_puts_in_the_place_of_its_output_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the list of an output and its reading, the job that wrote it may swap what is listed."""
    secret = tmp_path / "secrets"
    secret.mkdir()
    (secret / "file").write_text("of the nodelet")
    me = UnixUser("me", os.geteuid(), os.getegid(), (), "/", "/bin/sh")
    for user in (None, me):
        folders = JobFolders(tmp_path / f"jobs{user is None}", keep_s=0.0, user=user)
        out = Path(folders.make_output_dir("job_0123456789abcdef"))
        for name in ("file", "folder/file", "folder/folder/file"):
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_text("mine")
        parts = await folders.archive("job_0123456789abcdef")
        shutil.rmtree(out / "folder" / "folder")
        (out / "folder" / "folder").symlink_to(secret)
        (out / "file").unlink()
        (out / "file").symlink_to(secret / "file")
        content = b"".join([part async for part in parts])
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            files = [one.name for one in archive if one.isreg()]
        assert files == ["folder/file"]
        assert b"of the nodelet" not in content
    if os.geteuid() == 0:
        other = UnixUser("other", 12345, 12345, (), "/", "/bin/sh")
        folders = JobFolders(tmp_path / "others", keep_s=0.0, user=other)
        out = Path(folders.make_output_dir("job_0123456789abcdef"))
        assert out.stat().st_uid == 12345
        assert out.stat().st_mode & 0o777 == 0o700
        (out / "linked").hardlink_to(secret / "file")
        content = await archive_of(folders, "job_0123456789abcdef")
        assert b"of the nodelet" not in content
