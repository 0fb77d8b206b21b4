"""The controller of elastic jobs: a round at times, and between rounds the steps that carry it out.

A round shares the room out among all elastic jobs (:mod:`stoker_scheduler.core.elastic.rounds`), in a thread
and on a copy of the state; each look then orders what ``settle`` says (``core.elastic.generations``). The gcs
owns the jobs' generations and the placement groups: an order that comes too late is refused there. numpy is
imported with the first elastic job.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker_scheduler.core.dry_run.fork import size_of
from stoker_scheduler.core.elastic import generations as gen
from stoker_scheduler.core.elastic.targets import Targets
from stoker_scheduler.elastic.directory import bundle_of, new_group_id, places_of
from stoker_scheduler.elastic.plans import Cluster, filters_of, plan_round
from stoker_wire.errors import ConflictError, NotFoundError, StokerError
from stoker_wire.messages.elastic import (
    ElasticState,
    MakeOffer,
    Replica,
    WithdrawReplicas,
)
from stoker_wire.messages.groups import (
    CreatePlacementGroup,
    PlacementGroup,
    ReleaseBundles,
    Reschedule,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker_scheduler.core.elastic.allocations import Allocation
    from stoker_scheduler.core.elastic.jobs import ElasticPolicy
    from stoker_scheduler.core.elastic.rounds import Round
    from stoker_scheduler.core.model.requirements import Requirements
    from stoker_wire.http.client.client import Client
    from stoker_wire.messages.elastic import Scaling
    from stoker_wire.messages.groups import Bundle

_log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often it looks whether something is to be done."""
SOON_S = 0.2
"""How soon it looks again after an order, whose next step may be possible by then; doubled for each more."""
CALL_S = 10.0
MAX_SIZE = 100_000
"""Nodes, leases and requests of a state that is copied for a round, in about a second."""
ROUND_S = 60.0
"""The most that a policy may take, a plug-in too."""
MAX_PAUSE_S = 1800.0


@dataclass(frozen=True, slots=True)
class Seen:
    """The facts on which a round depends, but for hints: when they change, the next one comes early."""

    jobs: frozenset[tuple[str, object, int]]
    nodes: frozenset[tuple[str, int, object]]
    waiting: frozenset[str]


class ElasticController:
    """The rounds of one term, and the steps between them.

    A round comes every ``interval_s``, and earlier, though not within ``least_s`` of the one before, when a
    job comes or ends, a node does, or other work waits.
    """

    def __init__(
        self,
        gcs: Client,
        *,
        engine: Cluster,
        interval_s: float,
        least_s: float,
    ) -> None:
        self.directory = engine.elastic
        self.last: Round | None = None
        self._gcs = gcs
        self._engine = engine
        self._interval_s = interval_s
        self._least_s = least_s
        self._targets = Targets()
        self._seen: Seen | None = None
        self._waited: frozenset[str] = frozenset()
        """The requests of other work that waited at the last look."""
        self._round_at_s = -interval_s
        self._policies: dict[str, ElasticPolicy] = {}
        self._paused_until_s: dict[str, float] = {}
        """Jobs that let offers pass are offered no more for a while, each time for longer."""

    async def run(self) -> None:
        """Look until cancelled."""
        loop, pause_s = asyncio.get_running_loop(), LOOK_S
        while True:
            has_ordered = False
            try:
                if pause_s == LOOK_S:
                    has_ordered = await self.look(loop.time())
                else:
                    has_ordered = await self.step()
            except Exception:
                # Of one job, or one policy, too little is known to give all others up.
                _log.exception("elastic jobs keep what they have until the next look")
            soon_s = SOON_S if pause_s == LOOK_S else 2 * pause_s
            pause_s = min(soon_s, LOOK_S) if has_ordered else LOOK_S
            await asyncio.sleep(pause_s)

    async def look(self, now_s: float) -> bool:
        """Have a round if one is due, then order the next steps; returns whether there were any.

        ``now_s`` is of a clock that never jumps.
        """
        for group_id in self.directory.strays():
            await self._obey(gen.Release(group_id))
        if not self.directory.jobs:
            return False
        seen = self._look_around()
        waited_s = now_s - self._round_at_s
        if waited_s >= self._interval_s or (seen != self._seen and waited_s >= self._least_s):
            self._seen, self._round_at_s = seen, now_s
            await self._round()
        return await self.step()

    async def step(self) -> bool:
        """Order the next steps towards what the last round has decided; returns whether there were any."""
        orders = self.orders()
        if orders:
            await asyncio.gather(*(self._obey(order) for order in orders))
        return bool(orders)

    def _look_around(self) -> Seen:
        state = self._engine.state
        waiting = frozenset(one.request_id for one in state.queue.pending())
        waited, self._waited = self._waited, waiting
        return Seen(
            jobs=frozenset(
                (job.job_id, elastic.scaling.max_replicas, elastic.lost)
                for job, elastic in self.directory.running()
            ),
            nodes=frozenset(
                (node.node_id, node.spec.incarnation, (node.spec.health, node.spec.closed))
                for node in state.nodes.values()
            ),
            waiting=waiting & waited,  # what has its turn within a second needs no round
        )

    # Rounds

    async def _round(self) -> None:
        size = size_of(self._engine.state)
        if size > MAX_SIZE:
            _log.warning("elastic jobs keep what they have: %d nodes, leases and requests", size)
            return
        try:
            async with asyncio.timeout(ROUND_S):
                self.last = await plan_round(self._engine, self._policies)
        except TimeoutError:
            policy = self._engine.elastic_policy
            _log.error(
                "elastic jobs keep what they have: a round of the policy %s takes over %g s; "
                "set STOKER_ELASTIC_POLICY to another",
                policy,
                ROUND_S,
            )
            return
        self._targets.decide(self.last.targets)
        targets, paused = self._targets.by_job, self._paused_until_s
        self._paused_until_s = {name: paused[name] for name in paused if name in targets}
        for one in self.last.pools:
            if one.error:
                _log.error("the elastic policy of queue %s failed: %s", one.pool.queue, one.error)

    # Steps

    def orders(self) -> list[gen.Order]:
        """Return the next steps towards what the last round has decided."""
        from stoker_scheduler.core.elastic.rooms import Free
        from stoker_scheduler.elastic.candidates import requirements_of_replica

        now_s = self._engine.now()
        found: list[gen.Order] = []
        by_shape: dict[Requirements, list[str]] = {}
        for job, state in self.directory.running():
            shape = requirements_of_replica(state.scaling, filters_of(self._engine, job))
            by_shape.setdefault(shape, []).append(job.job_id)
        free = Free.of(self._engine.state)
        for shape, job_ids in by_shape.items():
            targets = {
                job_id: self._targets.by_job[job_id]
                for job_id in job_ids
                if job_id in self._targets.by_job and now_s >= self._paused_until_s.get(job_id, 0.0)
            }
            rooms = free.rooms(shape)
            standings = list(map(self._targets.seen, self.directory.standings(job_ids)))
            orders = gen.settle(standings, targets, rooms, now_s)
            for order in orders:
                if isinstance(order, gen.Reserve):
                    free.take(shape, order.wanted)
            found += orders
        return found

    async def _obey(self, order: gen.Order) -> None:
        """Carry one order out. One that is refused came too late: the next look sees why."""
        try:
            match order:
                case gen.Reserve():
                    await self._reserve(order)
                case gen.Offer():
                    await self._offer(order)
                case gen.Release():
                    await self._release(order)
                case gen.Withdraw():
                    await self._withdraw(order)
                case gen.Preempt():
                    reason = "it did not answer within its grace: it goes on from its last commit"
                    await self._take(order, reason)
                case gen.Lose():
                    await self._take(order, "the nodes of these replicas are gone")
                case gen.TakeBack():
                    await self._take(order, "the job has given them back")
        except (ConflictError, NotFoundError) as error:
            _log.info("%s was refused: %s", type(order).__name__.lower(), error)
        except StokerError as error:
            _log.warning("%s is tried again: %s", type(order).__name__.lower(), error)

    async def _reserve(self, order: gen.Reserve) -> None:
        job = self.directory.jobs[order.job_id]
        assert job.elastic is not None
        scaling = job.elastic.scaling
        body = CreatePlacementGroup(
            group_id=new_group_id(),
            job_id=job.job_id,
            bundles=bundles_of(scaling, order.wanted),
            namespace=job.namespace,
            reschedule=Reschedule.NEVER,
        )
        group = await self._gcs.call(
            "POST", "/v1/placement-groups", body, reply=PlacementGroup, timeout_s=CALL_S
        )
        self.directory.put_group(group)

    async def _offer(self, order: gen.Offer) -> None:
        body = MakeOffer(
            version=order.version,
            replicas=_replicas(order.places),
            answer_within_s=order.answer_within_s,
            reason=self._reason(order),
            speedup=self._speedup(order.job_id),
        )
        await self._change(order.job_id, "offer", body)

    def _reason(self, order: gen.Offer) -> str:
        job = self.directory.jobs[order.job_id]
        before = len(job.elastic.replicas) if job.elastic else 0
        more, count = len(order.places) - before, len(order.places)
        hints = job.elastic.hints if job.elastic else None
        if more > 0 and hints is not None and hints.spares:
            return "newcomers of replicas that are replaced come first"
        if not count:
            return "others need its replicas more"
        if more > 0:
            return f"{more} more are worth most to it"
        return f"{-more} are worth more to others" if more else "they are elsewhere"

    def _speedup(self, job_id: str) -> float | None:
        for one in self.last.pools if self.last is not None else ():
            if one.worth is not None and job_id in one.worth.jobs:
                return one.worth.jobs[job_id].speedup
        return None

    async def _withdraw(self, order: gen.Withdraw) -> None:
        state = await self._change(
            order.job_id,
            "withdraw",
            WithdrawReplicas(
                version=order.version,
                reason="it was not answered in time" if order.unanswered else "it is out of date",
            ),
        )
        if order.unanswered:
            pause_s = min(MAX_PAUSE_S, self._interval_s * 2.0 ** min(state.unanswered, 10))
            self._paused_until_s[order.job_id] = self._engine.now() + pause_s

    async def _take(self, order: gen.Preempt | gen.Lose | gen.TakeBack, reason: str) -> None:
        body = WithdrawReplicas(
            version=order.version,
            replicas=_replicas(order.places),
            preempted=isinstance(order, gen.Preempt),
            returned=isinstance(order, gen.TakeBack),
            reason=reason,
        )
        state = await self._change(order.job_id, "withdraw", body)
        if isinstance(order, gen.TakeBack):
            self._targets.took_back(order.job_id, places_of(state.replicas))
            nodes = {place.node_id for place in order.places}
            self.directory.note_returned(order.job_id, nodes, self._engine.now())

    async def _change(
        self, job_id: str, what: str, body: MakeOffer | WithdrawReplicas
    ) -> ElasticState:
        state = await self._gcs.call(
            "POST", f"/v1/jobs/{job_id}/{what}", body, reply=ElasticState, timeout_s=CALL_S
        )
        self.directory.put_state(job_id, state)
        return state

    async def _release(self, order: gen.Release) -> None:
        path = f"/v1/placement-groups/{order.group_id}"
        if order.bundles:
            body = ReleaseBundles(bundles=order.bundles)
            group = await self._gcs.call(
                "POST", f"{path}/release", body, reply=PlacementGroup, timeout_s=CALL_S
            )
        else:
            group = await self._gcs.call("DELETE", path, reply=PlacementGroup, timeout_s=CALL_S)
        self.directory.put_group(group)


def bundles_of(scaling: Scaling, wanted: Allocation) -> tuple[Bundle, ...]:
    """Return the bundles of replicas, each pinned to its node."""
    return tuple(bundle_of(scaling, node_id) for node_id, count in wanted for _ in range(count))


def _replicas(places: Sequence[gen.Place]) -> tuple[Replica, ...]:
    return tuple(
        Replica(group_id=one.group_id, bundle=one.bundle, node_id=one.node_id) for one in places
    )
