"""The start of a worker, as its nodelet sees it."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.errors import ConflictError, ForbiddenError, NotFoundError, UnavailableError
from stoker_wire.http.client.client import Client
from stoker_wire.http.server.service import Service
from stoker_wire.messages.cluster import Lease, LeaseKind
from stoker_wire.messages.common import Empty
from stoker_wire.messages.node_api import WorkerSetup
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from stoker_wire.http.server.request import Request

WAIT_S = 60.0
PROGRAM = """
import sys
from stoker.runtime.worker.main import main
from stoker_wire.messages.node_api import (WorkerBoot)

url, folder = sys.argv[1:]
main(WorkerBoot(
    worker_id="w_1", node_id="n_1", host_id="h", nodelet_url=url, nodelet_unix="", gcs_url=url, token="t",
    session_dir=folder, arena_dir=folder, socket_path=folder + "/w.sock", log_path=folder + "/w.log",
))
"""


@asynccontextmanager
async def nodelet_with(
    register: Callable[[Request], Awaitable[Any]], folder: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker at a nodelet of which ``register`` is all that there is."""
    nodelet = Service("nodelet", Settings(), token="t")
    nodelet.route("POST", "/v1/workers/register", register, summary="Registers.")
    await nodelet.start(host="127.0.0.1")
    nodelet.ready()
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, nodelet.url, str(folder)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield worker
    finally:
        if worker.returncode is None:
            worker.kill()
        await nodelet.stop(grace_s=0.2)


@pytest.mark.parametrize("error", [ConflictError, NotFoundError])
async def test_one_that_is_ended_as_it_starts_ends_without_a_word(
    tmp_path: Path, error: type[Exception]
) -> None:
    asked: list[str] = []

    async def register(req: Request) -> None:
        asked.append("register")
        raise error("w_1 must exit: it was killed")

    async with nodelet_with(register, tmp_path) as worker:
        output, _ = await asyncio.wait_for(worker.communicate(), WAIT_S)
    assert asked == ["register"]
    assert (worker.returncode, output.decode()) == (1, "")


async def test_one_that_is_assigned_before_it_hears_that_it_is_registered_serves(
    tmp_path: Path,
) -> None:
    lease = Lease(
        lease_id="l_1",
        owner_id="w_2",
        job_id="job_1",
        kind=LeaseKind.TASK,
        node_id="n_1",
        node_incarnation=1,
        resources={"CPU": 1.0},
    )
    asked: list[str] = []
    refused = asyncio.Event()

    async def register(req: Request) -> None:
        asked.append("register")
        if len(asked) == 1:
            setup = WorkerSetup(worker_id="w_1", node_id="n_1", token="t", lease=lease)
            await at_worker.call("POST", "/v1/assign", setup, reply=Empty)
            raise UnavailableError("the answer is lost")
        refused.set()
        raise ForbiddenError("job job_1 is not w_1", field="worker_id")

    unix_path = str(tmp_path / "w.sock")
    async with (
        Client("http://localhost", token="t", peer="nodelet", unix_path=unix_path) as at_worker,
        nodelet_with(register, tmp_path) as worker,
        asyncio.timeout(WAIT_S),
    ):
        await refused.wait()
        await at_worker.call("POST", "/v1/retire", reply=Empty)
        output, _ = await worker.communicate()
    assert worker.returncode == 0, output.decode()
