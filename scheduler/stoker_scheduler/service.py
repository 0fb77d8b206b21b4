"""The scheduler as a service: ``serve`` starts it, and returns when it listens.

It listens first (its URL is what it campaigns with), then campaigns; ``/readyz`` turns green when
it leads and knows the nodes and their leases. A standby stays not ready and names the leader. Each term
has an engine of its own, with the nodelet clients and the feed that belong to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from stoker_scheduler.api import ROUTES, Api
from stoker_scheduler.core.placement.scoring import ScorePolicy
from stoker_scheduler.core.state import SchedulingPolicy, State
from stoker_scheduler.engine import Engine
from stoker_scheduler.extenders.client import Extenders
from stoker_scheduler.extenders.config import read_extenders
from stoker_scheduler.gcs_feed import GcsFeed
from stoker_scheduler.jobs import JobDirectory
from stoker_scheduler.leadership import Leadership, not_leader
from stoker_scheduler.nodelet_clients import NodeletClients
from stoker_wire.errors import NotFoundError, NotReadyError, StokerError
from stoker_wire.http.client.client import Client
from stoker_wire.http.client.pool import ClientPool
from stoker_wire.http.server.service import Service
from stoker_wire.ids import Prefix, new_id
from stoker_wire.messages.common import Role
from stoker_wire.messages.work import Actor, Job
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from stoker_wire.http.server.tokens import TokenSigner
    from stoker_wire.messages.control import Leader
    from stoker_wire.messages.groups import PreemptGroup
    from stoker_wire.settings import Settings

DEFAULT_PORT = 8266
JOB_TIMEOUT_S = 2.0


class SchedulerService:
    """A scheduler that listens. ``stop`` ends it in good order."""

    def __init__(self, settings: Settings, *, token: str | TokenSigner, gcs_url: str) -> None:
        self._settings = settings
        self._service = Service("scheduler", settings, token=token)
        self._credential = self._service.tokens.service_credential(Role.SCHEDULER, "scheduler")
        self._gcs = Client(gcs_url, token=self._credential, peer="scheduler", settings=settings)
        self._background = Background("scheduler.life")
        self._extenders = read_extenders(settings.extenders) if settings.extenders else ()
        self._engine: Engine | None = None
        self._leadership: Leadership | None = None
        self._leads = asyncio.Event()
        api = Api(self._current_engine, lease_ttl_s=settings.lease_ttl_s)
        self._service.add_routes(ROUTES, api)
        self._add_metrics()

    @property
    def url(self) -> str:
        """The URL at which the scheduler listens."""
        return self._service.url

    @property
    def leads(self) -> bool:
        """Whether it leads and knows its cluster."""
        return self._service.is_ready

    async def until_leads(self, timeout_s: float) -> None:
        """Wait until this scheduler leads; TimeoutError after ``timeout_s``."""
        async with asyncio.timeout(timeout_s):
            await self._leads.wait()

    async def start(self, host: str, port: int) -> None:
        """Listen, and campaign in the background."""
        await self._service.start(host, port)
        self._leadership = Leadership(
            self._gcs,
            holder=new_id(Prefix.PEER),
            url=self._service.url,
            ttl_s=self._settings.leader_ttl_s,
            begin=self._begin_term,
            renewed=self._renewed,
            end=self._end_term,
        )
        self._background.spawn(self._leadership.run(), name="campaign")

    async def stop(self) -> None:
        """Stop answering, then end the term."""
        await self._background.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()
        await self._service.stop()
        await self._gcs.close()

    def _current_engine(self) -> Engine:
        if self._service.is_ready and self._engine is not None:
            return self._engine
        leadership = self._leadership
        if self._engine is not None or leadership is None or not leadership.leader_url:
            raise NotReadyError("the scheduler leads and is asking the nodes what they hold")
        raise not_leader(leadership.leader_url)

    async def _begin_term(self, leader: Leader) -> None:
        background = Background("scheduler")
        clients = ClientPool(token=self._credential, peer="scheduler", settings=self._settings)
        nodelets = NodeletClients(clients, epoch=leader.epoch, background=background)
        engine = Engine(
            _policy(self._settings),
            epoch=leader.epoch,
            jobs=JobDirectory(self._has_ended, self._find_run_as),
            nodelets=nodelets,
            background=background,
            extenders=Extenders(self._extenders),
            answer_s=self._settings.extender_answer_s,
            on_fenced=self._recheck_leadership,
            preempt_group=self._preempt_group,
        )
        self._engine = engine
        feed = GcsFeed(self._gcs, engine=engine, nodelets=nodelets, background=background)
        try:
            seq = await feed.load()
        except BaseException:
            self._engine = None
            await engine.close()
            raise
        background.spawn(feed.follow(seq), name="follow the gcs")
        self._service.ready()
        self._leads.set()

    async def _has_ended(self, job_id: str) -> bool | None:
        """Return whether a job has ended; None if the gcs does not say."""
        try:
            job = await self._gcs.call(
                "GET", f"/v1/jobs/{job_id}", reply=Job, timeout_s=JOB_TIMEOUT_S, retry=False
            )
        except NotFoundError:
            return False
        except StokerError:
            return None
        return job.state.terminal

    async def _find_run_as(self, subject: str) -> str:
        """Return as whom a job runs, or the detached actor of that id; nobody's is what there is not."""
        try:
            if subject.startswith(f"{Prefix.ACTOR}_"):
                actor = await self._gcs.call(
                    "GET", f"/v1/actors/{subject}", reply=Actor, timeout_s=JOB_TIMEOUT_S
                )
                subject = actor.origin_job_id or actor.job_id
            job = await self._gcs.call(
                "GET", f"/v1/jobs/{subject}", reply=Job, timeout_s=JOB_TIMEOUT_S
            )
        except NotFoundError:
            return ""
        return job.run_as

    def _renewed(self, leader: Leader) -> None:
        if self._engine is not None:
            self._engine.set_epoch(leader.epoch)

    async def _end_term(self, leader_url: str) -> None:
        self._service.ready(False)
        self._leads.clear()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close(leader_url)

    async def _preempt_group(self, group_id: str, body: PreemptGroup) -> None:
        await self._gcs.call("POST", f"/v1/placement-groups/{group_id}/preempt", body)

    def _recheck_leadership(self) -> None:
        if self._leadership is not None:
            self._leadership.recheck()

    def _add_metrics(self) -> None:
        def add(name: str, meaning: str, count: Callable[[State], int]) -> None:
            def value() -> float:
                return 0.0 if self._engine is None else float(count(self._engine.state))

            self._service.metrics.gauge(name, meaning).set_function(value)

        add("scheduler_leases", "Leases that exist.", lambda state: len(state.leases))
        add(
            "scheduler_requests",
            "Requests that are not answered yet.",
            lambda state: len(state.pending),
        )
        add("scheduler_nodes", "Nodes that are known.", lambda state: len(state.nodes))
        add("scheduler_placed", "Leases placed in this term.", lambda state: state.placed)


def _policy(settings: Settings) -> SchedulingPolicy:
    return SchedulingPolicy(
        score=ScorePolicy(pack_threshold=settings.spread_threshold),
        preemption_grace_s=settings.preemption_grace_s,
        lease_ttl_s=settings.lease_ttl_s,
        infeasible_grace_s=settings.infeasible_grace_s,
        node_return_s=settings.node_return_s,
        usage_half_life_s=settings.usage_half_life_s,
    )


async def serve(
    settings: Settings,
    *,
    token: str | TokenSigner,
    gcs_url: str,
    host: str | None = None,
    port: int | None = None,
) -> SchedulerService:
    """Start a scheduler; return once it listens (see ``/readyz`` for when it leads)."""
    scheduler = SchedulerService(settings, token=token, gcs_url=gcs_url)
    try:
        await scheduler.start(
            settings.host if host is None else host, settings.port if port is None else port
        )
    except BaseException:
        await scheduler.stop()
        raise
    return scheduler
