"""A small gcs over real HTTP, and nodelets as real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stoker_wire.data.spool import record_of, rows_in
from stoker_wire.errors import FencedError, NotFoundError, UnavailableError
from stoker_wire.http.client.client import Client
from stoker_wire.http.server.service import Request, Service, watch_response
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.ids import Prefix, new_id
from stoker_wire.messages.cluster import (
    ActorSpec,
    DriverSpec,
    Heartbeat,
    Lease,
    LeaseKind,
    RegisteredNode,
    RegisterNode,
    ReleaseLeases,
    StartedLease,
    StartLease,
    WorkerExit,
    WorkersExited,
    WorkerSpec,
)
from stoker_wire.messages.common import Empty, RuntimeEnv
from stoker_wire.messages.control import Event, Page
from stoker_wire.messages.work import FinishJob, TaskHistoryStatus, TaskRecord
from stoker_wire.process import process_tree
from stoker_wire.settings import Settings
from tests.e2e.nodelet.worker_target import Do, Seen

REPO = Path(__file__).resolve().parents[3]
TOKEN = "a-token-for-tests"
TARGET = "tests.e2e.nodelet.worker_target:main"


async def eventually(condition: Callable[[], Any], what: str, timeout_s: float = 40.0) -> Any:
    """Return the first true value of ``condition``."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        await asyncio.sleep(0.01)
    return value


class _EventQuery(msgspec.Struct, kw_only=True):
    watch: bool = False
    since: int = 0
    kind: str = ""
    limit: int = 100
    cursor: str = ""


@dataclass
class FakeGcs:
    """Says yes to a nodelet, remembers what it said, and can be away."""

    incarnation: int = 0
    register_delay_s: float = 0.0
    away: bool = False
    fenced: bool = False
    nodes: list[RegisterNode] = field(default_factory=list)
    beats: list[Heartbeat] = field(default_factory=list)
    exits: dict[str, WorkerExit] = field(default_factory=dict)
    tasks: list[TaskRecord] = field(default_factory=list)
    finished: dict[str, FinishJob] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    may_leave: asyncio.Event = field(default_factory=asyncio.Event)
    packages: dict[str, bytes] = field(default_factory=dict)
    downloads: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    url: str = ""
    service: Service | None = None

    async def start(self) -> None:
        service = Service("gcs", Settings(), token=TOKEN)
        add = service.route
        add("POST", "/v1/nodes", self.register, body=RegisterNode, summary="register")
        add("GET", "/v1/nodes", self.list_nodes, query=_EventQuery, summary="list")
        add("POST", "/v1/nodes/{id}/heartbeat", self.beat, body=Heartbeat, summary="beat")
        add("POST", "/v1/nodes/{id}/leave", self.leave, raw_body=True, summary="leave")
        add("POST", "/v1/workers/exited", self.exited, body=WorkersExited, summary="exited")
        add("POST", "/v1/tasks/spooled", self.spooled, raw_body=True, summary="spooled")
        add("POST", "/v1/jobs/{id}/finish", self.finish, body=FinishJob, summary="finish")
        add("GET", "/v1/jobs/{id}", self.job, summary="job")
        add("GET", "/v1/packages/{id}", self.package, summary="package")
        add("GET", "/v1/events", self.watch, query=_EventQuery, stream=True, summary="events")
        await service.start("127.0.0.1")
        service.ready()
        self.may_leave.set()
        self.service, self.url = service, service.url

    async def stop(self) -> None:
        if self.service is not None:
            await self.service.stop(0.2)

    def publish(self, kind: str, subject: str, **payload: Any) -> None:
        seq = len(self.events) + 1
        self.events.append(Event(seq=seq, at_s=0.0, kind=kind, subject=subject, payload=payload))

    def _answers(self) -> None:
        if self.away:
            raise UnavailableError("the gcs is away")

    async def register(self, req: Request) -> RegisteredNode:
        self._answers()
        self.incarnation += 1
        self.fenced = False
        self.nodes.append(req.body)
        await asyncio.sleep(self.register_delay_s)
        return RegisteredNode(
            node_id=req.body.node_id, incarnation=self.incarnation, heartbeat_s=0.1
        )

    async def list_nodes(self, _: Request) -> Page[Empty]:
        self._answers()
        return Page(items=(), seq=len(self.events))

    async def beat(self, req: Request) -> Empty:
        self._answers()
        if self.fenced or req.body.incarnation != self.incarnation:
            raise FencedError("this incarnation is over")
        self.beats.append(req.body)
        return Empty()

    async def leave(self, req: Request) -> Empty:
        self.left.append(req.path["id"])
        await self.may_leave.wait()
        return Empty()

    async def exited(self, req: Request) -> Empty:
        self._answers()
        self.exits.update({one.worker_id: one for one in req.body.exits})
        return Empty()

    async def spooled(self, req: Request) -> TaskHistoryStatus:
        self._answers()
        rows, _ = rows_in(await req.read())
        self.tasks += [record_of(row) for row in rows]
        return TaskHistoryStatus(accepted=len(rows))

    async def finish(self, req: Request) -> Empty:
        self._answers()
        self.finished[req.path["id"]] = req.body
        return Empty()

    async def job(self, req: Request) -> Empty:
        raise NotFoundError(req.path["id"])

    async def package(self, req: Request) -> bytes:
        self.downloads.append(req.path["id"])
        await asyncio.sleep(0.05)
        return self.packages[req.path["id"]]

    async def watch(self, req: Request) -> Any:
        async def source() -> AsyncIterator[Event]:
            seq = req.query.since
            while True:
                for event in self.events[seq:]:
                    seq = event.seq
                    yield event
                await asyncio.sleep(0.02)

        return await watch_response(req, source(), since=req.query.since)


@dataclass
class Nodelet:
    """A nodelet process and a client to it."""

    process: asyncio.subprocess.Process
    client: Client
    registration: RegisterNode
    incarnation: int
    epoch: int = 1
    _workers: dict[str, Client] = field(default_factory=dict)

    async def start_lease(
        self,
        *,
        job_id: str = "job_1",
        lease_id: str = "",
        kind: LeaseKind = LeaseKind.TASK,
        gpus: dict[int, float] | None = None,
        resources: dict[str, float] | None = None,
        env: RuntimeEnv | None = None,
        actor: ActorSpec | None = None,
        driver: DriverSpec | None = None,
        incarnation: int | None = None,
        epoch: int | None = None,
        timeout_s: float = 90.0,
    ) -> tuple[Lease, StartedLease]:
        lease = Lease(
            lease_id=lease_id or new_id(Prefix.LEASE),
            owner_id="p_1",
            job_id=job_id,
            kind=kind,
            node_id=self.registration.node_id,
            node_incarnation=self.incarnation if incarnation is None else incarnation,
            resources=resources or {"CPU": 1.0},
            gpus=gpus or {},
            actor_id=actor.actor_id if actor else "",
            name="work",
        )
        spec = WorkerSpec(runtime_env=env or RuntimeEnv(), actor=actor, driver=driver)
        body = StartLease(lease=lease, epoch=self.epoch if epoch is None else epoch, worker=spec)
        started = await self.client.call(
            "POST", "/v1/leases", body, reply=StartedLease, timeout_s=timeout_s, retry=False
        )
        return lease, started

    async def release(self, *lease_ids: str, kill: bool = False, epoch: int | None = None) -> None:
        body = ReleaseLeases(
            lease_ids=lease_ids, kill=kill, epoch=self.epoch if epoch is None else epoch
        )
        await self.client.call("POST", "/v1/leases/release", body, reply=Empty, retry=False)

    async def do(self, started: StartedLease, what: str, arg: str = "") -> Seen:
        client = self._workers.get(started.worker_id)
        if client is None:
            client = self._workers[started.worker_id] = Client(
                "http://localhost",
                token=TokenSigner(TOKEN).worker(started.worker_id),
                peer="test",
                unix_path=started.address.unix,
            )
        return await client.call("POST", "/test/do", Do(what=what, arg=arg), reply=Seen)

    async def exit_of(self, worker_id: str, wait_s: float = 25.0) -> WorkerExit:
        return await self.client.call(
            "GET", f"/v1/workers/{worker_id}/exit", reply=WorkerExit, query={"wait_s": wait_s}
        )

    async def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)
        try:
            async with asyncio.timeout(40.0):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
            raise
        for client in (self.client, *self._workers.values()):
            await client.close()


async def start_nodelet(
    gcs: FakeGcs, session_dir: Path, *args: str, env: dict[str, str] | None = None
) -> Nodelet:
    """Start ``python -m stoker_nodelet`` and wait until it has registered."""
    before = len(gcs.nodes)
    path = os.pathsep.join((str(REPO), os.environ.get("PYTHONPATH", "")))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "stoker_nodelet", "--gcs-url", gcs.url,
        "--session-dir", str(session_dir), "--target", TARGET, *args,
        env={
            **os.environ, "STOKER_TOKEN": TOKEN, "PYTHONPATH": path,
            "STOKER_LOG_LEVEL": "warning", **(env or {}),
        },
    )  # fmt: skip
    await eventually(lambda: len(gcs.nodes) > before, "the nodelet registers")
    registration = gcs.nodes[-1]
    client = Client(registration.url, token=TOKEN, peer="test")
    return Nodelet(process, client, registration, gcs.incarnation)


def fork_server_of(node: Nodelet) -> tuple[int, int]:
    """The pids of a nodelet's reaper and of the fork server below it."""
    (reaper,) = process_tree.children(node.process.pid)
    (forkserver,) = process_tree.children(reaper)
    return reaper, forkserver


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def there(path: Path | str) -> bool:
    return Path(path).exists()


def is_alive(pid: int) -> bool:
    return process_tree.start_time(pid) != 0
