"""Carries out what events call for, on the leading replica: the one loop that reads the whole log.

Every reaction can be done twice and is found again after a crash: :meth:`Reconciler.run` first looks
at what SQL says is unfinished, then follows the log from a point before that look.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from stoker_gcs.controllers.lease_requests import HELD
from stoker_gcs.registry.actors.rules import ACTORS, LIVING, waits
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.registry.tasks.history import OPEN
from stoker_gcs.state import schema
from stoker_wire.errors import StokerError
from stoker_wire.messages.cluster import LeaseKind, NodeState, WorkerExit
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.work import Actor, JobState
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from stoker_gcs.controllers.lease_requests import Releases
    from stoker_gcs.registry.actors.ownership import Ownership
    from stoker_gcs.registry.actors.placement import ActorPlacement
    from stoker_gcs.registry.actors.registry import ActorRegistry
    from stoker_gcs.registry.jobs.launch import Launcher
    from stoker_gcs.registry.jobs.registry import JobLedger
    from stoker_gcs.registry.nodes.registry import NodeRegistry
    from stoker_gcs.registry.tasks.history import TaskHistory
    from stoker_gcs.state.records import Truth
    from stoker_wire.messages.cluster import Lease
    from stoker_wire.messages.control import Event

_log = logging.getLogger("stoker.gcs.reconcile")
LAST_REPORTS_S = 3.0
"""How long the processes of an ended job have to report their tasks before we infer their end."""
RETRY_S = 1.0
ALL_INCARNATIONS = 1 << 60
_ENDS = ("actor.died", "actor.restarting", "worker.exited", "node.died", "node.registered")
"""Of what may own actors."""


class Reconciler:
    """See the module."""

    def __init__(
        self,
        truth: Truth,
        *,
        nodes: NodeRegistry,
        ledger: JobLedger,
        launcher: Launcher,
        actors: ActorRegistry,
        ownership: Ownership,
        placement: ActorPlacement,
        releases: Releases,
        history: TaskHistory,
    ) -> None:
        self._truth = truth
        self._nodes = nodes
        self._ledger = ledger
        self._launcher = launcher
        self._actors = actors
        self._ownership = ownership
        self._placement = placement
        self._releases = releases
        self._history = history

    async def run(self) -> None:
        """Reconcile until cancelled."""
        async with Background("gcs-reconcile") as work:
            since = self._truth.log.last
            await self._catch_up(work)
            async for events in self._truth.log.follow(since):
                for event in events:
                    self._react(event, work)

    def _react(self, event: Event, work: Background) -> None:
        subject, payload = event.subject, event.payload
        if event.kind in ("actor.created", "actor.died"):
            self._ownership.note(msgspec.convert(payload, Actor))
        if event.kind in _ENDS and self._ownership.has(subject):
            self._start(work, "orphans", subject, lambda: self._ownership.ended(subject))
        match event.kind:
            case "actor.created" | "actor.restarting" | "actor.supplied":
                self._start(work, "place", subject, lambda: self._place(subject))
            case "job.submitted":
                self._start(work, "launch", subject, lambda: self._launcher.launch(subject))
            case "job.finished":
                self._start(work, "end", subject, lambda: self._end_job(subject))
            case "worker.exited" if payload.get("job_id"):
                exit_ = msgspec.convert(payload, WorkerExit)
                self._bury(work, subject, lambda: self._history.end_worker(exit_))
            case "node.died":
                reason = f"node {subject} died: {payload.get('reason', '')}"
                self._lose(work, subject, int(payload["incarnation"]) + 1, reason)
                self._bury_node(work, event, reason)
            case "node.registered" if payload["incarnation"] > 1:
                reason = f"node {subject} started again"
                self._lose(work, subject, int(payload["incarnation"]), reason)
                self._bury_node(work, event, reason)
            case _:
                pass

    async def _place(self, actor_id: str) -> None:
        # Its owner may have ended while the request to create it was under way.
        if not await self._ownership.ends(actor_id):
            await self._placement.place(actor_id)

    async def _check(self, actor_id: str) -> None:
        await self._ownership.ends(actor_id)

    def _lose(self, work: Background, node_id: str, before: int, reason: str) -> None:
        self._start(work, "lose", node_id, lambda: self._lose_node(node_id, before, reason))

    def _bury_node(self, work: Background, event: Event, reason: str) -> None:
        self._bury(
            work,
            event.subject,
            lambda: self._history.end_node(event.subject, reason, before_s=event.at_s),
        )

    def _bury(
        self, work: Background, subject: str, end: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        async def later() -> None:
            await asyncio.sleep(LAST_REPORTS_S)
            await end()

        self._start(work, "bury", subject, later)

    def _start(
        self,
        work: Background,
        what: str,
        subject: str,
        reaction: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        async def until_done() -> None:
            while True:
                try:
                    return await reaction()
                except StokerError as error:
                    if not error.retryable:
                        _log.warning("%s %s: %s", what, subject, error)
                        return
                    _log.debug("%s %s waits: %s", what, subject, error)
                await asyncio.sleep(RETRY_S)

        work.spawn(until_done(), name=f"{what}-{subject}")

    async def _catch_up(self, work: Background) -> None:
        await self._releases.resume()
        for job in await self._truth.all(JOBS, {"state": JobState.PENDING.value}):
            if job.submitted:
                self._start(work, "launch", job.job_id, partial(self._launcher.launch, job.job_id))
        jobs: dict[str, bool] = {}
        for actor in await self._truth.all(ACTORS, {"state": LIVING}):
            if not actor.detached and actor.job_id not in jobs:
                jobs[actor.job_id] = await self._ledger.has_ended(actor.job_id)
            ended = not actor.detached and jobs[actor.job_id]
            self._ownership.note(actor)
            if waits(actor) and not ended:
                self._start(work, "place", actor.actor_id, partial(self._place, actor.actor_id))
            elif actor.owner is not None and not ended:
                self._start(work, "orphans", actor.actor_id, partial(self._check, actor.actor_id))
        for row in await self._truth.store.select(
            schema.TASKS, {"state": OPEN}, limit=100_000, columns=("job_id",)
        ):
            if row["job_id"] not in jobs:
                jobs[row["job_id"]] = await self._ledger.has_ended(row["job_id"])
        for job_id, ended in jobs.items():
            if ended:
                self._start(work, "end", job_id, partial(self._end_job, job_id))
        await self._check_leases(work)

    async def _check_leases(self, work: Background) -> None:
        """Leases on nodes that died or started again while nobody looked."""
        rows = await self._truth.store.select(
            schema.LEASES, {"state": HELD}, limit=100_000, columns=("node_id",)
        )
        for node_id in sorted({row["node_id"] for row in rows}):
            node = self._nodes.view.get(node_id)
            dead = node is None or node.state is NodeState.DEAD
            before = ALL_INCARNATIONS if node is None else node.incarnation + dead
            self._lose(work, node_id, before, f"node {node_id} died")

    async def _end_job(self, job_id: str) -> None:
        job = await self._truth.get(JOBS, job_id)
        self._releases.start(job.lease_id, f"job {job_id} is {job.state}")
        reason = f"its job {job_id} ended ({job.state})"
        await self._actors.end_job(job_id, reason)
        await asyncio.sleep(LAST_REPORTS_S)
        await self._history.end_job(job_id)

    async def _lose_node(self, node_id: str, before_incarnation: int, reason: str) -> None:
        leases = await self._releases.on_node(node_id, before_incarnation=before_incarnation)
        for lease in leases:
            await self._lose_lease(lease, reason)

    async def _lose_lease(self, lease: Lease, reason: str) -> None:
        if lease.kind is LeaseKind.DRIVER:
            await self._ledger.end(lease.job_id, JobState.FAILED, message=reason)
        elif lease.actor_id:
            cause = ErrorInfo(code="node_died", message=reason, extra={"node_id": lease.node_id})
            await self._actors.lose(
                lease.actor_id, cause, lease_id=lease.lease_id, restart=True, release=False
            )
