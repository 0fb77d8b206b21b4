"""Actors as callers and workers change them: the shell around ``actors.rules``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.registry.actors import rules
from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.state import schema
from stoker_gcs.store.changes import Change, Clash
from stoker_wire.errors import BadRequestError, NameTakenError, NotFoundError, UnavailableError
from stoker_wire.ids import Prefix, check_id
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.work import (
    Actor,
    ActorState,
    CreateActor,
    KillActor,
    ReportActor,
    SupplyArguments,
)

if TYPE_CHECKING:
    from stoker_gcs.controllers.lease_requests import Releases
    from stoker_gcs.registry.jobs.registry import JobLedger
    from stoker_gcs.state.records import Step, Truth
    from stoker_gcs.store.changes import Row
    from stoker_wire.messages.cluster import WorkerExit

PLACED_WITHIN_S = 10.0
_spec = msgspec.msgpack.Decoder(CreateActor)
_encode = msgspec.msgpack.Encoder().encode


def spec_of(row: Row) -> CreateActor:
    """Read the request that made the actor of a row."""
    return _spec.decode(row["spec"])


class ActorRegistry:
    """See the module."""

    def __init__(self, truth: Truth, ledger: JobLedger, releases: Releases) -> None:
        self._truth = truth
        self._ledger = ledger
        self._releases = releases

    async def create(self, body: CreateActor) -> Actor:
        """Accept an actor, durably. The same id again gives the same actor."""
        check_id(body.actor_id, Prefix.ACTOR, field="actor_id")
        if body.get_if_exists and not body.name:
            raise BadRequestError("get_if_exists: needs a name to look for", field="get_if_exists")
        known = await self._truth.find(ACTORS, body.actor_id)
        if known is not None:
            return known.record
        await self._ledger.check_living(body.demand.job_id, field="demand.job_id")
        namespace = body.namespace
        job = self._ledger.live.get(body.demand.job_id)
        if not namespace and job is not None:
            namespace = job.namespace
        actor = rules.created(body, namespace, self._truth.now())
        event = self._truth.event("actor.created", actor.actor_id, actor)
        insert = ACTORS.insert(actor, spec=_encode(body))
        while True:
            try:
                await self._truth.journal.apply(Change((insert,), (event,)))
            except Clash:
                found = await self._other(body, namespace)
                if found is not None:
                    return found
                continue
            return actor

    async def _other(self, body: CreateActor, namespace: str) -> Actor | None:
        """The actor that is in the way; None if it has gone since."""
        known = await self._truth.find(ACTORS, body.actor_id)
        if known is not None:
            return known.record
        try:
            named = await self.named(namespace, body.name)
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

    async def named(self, namespace: str, name: str) -> Actor:
        """The living actor of this name."""
        where = {"live_name": rules.live_name(namespace, name)}
        rows = await self._truth.store.select(schema.ACTORS, where, limit=1)
        if not rows:
            raise NotFoundError(f"there is no living actor {name!r} in namespace {namespace!r}")
        return ACTORS.kept(rows[0]).record

    async def spec(self, actor_id: str) -> CreateActor:
        """The request that made an actor."""
        row = await self._truth.store.get(schema.ACTORS, {"actor_id": actor_id})
        if row is None:
            raise NotFoundError(f"there is no actor {actor_id!r}")
        return spec_of(row)

    async def supply(self, actor_id: str, body: SupplyArguments) -> Actor:
        """The arguments of the constructor are there; the same again changes nothing."""
        spec = await self.spec(actor_id)
        return await self._truth.change(
            ACTORS, actor_id, lambda actor: rules.supplied(actor, spec, body.payload)
        )

    async def get(self, actor_id: str, wait_s: float) -> Actor:
        """The actor; with ``wait_s``, once it is ALIVE or DEAD, or the time is over."""
        settled = (ActorState.ALIVE, ActorState.DEAD)
        return await self._truth.wait_for(
            ACTORS, actor_id, lambda actor: actor.state in settled, wait_s
        )

    async def report(self, actor_id: str, body: ReportActor) -> Actor:
        """The worker tells how its actor does.

        A fast constructor may be done before the grant of its lease was written; the report waits
        for that, so that an ALIVE actor always has an address.
        """
        if body.state not in (ActorState.ALIVE, ActorState.DEAD):
            raise BadRequestError(
                f"state: a worker reports ALIVE or DEAD, not {body.state}", field="state"
            )
        if body.state is ActorState.ALIVE:
            found = await self._truth.wait_for(
                ACTORS,
                actor_id,
                lambda actor: (
                    bool(actor.lease_id)
                    or actor.incarnation != body.incarnation
                    or actor.state is ActorState.DEAD
                ),
                PLACED_WITHIN_S,
            )
            if not found.lease_id and rules.waits(found) and found.incarnation == body.incarnation:
                raise UnavailableError(f"the lease of actor {actor_id} is not recorded yet")
        now = self._truth.now()
        lease_id = ""

        def rule(actor: Actor) -> Step[Actor] | None:
            nonlocal lease_id
            lease_id = actor.lease_id
            return rules.reported(actor, body, now)

        actor = await self._truth.change(ACTORS, actor_id, rule)
        if body.state is ActorState.DEAD:
            self._releases.start(lease_id, "the actor ended")
        return actor

    async def kill(self, actor_id: str, body: KillActor) -> Actor:
        """End an actor's worker; with restarts permitted and left, it comes back."""
        cause = ErrorInfo(code="actor_died", message=body.reason)
        return await self.lose(actor_id, cause, restart=not body.no_restart, release=True)

    async def lose(
        self,
        actor_id: str,
        cause: ErrorInfo,
        *,
        lease_id: str | None = None,
        restart: bool,
        release: bool,
    ) -> Actor:
        """The worker of an actor is gone or must go (``lease_id`` None: whichever it has)."""
        lost = ""
        now = self._truth.now()

        def rule(actor: Actor) -> Step[Actor] | None:
            nonlocal lost
            lost = actor.lease_id if lease_id is None else lease_id
            if restart and lease_id is not None and not actor.lease_id:
                return None
            if not restart and lease_id is None:
                return rules.died(actor, cause, now, release=release)
            return rules.worker_lost(
                actor, cause, now, lease_id=lost, restart=restart, release=release
            )

        actor = await self._truth.change(ACTORS, actor_id, rule)
        if release:
            self._releases.start(lost, cause.message)
        return actor

    async def worker_exited(self, exit_: WorkerExit) -> None:
        """A worker ended: if an actor lived in it, it restarts or dies of that."""
        found = await self._truth.find(ACTORS, exit_.actor_id) if exit_.actor_id else None
        if found is not None and found.record.lease_id:
            lease_id = exit_.lease_id
            if not lease_id and found.record.worker_id == exit_.worker_id:
                lease_id = found.record.lease_id
            await self.lose(
                exit_.actor_id,
                rules.exit_cause(exit_),
                lease_id=lease_id,
                restart=True,
                release=False,
            )

    async def end_job(self, job_id: str, reason: str) -> None:
        """Kill the actors that go with a job."""
        cause = ErrorInfo(code="actor_died", message=reason)
        living = await self._truth.all(ACTORS, {"job_id": job_id, "state": rules.LIVING})
        gate = asyncio.Semaphore(64)

        async def one(actor: Actor) -> None:
            async with gate:
                await self.lose(actor.actor_id, cause, restart=False, release=False)

        async with asyncio.TaskGroup() as group:
            for actor in living:
                if not actor.detached:
                    group.create_task(one(actor))
