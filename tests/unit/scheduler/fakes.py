"""A small gcs and nodelets over real HTTP, as much of them as the scheduler talks to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec

from stoker_wire.errors import (
    CompactedError,
    ConflictError,
    NotFoundError,
    RuntimeEnvSetupError,
    StokerError,
    UnavailableError,
)
from stoker_wire.http.server.service import Request, Service, watch_response
from stoker_wire.messages.cluster import (
    Device,
    HeldLease,
    HeldLeases,
    Node,
    NodeState,
    ReleaseLeases,
    StartedLease,
    StartLease,
    StopLeases,
    WorkerExit,
)
from stoker_wire.messages.common import Address, Empty, RuntimeEnv
from stoker_wire.messages.control import Campaign, Event, Leader, ListQuery, Page
from stoker_wire.messages.events import EventQuery
from stoker_wire.messages.queries import JobQuery
from stoker_wire.messages.work import Job, JobState

if TYPE_CHECKING:
    from stoker_wire.settings import Settings

TOKEN = "t" * 32


def a_job(job_id: str, **options: Any) -> Job:
    """A job that runs."""
    return Job(
        job_id=job_id,
        name="",
        entrypoint="",
        state=JobState.RUNNING,
        submitted=False,
        namespace="",
        runtime_env=RuntimeEnv(),
        metadata={},
        resources={},
        created_at_s=0.0,
        **options,
    )


class FakeGcs:
    """Nodes, jobs, leadership and an event log; as of an older minor version, it has no queues to list."""

    def __init__(self, settings: Settings) -> None:
        self.service = Service("gcs", settings, token=TOKEN)
        self.nodes: dict[str, Node] = {}
        self.jobs: dict[str, Job] = {job.job_id: job for job in map(a_job, ("job_1", "job_2"))}
        self.events: list[Event] = []
        self.floor = 0
        """What came before this event is not told any more."""
        self.leader: Leader | None = None
        self._news = asyncio.Condition()
        route = self.service.route
        route("GET", "/v1/nodes", self._nodes, reply=Page[Node], query=ListQuery, summary="nodes")
        route("GET", "/v1/jobs", self._jobs, reply=Page[Job], query=JobQuery, summary="jobs")
        route("GET", "/v1/jobs/{job_id}", self._job, reply=Job, summary="job")
        route("GET", "/v1/events", self._events, query=EventQuery, summary="events", stream=True)
        route(
            "POST",
            "/v1/leaders/scheduler",
            self._campaign,
            body=Campaign,
            reply=Leader,
            summary="lead",
        )

    async def start(self) -> None:
        await self.service.start("127.0.0.1", 0)
        self.service.ready()

    async def tell(self, kind: str, subject: str, record: object = None) -> None:
        """Append an event."""
        payload: dict[str, Any] = {} if record is None else msgspec.to_builtins(record)
        async with self._news:
            self.events.append(
                Event(
                    seq=len(self.events) + 1,
                    at_s=time.time(),
                    kind=kind,
                    subject=subject,
                    payload=payload,
                )
            )
            self._news.notify_all()

    async def forget(self) -> None:
        """Let one event be gone before anybody was told of it."""
        async with self._news:
            self.events.append(
                Event(seq=len(self.events) + 1, at_s=time.time(), kind="x", subject="x")
            )
            self.floor = len(self.events)
            self._news.notify_all()

    async def register(self, node: Node) -> None:
        self.nodes[node.node_id] = node
        await self.tell("node.registered", node.node_id, node)

    async def _nodes(self, req: Request) -> Page[Node]:
        return Page(items=tuple(self.nodes.values()), seq=len(self.events))

    async def _jobs(self, req: Request) -> Page[Job]:
        living = tuple(job for job in self.jobs.values() if not job.state.terminal)
        return Page(items=living, seq=len(self.events))

    async def _job(self, req: Request) -> Job:
        job = self.jobs.get(req.path["job_id"])
        if job is None:
            raise NotFoundError(f"no job {req.path['job_id']}")
        return job

    async def _events(self, req: Request) -> Any:
        return await watch_response(req, self._since(req.query.since), since=req.query.since)

    async def _since(self, seq: int) -> AsyncIterator[Event]:
        while True:
            async with self._news:
                while len(self.events) <= seq:
                    await self._news.wait()
            if seq < self.floor:
                raise CompactedError(f"events before {self.floor} are gone")
            for event in self.events[seq:]:
                seq = event.seq
                yield event

    async def _campaign(self, req: Request) -> Leader:
        body: Campaign = req.body
        now, held = time.time(), self.leader
        if held is not None and held.holder != body.holder and held.expires_at_s > now:
            raise ConflictError(f"{held.holder} leads", extra={"leader": held.url})
        goes_on = held is not None and held.holder == body.holder and held.expires_at_s > now
        epoch = (held.epoch if held else 0) + (not goes_on)
        self.leader = Leader(
            name="scheduler",
            holder=body.holder,
            url=body.url,
            epoch=epoch,
            expires_at_s=now + body.ttl_s,
        )
        return self.leader


class FakeNodelet:
    """Starts leases at once. ``fail_next`` errors are raised by the next starts."""

    def __init__(self, settings: Settings, node_id: str, resources: dict[str, float]) -> None:
        self.service = Service("nodelet", settings, token=TOKEN)
        self.node_id = node_id
        self.resources = resources
        self.incarnation = 1
        self.held: dict[str, HeldLease] = {}
        self.released: list[ReleaseLeases] = []
        self.stops: list[StopLeases] = []
        self.orders: list[StartLease] = []
        self.fail_next: list[StokerError] = []
        self.start_delay_s = 0.0
        self.epoch = 0
        self.most_gpus_held = 0.0
        route = self.service.route
        route("POST", "/v1/leases", self._start, body=StartLease, reply=StartedLease, summary="s")
        route(
            "POST",
            "/v1/leases/release",
            self._release,
            body=ReleaseLeases,
            reply=Empty,
            summary="r",
        )
        route("GET", "/v1/leases", self._held, reply=HeldLeases, summary="held")
        route("POST", "/v1/leases/stop", self._stop, body=StopLeases, reply=Empty, summary="stop")

    async def start(self) -> None:
        await self.service.start("127.0.0.1", 0)
        self.service.ready()

    @property
    def node(self) -> Node:
        count = int(self.resources.get("GPU", 0))
        return Node(
            node_id=self.node_id,
            incarnation=self.incarnation,
            state=NodeState.ALIVE,
            url=self.service.url,
            unix="",
            hostname="here",
            host_id="h",
            pid=1,
            resources=self.resources,
            devices=tuple(
                Device(index=i, uuid=f"u{i}", name="Fake", fake=True) for i in range(count)
            ),
            labels={},
            version="0",
            arena_dir="",
            session_dir="",
            registered_at_s=0.0,
        )

    def exit_of(self, lease_id: str) -> WorkerExit:
        held = self.held.pop(lease_id)
        return WorkerExit(worker_id=held.worker_id, node_id=self.node_id, lease_id=lease_id)

    async def _start(self, req: Request) -> StartedLease:
        order: StartLease = req.body
        self.orders.append(order)
        if self.start_delay_s:
            await asyncio.sleep(self.start_delay_s)
        if self.fail_next:
            raise self.fail_next.pop(0)
        self.epoch = max(self.epoch, order.epoch)
        used: dict[int, float] = {}
        for held in (*(h.lease for h in self.held.values()), order.lease):
            for index, share in held.gpus.items():
                used[index] = used.get(index, 0.0) + share
        if any(share > 1.0001 for share in used.values()):
            raise ConflictError("GPU in use")
        worker_id = f"w_{len(self.orders)}"
        address = Address(worker_id, self.node_id, "h", "/tmp/x", "http://127.0.0.1:1")
        self.held[order.lease.lease_id] = HeldLease(
            lease=order.lease, worker_id=worker_id, address=address, pid=7
        )
        return StartedLease(worker_id=worker_id, address=address, pid=7)

    async def _release(self, req: Request) -> Empty:
        body: ReleaseLeases = req.body
        self.released.append(body)
        for lease_id in body.lease_ids:
            self.held.pop(lease_id, None)
        return Empty()

    async def _stop(self, req: Request) -> Empty:
        self.stops.append(req.body)
        if len(self.stops) == 1:
            raise UnavailableError("try again")
        return Empty()

    async def _held(self, req: Request) -> HeldLeases:
        return HeldLeases(
            node_id=self.node_id, incarnation=self.incarnation, leases=tuple(self.held.values())
        )


BAD_ENV = RuntimeEnvSetupError("pip could not install 'nonesuch'")
