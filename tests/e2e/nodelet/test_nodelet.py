"""A nodelet as a real process, with a small gcs over real HTTP: leases, workers, GPUs, fences."""

from __future__ import annotations

import asyncio
import time

import pytest

from stoker_wire.errors import (
    ConflictError,
    FencedError,
)
from stoker_wire.messages.cluster import ActorSpec, LeaseKind, Worker
from stoker_wire.messages.common import RuntimeEnv
from stoker_wire.messages.control import Page
from tests.e2e.nodelet.nodelet_harness import FakeGcs, eventually, is_alive


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


async def test_a_lease_may_come_before_the_answer_to_the_registration(start, gcs: FakeGcs) -> None:
    gcs.register_delay_s = 1.0
    node = await start()  # returns when the gcs, and so the scheduler, knows of the node
    await node.release("l_of_before")
    _, started = await node.start_lease()
    assert (await node.do(started, "see")).pid == started.pid


async def test_a_node_that_leaves_says_so_to_whoever_brings_a_lease(start, gcs: FakeGcs) -> None:
    node = await start()
    await node.start_lease()
    gcs.may_leave.clear()
    node.process.terminate()
    await eventually(lambda: gcs.left, "it says good-bye")
    try:
        with pytest.raises(ConflictError, match=f"{node.registration.node_id} is leaving"):
            await node.start_lease()
    finally:
        gcs.may_leave.set()
        async with asyncio.timeout(40):
            await node.process.wait()  # a second signal would end it where it is


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


async def test_a_worker_is_not_killed_for_a_lease_that_it_no_longer_serves(
    start, gcs: FakeGcs
) -> None:
    node = await start()
    _, worker = await node.start_lease(lease_id="l_1")
    await node.release("l_1")
    _, again = await node.start_lease(lease_id="l_2")
    assert again.worker_id == worker.worker_id
    kill = f"/v1/workers/{worker.worker_id}/kill"
    await node.client.call("POST", kill, {"reason": "too late", "lease_id": "l_1"})
    await node.client.call("POST", kill, {"reason": "in time", "lease_id": "l_2"})
    assert (await node.exit_of(worker.worker_id)).cause == "in time"


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


async def test_as_many_workers_wait_as_the_setting_says(start, gcs: FakeGcs) -> None:
    node = await start(env={"STOKER_PRESTART_WORKERS": "3"})
    found: list[Worker] = []
    async with asyncio.timeout(40):
        while len(found) != 3:
            found = list((await node.client.call("GET", "/v1/workers", reply=Page[Worker])).items)


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
