"""The nodelet's smaller parts: logs, arena, devices, packages and the words for an exit."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import stat
import zipfile
from typing import TYPE_CHECKING

import pytest

from stoker_nodelet import devices, process_tree
from stoker_nodelet.environments.environments import Environments, _extract, _run
from stoker_nodelet.environments.job_folders import JobFolders
from stoker_nodelet.objects import arena
from stoker_nodelet.objects.index import ObjectIndex
from stoker_nodelet.telemetry.driver_reports import final_state, message_of
from stoker_nodelet.telemetry.exits import Exits, describe
from stoker_nodelet.telemetry.logs import LogFile, LogFilter, Logs
from stoker_wire.arena import Arena
from stoker_wire.errors import NotFoundError, RuntimeEnvSetupError, UnavailableError
from stoker_wire.messages.cluster import WorkerExit
from stoker_wire.messages.common import RuntimeEnv
from stoker_wire.messages.work import JobState, ObjectInfo
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("status", "killed_for", "kernel_oom", "cause"),
    [
        (3 << 8, "", False, "exited with code 3"),
        (signal.SIGSEGV, "", False, "killed by SIGSEGV"),
        (signal.SIGKILL, "", False, "killed by SIGKILL from outside Stoker"),
        (signal.SIGKILL, "", True, "killed by the kernel's out-of-memory killer (SIGKILL)"),
        (signal.SIGKILL, "idle", False, "idle"),
        (signal.SIGSEGV | 0x80, "", False, "killed by SIGSEGV"),
    ],
)
def test_an_exit_has_one_cause(status: int, killed_for: str, kernel_oom: bool, cause: str) -> None:
    outcome = describe(status, killed_for=killed_for, kernel_oom=kernel_oom)
    assert outcome.cause == cause
    assert (outcome.exit_code is None) != (outcome.signal is None)


def test_a_drivers_exit_is_the_jobs_end() -> None:
    def exit_of(**facts: object) -> WorkerExit:
        return WorkerExit(worker_id="w", node_id="n", **facts)  # type: ignore[arg-type]

    assert final_state(exit_of(exit_code=0)) is JobState.SUCCEEDED
    assert final_state(exit_of(exit_code=1)) is JobState.FAILED
    assert final_state(exit_of(signal=9)) is JobState.FAILED
    assert final_state(exit_of(exit_code=0, expected=True)) is JobState.STOPPED
    assert message_of(exit_of(exit_code=0)) == ""
    failed = exit_of(exit_code=2, cause="exited with code 2", last_log_lines=("a", "b"))
    assert message_of(failed) == "the driver exited with code 2\na\nb"


async def test_exits_are_told_in_order_once_the_gcs_answers() -> None:
    told: list[str] = []
    away = True

    async def report(batch: tuple[WorkerExit, ...]) -> None:
        if away:
            raise UnavailableError("away")
        told.extend(one.worker_id for one in batch)

    exits = Exits(report)
    for index in range(250):
        exits.add(WorkerExit(worker_id=f"w_{index}", node_id="n"))
    assert not await exits.flush()
    away = False
    assert await exits.flush()
    assert told == [f"w_{index}" for index in range(250)]
    assert await exits.wait("w_none", 0.01) is None
    waiting = asyncio.ensure_future(exits.wait("w_new", 5.0))
    await asyncio.sleep(0)
    exits.add(WorkerExit(worker_id="w_new", node_id="n"))
    assert (await waiting) is exits.get("w_new")


async def test_log_lines_are_read_whole_and_cursors_continue(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes("one\ntwö\r\n\nrest".encode())
    logs = Logs("n_1")
    logs.add(LogFile("w_1", path, job_id="job_1", name="f", pid=3))
    chosen = LogFilter(worker_id="w_1")

    async def read(**how: int) -> list[tuple[str, int]]:
        found = []
        async for batch in logs.read(chosen, **how):  # type: ignore[arg-type]
            found += [(line.text, line.cursor) for line in batch]
        return found

    assert await read() == [("one", 4), ("twö", 10), ("", 11), ("rest", 15)]
    assert await read(since=4) == [("twö", 10), ("", 11), ("rest", 15)]
    assert await read(last=1) == [("rest", 15)]
    assert logs.tail("w_1", 2) == ("", "rest")
    assert logs.tail("w_2", 2) == ()
    path.write_bytes(b"x" * 200_000)
    assert sum(len(text) for text, _ in await read()) == 200_000


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


def test_objects_count_their_bytes_and_go_with_their_job(tmp_path: Path) -> None:
    (tmp_path / "free").mkdir()
    objects = ObjectIndex(Arena(tmp_path), "n_1")
    for index in range(4):
        (tmp_path / f"o_{index}").write_bytes(b"x" * index)
        info = ObjectInfo(
            object_id=f"o_{index}", nbytes=index, job_id=f"j_{index % 2}", owner_id=f"p_{index}"
        )
        objects.seal((info, info))
    assert (objects.nbytes, len(objects)) == (6, 4)
    assert [one.object_id for one in objects.largest(2)] == ["o_3", "o_2"]
    assert objects.free_job("j_1", keep_owners={"p_3"}) == 1
    assert objects.free_owner("p_3") == 1
    assert objects.free(("o_0", "o_0", "o_9")) == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["o_2"]
    assert objects.nbytes == 2
    objects.seal((ObjectInfo(object_id="o_none", nbytes=1),))
    assert "o_none" not in objects, "freed by its owner before the report of it came"


def test_more_gpus_than_there_are_become_fakes() -> None:
    found = devices.find_devices(num_gpus=2, fake_gpus=3)
    assert [(one.index, one.fake) for one in found] == [(0, True), (1, True)]
    assert devices.accelerator_labels(found) == {"accelerator_type": "Fake-GPU"}
    assert devices.visible_mask({2: 0.5, 0: 1.0}) == "0,2"
    assert devices.visible_mask({}) == ""
    assert devices.usable_cpus() >= 1
    assert 0 < devices.schedulable_memory_bytes() < devices.memory_limit_bytes()
    assert devices.oom_kills() >= 0


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out"])
def test_a_package_cannot_leave_its_folder(tmp_path: Path, name: str) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(name, "x")
    with pytest.raises(RuntimeEnvSetupError, match="leaves the package"):
        _extract(content.getvalue(), tmp_path / "in" / "p", "p")
    assert not (tmp_path / "out").exists()


def test_a_link_in_a_package_is_refused(tmp_path: Path) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        link = zipfile.ZipInfo("link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(RuntimeEnvSetupError, match="leaves the package"):
        _extract(content.getvalue(), tmp_path / "p", "p")


def _broken_package(how: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        if how == "long name":
            archive.writestr("x" * 5000, "x")
        elif how == "file and folder":
            archive.writestr("a", "x")
            archive.writestr("a/b", "x")
        else:
            archive.writestr("a", b"text" * 100)
    raw = bytearray(content.getvalue())
    for start, flags, method in ((raw.find(b"PK\1\2"), 8, 10), (raw.find(b"PK\3\4"), 6, 8)):
        if how == "encrypted":
            raw[start + flags] |= 1
        elif how == "unknown method":
            raw[start + method] = 77
    if how == "noise":
        raw[35:45] = b"\xff" * 10
    return bytes(raw)


@pytest.mark.parametrize(
    "how", ["long name", "file and folder", "encrypted", "unknown method", "noise"]
)
def test_a_package_that_cannot_be_unpacked_fails_its_environment(tmp_path: Path, how: str) -> None:
    with pytest.raises(RuntimeEnvSetupError, match="package p "):
        _extract(_broken_package(how), tmp_path / "p", "p")


async def test_a_package_that_nobody_uploaded_fails_its_environment(tmp_path: Path) -> None:
    async def download(package: str) -> bytes:
        raise NotFoundError(f"there is no package {package!r}")

    async with Background("test") as background:
        folders = JobFolders(tmp_path / "jobs", keep_s=0.0)
        environments = Environments(tmp_path / "env", download, background, folders)
        for _ in range(2):
            with pytest.raises(
                RuntimeEnvSetupError, match=r"(?s)a{12}… is not in this cluster.*a{64}"
            ):
                await environments.prepare(RuntimeEnv(working_dir="a" * 64), "job_1")


async def test_a_command_that_fails_is_named_with_its_own_last_words() -> None:
    script = "echo Looking; echo 'ERROR: No matching distribution found for x'; echo Bye; exit 3"
    with pytest.raises(RuntimeEnvSetupError) as raised:
        await _run(["/bin/sh", "-c", script], "pip install x")
    first, *rest = str(raised.value).splitlines()
    assert first == "pip install x failed (exit code 3)."
    assert rest[0] == "No matching distribution found for x"
    assert rest[1:] == ["Looking", "ERROR: No matching distribution found for x", "Bye"]


def test_the_process_tree_is_seen() -> None:
    me = os.getpid()
    assert process_tree.start_time(me) > 0
    assert process_tree.start_time(2**30) == 0
    assert me in process_tree.children(os.getppid()) or os.getppid() == 0
    assert process_tree.rss_bytes(me) > 1 << 20
    assert process_tree.tree_bytes(me) > 1 << 20
