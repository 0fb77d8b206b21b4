"""A nodelet as a real process, with a small gcs over real HTTP."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import time
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from stoker_nodelet import proctree
from stoker_nodelet.api import ArenaUsage, Freed
from stoker_wire.arena import Arena, ObjectHead, split
from stoker_wire.errors import (
    BadRequestError,
    ConflictError,
    FencedError,
    NotFoundError,
    RuntimeEnvSetupError,
    StokerError,
    UnavailableError,
)
from stoker_wire.messages.cluster import ActorSpec, DriverSpec, LeaseKind
from stoker_wire.messages.common import Empty, RuntimeEnv
from stoker_wire.messages.control import LogLine, Page
from stoker_wire.messages.work import (
    FreeObjects,
    JobState,
    ObjectInfo,
    SealObjects,
    TaskHistoryStatus,
    TaskRecord,
    TaskState,
)
from stoker_wire.spool import SpoolWriter, row_of, spool_folder
from tests.e2e.nodelet_harness import FakeGcs, Nodelet, eventually, start_nodelet


@pytest.fixture
async def gcs() -> AsyncIterator[FakeGcs]:
    fake = FakeGcs()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def start(gcs: FakeGcs, tmp_path: Path) -> AsyncIterator[Callable[..., object]]:
    started: list[Nodelet] = []

    async def start(*args: str, **kwargs: object) -> Nodelet:
        one = await start_nodelet(gcs, tmp_path / "session", *args, **kwargs)  # type: ignore[arg-type]
        started.append(one)
        return one

    yield start
    for one in started:
        await one.stop()


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def there(path: Path | str) -> bool:
    return Path(path).exists()


def is_alive(pid: int) -> bool:
    return proctree.start_time(pid) != 0


async def test_a_lease_gets_a_worker_and_the_worker_is_used_again(start, gcs: FakeGcs) -> None:
    node = await start("--num-cpus", "2", "--num-gpus", "2")
    assert gcs.nodes[0].resources["CPU"] == 2.0
    first, worker = await node.start_lease()
    seen = await node.do(worker, "see")
    assert seen.lease_id == first.lease_id
    assert seen.pid == worker.pid
    assert seen.env["CUDA_VISIBLE_DEVICES"] == ""
    await node.release(first.lease_id)
    second, again = await node.start_lease()
    assert again.worker_id == worker.worker_id
    assert (await node.do(again, "see")).lease_id == second.lease_id
    _, other = await node.start_lease(job_id="job_2")
    assert other.worker_id != worker.worker_id
    await eventually(lambda: gcs.beats, "a heartbeat")


async def test_a_killed_nodelet_leaves_nothing(start, gcs: FakeGcs) -> None:
    node = await start()
    _, worker = await node.start_lease()
    seen = await node.do(worker, "spawn")
    assert is_alive(seen.child)
    arena = Path(gcs.nodes[0].arena_dir)
    assert mode(arena) == 0o700
    (arena / "o_1").write_bytes(b"left")
    tree = proctree.descendants(node.process.pid)
    assert {worker.pid, seen.child} <= set(tree)
    node.process.kill()
    await eventually(lambda: not any(map(is_alive, tree)), "all descendants are gone", 5.0)
    await eventually(lambda: not there(arena), "its fork server removed the arena", 5.0)


async def test_a_nodelet_sweeps_the_arenas_of_dead_ones(start, gcs: FakeGcs) -> None:
    await start()
    orphan = Path(gcs.nodes[0].arena_dir).with_name("stoker-dead-n_0")
    orphan.mkdir(mode=0o700)
    namespace, _, _ = (Path(gcs.nodes[0].arena_dir) / ".owner").read_text().split()
    (orphan / ".owner").write_text(f"{namespace} 4194304 1")  # a pid above the kernel's largest
    (orphan / "o_1").write_bytes(b"left")
    await start()
    assert not there(orphan)


async def test_a_stopped_nodelet_leaves_the_cluster_and_cleans_up(start, gcs: FakeGcs) -> None:
    node = await start()
    _, worker = await node.start_lease()
    child = (await node.do(worker, "spawn")).child
    await node.stop()
    assert gcs.left == [node.registration.node_id]
    assert not there(node.registration.arena_dir)
    assert not there(node.registration.unix)
    assert not is_alive(child)
    assert not is_alive(worker.pid)


@pytest.mark.parametrize(
    ("what", "arg", "exit_code", "number", "cause"),
    [
        ("exit", "3", 3, None, "exited with code 3"),
        ("signal", "11", None, signal.SIGSEGV, "killed by SIGSEGV"),
        ("signal", "9", None, signal.SIGKILL, "killed by SIGKILL from outside Stoker"),
    ],
)
async def test_an_exit_is_told_with_its_evidence(
    start, gcs: FakeGcs, what: str, arg: str, exit_code: int | None, number: int | None, cause: str
) -> None:
    node = await start()
    lease, worker = await node.start_lease()
    child = (await node.do(worker, "spawn")).child
    await node.do(worker, "print", "the last words")
    await node.do(worker, what, arg)
    one = await node.exit_of(worker.worker_id)
    assert (one.exit_code, one.signal, one.cause) == (exit_code, number, cause)
    assert (one.lease_id, one.job_id, one.oom, one.expected) == (
        lease.lease_id, "job_1", False, False,
    )  # fmt: skip
    assert one.last_log_lines[-1] == "the last words"
    assert one.peak_rss_bytes > 1 << 20
    assert not is_alive(child)
    told = await eventually(lambda: gcs.exits.get(worker.worker_id), "the gcs is told")
    assert told == one
    _, other = await node.start_lease()
    assert other.worker_id != worker.worker_id


async def test_the_memory_guard_kills_who_exceeds_its_memory(start, gcs: FakeGcs) -> None:
    node = await start()
    _, worker = await node.start_lease(resources={"CPU": 1.0, "memory": 200 * 2.0**20})
    _, modest = await node.start_lease(resources={"CPU": 1.0, "memory": 2.0**33})
    await node.do(worker, "hoard", "300")
    one = await node.exit_of(worker.worker_id)
    assert one.oom
    assert not one.expected
    assert one.cause.startswith("exceeded memory=209715200 bytes (used ")
    await node.do(modest, "see")


async def test_fractions_share_a_gpu_and_whole_ones_do_not(start, gcs: FakeGcs) -> None:
    node = await start("--num-gpus", "3")
    assert [device.fake for device in gcs.nodes[0].devices] == [True] * 3
    assert gcs.nodes[0].resources["GPU"] == 3.0

    async def mask(gpus: dict[int, float]) -> str:
        _, worker = await node.start_lease(gpus=gpus, resources={"CPU": 1.0, "GPU": 1.0})
        return (await node.do(worker, "see")).env["CUDA_VISIBLE_DEVICES"]

    assert await mask({0: 0.5}) == "0"
    assert await mask({0: 0.5}) == "0"
    assert await mask({1: 1.0, 2: 1.0}) == "1,2"
    with pytest.raises(ConflictError, match="GPU 0 has 0 left"):
        await mask({0: 0.1})
    with pytest.raises(ConflictError, match="GPU 2 has 0 left"):
        await mask({2: 1.0})


async def test_a_released_gpu_is_free_when_its_worker_is_gone(start, gcs: FakeGcs) -> None:
    node = await start("--num-gpus", "1")
    for _ in range(3):
        lease, worker = await node.start_lease(gpus={0: 1.0})
        await node.release(lease.lease_id)
        assert not is_alive(worker.pid)


async def test_stale_senders_are_refused(start, gcs: FakeGcs) -> None:
    node = await start()
    node.epoch = 5
    lease, _ = await node.start_lease()
    with pytest.raises(FencedError, match="epoch 4"):
        await node.start_lease(epoch=4)
    with pytest.raises(FencedError, match="incarnation 7"):
        await node.start_lease(incarnation=7)
    with pytest.raises(FencedError, match="epoch 4"):
        await node.release(lease.lease_id, epoch=4)
    await node.release("l_never")
    with pytest.raises(ConflictError, match="has ended"):
        await node.start_lease(lease_id="l_never")


async def test_a_fenced_node_kills_its_work_and_registers_anew(start, gcs: FakeGcs) -> None:
    node = await start()
    _, worker = await node.start_lease()
    gcs.fenced = True
    await eventually(lambda: len(gcs.nodes) == 2, "it registers again")
    assert not is_alive(worker.pid)
    node.incarnation = gcs.incarnation
    await eventually(lambda: gcs.beats and gcs.beats[-1].incarnation == 2, "it beats again")
    await node.start_lease()


async def test_asking_twice_gives_the_same(start, gcs: FakeGcs) -> None:
    node = await start()
    together = [node.start_lease(lease_id="l_1") for _ in range(3)]
    answers = [started for _, started in await asyncio.gather(*together)]
    _, again = await node.start_lease(lease_id="l_1")
    assert {one.worker_id for one in (*answers, again)} == {again.worker_id}
    await node.release("l_1")
    await node.release("l_1")
    with pytest.raises(ConflictError, match="has ended"):
        await node.start_lease(lease_id="l_1")
    kill = f"/v1/workers/{again.worker_id}/kill"
    await node.client.call("POST", kill, {"reason": "a test"})
    await node.client.call("POST", kill, {"reason": "another"})
    assert (await node.exit_of(again.worker_id)).cause == "a test"
    await node.client.call("POST", kill, {"reason": "it is gone"})


async def test_an_actor_gets_a_fresh_worker_with_its_spec_and_is_never_pooled(
    start, gcs: FakeGcs
) -> None:
    node = await start()
    actor = ActorSpec(actor_id="a_1", incarnation=0, class_name="Counter", payload=b"x")
    lease, worker = await node.start_lease(kind=LeaseKind.ACTOR, actor=actor)
    assert (await node.do(worker, "see")).actor_id == "a_1"
    # Its job's end is not its own: it may be detached, and the gcs decides.
    gcs.publish("job.finished", "job_1")
    _, task = await node.start_lease(job_id="job_2")
    gcs.publish("job.finished", "job_2")
    ended = await node.exit_of(task.worker_id)
    assert (ended.cause, ended.expected) == ("job_2 finished", True)
    await node.do(worker, "see")
    await node.release(lease.lease_id)
    assert (await node.exit_of(worker.worker_id)).actor_id == "a_1"


async def test_idle_workers_retire_unless_they_own_objects(start, gcs: FakeGcs) -> None:
    node = await start(env={"STOKER_WORKER_IDLE_S": "0.2"})
    first, owner = await node.start_lease()
    second, other = await node.start_lease()
    await node.do(owner, "own")
    await node.release(first.lease_id, second.lease_id)
    one = await node.exit_of(other.worker_id)
    assert (one.exit_code, one.expected, one.cause) == (0, True, "idle")
    assert (await node.do(owner, "disown")).pid == owner.pid
    assert (await node.exit_of(owner.worker_id)).exit_code == 0


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


async def test_forking_is_quick(start, gcs: FakeGcs) -> None:
    node = await start()
    await node.start_lease()
    forks, leases = [], []
    for index in range(10):
        before_s = time.monotonic()
        _, worker = await node.start_lease(job_id=f"job_{index}", gpus={}, env=RuntimeEnv(
            env_vars={"N": str(index)}
        ))  # fmt: skip
        leases.append(time.monotonic() - before_s)
        forks.append((await node.do(worker, "see")).main_at_s - before_s)
    forks.sort()
    leases.sort()
    print(  # noqa: T201
        f"\nlease asked -> main: min {forks[0] * 1e3:.1f} ms, median {forks[5] * 1e3:.1f} ms; "
        f"lease asked -> registered: min {leases[0] * 1e3:.1f}, median {leases[5] * 1e3:.1f} ms"
    )


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
    async with asyncio.timeout(5.0):
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


async def test_a_drivers_end_is_reported(start, gcs: FakeGcs, tmp_path: Path) -> None:
    node = await start()

    async def run(job_id: str, entrypoint: str) -> str:
        spec = DriverSpec(job_id=job_id, entrypoint=entrypoint, env={"WHO": "me"})
        env = RuntimeEnv(cwd=str(tmp_path))
        lease, _ = await node.start_lease(
            job_id=job_id, kind=LeaseKind.DRIVER, driver=spec, env=env
        )
        return lease.lease_id

    await run("job_1", "echo $WHO $STOKER_JOB_ID $STOKER_ADDRESS; pwd; sleep 1000 & exit 0")
    await run("job_2", "echo wrong; exit 3")
    stopped = await run("job_3", "trap '' TERM; echo up; while true; do sleep 0.1; done")
    await eventually(lambda: {"job_1", "job_2"} <= set(gcs.finished), "two jobs end")
    assert gcs.finished["job_1"].state is JobState.SUCCEEDED
    failed = gcs.finished["job_2"]
    assert (failed.state, failed.exit_code) == (JobState.FAILED, 3)
    assert failed.message == "the driver exited with code 3\nwrong"
    lines = node.client.stream("/v1/logs", item=LogLine, query={"job_id": "job_1"})
    assert [line.text async for line in lines] == [f"me job_1 {gcs.url}", str(tmp_path)]
    log = tmp_path / "session" / "logs" / "job-job_3.log"
    await eventually(lambda: log.read_text() == "up\n", "the stubborn driver is up")
    await node.release(stopped, kill=True)
    await eventually(lambda: "job_3" in gcs.finished, "it is stopped")
    assert gcs.finished["job_3"].state is JobState.STOPPED


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


async def test_a_node_works_on_while_the_gcs_is_away(start, gcs: FakeGcs) -> None:
    node = await start()
    lease, worker = await node.start_lease()
    gcs.away = True
    await node.do(worker, "exit", "0")
    await node.exit_of(worker.worker_id)
    lease, worker = await node.start_lease()
    gcs.away = False
    await eventually(lambda: gcs.exits, "the exit is told when the gcs is back", 20.0)
    assert (await node.do(worker, "see")).lease_id == lease.lease_id
    assert len(gcs.nodes) == 1


def package(**files: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "/"), text)
    return content.getvalue()


async def test_packages_are_fetched_once_and_unpacked_safely(start, gcs: FakeGcs) -> None:
    node = await start()
    gcs.packages = {
        "aaaaaaaa": package(**{"hello.py": "x = 1"}),
        "bbbbbbbb": package(**{"mod.py": "y = 2"}),
        "cccccccc": package(**{"..__..__evil": "z"}),
        "dddddddd": b"no zip",
    }
    env = RuntimeEnv(working_dir="aaaaaaaa", py_modules=("bbbbbbbb",))
    answers = await asyncio.gather(*(node.start_lease(job_id=f"j{i}", env=env) for i in range(3)))
    seen = await node.do(answers[0][1], "see")
    assert Path(seen.cwd).name == "aaaaaaaa"
    assert [Path(path).name for path in seen.sys_path[:2]] == ["aaaaaaaa", "bbbbbbbb"]
    assert sorted(gcs.downloads) == ["aaaaaaaa", "bbbbbbbb"]
    for name, reason in (("cccccccc", "leaves the package"), ("dddddddd", "not a zip")):
        with pytest.raises(RuntimeEnvSetupError, match=reason):
            await node.start_lease(env=RuntimeEnv(working_dir=name))


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
    answers = await asyncio.gather(*(node.start_lease(job_id=f"j{i}", env=env) for i in range(2)))
    seen = await node.do(answers[0][1], "see")
    assert any("venvs" in path for path in seen.sys_path)
    with pytest.raises(RuntimeEnvSetupError, match="no-such-thing"):
        await node.start_lease(env=RuntimeEnv(pip=("no-such-thing",)))
    with pytest.raises(StokerError, match="no_such_module"):
        await node.start_lease(env=RuntimeEnv(preload=("no_such_module",)))


async def test_a_dead_fork_server_is_replaced_and_its_workers_exits_are_told(
    start, gcs: FakeGcs
) -> None:
    node = await start()
    _, worker = await node.start_lease()
    child = (await node.do(worker, "spawn")).child
    (forkserver,) = proctree.children(node.process.pid)
    os.kill(forkserver, signal.SIGKILL)
    one = await node.exit_of(worker.worker_id)
    assert one.signal == signal.SIGKILL
    await eventually(lambda: not is_alive(child) and not is_alive(worker.pid), "all are gone")
    _, other = await node.start_lease()
    await node.do(other, "see")
