"""The scheduler as a service: ``serve`` starts it, and returns when it listens.

It listens first (its URL is what it campaigns with), then campaigns; ``/readyz`` turns green when
it leads and knows the nodes and their leases. A standby stays not ready and names the leader. Each term
has an engine of its own, with the nodelet clients and the feed that belong to it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from stoker_scheduler.api import ROUTES, Api
from stoker_scheduler.core.leases.lease import Phase
from stoker_scheduler.core.model.resources import CPU, GPU, MEMORY
from stoker_scheduler.core.placement.scoring import ScorePolicy
from stoker_scheduler.core.state import SchedulingPolicy, State
from stoker_scheduler.elastic.controller import ElasticController
from stoker_scheduler.engine import Engine, LeaseCounts
from stoker_scheduler.extenders.client import Extenders
from stoker_scheduler.extenders.config import read_extenders
from stoker_scheduler.gcs_feed import GcsFeed
from stoker_scheduler.jobs import JobDirectory
from stoker_scheduler.leadership import Leadership, not_leader
from stoker_scheduler.nodelet_clients import NodeletClients
from stoker_scheduler.wire_types import resources_of
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
        self._elastic: ElasticController | None = None
        self._counts = LeaseCounts()
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
            counts=self._counts,
            elastic_policy=self._settings.elastic_policy,
            elastic_fairness=self._settings.elastic_fairness,
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
        controller = ElasticController(
            self._gcs,
            engine=engine,
            interval_s=self._settings.elastic_interval_s,
            least_s=self._settings.elastic_min_interval_s,
        )
        self._elastic = controller
        background.spawn(controller.run(), name="elastic jobs")
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
        show, counts = self._service.metrics.show, self._counts

        def of_state(name: str, read: Callable[[State], float | Mapping[str, float]]) -> None:
            """Show what the state of this term has; that of a standby is empty."""
            show(name, lambda: read(self._engine.state if self._engine else State()))

        show("stoker_leader", lambda: int(self.leads))
        of_state("stoker_scheduler_nodes", lambda state: len(state.nodes))
        of_state("stoker_scheduler_leases", _count_phases)
        of_state("stoker_scheduler_leases_preempted", _count_preempted)
        of_state("stoker_scheduler_requests_waiting", lambda state: len(state.pending))
        of_state(
            "stoker_scheduler_leases_waiting",
            lambda state: sum(one.wanted for one in state.pending.values()),
        )
        of_state("stoker_scheduler_leases_placed_total", lambda state: state.placed)
        of_state("stoker_scheduler_resource_capacity", lambda state: self._resources(state)[0])
        of_state("stoker_scheduler_resource_allocated", lambda state: self._resources(state)[1])
        show("stoker_scheduler_leases_granted_total", lambda: counts.granted)
        show("stoker_scheduler_leases_lost_total", lambda: counts.lost)
        show("stoker_scheduler_preemptions_total", lambda: counts.preempted)
        show("stoker_scheduler_requests_rejected_total", lambda: counts.rejected)
        show("stoker_scheduler_lease_wait_seconds", lambda: counts.wait_s)

    def _resources(self, state: State) -> tuple[dict[str, float], dict[str, float]]:
        """Return what there is of resources, and what is allocated; of so many as labels may have."""
        found = resources_of(state)
        names = sorted(found.total, key=lambda name: (name not in (CPU, GPU, MEMORY), name))
        names = names[: self._settings.metrics_max_labels]
        used = {name: found.total[name] - found.available.get(name, 0.0) for name in names}
        return {name: found.total[name] for name in names}, used


def _count_phases(state: State) -> dict[str, float]:
    phases = Counter(lease.phase for lease in state.leases.values())
    return {phase.value: phases[phase] for phase in Phase}


def _count_preempted(state: State) -> int:
    return sum(lease.preempted for lease in state.leases.values())


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
