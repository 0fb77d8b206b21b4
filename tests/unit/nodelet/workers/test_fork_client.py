"""What a fork server says, in whatever pieces it comes."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from stoker_nodelet.workers.fork_client import ForkExit, ForkRequest, ForkServer
from stoker_nodelet.workers.forkserver import HEAD, ForkServerHandle
from stoker_wire.process.background import Background


def frame(message: dict[str, Any]) -> bytes:
    body = msgspec.msgpack.encode(message)
    return HEAD.pack(len(body)) + body


@pytest.mark.parametrize("together", [True, False])
async def test_the_end_of_a_child_is_told_behind_its_fork(together: bool) -> None:
    told: list[str] = []
    ours, theirs = socket.socketpair()
    forked = frame({"ev": "forked", "worker_id": "w_1", "pid": 7})
    exited = frame({"ev": "exited", "worker_id": "w_1", "pid": 7, "status": 0, "peak_rss_bytes": 1})

    def on_exit(one: ForkExit) -> None:
        told.append(f"exited {one.pid}")

    async with Background("test") as background:
        server = ForkServer(ForkServerHandle(MagicMock(), ours, "", (), ""), on_exit, background)
        server.start()

        async def fork() -> None:
            told.append(f"forked {await server.fork(ForkRequest('w_1', '', {}))}")

        task = background.spawn(fork(), name="fork")
        theirs.sendall(forked + exited if together else forked)
        await task
        if not together:
            theirs.sendall(exited)
        theirs.close()  # a child that was never told of would be told of now
        for running in list(background._tasks):
            await running
    assert told == ["forked 7", "exited 7"]


def test_orders_to_one_that_was_told_to_stop_are_dropped() -> None:
    uvloop = pytest.importorskip("uvloop", reason="its transports refuse to write once closed")

    async def main() -> None:
        ours, theirs = socket.socketpair()
        async with Background("test") as background:
            handle = ForkServerHandle(MagicMock(), ours, "", (), "")
            server = ForkServer(handle, lambda _: None, background)
            server.start()
            while server._writer is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            server._writer.close()
            await server._writer.wait_closed()
            server.lost = False
            server.signal("w_1", 9)
            server.add_cleanup_path(Path("/nowhere"))
        theirs.close()

    uvloop.run(main())
