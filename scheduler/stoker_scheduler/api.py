"""The scheduler's HTTP API: the table of its routes, and the way from each request to the engine and back.

It decides nothing. A scheduler that does not lead answers 409 ``not_leader`` with the leader's URL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.resources import UNIT
from stoker_scheduler.core.placement.explain import explain, starting_text
from stoker_scheduler.core.placement.feasibility import NodeFit
from stoker_scheduler.core.placement.plan import PlacementRequest, plan
from stoker_scheduler.wire_types import (
    lease_of,
    queue_of,
    requirements_of,
    resources_of,
    setup_of,
    verdicts_of,
)
from stoker_wire.http.paging import page_of
from stoker_wire.http.server.routes import Route
from stoker_wire.messages.cluster import (
    BlockLease,
    ClusterResources,
    Demand,
    Lease,
    LeaseReply,
    LeaseRequest,
    LeaseUpdates,
    OwnerPoll,
    ReleaseLeases,
)
from stoker_wire.messages.common import Empty
from stoker_wire.messages.control import Explanation, LeaseQuery, ListQuery, Page, QueueEntry
from stoker_wire.messages.kernels import kernel_set
from stoker_wire.messages.scheduling import PlannedLease, PlanReply, PlanRequest

if TYPE_CHECKING:
    from stoker_scheduler.core.state import State
    from stoker_scheduler.engine import Engine
    from stoker_wire.http.server.service import Request

ANSWER_MARGIN_S = 0.3
"""A long poll ends so much before the caller's deadline."""


class Api:
    """Handlers; ``engine()`` returns the engine of the present term, or raises why there is none."""

    def __init__(self, engine: Callable[[], Engine], *, lease_ttl_s: float) -> None:
        self._engine = engine
        self._poll_limit_s = lease_ttl_s / 3

    async def request_leases(self, req: Request) -> LeaseReply:
        """Wait until some leases of a demand are granted, or the wait has passed."""
        body: LeaseRequest = req.body
        wait_s = max(0.0, min(body.wait_s, req.deadline_s - ANSWER_MARGIN_S))
        req.waiting_for(f"{body.count} x {body.demand.name or body.demand.kind} to be placed")
        return await self._engine().request_leases(body, wait_s)

    async def release_leases(self, req: Request) -> Empty:
        """Return leases to the pool, or end their workers."""
        engine, body = self._engine(), req.body
        engine.apply(
            ev.LeaseReleased(
                at_s=engine.now(), lease_ids=body.lease_ids, kill=body.kill, reason=body.reason
            )
        )
        return Empty()

    async def set_blocked(self, req: Request) -> Empty:
        """Free the CPU of a lease whose worker waits in get, or allocate it again.

        A lease that is gone is no error: its worker is ending.
        """
        engine, lease_id = self._engine(), req.path["lease_id"]
        if req.body.blocked:
            engine.apply(ev.LeaseBlocked(at_s=engine.now(), lease_id=lease_id))
        else:
            engine.apply(ev.LeaseUnblocked(at_s=engine.now(), lease_id=lease_id))
        return Empty()

    async def poll_owner(self, req: Request) -> LeaseUpdates:
        """Renew an owner's leases, and wait for preemptions and losses; well within a lease's life."""
        body: OwnerPoll = req.body
        wait_s = max(0.0, min(body.wait_s, req.deadline_s - ANSWER_MARGIN_S, self._poll_limit_s))
        return await self._engine().poll(req.path["owner_id"], body, wait_s)

    async def list_leases(self, req: Request) -> Page[Lease]:
        """Return the leases of one job, owner or node, or all."""
        query: LeaseQuery = req.query
        matching = (
            lease_of(lease)
            for lease in self._engine().state.leases.values()
            if query.job_id in ("", lease.job_id)
            and query.owner_id in ("", lease.owner_id)
            and query.node_id in ("", lease.node_id)
        )
        return page_of(
            matching,
            query,
            key=lambda lease: lease.lease_id,
            created=lambda lease: lease.granted_at_s,
        )

    async def get_resources(self, req: Request) -> ClusterResources:
        """Return the resources of the cluster and of each node, in all and available."""
        return resources_of(self._engine().state)

    async def list_queue(self, req: Request) -> Page[QueueEntry]:
        """Return the requests that wait, in the order of the queue."""
        engine = self._engine()
        entries = queue_of(engine.state, engine.requests, engine.now())
        return page_of(entries, req.query, key=lambda entry: f"{entry.position:08}")

    async def explain_demand(self, req: Request) -> Explanation:
        """Return why a demand waits, on which nodes it could run, and what would have to change."""
        engine = self._engine()
        return _explanation(engine.state, req.body, engine.now())

    async def plan_demands(self, req: Request) -> PlanReply:
        """Return the nodes on which demands would be placed, without allocating anything."""
        body: PlanRequest = req.body
        state = self._engine().state
        requests = [
            PlacementRequest(
                requirements_of(demand, at=f"demands.{index}."),
                demand.locality,
                kernel_set(demand.runtime_env),
            )
            for index, demand in enumerate(body.demands)
        ]
        placements = plan(state.nodes.values(), requests, state.policy.score).placements
        return PlanReply(
            placements=tuple(
                PlannedLease(
                    node_id=placement.node_id,
                    gpus={index: units / UNIT for index, units in placement.gpus.items()},
                    verdicts=verdicts_of(placement.verdicts),
                )
                for placement in placements
            )
        )


def _explanation(state: State, demand: Demand, now_s: float) -> Explanation:
    requirements = requirements_of(demand, at="")
    kernels = kernel_set(demand.runtime_env)
    placement = explain(state, requirements, demand.name, demand.locality, kernels)
    subqueue = state.queue.subqueues.get(requirements)
    waiting = [] if subqueue is None else list(subqueue.pending())
    waiting = [pending for pending in waiting if pending.request.job_id == demand.job_id]
    position, waited_s, summary, remedy = None, 0.0, placement.summary, placement.remedy
    if waiting:
        first = min(waiting, key=lambda pending: (pending.since_s, pending.seq))
        position = state.queue.position(first)
        waited_s = max(0.0, now_s - first.since_s)
        summary += f"; it has waited {waited_s:.1f} s with {position} ahead in the queue"
    setup = setup_of(demand.runtime_env)
    starting = starting_text(state, requirements, demand.job_id, setup, now_s=now_s)
    if starting:
        summary = f"{starting}; {summary}" if waiting else starting
        remedy = remedy if waiting else "none needed: it starts when that is done"
    return Explanation(
        subject=demand.name,
        state=_explained_state(placement.fit, bool(waiting)),
        summary=summary,
        remedy=remedy,
        waited_s=waited_s,
        queue_position=position,
        verdicts=verdicts_of(placement.verdicts),
        demand=demand,
    )


def _explained_state(fit: NodeFit, waits: bool) -> str:
    if fit is NodeFit.NEVER:
        return "INFEASIBLE"
    return "QUEUED" if waits else ("FITS" if fit is NodeFit.FITS else "BUSY")


# Every route is there before the scheduler leads: it then answers with the leader, or why there is none.
# Events name what they are about and may be repeated, so none needs an Idempotency-Key; a request for
# leases is idempotent by its request_id, which also survives a retry under another key.
ROUTES = (
    Route(
        "POST",
        "/v1/leases",
        Api.request_leases,
        body=LeaseRequest,
        reply=LeaseReply,
        summary="Request leases",
        idempotency=False,
        before_ready=True,
    ),
    Route(
        "POST",
        "/v1/leases/release",
        Api.release_leases,
        body=ReleaseLeases,
        reply=Empty,
        summary="Release leases",
        idempotency=False,
        before_ready=True,
    ),
    Route(
        "POST",
        "/v1/leases/{lease_id}/blocked",
        Api.set_blocked,
        body=BlockLease,
        reply=Empty,
        summary="Mark lease blocked or unblocked",
        idempotency=False,
        before_ready=True,
    ),
    Route(
        "POST",
        "/v1/owners/{owner_id}/poll",
        Api.poll_owner,
        body=OwnerPoll,
        reply=LeaseUpdates,
        summary="Renew leases and await orders",
        idempotency=False,
        before_ready=True,
    ),
    Route(
        "GET",
        "/v1/leases",
        Api.list_leases,
        query=LeaseQuery,
        reply=Page[Lease],
        summary="List leases",
        before_ready=True,
    ),
    Route(
        "GET",
        "/v1/resources",
        Api.get_resources,
        reply=ClusterResources,
        summary="Get cluster resources",
        before_ready=True,
    ),
    Route(
        "GET",
        "/v1/queue",
        Api.list_queue,
        query=ListQuery,
        reply=Page[QueueEntry],
        summary="List queued requests",
        before_ready=True,
    ),
    Route(
        "POST",
        "/v1/explain",
        Api.explain_demand,
        body=Demand,
        reply=Explanation,
        summary="Explain placement of a demand",
        idempotency=False,
        before_ready=True,
    ),
    Route(
        "POST",
        "/v1/plan",
        Api.plan_demands,
        body=PlanRequest,
        reply=PlanReply,
        summary="Plan placement of demands (dry run)",
        idempotency=False,
        before_ready=True,
    ),
)
