"""Finds a worker for each actor that has none: one long poll per actor, on the leading replica."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.controllers.lease_requests import OWNER, POLL_S, Refused, exit_of, seek
from stoker_gcs.registry.actors import rules
from stoker_gcs.registry.actors.rules import ACTORS
from stoker_wire.errors import InfeasibleError
from stoker_wire.messages.cluster import ActorSpec, GrantedLease, LeaseKind, LeaseRequest
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.work import Actor, ActorState, CreateActor

if TYPE_CHECKING:
    from stoker_gcs.controllers.lease_requests import Releases
    from stoker_gcs.peer_clients import Links
    from stoker_gcs.registry.actors.registry import ActorRegistry
    from stoker_gcs.state.records import Step, Truth

AT_ONCE = 1024


class ActorPlacement:
    """See the module. ``restart_grace_s``: how long a restart waits for a node that fits."""

    def __init__(
        self,
        truth: Truth,
        links: Links,
        registry: ActorRegistry,
        releases: Releases,
        *,
        restart_grace_s: float,
    ) -> None:
        self._truth = truth
        self._links = links
        self._registry = registry
        self._releases = releases
        self._restart_grace_s = restart_grace_s
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def place(self, actor_id: str) -> None:
        """Bring one actor onto a worker, or to its end with the scheduler's reason."""
        async with self._gate:
            actor = await self._truth.get(ACTORS, actor_id)
            if not rules.waits(actor):
                return
            spec = await self._registry.spec(actor_id)
            until = asyncio.get_running_loop().time() + self._restart_grace_s
            while True:
                result = await self._seek(actor, spec)
                if (
                    isinstance(result, Refused)
                    and isinstance(result.error, InfeasibleError)
                    and actor.state is ActorState.RESTARTING
                    and asyncio.get_running_loop().time() < until
                ):
                    # The node it ran on may come back; its state is lost, its place is not.
                    await self._delayed(actor_id, str(result.error))
                    await asyncio.sleep(0.5)
                    continue
                break
            if isinstance(result, Refused):
                await self._refused(actor, result)
            elif result is not None:
                await self._record(actor, result)

    async def _seek(self, actor: Actor, spec: CreateActor) -> GrantedLease | Refused | None:
        async def wanted() -> bool:
            now = await self._truth.find(ACTORS, actor.actor_id)
            return (
                now is not None
                and rules.waits(now.record)
                and now.record.incarnation == actor.incarnation
            )

        async def delayed(reason: str) -> None:
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
            ),
        )
        return await seek(self._links, request, wanted=wanted, delayed=delayed)

    async def _delayed(self, actor_id: str, reason: str) -> None:
        await self._truth.change(ACTORS, actor_id, lambda found: rules.delayed(found, reason))

    async def _refused(self, actor: Actor, refused: Refused) -> None:
        error = refused.error
        cause = ErrorInfo(code=error.code, message=error.message, extra=error.extra)
        now = self._truth.now()

        def rule(found: Actor) -> Step[Actor] | None:
            if not rules.waits(found) or found.incarnation != actor.incarnation:
                return None
            return rules.died(found, cause, now, release=False)

        await self._truth.change(ACTORS, actor.actor_id, rule)

    async def _record(self, actor: Actor, granted: GrantedLease) -> None:
        found = await self._truth.change(
            ACTORS,
            actor.actor_id,
            lambda found: rules.placed(found, granted, actor.incarnation),
        )
        if found.lease_id != granted.lease.lease_id:
            self._releases.start(granted.lease.lease_id, "the actor is no longer wanted")
            return
        exit_ = await exit_of(self._truth, granted.worker_id)
        if exit_ is not None:
            await self._registry.worker_exited(
                msgspec.structs.replace(exit_, lease_id=granted.lease.lease_id)
            )
