"""The start of a worker, as its nodelet sees it."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from stoker_wire.errors import ConflictError, NotFoundError
from stoker_wire.http.server.service import Service
from stoker_wire.settings import Settings

if TYPE_CHECKING:
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


@pytest.mark.parametrize("error", [ConflictError, NotFoundError])
async def test_one_that_is_ended_as_it_starts_ends_without_a_word(
    tmp_path: Path, error: type[Exception]
) -> None:
    asked: list[str] = []

    async def register(req: Request) -> None:
        asked.append("register")
        raise error("w_1 must exit: it was killed")

    nodelet = Service("nodelet", Settings(), token="t")
    nodelet.route("POST", "/v1/workers/register", register, summary="Registers.")
    await nodelet.start(host="127.0.0.1")
    nodelet.ready()
    try:
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            PROGRAM,
            nodelet.url,
            str(tmp_path),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(worker.communicate(), WAIT_S)
    finally:
        await nodelet.stop(grace_s=0.2)
    assert asked == ["register"]
    assert (worker.returncode, output.decode()) == (1, "")
