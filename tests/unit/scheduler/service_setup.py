"""A scheduler that listens, with a small gcs and nodelets behind it, and a client of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from stoker_scheduler.service import SchedulerService, serve
from stoker_wire.http.client.client import Client
from stoker_wire.messages.cluster import (
    ClusterResources,
    Demand,
    Lease,
    LeaseReply,
    LeaseRequest,
    LeaseUpdates,
    OwnerPoll,
    ReleaseLeases,
)
from stoker_wire.messages.control import Page
from stoker_wire.settings import Settings
from tests.unit.scheduler.fakes import TOKEN, FakeGcs, FakeNodelet

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

SETTINGS = Settings(infeasible_grace_s=0.1, lease_ttl_s=30.0, leader_ttl_s=4.0)
_numbers = itertools.count(1)


class Setup:
    """One gcs, some nodelets, a scheduler and a client of it."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.settings = SETTINGS
        self.gcs = FakeGcs(SETTINGS)
        self.nodelets: list[FakeNodelet] = []
        self.running: SchedulerService
        self.client: Client

    async def node(self, **resources: float) -> FakeNodelet:
        nodelet = FakeNodelet(SETTINGS, f"n_{len(self.nodelets) + 1}", resources)
        self.nodelets.append(nodelet)
        await nodelet.start()
        self.stack.push_async_callback(nodelet.service.stop, 0.1)
        await self.gcs.register(nodelet.node)
        return nodelet

    async def scheduler(self) -> SchedulerService:
        running = await serve(self.settings, token=TOKEN, gcs_url=self.gcs.service.url, port=0)
        self.stack.push_async_callback(running.stop)
        return running

    def client_of(self, running: SchedulerService) -> Client:
        client = Client(running.url, token=TOKEN, peer="test", settings=SETTINGS)
        self.stack.push_async_callback(client.close)
        return client

    async def lead(self) -> None:
        self.running = await self.scheduler()
        await self.running.until_leads(40)
        self.client = self.client_of(self.running)

    async def ask(
        self,
        count: int = 1,
        *,
        owner: str = "p_1",
        wait_s: float = 20.0,
        request_id: str = "",
        job: str = "job_1",
        options: dict[str, Any] | None = None,
        **resources: float,
    ) -> LeaseReply:
        request = LeaseRequest(
            request_id=request_id or f"r_{next(_numbers)}",
            owner_id=owner,
            demand=Demand(job_id=job, resources=resources, name="train", **(options or {})),
            count=count,
            wait_s=wait_s,
        )
        return await self.client.call("POST", "/v1/leases", request, reply=LeaseReply)

    async def release(self, *lease_ids: str, kill: bool = False) -> None:
        body = ReleaseLeases(lease_ids=lease_ids, kill=kill)
        await self.client.call("POST", "/v1/leases/release", body)

    async def poll(
        self, owner: str, *ids: str, idle: bool = False, wait_s: float = 0
    ) -> LeaseUpdates:
        body = OwnerPoll(lease_ids=ids, idle_lease_ids=ids if idle else (), wait_s=wait_s)
        return await self.client.call("POST", f"/v1/owners/{owner}/poll", body, reply=LeaseUpdates)

    async def resources(self) -> ClusterResources:
        return await self.client.call("GET", "/v1/resources", reply=ClusterResources)

    async def leases(self) -> tuple[Lease, ...]:
        return (await self.client.call("GET", "/v1/leases", reply=Page[Lease])).items


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 40.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 (it is the other process that changes)
            await asyncio.sleep(0.01)


def ids(reply: LeaseReply) -> list[str]:
    return [granted.lease.lease_id for granted in reply.granted]
