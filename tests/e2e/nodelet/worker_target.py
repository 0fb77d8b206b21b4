"""What nodelet tests run in their workers: registers, takes leases on, and does what it is told.

A stand-in for stoker.runtime.worker.main with the same duties (register, /v1/assign, /v1/retire);
``/test/do`` makes
it misbehave.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any

import msgspec

from stoker_wire.http.client.client import Client
from stoker_wire.http.server.service import Request, Service
from stoker_wire.messages.common import Address, Empty
from stoker_wire.messages.node_api import RegisterWorker, WorkerBoot, WorkerSetup
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web


class Do(msgspec.Struct, kw_only=True):
    """An order to misbehave."""

    what: str
    arg: str = ""


class Seen(msgspec.Struct, kw_only=True):
    """What the worker knows of itself."""

    pid: int
    env: dict[str, str]
    cwd: str
    sys_path: list[str]
    lease_id: str
    job_id: str
    actor_id: str
    child: int = 0
    main_at_s: float = 0.0


def main(boot: WorkerBoot) -> None:
    started_at_s = time.monotonic()
    asyncio.run(_Worker(boot, started_at_s).run())


class _Worker:
    def __init__(self, boot: WorkerBoot, started_at_s: float) -> None:
        self.boot = boot
        self.started_at_s = started_at_s
        self.setup: WorkerSetup | None = None
        self.owns = False
        self.child = 0
        self.over = asyncio.Event()
        self.settled = asyncio.Event()
        self.hoard: list[bytearray] = []
        self.shared: list[SharedMemory] = []

    async def run(self) -> None:
        boot = self.boot
        service = Service("worker", Settings(), token=boot.token)
        service.route(
            "POST", "/v1/assign", self.assign, body=WorkerSetup, summary="take a lease on"
        )
        service.route("POST", "/v1/retire", self.retire, summary="leave if nothing is owned")
        service.route("POST", "/test/do", self.do, body=Do, reply=Seen, summary="misbehave")
        await service.start(None, 0, boot.socket_path)
        service.ready()
        print(f"worker {boot.worker_id} is up", flush=True)  # noqa: T201
        nodelet = Client(
            boot.nodelet_url, token=boot.token, peer=boot.worker_id, unix_path=boot.nodelet_unix
        )
        async with nodelet:
            address = Address(boot.worker_id, boot.node_id, boot.host_id, boot.socket_path, "")
            body = RegisterWorker(worker_id=boot.worker_id, pid=os.getpid(), address=address)
            setup = await nodelet.call("POST", "/v1/workers/register", body, reply=WorkerSetup)
            again = await nodelet.call("POST", "/v1/workers/register", body, reply=WorkerSetup)
            assert setup.worker_id == again.worker_id
            # A lease may have been assigned before the reply to the registration was read.
            if self.setup is None:
                self.take(setup)
            await self.over.wait()
        await service.stop(0.2)

    def take(self, setup: WorkerSetup) -> None:
        self.setup = setup
        os.environ.update(setup.env_vars)
        sys.path[:0] = [path for path in setup.sys_path if path not in sys.path]
        if setup.cwd:
            os.chdir(setup.cwd)
        self.settled.set()

    async def assign(self, req: Request) -> Empty:
        self.take(req.body)
        return Empty()

    async def retire(self, _: Request) -> web.Response | Empty:
        if self.owns:
            from stoker_wire.errors import ConflictError

            raise ConflictError("objects are still owned here")
        asyncio.get_running_loop().call_later(0.05, self.over.set)
        return Empty()

    async def do(self, req: Request) -> Seen:
        # Callers may come as soon as it has registered, before the reply to that is here.
        await self.settled.wait()
        what, arg = req.body.what, req.body.arg
        soon = asyncio.get_running_loop().call_later
        acts: dict[str, Callable[[], Any]] = {
            "see": lambda: None,
            "own": lambda: setattr(self, "owns", True),
            "disown": lambda: setattr(self, "owns", False),
            "print": lambda: print(arg),  # noqa: T201
            "exit": lambda: soon(0.05, os._exit, int(arg or 0)),
            "signal": lambda: soon(0.05, os.kill, os.getpid(), int(arg or signal.SIGKILL)),
            # After the reply: the guard may be quicker than it.
            "hoard": lambda: soon(0.05, self.hoard_mib, int(arg)),
            "spawn": self.spawn,
            "share": lambda: self.shared.append(SharedMemory(arg, create=True, size=1)),
        }
        acts[what]()
        lease = self.setup.lease if self.setup else None
        return Seen(
            pid=os.getpid(),
            env=dict(os.environ),
            cwd=os.getcwd(),
            sys_path=sys.path,
            lease_id=lease.lease_id if lease else "",
            job_id=lease.job_id if lease else self.boot.job_id,
            actor_id=self.setup.actor.actor_id if self.setup and self.setup.actor else "",
            child=self.child,
            main_at_s=self.started_at_s,
        )

    def hoard_mib(self, count: int) -> None:
        self.hoard.append(bytearray(os.urandom(1 << 20) * count))

    def spawn(self) -> None:
        """A daemon as careless as they come: its own session, its parent gone."""
        script = "setsid sleep 1000 >/dev/null 2>&1 & echo $!"
        done = subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, check=True)
        self.child = int(done.stdout)
