"""The ends of workers: one cause each, told to the gcs once and in order."""

from __future__ import annotations

import asyncio
import logging
import signal

import pytest

from stoker_nodelet.telemetry.exits import Exits, describe
from stoker_wire.errors import ConflictError, ProtocolError, StokerError, UnavailableError
from stoker_wire.messages.cluster import WorkerExit


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


@pytest.mark.parametrize(
    "error", [ProtocolError("two minor versions apart"), UnavailableError("away")]
)
async def test_exits_outlive_a_gcs_that_cannot_be_told_now_which_is_said_once(
    error: StokerError, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    refusals: list[StokerError] = [error] * 3

    async def report(batch: tuple[WorkerExit, ...]) -> None:
        if refusals:
            raise refusals.pop()
        told.extend(one.worker_id for one in batch)

    exits = Exits(report)
    exits.add(WorkerExit(worker_id="w_1", node_id="n"))
    with caplog.at_level(logging.INFO, "stoker_nodelet.telemetry.exits"):
        assert [await exits.flush() for _ in range(4)] == [False, False, False, True]
    assert told == ["w_1"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_exits_that_the_gcs_will_never_accept_hold_up_no_others() -> None:
    told: list[str] = []

    async def report(batch: tuple[WorkerExit, ...]) -> None:
        if batch[0].worker_id == "w_0":
            raise ConflictError("of another node")
        told.extend(one.worker_id for one in batch)

    exits = Exits(report)
    exits.add(WorkerExit(worker_id="w_0", node_id="n"))
    assert await exits.flush()
    exits.add(WorkerExit(worker_id="w_1", node_id="n"))
    assert await exits.flush()
    assert told == ["w_1"]
