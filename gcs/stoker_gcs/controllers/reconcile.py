"""The controller of actors, jobs, leases and task attempts: one loop over the whole event log.

Runs on the leading replica only. Every reaction is idempotent and resumed after a crash:
:meth:`Reconciler.run` first reads from SQL what is unfinished, then follows the log from a point
before that read.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from stoker_gcs.registry.actors.rules import ACTORS, LIVING, waits
from stoker_gcs.registry.jobs.arrays import is_member
from stoker_gcs.registry.jobs.attempts import LAST_REPORTS_S
from stoker_gcs.registry.jobs.rules import JOBS, is_whole
from stoker_gcs.registry.leases import HELD
from stoker_gcs.registry.task_history import OPEN
from stoker_gcs.state import schema
from stoker_wire.errors import NotFoundError, StokerError
from stoker_wire.http.tolerant import convert_known
from stoker_wire.messages.cluster import LeaseKind, NodeState, WorkerExit
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.groups import PlacementGroup
from stoker_wire.messages.work import Actor, FinishJob, JobState
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from stoker_gcs.registry.actors.placement import ActorPlacement
    from stoker_gcs.registry.actors.registry import ActorRegistry
    from stoker_gcs.registry.groups.placement import GroupPlacement
    from stoker_gcs.registry.groups.registry import GroupRegistry
    from stoker_gcs.registry.jobs.arrays import JobArrays
    from stoker_gcs.registry.jobs.attempts import JobWork
    from stoker_gcs.registry.jobs.placement import DriverPlacement
    from stoker_gcs.registry.jobs.registry import JobRegistry
    from stoker_gcs.registry.leases import LeaseReleaser
    from stoker_gcs.registry.nodes.registry import NodeRegistry
    from stoker_gcs.registry.ownership import Ownership
    from stoker_gcs.registry.task_history import TaskHistory
    from stoker_gcs.registry.tokens import Tokens
    from stoker_gcs.state.records import StateStore
    from stoker_wire.messages.cluster import Lease
    from stoker_wire.messages.control import Event

_log = logging.getLogger(__name__)
RETRY_S = 1.0
ALL_INCARNATIONS = 1 << 60
_OWNER_ENDS = (
    EventKind.ACTOR_DIED,
    EventKind.ACTOR_RESTARTING,
    EventKind.WORKER_EXITED,
    EventKind.NODE_DIED,
    EventKind.NODE_DRAINED,
    EventKind.NODE_REGISTERED,
)
"""Ends of processes that may own actors."""
_GRANTS_RECORDED = (EventKind.ACTOR_PLACED, EventKind.JOB_STARTED, EventKind.JOB_CHANGED)
"""Those of one grant; a job that its driver had started before is only changed by it."""


class Reconciler:
    """The reactions to events, each retried until it is done or refused for good."""

    def __init__(
        self,
        state: StateStore,
        *,
        nodes: NodeRegistry,
        jobs: JobRegistry,
        job_work: JobWork,
        driver_placement: DriverPlacement,
        arrays: JobArrays,
        actors: ActorRegistry,
        ownership: Ownership,
        actor_placement: ActorPlacement,
        groups: GroupRegistry,
        group_placement: GroupPlacement,
        releaser: LeaseReleaser,
        history: TaskHistory,
        tokens: Tokens,
    ) -> None:
        self._state = state
        self._nodes = nodes
        self._jobs = jobs
        self._job_work = job_work
        self._driver_placement = driver_placement
        self._arrays = arrays
        self._actors = actors
        self._ownership = ownership
        self._actor_placement = actor_placement
        self._groups = groups
        self._group_placement = group_placement
        self._releaser = releaser
        self._history = history
        self._tokens = tokens

    async def run(self) -> None:
        """Reconcile until cancelled."""
        async with Background("gcs-reconcile") as work:
            since = self._state.log.last
            await self._resume(work)
            async for events in self._state.log.follow(since):
                for event in events:
                    self._react(event, work)

    def _react(self, event: Event, work: Background) -> None:
        subject, payload = event.subject, event.payload
        if event.kind in (EventKind.ACTOR_CREATED, EventKind.ACTOR_DIED):
            self._ownership.track(convert_known(payload, Actor))
        if event.kind in (EventKind.GROUP_CREATED, EventKind.GROUP_REMOVED):
            self._ownership.track(convert_known(payload, PlacementGroup))
        if event.kind in _OWNER_ENDS and self._ownership.owns_any(subject):
            self._start(work, "orphans", subject, lambda: self._ownership.end_owned_by(subject))
        if event.kind in _GRANTS_RECORDED and payload.get("node_id"):
            self._check_node(work, payload["node_id"], payload.get("node_incarnation", 0))
        match event.kind:
            case EventKind.ACTOR_CREATED | EventKind.ACTOR_RESTARTING | EventKind.ACTOR_SUPPLIED:
                self._start(work, "place", subject, lambda: self._place(subject))
            case EventKind.GROUP_PLACED:
                for place in convert_known(payload, PlacementGroup).placements.values():
                    self._check_node(work, place.node_id, place.node_incarnation)
            case EventKind.GROUP_CREATED | EventKind.GROUP_RESCHEDULING:
                self._start(work, "place", subject, lambda: self._place_group(subject))
            case EventKind.JOB_SUBMITTED if payload.get("array") or payload.get("one_per_node"):
                self._start(work, "launch", subject, lambda: self._arrays.run(subject))
            case EventKind.JOB_SUBMITTED if not payload.get("array_id"):
                self._start(work, "launch", subject, lambda: self._launch(subject))
            case EventKind.JOB_RETRYING:
                self._start(work, "launch", subject, lambda: self._launch(subject))
            case EventKind.JOB_STARTED if payload.get("timeout_s") and _is_first_start(payload):
                self._start(work, "timeout", subject, lambda: self._jobs.end_at_timeout(subject))
            case EventKind.TOKEN_REVOKED:
                self._start(work, "revoked", subject, lambda: self._end_drivers_of(subject))
            case EventKind.JOB_FINISHED:
                self._start(work, "end", subject, lambda: self._end_job(subject))
            case EventKind.WORKER_EXITED if payload.get("job_id"):
                exit_ = convert_known(payload, WorkerExit)
                self._close_attempts_after_grace(
                    work, subject, lambda: self._history.close_worker(exit_)
                )
            case EventKind.NODE_DIED | EventKind.NODE_DRAINED:
                how = "died" if event.kind == EventKind.NODE_DIED else "left"
                reason = f"node {subject} {how}: {payload.get('reason', '')}"
                self._end_leases_on_node(work, subject, int(payload["incarnation"]) + 1, reason)
                self._close_attempts_on_node(work, event, reason)
            case EventKind.NODE_REGISTERED if payload["incarnation"] > 1:
                reason = f"node {subject} started again"
                self._end_leases_on_node(work, subject, int(payload["incarnation"]), reason)
                self._close_attempts_on_node(work, event, reason)
            case _:
                pass

    async def _launch(self, job_id: str) -> None:
        try:
            await self._driver_placement.place(job_id)
        except NotFoundError:
            if await self._jobs.find(job_id) is not None:
                raise
            # It has ended and was deleted meanwhile, as a schedule does with its oldest jobs.

    async def _place(self, actor_id: str) -> None:
        # Its owner may have ended while the request to create it was in flight.
        if not await self._ownership.end_if_orphaned(actor_id):
            await self._actor_placement.place(actor_id)

    async def _place_group(self, group_id: str) -> None:
        if not await self._ownership.end_if_orphaned(group_id):
            await self._group_placement.place(group_id)

    async def _check_owner(self, owned_id: str) -> None:
        await self._ownership.end_if_orphaned(owned_id)

    def _check_node(self, work: Background, node_id: str, incarnation: int) -> None:
        """End what was granted on a node that died, or started again, before the grant was recorded."""
        node = self._nodes.view.get(node_id)
        if node is not None and (
            node.state is NodeState.DEAD or 0 < incarnation < node.incarnation
        ):
            self._end_lost_leases(work, node_id)

    def _end_lost_leases(self, work: Background, node_id: str) -> None:
        """End what earlier incarnations of a node had, or all that it had if it is dead."""
        node = self._nodes.view.get(node_id)
        dead = node is None or node.state is NodeState.DEAD
        before = ALL_INCARNATIONS if node is None else node.incarnation + dead
        self._end_leases_on_node(work, node_id, before, f"node {node_id} died")

    def _end_leases_on_node(self, work: Background, node_id: str, before: int, reason: str) -> None:
        self._start(work, "end leases", node_id, lambda: self._end_leases(node_id, before, reason))

    def _close_attempts_on_node(self, work: Background, event: Event, reason: str) -> None:
        self._close_attempts_after_grace(
            work,
            event.subject,
            lambda: self._history.close_node(event.subject, reason, before_s=event.at_s),
        )

    def _close_attempts_after_grace(
        self, work: Background, subject: str, close: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        async def close_later() -> None:
            await asyncio.sleep(LAST_REPORTS_S)
            await close()

        self._start(work, "close attempts", subject, close_later)

    def _start(
        self,
        work: Background,
        action: str,
        subject: str,
        reaction: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        async def retry_until_done() -> None:
            while True:
                try:
                    return await reaction()
                except StokerError as error:
                    if not error.retryable:
                        _log.warning("%s %s: %s", action, subject, error)
                        return
                    _log.debug("%s %s waits: %s", action, subject, error)
                await asyncio.sleep(RETRY_S)

        work.spawn(retry_until_done(), name=f"{action}-{subject}")

    async def _end_drivers_of(self, token_id: str) -> None:
        """End the jobs of drivers that attached by a token that was revoked; submitted ones go on."""
        for job in list(self._jobs.live.values()):
            if job.token_id == token_id and not job.submitted:
                message = f"the token {token_id} of its user was revoked"
                await self._jobs.end(job.job_id, JobState.FAILED, message=message)

    async def _resume(self, work: Background) -> None:
        await self._releaser.resume()
        for job in await self._state.all(JOBS, {"state": JobState.PENDING.value}):
            if job.submitted and not is_whole(job) and not is_member(job):
                self._start(
                    work, "launch", job.job_id, partial(self._driver_placement.place, job.job_id)
                )
        unfinished = (JobState.PENDING.value, JobState.RUNNING.value)
        for job in await self._state.all(JOBS, {"state": unfinished}):
            if is_whole(job):
                self._start(work, "launch", job.job_id, partial(self._arrays.run, job.job_id))
            elif job.timeout_s is not None and job.started_at_s is not None:
                self._start(
                    work, "timeout", job.job_id, partial(self._jobs.end_at_timeout, job.job_id)
                )
            if job.token_id and await self._tokens.is_revoked(job.token_id):
                self._start(
                    work, "revoked", job.token_id, partial(self._end_drivers_of, job.token_id)
                )
            if job.state is JobState.RUNNING and job.worker_id:
                self._start(
                    work,
                    "exit",
                    job.job_id,
                    partial(self._driver_placement.end_if_exited, job.job_id),
                )
        jobs: dict[str, bool] = {}
        for actor in await self._state.all(ACTORS, {"state": LIVING}):
            if not actor.detached and actor.job_id not in jobs:
                jobs[actor.job_id] = await self._jobs.has_ended(actor.job_id)
            ended = not actor.detached and jobs[actor.job_id]
            self._ownership.track(actor)
            if waits(actor) and not ended:
                self._start(work, "place", actor.actor_id, partial(self._place, actor.actor_id))
            elif actor.owner is not None and not ended:
                self._start(
                    work, "orphans", actor.actor_id, partial(self._check_owner, actor.actor_id)
                )
            if actor.lease_id:
                self._start(
                    work,
                    "exit",
                    actor.actor_id,
                    partial(self._actor_placement.end_if_exited, actor),
                )
        for group in await self._groups.living():
            if not group.detached and group.job_id not in jobs:
                jobs[group.job_id] = await self._jobs.has_ended(group.job_id)
            self._ownership.track(group)
            if group.detached or not jobs[group.job_id]:
                self._start(
                    work, "place", group.group_id, partial(self._place_group, group.group_id)
                )
        with_open = await self._state.store.distinct(schema.TASKS, "job_id", {"state": OPEN})
        for job_id in map(str, with_open):
            if job_id not in jobs:
                jobs[job_id] = await self._jobs.has_ended(job_id)
        for job_id, ended in jobs.items():
            if ended:
                self._start(work, "end", job_id, partial(self._end_job, job_id))
        await self._check_leases(work)

    async def _check_leases(self, work: Background) -> None:
        """End leases on nodes that died or started again while no reconciler ran."""
        rows = await self._state.store.select(
            schema.LEASES, {"state": HELD}, limit=100_000, columns=("node_id",)
        )
        with_bundles = {
            placement.node_id
            for group in await self._groups.living()
            for placement in group.placements.values()
        }
        for node_id in sorted({row["node_id"] for row in rows} | with_bundles):
            self._end_lost_leases(work, node_id)

    async def _end_job(self, job_id: str) -> None:
        job = await self._jobs.find(job_id)
        if (
            job is None
        ):  # It is deleted: nothing of it lives, but a report of a task may have come late.
            await self._history.close_job(job_id)
            return
        await self._jobs.end_members(job)
        await self._job_work.end(job)

    async def _end_leases(self, node_id: str, before_incarnation: int, reason: str) -> None:
        leases = await self._releaser.leases_on_node(node_id, before_incarnation=before_incarnation)
        for lease in leases:
            await self._end_lease(lease, reason)
        await self._groups.node_lost(node_id, before_incarnation, reason)

    async def _end_lease(self, lease: Lease, reason: str) -> None:
        if lease.kind is LeaseKind.DRIVER:
            job = await self._state.get(JOBS, lease.job_id)
            if job.lease_id == lease.lease_id:
                end = FinishJob(state=JobState.FAILED, message=reason, attempt=job.attempt)
                await self._jobs.fail_attempt(lease.job_id, end)
        elif lease.actor_id:
            cause = ErrorInfo(code="node_died", message=reason, extra={"node_id": lease.node_id})
            await self._actors.lose_worker(
                lease.actor_id, cause, lease_id=lease.lease_id, restart=True, release=False
            )


def _is_first_start(job: Mapping[str, Any]) -> bool:
    return bool(job.get("started_at_s") == job.get("attempt_started_at_s"))
