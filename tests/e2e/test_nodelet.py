"""A nodelet as a real process, with a small gcs over real HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from stoker_nodelet import proctree
from stoker_wire.errors import ConflictError, FencedError
from stoker_wire.messages.cluster import ActorSpec, LeaseKind
from stoker_wire.messages.common import RuntimeEnv
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
