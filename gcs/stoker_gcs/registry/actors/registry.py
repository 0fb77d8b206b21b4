"""The registry of actors: applies ``actors.rules`` to what callers, workers and the reconciler ask."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.registry.actors import rules
from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.state import schema
from stoker_gcs.store.changes import Change, WriteConflict
from stoker_wire.amounts import check_parts
from stoker_wire.constraints import variables
from stoker_wire.errors import (
    BadRequestError,
    ConflictError,
    NameTakenError,
    NotFoundError,
    UnavailableError,
)
from stoker_wire.http.tolerant import TolerantDecoder
from stoker_wire.ids import Prefix, check_id
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.work import (
    Actor,
    ActorState,
    CreateActor,
    KillActor,
    ReportActor,
    SupplyArguments,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from stoker_gcs.registry.jobs.registry import JobRegistry
    from stoker_gcs.registry.leases import LeaseReleaser
    from stoker_gcs.state.records import StateStore, Transition
    from stoker_gcs.store.changes import Row
    from stoker_wire.messages.cluster import WorkerExit

PLACED_WITHIN_S = 10.0
END_AT_ONCE = 64
_spec = TolerantDecoder(CreateActor)
_encode = msgspec.msgpack.Encoder().encode


def spec_of(row: Row) -> CreateActor:
    """Decode the request that created the actor of a row."""
    return _spec.decode(row["spec"])


class ActorRegistry:
    """Durable creation, lookup, reports and ends of actors."""

    def __init__(self, state: StateStore, jobs: JobRegistry, releaser: LeaseReleaser) -> None:
        self._state = state
        self._jobs = jobs
        self._releaser = releaser

    async def create(self, body: CreateActor, *, origin_job_id: str = "") -> Actor:
        """Accept an actor, durably. The same id again gives the same actor.

        ``origin_job_id`` is the job in whose name a detached actor creates it.
        """
        check_id(body.actor_id, Prefix.ACTOR, field="actor_id")
        check_parts(body.demand.resources, "demand.resources")
        variables.check(body.demand.runtime_env.env_vars, "demand.runtime_env.env_vars")
        if body.get_if_exists and not body.name:
            raise BadRequestError("get_if_exists: needs a name to look for", field="get_if_exists")
        existing = await self._state.find(ACTORS, body.actor_id)
        if existing is not None:
            return _same(existing.record, body)
        await self._jobs.check_living(body.demand.job_id, field="demand.job_id")
        namespace = body.namespace
        job = self._jobs.live.get(body.demand.job_id)
        if not namespace and job is not None:
            namespace = job.namespace
        actor = rules.created(body, namespace, self._state.now(), origin_job_id=origin_job_id)
        event = self._state.event(EventKind.ACTOR_CREATED, actor.actor_id, actor)
        insert = ACTORS.insert(actor, spec=_encode(body))
        while True:
            try:
                await self._state.writer.apply(Change((insert,), (event,)))
            except WriteConflict:
                other = await self._conflicting(body, namespace)
                if other is not None:
                    return other
                continue
            return actor

    async def _conflicting(self, body: CreateActor, namespace: str) -> Actor | None:
        """Return the actor with this id or name; None if it has gone since."""
        existing = await self._state.find(ACTORS, body.actor_id)
        if existing is not None:
            return _same(existing.record, body)
        try:
            named = await self.get_named(namespace, body.name)
        except NotFoundError:
            return None
        if body.get_if_exists:
            return named
        raise NameTakenError(
            f"the name {body.name!r} is taken in namespace {namespace!r}\n"
            f"by actor {named.actor_id} ({named.class_name}, {named.state}): choose another, or "
            "use get_if_exists",
            field="name",
        )

    async def get_named(self, namespace: str, name: str) -> Actor:
        """Return the living actor of this name."""
        where = {"live_name": rules.live_name(namespace, name)}
        rows = await self._state.store.select(schema.ACTORS, where, limit=1)
        if not rows:
            raise NotFoundError(f"there is no living actor {name!r} in namespace {namespace!r}")
        return ACTORS.decode(rows[0]).record

    async def spec(self, actor_id: str) -> CreateActor:
        """Return the request that created an actor."""
        row = await self._state.store.get(schema.ACTORS, {"actor_id": actor_id})
        if row is None:
            raise NotFoundError(f"there is no actor {actor_id!r}")
        return spec_of(row)

    async def supply(self, actor_id: str, body: SupplyArguments) -> Actor:
        """Add the arguments of the constructor; the same again changes nothing."""
        spec = await self.spec(actor_id)
        return await self._state.change(
            ACTORS, actor_id, lambda actor: rules.supplied(actor, spec, body.payload)
        )

    async def saved_states(self, actor_ids: Collection[str]) -> dict[str, str]:
        """Return the object with the saved state of each of these actors that is not dead; '' if none."""
        found = await self._state.all(ACTORS, {"actor_id": tuple(actor_ids)})
        return {one.actor_id: one.state_object for one in found if one.state is not ActorState.DEAD}

    async def get(self, actor_id: str, wait_s: float) -> Actor:
        """Return the actor; with ``wait_s``, once it is ALIVE or DEAD, or the time is over."""
        settled = (ActorState.ALIVE, ActorState.DEAD)
        return await self._state.wait_for(
            ACTORS, actor_id, lambda actor: actor.state in settled, wait_s
        )

    async def report(self, actor_id: str, body: ReportActor) -> Actor:
        """Apply the report of an actor's worker.

        A fast constructor may be done before the grant of its lease was written; the report waits
        for that, so that an ALIVE actor always has an address.
        """
        if body.state not in (ActorState.ALIVE, ActorState.DEAD):
            raise BadRequestError(
                f"state: a worker reports ALIVE or DEAD, not {body.state}", field="state"
            )
        if body.state is ActorState.ALIVE:
            placed = await self._state.wait_for(
                ACTORS,
                actor_id,
                lambda actor: (
                    bool(actor.lease_id)
                    or actor.incarnation != body.incarnation
                    or actor.state is ActorState.DEAD
                ),
                PLACED_WITHIN_S,
            )
            if (
                not placed.lease_id
                and rules.waits(placed)
                and placed.incarnation == body.incarnation
            ):
                raise UnavailableError(f"the lease of actor {actor_id} is not recorded yet")
        now = self._state.now()
        lease_id = ""

        def rule(actor: Actor) -> Transition[Actor] | None:
            nonlocal lease_id
            lease_id = actor.lease_id
            return rules.reported(actor, body, now)

        actor = await self._state.change(ACTORS, actor_id, rule)
        if body.state is ActorState.DEAD:
            self._releaser.start(lease_id, "the actor ended")
        return actor

    async def kill(self, actor_id: str, body: KillActor) -> Actor:
        """End an actor's worker; with restarts permitted and left, it comes back."""
        cause = ErrorInfo(code="actor_died", message=body.reason)
        return await self.lose_worker(actor_id, cause, restart=not body.no_restart, release=True)

    async def lose_worker(
        self,
        actor_id: str,
        cause: ErrorInfo,
        *,
        lease_id: str | None = None,
        restart: bool,
        release: bool,
        moves: bool = False,
    ) -> Actor:
        """End or restart an actor whose worker is gone or must go (``lease_id`` None: whichever it has).

        The restart of one that ``moves`` does not count.
        """
        lost_lease = ""
        now = self._state.now()

        def rule(actor: Actor) -> Transition[Actor] | None:
            nonlocal lost_lease
            lost_lease = actor.lease_id if lease_id is None else lease_id
            if restart and lease_id is not None and not actor.lease_id:
                return None
            if not restart and lease_id is None:
                return rules.died(actor, cause, now, release=release)
            return rules.worker_lost(
                actor,
                cause,
                now,
                lease_id=lost_lease,
                restart=restart,
                release=release,
                moves=moves,
            )

        actor = await self._state.change(ACTORS, actor_id, rule)
        if release:
            self._releaser.start(lost_lease, cause.message)
        return actor

    async def worker_exited(self, exit_: WorkerExit) -> None:
        """Restart or end the actor that lived in a worker, if one did."""
        current = await self._state.find(ACTORS, exit_.actor_id) if exit_.actor_id else None
        if current is not None and current.record.lease_id:
            lease_id = exit_.lease_id
            if not lease_id and current.record.worker_id == exit_.worker_id:
                lease_id = current.record.lease_id
            await self.lose_worker(
                exit_.actor_id,
                rules.exit_cause(exit_),
                lease_id=lease_id,
                restart=True,
                release=False,
            )

    async def end_job(self, job_id: str, reason: str, *, before_s: float = math.inf) -> None:
        """End the living actors of a job that were created before then, except detached ones."""
        cause = ErrorInfo(code="actor_died", message=reason)
        living = await self._state.all(ACTORS, {"job_id": job_id, "state": rules.LIVING})
        slots = asyncio.Semaphore(END_AT_ONCE)

        async def end(actor: Actor) -> None:
            async with slots:
                await self.lose_worker(actor.actor_id, cause, restart=False, release=False)

        async with asyncio.TaskGroup() as group:
            for actor in living:
                if not actor.detached and actor.created_at_s < before_s:
                    group.create_task(end(actor))


def _same(actor: Actor, body: CreateActor) -> Actor:
    """Return the actor that a request made when it was sent first; its id is no other's to use."""
    if (actor.job_id, actor.class_name) != (body.demand.job_id, body.class_name):
        raise ConflictError(
            f"there is another actor {actor.actor_id} already\nchoose another id",
            field="actor_id",
        )
    return actor
