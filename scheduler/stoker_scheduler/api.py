"""The scheduler's HTTP API: every route, and nothing but the way from request to engine and back.

A scheduler that does not lead answers 409 ``not_leader`` with the leader's URL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.resources import UNIT
from stoker_scheduler.core.placement.explain import Story, starting_text, tell
from stoker_scheduler.core.placement.feasibility import Fit
from stoker_scheduler.core.placement.plan import PlanRequest, plan
from stoker_scheduler.messages import PlannedLease, PlanQuery, PlanReply
from stoker_scheduler.wire_types import (
    lease_of,
    need_of,
    queue_of,
    resources_of,
    setup_of,
    verdicts_of,
)
from stoker_wire.errors import NotReadyError
from stoker_wire.http.paging import page_of
from stoker_wire.messages.cluster import (
    BlockLease,
    ClusterResources,
    Demand,
    Lease,
    LeaseReply,
    LeaseRequest,
    OwnerOrders,
    OwnerPoll,
    ReleaseLeases,
)
from stoker_wire.messages.common import Empty
from stoker_wire.messages.control import Explanation, LeaseQuery, ListQuery, Page, QueueEntry
from stoker_wire.messages.kernels import kernel_set

if TYPE_CHECKING:
    from stoker_scheduler.engine import Engine
    from stoker_wire.http.server import Request, Service

ANSWER_MARGIN_S = 0.3
"""A long poll ends so much before the caller's deadline."""


class Api:
    """Handlers; ``engine()`` returns the engine of the present term, or raises why there is none."""

    def __init__(self, service: Service, engine: Callable[[], Engine], lease_ttl_s: float) -> None:
        self._engine = engine
        self._poll_limit_s = lease_ttl_s / 3
        add = service.route
        add(
            "POST",
            "/v1/leases",
            self.ask,
            body=LeaseRequest,
            reply=LeaseReply,
            summary="Ask for leases; waits until some are granted",
            idempotency=False,  # by request_id, which also survives a lost reply's key
            before_ready=True,
        )
        add(
            "POST",
            "/v1/leases/release",
            self.release,
            body=ReleaseLeases,
            reply=Empty,
            summary="Give leases back, or end them",
            idempotency=False,
            before_ready=True,
        )
        add(
            "POST",
            "/v1/leases/{lease_id}/blocked",
            self.block,
            body=BlockLease,
            reply=Empty,
            summary="Free the CPU of a lease whose worker waits in get, or take it back",
            idempotency=False,
            before_ready=True,
        )
        add(
            "POST",
            "/v1/owners/{owner_id}/poll",
            self.poll,
            body=OwnerPoll,
            reply=OwnerOrders,
            summary="Renew an owner's leases and wait for orders",
            idempotency=False,
            before_ready=True,
        )
        add(
            "GET",
            "/v1/leases",
            self.leases,
            reply=Page[Lease],
            query=LeaseQuery,
            summary="All leases",
            before_ready=True,
        )
        add(
            "GET",
            "/v1/resources",
            self.resources,
            reply=ClusterResources,
            summary="What the cluster has and what is free",
            before_ready=True,
        )
        add(
            "GET",
            "/v1/queue",
            self.queue,
            reply=Page[QueueEntry],
            query=ListQuery,
            summary="Requests that wait, in order",
            before_ready=True,
        )
        add(
            "POST",
            "/v1/explain",
            self.explain,
            body=Demand,
            reply=Explanation,
            summary="Why a demand waits, and what would have to change",
            idempotency=False,
            before_ready=True,
        )
        add(
            "POST",
            "/v1/plan",
            self.plan,
            body=PlanQuery,
            reply=PlanReply,
            summary="Where demands would go, without taking anything",
            idempotency=False,
            before_ready=True,
        )

    async def ask(self, req: Request) -> LeaseReply:
        """POST /v1/leases."""
        body: LeaseRequest = req.body
        wait_s = max(0.0, min(body.wait_s, req.deadline_s - ANSWER_MARGIN_S))
        req.waiting_for(f"{body.count} x {body.demand.name or body.demand.kind} to be placed")
        return await self._engine().ask(body, wait_s)

    async def release(self, req: Request) -> Empty:
        """POST /v1/leases/release."""
        engine, body = self._engine(), req.body
        engine.apply(
            ev.LeaseReleased(
                at_s=engine.now(), lease_ids=body.lease_ids, kill=body.kill, reason=body.reason
            )
        )
        return Empty()

    async def block(self, req: Request) -> Empty:
        """POST /v1/leases/{id}/blocked; a lease that is gone is no error, its worker is ending."""
        engine, lease_id = self._engine(), req.path["lease_id"]
        if req.body.blocked:
            engine.apply(ev.LeaseBlocked(at_s=engine.now(), lease_id=lease_id))
        else:
            engine.apply(ev.LeaseUnblocked(at_s=engine.now(), lease_id=lease_id))
        return Empty()

    async def poll(self, req: Request) -> OwnerOrders:
        """POST /v1/owners/{id}/poll; answered well within the life of a lease."""
        body: OwnerPoll = req.body
        wait_s = max(0.0, min(body.wait_s, req.deadline_s - ANSWER_MARGIN_S, self._poll_limit_s))
        return await self._engine().poll(req.path["owner_id"], body, wait_s)

    async def leases(self, req: Request) -> Page[Lease]:
        """GET /v1/leases."""
        query: LeaseQuery = req.query
        found = (
            lease_of(lease)
            for lease in self._engine().state.leases.values()
            if query.job_id in ("", lease.job_id)
            and query.owner_id in ("", lease.owner_id)
            and query.node_id in ("", lease.node_id)
        )
        return page_of(
            found,
            query,
            key=lambda lease: lease.lease_id,
            created=lambda lease: lease.granted_at_s,
        )

    async def resources(self, req: Request) -> ClusterResources:
        """GET /v1/resources."""
        return resources_of(self._engine().state)

    async def queue(self, req: Request) -> Page[QueueEntry]:
        """GET /v1/queue."""
        engine = self._engine()
        entries = queue_of(engine.state, engine.requests, engine.now())
        return page_of(entries, req.query, key=lambda e: f"{e.position:08}")

    async def explain(self, req: Request) -> Explanation:
        """POST /v1/explain."""
        engine, demand = self._engine(), req.body
        state, need = engine.state, need_of(demand, at="")
        kernels = kernel_set(demand.runtime_env)
        story = tell(state, need, demand.name, demand.locality, kernels)
        lane = state.queue.lanes.get(need)
        waiting = (
            [] if lane is None else [a for a in lane.asks() if a.asked.job_id == demand.job_id]
        )
        position, waited_s, summary, remedy = None, 0.0, story.summary, story.remedy
        if waiting:
            first = min(waiting, key=lambda ask: (ask.since_s, ask.seq))
            position = state.queue.position(first)
            waited_s = max(0.0, engine.now() - first.since_s)
            summary += f"; it has waited {waited_s:.1f} s with {position} ahead in the queue"
        setup = setup_of(demand.runtime_env)
        starting = starting_text(state, need, demand.job_id, setup, now_s=engine.now())
        if starting:
            summary = f"{starting}; {summary}" if waiting else starting
            remedy = remedy if waiting else "nothing: it begins when that is done"
        return Explanation(
            subject=demand.name,
            state=_state(story, bool(waiting)),
            summary=summary,
            remedy=remedy,
            waited_s=waited_s,
            queue_position=position,
            verdicts=verdicts_of(story.verdicts),
            demand=demand,
        )

    async def plan(self, req: Request) -> PlanReply:
        """POST /v1/plan."""
        state = self._engine().state
        requests = [
            PlanRequest(
                need_of(demand, at=f"demands.{index}."),
                demand.locality,
                kernel_set(demand.runtime_env),
            )
            for index, demand in enumerate(req.body.demands)
        ]
        made = plan(state.nodes.values(), requests, state.policy.score)
        return PlanReply(
            placements=tuple(
                PlannedLease(
                    node_id=p.node_id,
                    gpus={index: units / UNIT for index, units in p.gpus.items()},
                    verdicts=verdicts_of(p.verdicts),
                )
                for p in made.placements
            )
        )


def _state(story: Story, waits: bool) -> str:
    if story.fit is Fit.NEVER:
        return "INFEASIBLE"
    return "QUEUED" if waits else ("FITS" if story.fit is Fit.FITS else "BUSY")


def not_loaded() -> NotReadyError:
    """Return the error of a leader that does not know its cluster yet."""
    return NotReadyError("the scheduler leads and is asking the nodes what they hold")
