"""Placement of actors: one long poll of the scheduler per actor without a worker.

Runs on the leading replica, started by the reconciler; the rules decide whether the grant is still
wanted, and one that is not is released.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.registry.actors import rules
from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.registry.leases import OWNER, POLL_S, Refused, request_lease
from stoker_gcs.registry.worker_exits import find_exit
from stoker_wire.errors import InfeasibleError
from stoker_wire.messages.cluster import ActorSpec, GrantedLease, LeaseKind, LeaseRequest
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.work import Actor, ActorState, CreateActor

if TYPE_CHECKING:
    from stoker_gcs.peer_clients import PeerClients
    from stoker_gcs.registry.actors.registry import ActorRegistry
    from stoker_gcs.registry.leases import LeaseReleaser
    from stoker_gcs.state.records import StateStore, Transition

AT_ONCE = 1024
INFEASIBLE_RETRY_S = 0.5
LOOK_S = 5.0


class ActorPlacement:
    """Placement of actors on workers; a restart waits ``restart_grace_s`` for a node that fits."""

    def __init__(
        self,
        state: StateStore,
        peers: PeerClients,
        registry: ActorRegistry,
        releaser: LeaseReleaser,
        *,
        restart_grace_s: float,
    ) -> None:
        self._state = state
        self._peers = peers
        self._registry = registry
        self._releaser = releaser
        self._restart_grace_s = restart_grace_s
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def place(self, actor_id: str) -> None:
        """Put one actor on a worker, once its pause is over, or end it with the scheduler's reason."""
        await self._pause(actor_id)
        async with self._slots:
            actor = await self._state.get(ACTORS, actor_id)
            if not rules.waits(actor):
                await self.end_if_exited(actor)
                return
            spec = await self._registry.spec(actor_id)
            until = asyncio.get_running_loop().time() + self._restart_grace_s
            while True:
                result = await self._request(actor, spec)
                if (
                    isinstance(result, Refused)
                    and isinstance(result.error, InfeasibleError)
                    and actor.state is ActorState.RESTARTING
                    and asyncio.get_running_loop().time() < until
                ):
                    # The node it ran on may come back, and with it what it needs.
                    await self._delayed(actor_id, str(result.error))
                    await asyncio.sleep(INFEASIBLE_RETRY_S)
                    continue
                break
            if isinstance(result, Refused):
                await self._refused(actor, result)
            elif result is not None:
                await self._record(actor, result)

    async def _pause(self, actor_id: str) -> None:
        """Wait until an actor that restarts may do so, or has ended."""
        while True:
            actor = await self._state.get(ACTORS, actor_id)
            if not rules.waits(actor) or actor.restart_at_s is None:
                return
            left_s = actor.restart_at_s - self._state.now()
            if left_s <= 0:
                return
            await self._delayed(actor_id, f"restarts after a pause: {_why(actor)}")
            # It may be killed meanwhile, or the clock be set.
            await self._state.wait_for(
                ACTORS, actor_id, lambda one: not rules.waits(one), min(left_s, LOOK_S)
            )

    async def _request(self, actor: Actor, spec: CreateActor) -> GrantedLease | Refused | None:
        async def still_wanted() -> bool:
            row = await self._state.find(ACTORS, actor.actor_id)
            return (
                row is not None
                and rules.waits(row.record)
                and row.record.incarnation == actor.incarnation
            )

        async def on_delayed(reason: str) -> None:
            await self._delayed(actor.actor_id, reason)

        demand = msgspec.structs.replace(
            spec.demand,
            kind=LeaseKind.ACTOR,
            job_id=rules.lease_job(actor),
            name=spec.demand.name or actor.name or actor.class_name,
        )
        request = LeaseRequest(
            request_id=f"r_{actor.actor_id}.{actor.incarnation}",
            owner_id=OWNER,
            demand=demand,
            wait_s=POLL_S,
            actor=ActorSpec(
                actor_id=actor.actor_id,
                incarnation=actor.incarnation,
                class_name=actor.class_name,
                payload=spec.payload,
                restartable=actor.restarts_left(oom=True) != 0,
                saves_state=actor.saves_state,
            ),
        )
        return await request_lease(
            self._peers, request, still_wanted=still_wanted, on_delayed=on_delayed
        )

    async def _delayed(self, actor_id: str, reason: str) -> None:
        await self._state.change(ACTORS, actor_id, lambda actor: rules.delayed(actor, reason))

    async def _refused(self, actor: Actor, refused: Refused) -> None:
        error = refused.error
        cause = ErrorInfo(code=error.code, message=error.message, extra=error.extra)
        now = self._state.now()

        def rule(current: Actor) -> Transition[Actor] | None:
            if not rules.waits(current) or current.incarnation != actor.incarnation:
                return None
            return rules.died(current, cause, now, release=False)

        await self._state.change(ACTORS, actor.actor_id, rule)

    async def _record(self, actor: Actor, granted: GrantedLease) -> None:
        placed = await self._state.change(
            ACTORS,
            actor.actor_id,
            lambda current: rules.placed(current, granted, actor.incarnation),
        )
        if placed.lease_id != granted.lease.lease_id:
            self._releaser.start(granted.lease.lease_id, "the actor is no longer wanted")
            return
        await self.end_if_exited(placed)

    async def end_if_exited(self, actor: Actor) -> None:
        """End or restart an actor whose worker exited before its grant was recorded.

        Whoever recorded it may have been stopped, or have lost its database, before it could look.
        """
        exit_ = await find_exit(self._state, actor.worker_id)
        if exit_ is not None:
            await self._registry.worker_exited(
                msgspec.structs.replace(exit_, lease_id=actor.lease_id, actor_id=actor.actor_id)
            )


def _why(actor: Actor) -> str:
    return actor.death_cause.message if actor.death_cause is not None else "it died"
