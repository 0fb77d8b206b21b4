"""What contract tests of the gcs share: migrated databases, running services, a fake scheduler."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from stoker_gcs.service import Running, serve
from stoker_migrations.command import upgrade
from stoker_wire.errors import InfeasibleError, NotFoundError
from stoker_wire.http.client.client import Client
from stoker_wire.http.server.service import Request, Service
from stoker_wire.messages.cluster import (
    ClusterResources,
    Demand,
    GrantedLease,
    Lease,
    LeaseKind,
    LeaseReply,
    LeaseRequest,
    Node,
    NodeState,
    RegisteredNode,
    RegisterNode,
    ReleaseLeases,
)
from stoker_wire.messages.common import Address
from stoker_wire.messages.control import (
    Campaign,
    ExplainQuery,
    Explanation,
    Holder,
    Leader,
    Verdict,
)
from stoker_wire.messages.groups import (
    PlannedLease,
    PlanOutcome,
    PlanReply,
    PlanRequest,
    RequestBundles,
)
from stoker_wire.messages.work import AttachDriver, Job
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

TOKEN = "test-token"
PATIENT = Settings(
    suspect_after_s=60.0,
    dead_after_s=90.0,
    driver_reconnect_s=60.0,
    restart_reconnect_s=60.0,
    infeasible_grace_s=0.5,
    bookmark_s=0.2,
)
"""Nobody who is silent during a test is given up, unless that is what it is about."""


async def migrate(database_url: str) -> None:
    """Bring a database to the present schema, as an operator does."""
    await asyncio.to_thread(upgrade, database_url)


async def eventually(
    condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = 40.0
) -> None:
    """Return once the condition holds, or fail with what was waited for."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await condition():  # noqa: ASYNC110  a condition of another process has no event
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s} s: {what}") from None


@asynccontextmanager
async def gcs(
    database_url: str, redis_url: str | None = None, *, settings: Settings = PATIENT, port: int = 0
) -> AsyncIterator[tuple[Running, Client]]:
    """A running gcs and a client of it."""
    running = await serve(
        settings, token=TOKEN, database_url=database_url, redis_url=redis_url, port=port
    )
    try:
        async with Client(running.url, token=TOKEN, peer="test", timeout_s=60.0) as client:
            yield running, client
    finally:
        await running.stop(0.5)


def a_node(node_id: str = "n_1", url: str = "") -> RegisterNode:
    """A registration; without ``url`` at one of its own, where nobody answers."""
    return RegisterNode(
        node_id=node_id,
        url=url or f"http://{node_id.replace('_', '-')}.invalid:9",
        unix="",
        hostname="here",
        host_id="h",
        pid=1,
        resources={"CPU": 4.0},
    )


async def register(client: Client, node_id: str = "n_1") -> RegisteredNode:
    """Register a node."""
    return await client.call("POST", "/v1/nodes", a_node(node_id), reply=RegisteredNode)


async def attach(client: Client, job_id: str | None = None) -> Job:
    """Attach a driver."""
    body = AttachDriver(pid=7, hostname="here", job_id=job_id)
    return await client.call("POST", "/v1/jobs/attach", body, reply=Job)


class FakeScheduler:
    """Speaks the scheduler's HTTP; grants everything on n_1 that ``infeasible`` does not name.

    While ``delivers`` is not set, workers are granted and the replies are on their way.
    """

    def __init__(self) -> None:
        self._gcs: Client | None = None
        self.service = Service("scheduler", Settings(), token=TOKEN)
        self.requests: list[LeaseRequest] = []
        self.gangs: list[RequestBundles] = []
        self.released: list[str] = []
        self.infeasible: set[str] = set()
        self.verdicts: tuple[Verdict, ...] = ()
        self.plans: list[PlanRequest] = []
        self.holders: tuple[Holder, ...] = ()
        self.held_back = asyncio.Event()
        self.held_back.set()
        self.delivers = asyncio.Event()
        self.delivers.set()
        self._granted: dict[str, GrantedLease] = {}
        self._count = itertools.count(1)
        add = self.service.route
        add("POST", "/v1/leases", self._ask, body=LeaseRequest, reply=LeaseReply, summary="ask")
        add(
            "POST",
            "/v1/bundles",
            self._ask_bundles,
            body=RequestBundles,
            reply=LeaseReply,
            summary="ask",
        )
        add("POST", "/v1/leases/release", self._release, body=ReleaseLeases, summary="release")
        add(
            "POST",
            "/v1/explain",
            self._explain,
            body=Demand,
            query=ExplainQuery,
            reply=Explanation,
            summary="why",
        )
        add("POST", "/v1/plan", self._plan, body=PlanRequest, reply=PlanReply, summary="plan")
        add("GET", "/v1/resources", self._resources, reply=ClusterResources, summary="all")

    async def start(self, client: Client, holder: str = "p_sched") -> Leader:
        """Listen, and win the leadership."""
        self._gcs = client
        await self.service.start("127.0.0.1")
        self.service.ready()
        body = Campaign(holder=holder, url=self.service.url, ttl_s=60.0)
        return await client.call("POST", "/v1/leaders/scheduler", body, reply=Leader)

    @property
    def granted(self) -> set[str]:
        """The leases of workers that are granted."""
        return {one.lease.lease_id for one in self._granted.values()}

    async def _ask(self, req: Request) -> LeaseReply:
        body: LeaseRequest = req.body
        self.requests.append(body)
        if body.demand.name in self.infeasible:
            raise InfeasibleError("no node has 99 CPUs; the largest has 4")
        if not self.held_back.is_set():
            return LeaseReply(note="3 demands wait before it")
        known = self._granted.get(body.request_id)
        if known is None:
            incarnation = await self._incarnation()
            if incarnation is None:
                return LeaseReply(note="n_1 is dead")
            n = next(self._count)
            lease = Lease(
                lease_id=f"l_{n}",
                owner_id=body.owner_id,
                job_id=body.demand.job_id,
                kind=body.demand.kind,
                node_id="n_1",
                node_incarnation=incarnation,
                resources=body.demand.resources,
                actor_id=body.actor.actor_id if body.actor else "",
            )
            address = Address(f"w_{n}", "n_1", "h", "", "http://127.0.0.1:9")
            known = GrantedLease(lease=lease, worker_id=f"w_{n}", address=address, pid=100 + n)
            self._granted[body.request_id] = known
        await self.delivers.wait()
        return LeaseReply(granted=(known,))

    async def _incarnation(self) -> int | None:
        """Return which incarnation of n_1 lives: None if it is dead, the first if it is unknown."""
        assert self._gcs is not None
        try:
            node = await self._gcs.call("GET", "/v1/nodes/n_1", reply=Node)
        except NotFoundError:
            return 1
        return None if node.state is NodeState.DEAD else node.incarnation

    async def _ask_bundles(self, req: Request) -> LeaseReply:
        """Grant the bundles on n_1 and n_2 in turn."""
        body: RequestBundles = req.body
        self.gangs.append(body)
        if not self.held_back.is_set():
            return LeaseReply(note="3 demands wait before it")
        nobody = Address("", "", "", "", "")
        leases = [
            Lease(
                lease_id=f"l_{body.request_id[2:]}.{index}",
                owner_id="gcs",
                job_id=body.job_id,
                kind=LeaseKind.BUNDLE,
                node_id=f"n_{1 + index % 2}",
                node_incarnation=1,
                resources=bundle.resources,
                group_id=body.group_id,
                bundle=index,
            )
            for index, bundle in zip(body.indices, body.bundles, strict=True)
        ]
        granted = [GrantedLease(lease=lease, worker_id="", address=nobody) for lease in leases]
        return LeaseReply(granted=tuple(granted))

    async def _release(self, req: Request) -> None:
        self.released += req.body.lease_ids

    async def _explain(self, req: Request) -> Explanation:
        return Explanation(
            subject="",
            state="",
            summary=f"{req.body.name} waits for 99 CPUs",
            queue_position=2,
            verdicts=self.verdicts,
            holders=self.holders if req.query.remedies else (),
        )

    async def _plan(self, req: Request) -> PlanReply:
        self.plans.append(req.body)
        return PlanReply(placements=(PlannedLease(node_id=None, outcome=PlanOutcome.WAITS),))

    async def _resources(self, _: Request) -> ClusterResources:
        return ClusterResources(total={"CPU": 4.0}, available={"CPU": 1.0})


@asynccontextmanager
async def scheduler(client: Client) -> AsyncIterator[FakeScheduler]:
    """A fake scheduler that leads."""
    fake = FakeScheduler()
    await fake.start(client)
    try:
        yield fake
    finally:
        await fake.service.stop(0.2)
