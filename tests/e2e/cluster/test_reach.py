"""A driver that cannot reach the scheduler or a node is told so, with the URL, at once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

from stoker_wire.http.server.service import ListQuery, Request, Service
from stoker_wire.messages.cluster import Node
from stoker_wire.messages.control import Leader, Page
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOKEN = "secret-of-the-test"
NOBODY = "http://127.0.0.1:1"


async def test_an_unreachable_scheduler_is_named_at_init(tmp_path: Path) -> None:
    """As outside a compose network: the gcs is published, the scheduler's name is not known."""
    gcs = Service("gcs", Settings(), token=TOKEN)

    async def nodes(_: Request) -> Page[Node]:
        return Page(items=())

    async def leader(_: Request) -> Leader:
        expires_at_s = time.time() + 60
        return Leader(name="scheduler", holder="s", url=NOBODY, epoch=1, expires_at_s=expires_at_s)

    gcs.route("GET", "/v1/nodes", nodes, query=ListQuery, reply=Page[Node], summary="Nodes")
    gcs.route("GET", "/v1/leaders/{name}", leader, reply=Leader, summary="Who leads")
    await gcs.start("127.0.0.1")
    gcs.ready()
    program = "import stoker\nstoker.init('auto')"
    env = {
        **os.environ,
        "STOKER_SESSION_ROOT": str(tmp_path),
        "STOKER_ADDRESS": gcs.url,
        "STOKER_TOKEN": TOKEN,
        "STOKER_LEADER_TTL_S": "0.1",
    }
    try:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", program],
            env=env,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
    finally:
        await gcs.stop()
    *_, said, _, _, fix = done.stderr.strip().splitlines()
    assert f"the scheduler at {NOBODY} cannot be reached from here." in said, done.stderr
    assert "STOKER_ADVERTISE_HOST" in fix


def test_an_unreachable_node_is_named_by_what_waits(
    driver: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = driver(
        textwrap.dedent("""
        import stoker
        from stoker.exceptions import UnavailableError
        stoker.init(num_cpus=1, num_gpus=0)
        peers = stoker.runtime.current.runtime().channels
        connect = peers._connect
        async def refused(address):
            raise UnavailableError("Cannot connect to host elsewhere:7620")
        peers._connect = refused
        @stoker.remote
        def f(): return "it came"
        ref = f.remote()
        told, rounds = "", 0
        while "cannot be reached" not in told and (rounds := rounds + 1) < 60:
            try:
                stoker.get(ref, timeout=0.5)
            except TimeoutError as error:
                told = str(error)
        print(told)
        peers._connect = connect
        print(stoker.get(ref, timeout=60))
        """)
    )
    assert "cannot be reached from here: Cannot connect to host elsewhere:7620" in done.stdout, (
        done.stdout + done.stderr
    )
    assert "it came" in done.stdout
