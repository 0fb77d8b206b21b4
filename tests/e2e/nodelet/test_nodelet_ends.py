"""How workers, drivers and nodelets end, and what the gcs is told of it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from stoker_nodelet.devices.limits import memory_limit_bytes
from stoker_wire.constraints.conditions import ConditionKind
from stoker_wire.messages.cluster import ActorSpec, DriverSpec, HeldLeases, LeaseKind
from stoker_wire.messages.common import Empty, RuntimeEnv
from stoker_wire.messages.control import LogLine
from stoker_wire.messages.work import EndAttempt, JobState
from stoker_wire.process import process_tree
from tests.e2e.nodelet.nodelet_harness import (
    FakeGcs,
    eventually,
    fork_server_of,
    is_alive,
    mode,
    there,
)


async def test_a_killed_nodelet_leaves_nothing(start, gcs: FakeGcs) -> None:
    node = await start()
    _, worker = await node.start_lease()
    seen = await node.do(worker, "spawn")
    assert is_alive(seen.child)
    arena = Path(gcs.nodes[0].arena_dir)
    assert mode(arena) == 0o700
    (arena / "o_1").write_bytes(b"left")
    tree = process_tree.descendants(node.process.pid)
    assert {worker.pid, seen.child} <= set(tree)
    node.process.kill()
    await eventually(lambda: not any(map(is_alive, tree)), "all descendants are gone")
    await eventually(lambda: not there(arena), "its fork server removed the arena")


async def test_a_nodelet_killed_with_its_fork_server_leaves_nothing(start, gcs: FakeGcs) -> None:
    node = await start()
    _, worker = await node.start_lease()
    seen = await node.do(worker, "spawn")
    arena, socket = Path(gcs.nodes[0].arena_dir), Path(node.registration.unix)
    (arena / "o_1").write_bytes(b"left")
    tree = process_tree.descendants(node.process.pid)
    assert {worker.pid, seen.child} <= set(tree)
    # Like the task's own process in all but its descent.
    stranger = await asyncio.create_subprocess_exec(
        "setsid", "sleep", "1000", env={"PATH": os.environ["PATH"], **seen.env}
    )
    _, forkserver = fork_server_of(node)
    for signum in (signal.SIGSTOP, signal.SIGKILL):  # neither may see the other's death
        for pid in (node.process.pid, forkserver):
            os.kill(pid, signum)
    await eventually(lambda: not any(map(is_alive, tree)), "all descendants are gone")
    await eventually(lambda: not there(arena) and not there(socket), "its folders are removed")
    assert is_alive(stranger.pid)
    stranger.kill()
    await stranger.wait()


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


async def test_a_stopped_nodelet_leaves_nothing_though_its_fork_server_hangs(start) -> None:
    node = await start()
    _, worker = await node.start_lease()
    child = (await node.do(worker, "spawn")).child
    reaper, forkserver = fork_server_of(node)
    os.kill(forkserver, signal.SIGSTOP)
    await node.stop()
    processes = (reaper, forkserver, worker.pid, child)
    await eventually(lambda: not any(map(is_alive, processes)), "all are gone")


@pytest.mark.parametrize("end", ["stop", "kill", "forkserver", "both"])
async def test_workers_leave_no_shared_memory_however_they_end(
    start, gcs: FakeGcs, end: str
) -> None:
    node = await start()
    ends = ("crash", "release", "job", "node") if end == "stop" else ("node",)
    leases = {how: await node.start_lease(job_id=f"job_{how}") for how in ends}
    shared = {how: Path(f"/dev/shm/{node.registration.node_id}-{how}") for how in ends}
    for how, (_, worker) in leases.items():
        await node.do(worker, "share", shared[how].name)
        assert there(shared[how])
    if end == "stop":
        await node.do(leases["crash"][1], "signal", str(int(signal.SIGKILL)))
        await node.release(leases["release"][0].lease_id, kill=True)
        gcs.publish("job.finished", "job_job")
        for how in ends[:-1]:
            await eventually(lambda path=shared[how]: not there(path), f"cleaned up after {how}")
        await node.stop()
    elif end == "kill":
        node.process.kill()
    else:
        _, forkserver = fork_server_of(node)
        os.kill(forkserver, signal.SIGKILL)
        if end == "both":
            node.process.kill()
    await eventually(lambda: not there(shared["node"]), "its resource tracker has cleaned up")


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
    memory = one.memory
    assert memory is not None and memory.limit_bytes == 200 << 20 < memory.used_bytes
    assert memory.used_bytes < memory.node_total_bytes > memory.node_used_bytes > 0
    assert (memory.largest[0].pid, memory.largest[0].nbytes > 200 << 20) == (worker.pid, True)
    await node.do(modest, "see")


async def test_a_node_out_of_memory_stops_a_task_before_an_actor(start, gcs: FakeGcs) -> None:
    node = await start(env={"STOKER_MEMORY_THRESHOLD": "0.00001"})  # out of it from the start
    size = str(memory_limit_bytes() // (64 << 20))  # a 64th of all, and so worth its end
    spec = ActorSpec(actor_id="a_1", incarnation=1, class_name="A", payload=b"")
    _, actor = await node.start_lease(kind=LeaseKind.ACTOR, actor=spec)
    _, small = await node.start_lease()
    _, task = await node.start_lease()
    await node.do(task, "hoard", size)
    one = await node.exit_of(task.worker_id)
    assert one.oom and not one.expected and one.memory is not None
    assert one.cause.startswith("the node is out of memory (")
    assert (one.memory.limit_bytes, one.memory.used_bytes > 1 << 20) == (0, True)
    await node.do(actor, "hoard", size)
    assert (await node.exit_of(actor.worker_id)).oom, "no task is worth its end"
    await node.do(small, "see")


async def test_a_condition_of_the_node_is_reported(start, gcs: FakeGcs) -> None:
    await start(env={"STOKER_MEMORY_PRESSURE_AT": "0.00001"})
    seen = await eventually(
        lambda: [one.conditions for one in (*gcs.nodes, *gcs.beats) if one.conditions],
        "it is reported",
    )
    assert [one.kind for one in seen[0]] == [ConditionKind.MEMORY_PRESSURE]
    assert "of memory are in use" in seen[0][0].reason


async def test_a_fenced_node_kills_its_work_and_registers_anew(start, gcs: FakeGcs) -> None:
    node = await start()
    _, worker = await node.start_lease()
    gcs.fenced = True
    await eventually(lambda: len(gcs.nodes) == 2, "it registers again")
    assert not is_alive(worker.pid)
    node.incarnation = gcs.incarnation
    await eventually(lambda: gcs.beats and gcs.beats[-1].incarnation == 2, "it beats again")
    await node.start_lease()


async def test_the_end_of_an_attempt_ends_its_work_once_and_spares_the_next(
    start, gcs: FakeGcs
) -> None:
    node = await start()

    async def end_attempt() -> None:
        path, body = "/v1/jobs/job_1/end-attempt", EndAttempt(attempt=1)
        await node.client.call("POST", path, body, reply=Empty)

    _, first = await node.start_lease(job_id="job_1")
    _, other = await node.start_lease(job_id="job_2")
    await end_attempt()
    await eventually(lambda: not is_alive(first.pid), "the worker of the attempt is gone")
    _, second = await node.start_lease(job_id="job_1")
    await end_attempt()  # the order, again
    held = await node.client.call("GET", "/v1/leases", reply=HeldLeases)
    assert {one.pid for one in held.leases} == {other.pid, second.pid}


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
    await eventually(
        lambda: log.exists() and log.read_text() == "up\n", "the stubborn driver is up"
    )
    await node.release(stopped, kill=True)
    await eventually(lambda: "job_3" in gcs.finished, "it is stopped")
    assert gcs.finished["job_3"].state is JobState.STOPPED


async def test_a_node_works_on_while_the_gcs_is_away(start, gcs: FakeGcs) -> None:
    node = await start()
    lease, worker = await node.start_lease()
    gcs.away = True
    await node.do(worker, "exit", "0")
    await node.exit_of(worker.worker_id)
    lease, worker = await node.start_lease()
    gcs.away = False
    await eventually(lambda: gcs.exits, "the exit is told when the gcs is back")
    assert (await node.do(worker, "see")).lease_id == lease.lease_id
    assert len(gcs.nodes) == 1


@pytest.mark.parametrize("which", [0, 1], ids=["reaper", "fork server"])
async def test_a_dead_fork_server_is_replaced_and_its_workers_exits_are_told(
    start, gcs: FakeGcs, which: int
) -> None:
    node = await start()
    _, worker = await node.start_lease()
    child = (await node.do(worker, "spawn")).child
    os.kill(fork_server_of(node)[which], signal.SIGKILL)
    one = await node.exit_of(worker.worker_id)
    assert one.signal == signal.SIGKILL
    await eventually(lambda: not is_alive(child) and not is_alive(worker.pid), "all are gone")
    _, other = await node.start_lease()
    await node.do(other, "see")
