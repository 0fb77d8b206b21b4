"""The folders of jobs on a node: private copies, their end, and output on its way to the user."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from stoker._outputs import unpack
from stoker_nodelet import jobfolders
from stoker_nodelet.environments import Environments
from stoker_nodelet.jobfolders import JobFolders, copy_private
from stoker_wire.background import Background
from stoker_wire.errors import (
    BadRequestError,
    NotFoundError,
    PayloadTooLargeError,
    RuntimeEnvSetupError,
    UnavailableError,
)
from stoker_wire.messages.common import RuntimeEnv


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
    environments = Environments(tmp_path / "env", download, background, folders)
    wanted = RuntimeEnv(working_dir="a" * 64)
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
    monkeypatch.setattr(jobfolders, "MAX_OUTPUT_BYTES", 10)
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
        written += unpack(archive, target, node_id=node_id, taken=frozenset(written))
    assert written == ["log", "of-n_1", "n_2/log", "of-n_2"]
    assert (target / "log").read_text() == "n_1"
    assert (target / "n_2" / "log").read_text() == "n_2"


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
        unpack(raw, target)
    assert not (tmp_path / "out").exists()


async def test_a_cut_archive_is_no_whole_one(tmp_path: Path) -> None:
    folders = JobFolders(tmp_path, keep_s=0.0)
    (tmp_path / "job_1" / "output").mkdir(parents=True)
    (tmp_path / "job_1" / "output" / "big").write_bytes(bytes(100_000))
    whole = await archive_of(folders, "job_1")
    with pytest.raises(UnavailableError, match="broke off"):
        unpack(io.BytesIO(whole[:50_000]), tmp_path / "target", node_id="n_1")
    assert not (tmp_path / "target" / "big").exists()
