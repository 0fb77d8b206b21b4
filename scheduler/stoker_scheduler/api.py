"""The scheduler's HTTP API: the table of its routes, and the way from each request to the engine and back.

It decides nothing. A scheduler that does not lead answers 409 ``not_leader`` with the leader's URL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.dry_run.diagnosis import diagnose
from stoker_scheduler.core.dry_run.fork import fork, size_of
from stoker_scheduler.core.dry_run.plan import MAX_EXPLAINED, Outcome, plan
from stoker_scheduler.core.dry_run.remedies import MAX_SIZE
from stoker_scheduler.core.model.queues import DEFAULT_QUEUE
from stoker_scheduler.core.queueing.standing import standing
from stoker_scheduler.elastic.plans import elastic_plan_of, plan_round
from stoker_scheduler.jobs import JobFacts
from stoker_scheduler.wire_types import (
    bundles_event,
    explanation_of,
    lease_of,
    planned_of,
    queue_explanation_of,
    queue_of,
    request_event,
    requirements_of,
    resources_of,
    usage_of,
)
from stoker_wire.errors import BadRequestError, ForbiddenError, NotFoundError, UnavailableError
from stoker_wire.http.paging import page_of
from stoker_wire.http.principals import ADMINS, GCS, JOBS
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
from stoker_wire.messages.control import (
    ExplainQuery,
    Explanation,
    LeaseQuery,
    ListQuery,
    Page,
    QueueEntry,
)
from stoker_wire.messages.elastic import ElasticPlan
from stoker_wire.messages.groups import PlanReply, PlanRequest, RequestBundles
from stoker_wire.messages.queues import QueueExplanation, QueueUsage

if TYPE_CHECKING:
    from stoker_scheduler.core.state import State
    from stoker_scheduler.engine import Engine
    from stoker_wire.http.server.service import Request

PLANNED_WAIT_S = 3600.0
"""A planned request does not give up while it is planned."""
MAX_PLANNED_SIZE = 100_000
"""Nodes, leases and requests of a state that is copied for a plan, in about a second."""
MAX_REMEDIED = 3
"""Requests of one plan for which remedies are looked for: each takes some copies of the state."""
T = TypeVar("T")
UNPLACED = (Outcome.WAITS, Outcome.REJECTED)
ANSWER_MARGIN_S = 0.3
"""A long poll ends so much before the caller's deadline."""


class Api:
    """Handlers; ``engine()`` returns the engine of the present term, or raises why there is none."""

    def __init__(self, engine: Callable[[], Engine], *, lease_ttl_s: float) -> None:
        self._engine = engine
        self._one_fork = asyncio.Semaphore()
        self._poll_limit_s = lease_ttl_s / 3

    async def request_leases(self, req: Request) -> LeaseReply:
        """Wait until some leases of a demand are granted, or the wait has passed."""
        body: LeaseRequest = req.body
        _check_job(req, body.demand.job_id)
        if (body.actor or body.driver) and not req.principal.owns_all:
            raise ForbiddenError(
                f"{req.principal} may not start actors and drivers\nthe gcs does: POST /v1/actors there",
                field="driver" if body.driver else "actor",
            )
        if body.acts_for != req.principal.actor_id:
            body = msgspec.structs.replace(body, acts_for=req.principal.actor_id)
        wait_s = max(0.0, min(body.wait_s, req.deadline_s - ANSWER_MARGIN_S))
        req.waiting_for(f"{body.count} x {body.demand.name or body.demand.kind} to be placed")
        return await self._engine().request_leases(body, wait_s)

    async def request_bundles(self, req: Request) -> LeaseReply:
        """Wait until all bundles are held, or the wait has passed."""
        body: RequestBundles = req.body
        wait_s = max(0.0, min(body.wait_s, req.deadline_s - ANSWER_MARGIN_S))
        req.waiting_for(f"{len(body.bundles)} bundles of {body.group_id} to be placed")
        return await self._engine().request_bundles(body, wait_s)

    async def release_leases(self, req: Request) -> Empty:
        """Return leases to the pool, or end their workers."""
        engine, body = self._engine(), req.body
        _check_leases(req, engine, body.lease_ids)
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
        _check_leases(req, engine, (lease_id,))
        if req.body.blocked:
            engine.apply(ev.LeaseBlocked(at_s=engine.now(), lease_id=lease_id))
        else:
            engine.apply(ev.LeaseUnblocked(at_s=engine.now(), lease_id=lease_id))
        return Empty()

    async def poll_owner(self, req: Request) -> LeaseUpdates:
        """Renew an owner's leases, and wait for preemptions and losses; well within a lease's life."""
        body: OwnerPoll = req.body
        wait_s = max(0.0, min(body.wait_s, req.deadline_s - ANSWER_MARGIN_S, self._poll_limit_s))
        engine, owner_id = self._engine(), req.path["owner_id"]
        _check_leases(req, engine, engine.state.lease_index.of(owner_id))
        return await engine.poll(owner_id, body, wait_s)

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

    async def list_queue_usage(self, req: Request) -> Page[QueueUsage]:
        """Return what the work of each queue has, can claim and waits for."""
        return page_of(usage_of(self._engine().state), req.query, key=lambda usage: usage.name)

    async def explain_queue(self, req: Request) -> QueueExplanation:
        """Return what a queue has, borrows and lends, who waits in it, and what binds it."""
        engine, name = self._engine(), req.path["name"]
        usage = next((one for one in usage_of(engine.state) if one.name == name), None)
        if usage is None:
            raise NotFoundError(f"no work is in queue {name!r}, and it has no settings")
        return queue_explanation_of(standing(engine.state, name), usage, engine.now())

    async def explain_demand(self, req: Request) -> Explanation:
        """Return why a demand waits, on which nodes it could run, and what would have to change."""
        demand: Demand = req.body
        requirements_of(demand, at="")  # the field of its error is one of this body
        asked = LeaseRequest(request_id="r_explain", owner_id="", demand=demand, count=1)
        explanation = await self._explain(
            req, lambda job, at_s: _event(asked, job, at_s), demand.job_id
        )
        return msgspec.structs.replace(explanation, subject=demand.name, demand=demand)

    async def explain_bundles(self, req: Request) -> Explanation:
        """Return why bundles of a placement group wait, and what would have to change."""
        body: RequestBundles = req.body
        body = msgspec.structs.replace(body, name=body.name or body.group_id)
        explanation = await self._explain(
            req, lambda job, at_s: bundles_event(body, job, at_s=at_s, wait_s=0.0), body.job_id
        )
        return msgspec.structs.replace(explanation, subject=body.group_id)

    async def _explain(
        self, req: Request, event: Callable[[JobFacts, float], ev.LeaseRequested], job_id: str
    ) -> Explanation:
        engine, query = self._engine(), req.query
        request = event(engine.jobs.get(job_id) or JobFacts(), engine.now())
        request = await _consulted(engine, request)
        now_s = engine.now()
        if not query.remedies or size_of(engine.state) > MAX_SIZE:
            diagnosis = diagnose(engine.state, request, at_s=now_s, try_remedies=False)
            return explanation_of(diagnosis, subject="", now_s=now_s)

        def on(twin: State) -> Explanation:
            diagnosis = diagnose(twin, request, at_s=now_s, try_remedies=True)
            return explanation_of(diagnosis, subject="", now_s=now_s)

        return await self._on_fork(engine.state, on)

    async def _on_fork(self, state: State, run: Callable[[State], T]) -> T:
        """Run what is tried on a copy of the state in a thread, one at a time.

        While that goes on the scheduler waits for milliseconds at a time, as for any thread.
        """
        await self._one_fork.acquire()
        try:
            tried = asyncio.get_running_loop().run_in_executor(None, run, fork(state))
        except BaseException:
            self._one_fork.release()
            raise
        # A caller that goes away does not end it.
        tried.add_done_callback(lambda _: self._one_fork.release())
        return await asyncio.shield(tried)

    async def plan_round(self, req: Request) -> ElasticPlan:
        """Return what a round of elastic jobs would decide now, and what their replicas are worth."""
        engine = self._engine()
        if not engine.elastic.jobs:
            return ElasticPlan(at_s=engine.now())
        if size_of(engine.state) > MAX_PLANNED_SIZE:
            raise UnavailableError("the cluster is too large to plan a round\nask for less often")
        return elastic_plan_of(await plan_round(engine))

    async def plan_demands(self, req: Request) -> PlanReply:
        """Return what would become of demands, and on which nodes, without side effects."""
        body: PlanRequest = req.body
        if not body.demands and not body.bundles:
            raise BadRequestError("demands: give one at least, or bundles", field="demands")
        engine = self._engine()
        size = size_of(engine.state)
        if size > MAX_PLANNED_SIZE:
            raise UnavailableError(
                f"no plan can be made of {size} nodes, leases and requests, as the copy would hold the "
                f"scheduler up\nplan when there are at most {MAX_PLANNED_SIZE}"
            )
        now_s = engine.now()
        job = JobFacts(body.queue or DEFAULT_QUEUE, body.user, body.priority)
        if body.job_id:
            known = engine.jobs.get(body.job_id)
            if known is None:
                raise NotFoundError(f"job_id: no job {body.job_id!r} is running or waiting")
            job = known
        requests = []
        if body.bundles:
            bundles = RequestBundles(
                request_id="r_plan",
                group_id="pg_plan",
                job_id=body.job_id,
                bundles=body.bundles,
                strategy=body.strategy,
                indices=tuple(range(len(body.bundles))),
            )
            requests.append(bundles_event(bundles, job, at_s=now_s, wait_s=PLANNED_WAIT_S))
        for index, demand in enumerate(body.demands):
            requirements_of(demand, at=f"demands.{index}.")
            of_demand = engine.jobs.get(demand.job_id) if demand.job_id else None
            asked = LeaseRequest(
                request_id=f"r_plan{index}", owner_id="plan", demand=demand, count=1
            )
            requests.append(_event(asked, of_demand or job, now_s))
        requests = [await _consulted(engine, request) for request in requests]
        few = len(requests) <= MAX_REMEDIED

        def on(twin: State) -> PlanReply:
            placements = []
            for number, (one, request) in enumerate(
                zip(plan(twin, requests), requests, strict=True)
            ):
                diagnosis = None
                if one.outcome in UNPLACED and number < MAX_EXPLAINED:
                    diagnosis = diagnose(twin, request, at_s=now_s, try_remedies=few)
                placements.append(planned_of(one, diagnosis))
            return PlanReply(placements=tuple(placements))

        return await self._on_fork(engine.state, on)


def _check_job(req: Request, job_id: str) -> None:
    """Raise ForbiddenError for a process of another job than the one that a request is about."""
    if not req.principal.owns_all and job_id != req.principal.job_id:
        raise ForbiddenError(
            f"{req.principal} may not ask for leases of {job_id or 'no job'}", field="job_id"
        )


def _check_leases(req: Request, engine: Engine, lease_ids: Iterable[str]) -> None:
    """Raise ForbiddenError if one of the leases is of another job than that of the caller."""
    if req.principal.owns_all:
        return
    for lease_id in lease_ids:
        lease = engine.state.leases.get(lease_id)
        if lease is not None and lease.job_id != req.principal.job_id:
            raise ForbiddenError(f"{lease_id} is not {req.principal}'s", field="lease_ids")


def _event(asked: LeaseRequest, job: JobFacts, at_s: float) -> ev.LeaseRequested:
    return request_event(asked, job, at_s=at_s, wait_s=PLANNED_WAIT_S)


async def _consulted(engine: Engine, request: ev.LeaseRequested) -> ev.LeaseRequested:
    """Have the extenders asked for a request that will not be made; return it with those that count."""
    consulted = await engine.consult(request.requirements)
    return msgspec.structs.replace(request, requirements=consulted)


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
        roles=JOBS | GCS,
        summary="Request leases",
        idempotency=False,
        before_ready=True,
    ),
    Route(
        "POST",
        "/v1/bundles",
        Api.request_bundles,
        body=RequestBundles,
        reply=LeaseReply,
        roles=GCS,
        summary="Request bundles of a placement group",
        idempotency=False,
        before_ready=True,
    ),
    Route(
        "POST",
        "/v1/leases/release",
        Api.release_leases,
        body=ReleaseLeases,
        reply=Empty,
        roles=JOBS | GCS,
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
        roles=JOBS,
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
        roles=JOBS,
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
        roles=GCS | ADMINS,
        summary="List leases",
        before_ready=True,
    ),
    Route(
        "GET",
        "/v1/resources",
        Api.get_resources,
        reply=ClusterResources,
        roles=GCS | ADMINS,
        summary="Get cluster resources",
        before_ready=True,
    ),
    Route(
        "GET",
        "/v1/queue-usage",
        Api.list_queue_usage,
        query=ListQuery,
        reply=Page[QueueUsage],
        roles=GCS | ADMINS,
        summary="List what queues have, can claim and wait for",
        before_ready=True,
    ),
    Route(
        "GET",
        "/v1/queues/{name}/explain",
        Api.explain_queue,
        reply=QueueExplanation,
        roles=GCS | ADMINS,
        summary="Explain what queue has, and what waits in it",
        before_ready=True,
    ),
    Route(
        "GET",
        "/v1/queue",
        Api.list_queue,
        query=ListQuery,
        reply=Page[QueueEntry],
        roles=GCS | ADMINS,
        summary="List queued requests",
        before_ready=True,
    ),
    Route(
        "POST",
        "/v1/explain",
        Api.explain_demand,
        cost="expensive",
        body=Demand,
        query=ExplainQuery,
        reply=Explanation,
        roles=GCS | JOBS | ADMINS,
        summary="Explain placement of a demand",
        idempotency=False,
        before_ready=True,
    ),
    Route(
        "POST",
        "/v1/bundles/explain",
        Api.explain_bundles,
        body=RequestBundles,
        query=ExplainQuery,
        reply=Explanation,
        roles=GCS | ADMINS,
        summary="Explain placement of a placement group's bundles",
        idempotency=False,
        before_ready=True,
    ),
    Route(
        "GET",
        "/v1/elastic-plan",
        Api.plan_round,
        cost="expensive",
        reply=ElasticPlan,
        roles=GCS | ADMINS,
        summary="Plan a round of elastic jobs, and say what their replicas are worth",
        before_ready=True,
    ),
    Route(
        "POST",
        "/v1/plan",
        Api.plan_demands,
        cost="expensive",
        body=PlanRequest,
        reply=PlanReply,
        roles=GCS | ADMINS,
        summary="Plan where demands would go, and whom they would preempt",
        idempotency=False,
        before_ready=True,
    ),
)
