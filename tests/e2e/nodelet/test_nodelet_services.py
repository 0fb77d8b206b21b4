"""What a nodelet does for those who work on it: environments, logs, objects, task history."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import zipfile
from pathlib import Path

import pytest

from stoker_wire.arena import Arena, ObjectHead, split
from stoker_wire.data.spool import SpoolWriter, row_of, spool_folder
from stoker_wire.errors import (
    BadRequestError,
    NotFoundError,
    RuntimeEnvSetupError,
    StokerError,
    UnavailableError,
)
from stoker_wire.messages.common import Empty, RuntimeEnv
from stoker_wire.messages.control import LogLine, Page
from stoker_wire.messages.node_api import ArenaUsage, Freed
from stoker_wire.messages.objects import FreeObjects, ObjectInfo, SealObjects
from stoker_wire.messages.work import TaskHistoryStatus, TaskRecord, TaskState
from tests.e2e.nodelet.nodelet_harness import FakeGcs, eventually


async def test_a_runtime_environment_reaches_pooled_and_new_workers(
    start, gcs: FakeGcs, tmp_path: Path
) -> None:
    node = await start()
    env = RuntimeEnv(env_vars={"COLOUR": "red"}, cwd=str(tmp_path), sys_path=("/a", "/b"))
    for job_id in ("job_1", "job_2"):
        _, worker = await node.start_lease(job_id=job_id, env=env, resources={"CPU": 3.0})
        seen = await node.do(worker, "see")
        assert seen.env["COLOUR"] == "red"
        assert seen.env["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "3")
        assert seen.env["STOKER_WORKER_ID"] == worker.worker_id
        assert "STOKER_TOKEN" not in seen.env or seen.env["STOKER_TOKEN"]
        assert seen.cwd == str(tmp_path)
        assert seen.sys_path[:2] == ["/a", "/b"]


async def test_logs_are_followed_to_their_end(start, gcs: FakeGcs) -> None:
    node = await start()
    _, worker = await node.start_lease()
    _, other = await node.start_lease(job_id="job_2")
    await node.do(worker, "print", "one")
    await node.do(other, "print", "not this")
    seen: list[LogLine] = []

    async def follow() -> None:
        query = {"worker_id": worker.worker_id, "follow": True}
        async for line in node.client.stream("/v1/logs", item=LogLine, query=query):
            seen.append(line)

    following = asyncio.create_task(follow())
    await eventually(lambda: seen and seen[-1].text == "one", "the first line")
    await node.do(worker, "print", "two")
    await eventually(lambda: seen[-1].text == "two", "the second line")
    await node.do(worker, "exit", "0")
    async with asyncio.timeout(40.0):
        await following
    assert [line.text for line in seen][1:] == ["one", "two"]
    assert {(line.job_id, line.name, line.pid) for line in seen} == {("job_1", "work", worker.pid)}

    async def read(**query: object) -> list[str]:
        lines = node.client.stream("/v1/logs", item=LogLine, query=query)
        return [line.text async for line in lines]

    assert await read(worker_id=worker.worker_id, since=seen[1].cursor) == ["two"]
    assert await read(job_id="job_2", tail=1) == ["not this"]
    assert await read(job_id="job_1", kind="driver") == []


async def test_objects_are_sealed_read_in_ranges_and_deleted(start, gcs: FakeGcs) -> None:
    node = await start()
    arena = Path(node.registration.arena_dir)
    content = os.urandom(300_000)

    async def seal(object_id: str, job_id: str, owner_id: str = "p_1") -> None:
        nbytes = 1
        if "/" not in object_id:
            head = ObjectHead(job_id, owner_id, 0.0, len(content), ())
            nbytes = Arena(arena).write(object_id, head, content, ())
        info = ObjectInfo(object_id=object_id, nbytes=nbytes, job_id=job_id, owner_id=owner_id)
        for _ in range(2):
            body = SealObjects(objects=(info,))
            await node.client.call("POST", "/v1/objects", body, reply=Empty)

    await seal("o_1", "job_1")
    await seal("o_2", "job_1")
    await seal("o_3", "job_2")
    path = "/v1/objects/o_1"
    stored = await node.client.call("GET", path, raw=True)
    assert split(memoryview(stored))[0] == content
    async with node.client.open("GET", path, headers={"Range": "bytes=1000-1999"}) as part:
        assert part.status == 206
        assert await part.read() == stored[1000:2000]
    usage = await node.client.call("GET", "/v1/arena", reply=ArenaUsage)
    assert (usage.object_bytes, usage.objects) == (3 * len(stored), 3)
    assert usage.used_bytes + usage.free_bytes == usage.limit_bytes
    assert [one.object_id for one in usage.largest] == ["o_1", "o_2", "o_3"]
    for expected in (1, 0):
        body = FreeObjects(object_ids=("o_2",))
        freed = await node.client.call("POST", "/v1/objects/free", body, reply=Freed)
        assert freed.freed == expected
    gcs.publish("job.finished", "job_1")
    await eventually(lambda: not (arena / "o_1").exists(), "the job's objects go")
    page = await node.client.call("GET", "/v1/objects", reply=Page[ObjectInfo])
    assert [one.object_id for one in page.items] == ["o_3"]
    with pytest.raises(NotFoundError):
        await node.client.call("GET", path, raw=True)
    with pytest.raises(BadRequestError):
        await seal("o_../../etc", "job_1")
    # An owner's death takes its objects along.
    _, worker = await node.start_lease(job_id="job_2")
    await seal("o_4", "job_2", worker.worker_id)
    await node.do(worker, "exit", "0")
    await eventually(lambda: not (arena / "o_4").exists(), "the owner's objects go")


async def test_task_history_survives_an_absent_gcs_and_a_restart(start, gcs: FakeGcs) -> None:
    node = await start()
    session = Path(node.registration.session_dir)
    writer = SpoolWriter(spool_folder(session, node.registration.node_id), "p_1")

    def write(*names: str) -> None:
        records = (
            TaskRecord(task_id=name, attempt=0, state=TaskState.FINISHED, job_id="j", name="f")
            for name in names
        )
        writer.write([row_of(record) for record in records])

    def told() -> set[str]:
        return {record.task_id for record in gcs.tasks}

    async def flush() -> TaskHistoryStatus:
        return await node.client.call("POST", "/v1/tasks/flush", reply=TaskHistoryStatus)

    write("t_1", "t_2")
    assert (await flush()).accepted == 2
    assert told() == {"t_1", "t_2"}
    gcs.away = True
    write("t_3")
    with pytest.raises(UnavailableError, match="on disk"):
        await node.client.call("POST", "/v1/tasks/flush", retry=False)
    node.process.kill()
    await node.process.wait()
    write("t_4")  # by a driver that outlives its nodelet
    gcs.away = False
    node = await start()
    await eventually(lambda: told() == {"t_1", "t_2", "t_3", "t_4"}, "all of it is told")
    write("t_5")
    await eventually(lambda: "t_5" in told(), "the folder of the dead one is still read")
    assert (await flush()).dropped == 0
    writer.close()


def package(**files: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "/"), text)
    return content.getvalue()


async def test_packages_are_fetched_once_and_unpacked_safely(start, gcs: FakeGcs) -> None:
    node = await start()
    contents = (
        package(**{"hello.py": "x = 1"}),
        package(**{"mod.py": "y = 2"}),
        package(**{"..__..__evil": "z"}),
        b"no zip",
    )
    folder, module, leaving, noise = names = [hashlib.sha256(one).hexdigest() for one in contents]
    other = 64 * "0"
    gcs.packages = {**dict(zip(names, contents, strict=True)), other: contents[0]}
    env = RuntimeEnv(working_dir=folder, py_modules=(module,))
    answers = await asyncio.gather(
        *(node.start_lease(job_id=f"job_{i}", env=env) for i in range(3))
    )
    seen = await node.do(answers[0][1], "see")
    assert Path(seen.cwd).name == folder[:16]
    assert [Path(path).name for path in seen.sys_path[:2]] == [folder[:16], module]
    assert sorted(gcs.downloads) == sorted([folder, module])
    for name, reason in (
        (leaving, "leaves the package"),
        (noise, "not a zip"),
        (other, "not what it is named by"),
    ):
        with pytest.raises(RuntimeEnvSetupError, match=reason):
            await node.start_lease(env=RuntimeEnv(working_dir=name))


@pytest.mark.logs(r"forkserver.*Traceback")
async def test_pip_requirements_get_a_venv_of_their_own(
    start, gcs: FakeGcs, tmp_path: Path
) -> None:
    node = await start(env={"PIP_NO_INDEX": "1"})
    wheel = tmp_path / "tiny_thing-1.0-py3-none-any.whl"
    info = "tiny_thing-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_thing.py", "VALUE = 7")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    env = RuntimeEnv(pip=(f"tiny-thing @ file://{wheel}",), preload=("tiny_thing",))
    answers = await asyncio.gather(
        *(node.start_lease(job_id=f"job_{i}", env=env) for i in range(2))
    )
    seen = await node.do(answers[0][1], "see")
    assert any("venvs" in path for path in seen.sys_path)
    with pytest.raises(RuntimeEnvSetupError, match="no-such-thing"):
        await node.start_lease(env=RuntimeEnv(pip=("no-such-thing",)))
    with pytest.raises(StokerError, match="no_such_module"):
        await node.start_lease(env=RuntimeEnv(preload=("no_such_module",)))
