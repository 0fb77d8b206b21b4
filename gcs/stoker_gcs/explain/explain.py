"""Explanations of jobs, actors and tasks: records and events, and the scheduler's verdicts.

The verdicts come from the code that places, so an explanation cannot differ from the decision; when
the scheduler does not answer, the explanation says so instead of failing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.explain.causes import WaitingGroups, cause_of, short_of
from stoker_gcs.explain.elastic import clause_of as clause_of_elastic
from stoker_gcs.explain.held_jobs import clause_of, hold_of
from stoker_gcs.history.sentences import innermost
from stoker_gcs.history.story import TOLD
from stoker_gcs.registry.actors.rules import ACTORS, lease_job, waits
from stoker_gcs.registry.groups.placement import request_for
from stoker_gcs.registry.groups.rules import GROUPS, missing
from stoker_gcs.registry.jobs.placement import demand_of
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.registry.schedules.rules import SCHEDULES
from stoker_gcs.state import schema
from stoker_gcs.store.rows import event_of
from stoker_wire.errors import NotFoundError, StokerError
from stoker_wire.messages.cluster import Demand, LeaseKind
from stoker_wire.messages.control import Event, Explanation, WaitPhase
from stoker_wire.messages.elastic import ElasticPlan
from stoker_wire.messages.events import EventKind, payload_as
from stoker_wire.messages.work import ActorState, JobState, SlowTask, TaskState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker_gcs.peer_clients import PeerClients
    from stoker_gcs.registry.actors.registry import ActorRegistry
    from stoker_gcs.registry.jobs.registry import JobRegistry
    from stoker_gcs.registry.task_history import TaskHistory
    from stoker_gcs.state.records import StateStore
    from stoker_gcs.store.changes import Condition
    from stoker_wire.messages.control import Holder
    from stoker_wire.messages.groups import RequestBundles
    from stoker_wire.messages.work import Job

MAX_EVENTS = 50
_BEFORE_ITS_TURN = (TaskState.WAITING, TaskState.QUEUED)
_OBJECT = re.compile(r"\bo_([0-9a-f]+)\.\d+")


class Explainer:
    """The explanations that a gcs gives."""

    def __init__(
        self,
        state: StateStore,
        peers: PeerClients,
        *,
        jobs: JobRegistry,
        actors: ActorRegistry,
        history: TaskHistory,
    ) -> None:
        self._state = state
        self._peers = peers
        self._jobs = jobs
        self._actors = actors
        self._history = history
        self._waiting_groups = WaitingGroups(state, peers)

    async def job(self, job_id: str) -> Explanation:
        """Explain a job: its events, what of it waits, and while it is PENDING why its driver waits."""
        job = await self._state.get(JOBS, job_id)
        explanation = await self._job(job)
        if job.schedule:
            known = await self._state.find(SCHEDULES, job.schedule)
            clause = clause_of(job.schedule, known.record if known else None, self._state.now())
            summary = f"{explanation.summary}; {clause}"
            explanation = msgspec.structs.replace(explanation, summary=summary)
        return explanation

    async def _job(self, job: Job) -> Explanation:
        job_id = job.job_id
        events = await self._events_of(job_id)
        if job.state is JobState.PENDING:
            waited_s = self._state.now() - job.created_at_s
            hold = await hold_of(self._state, self._jobs, job)
            if hold is not None:
                return Explanation(
                    subject=job_id,
                    state=job.state,
                    summary=f"job {job_id} is PENDING: {hold[0]}",
                    remedy=hold[1],
                    waited_s=waited_s,
                    events=events,
                    phase=WaitPhase.DEPENDENCY,
                )
            return await self._waiting(
                job_id, job.state, demand_of(job), waited_s, events, job.message
            )
        summary = f"job {job_id} is {job.state}{_tries(job)}"
        summary += f": {job.message}" if job.message else ""
        if job.elastic is not None and not job.state.terminal:
            summary += f"; {clause_of_elastic(job, job.elastic, await self._elastic_plan())}"
        waiting = () if job.state.terminal else await self._waiting_groups.of_job(job_id)
        return Explanation(
            subject=job_id, state=job.state, summary=summary, events=events, waiting=waiting
        )

    async def _elastic_plan(self) -> ElasticPlan | None:
        try:
            return await self._peers.call_scheduler("GET", "/v1/elastic-plan", reply=ElasticPlan)
        except StokerError:
            return None

    async def _find_job(self, job_id: str) -> Job | None:
        try:
            return await self._state.get(JOBS, job_id)
        except NotFoundError:
            return None

    async def actor(self, actor_id: str) -> Explanation:
        """Explain an actor: its events, and while it has no worker, why."""
        actor = await self._state.get(ACTORS, actor_id)
        events = await self._events_of(actor_id)
        if waits(actor):
            spec = await self._actors.spec(actor_id)
            demand = msgspec.structs.replace(
                spec.demand, kind=LeaseKind.ACTOR, job_id=lease_job(actor)
            )
            waited_s = self._state.now() - (events[-1].at_s if events else actor.created_at_s)
            return await self._waiting(
                actor_id, actor.state, demand, waited_s, events, actor.pending_reason
            )
        where = f" on node {actor.node_id}" if actor.node_id else ""
        match actor.state:
            case ActorState.DEAD:
                why = (
                    actor.death_cause.message
                    if actor.death_cause
                    else "for no reason that was reported"
                )
                summary = f"actor {actor_id} ({actor.class_name}) is DEAD: {why}"
            case ActorState.ALIVE:
                summary = f"actor {actor_id} ({actor.class_name}) is ALIVE{where}"
            case _ if actor.awaits_arguments:
                owner = f"its owner {actor.owner.peer_id}" if actor.owner else "its creator"
                summary = (
                    f"actor {actor_id} ({actor.class_name}) waits for its constructor's arguments, "
                    f"which {owner} gives it once they are there"
                )
            case _:
                summary = f"actor {actor_id} ({actor.class_name}) runs its constructor{where}"
        phase = WaitPhase.DEPENDENCY if actor.awaits_arguments else None
        return Explanation(
            subject=actor_id, state=actor.state, summary=summary, events=events, phase=phase
        )

    async def group(self, group_id: str) -> Explanation:
        """Explain a placement group: its events, and while bundles of it are not placed, why."""
        group = await self._state.get(GROUPS, group_id)
        events = await self._events_of(group_id)
        if missing(group):
            since_s = events[-1].at_s if events else group.created_at_s
            request = request_for(group)
            return await self._waiting(
                group_id,
                group.state,
                None,
                self._state.now() - since_s,
                events,
                group.reason,
                ask=("/v1/bundles/explain", request),
            )
        name = f"placement group {group_id}" + (f" ({group.name!r})" if group.name else "")
        nodes = sorted({placement.node_id for placement in group.placements.values()})
        where = f" on {', '.join(nodes)}" if nodes else ""
        why = f": {group.reason}" if group.reason else ""
        summary = f"{name} is {group.state}{where}{why}"
        return Explanation(subject=group_id, state=group.state, summary=summary, events=events)

    async def task(self, task_id: str) -> Explanation:
        """Explain a task: its state, and while it is QUEUED, why."""
        attempts = await self._history.attempts(task_id)
        last = attempts[-1]
        now = self._state.now()
        submitted_at_s = attempts[0].submitted_at_s
        waited_s = max(0.0, now - submitted_at_s) if submitted_at_s else 0.0
        if last.state is TaskState.QUEUED and last.demand is not None:
            return await self._waiting(task_id, last.state, last.demand, waited_s, (), "")
        name = f"task {task_id} ({last.name}, attempt {last.attempt})"
        match last.state:
            case TaskState.WAITING | TaskState.QUEUED if last.actor_id:
                summary = f"{name} waits for its actor"
            case TaskState.WAITING:
                summary = f"{name} {short_of(last.waiting_for) or 'waits for an argument'}"
                summary += await self._producer(last.waiting_for)
            case TaskState.QUEUED:
                summary = f"{name} waits for a worker"
            case TaskState.RUNNING:
                summary = f"{name} runs on node {last.node_id}"
            case _:
                took = (
                    f" after {last.ended_at_s - last.started_at_s:.3f} s"
                    if last.ended_at_s and last.started_at_s
                    else ""
                )
                why = f": {last.error.message}" if last.error else ""
                summary = f"{name} is {last.state}{took}{why}"
        if last.reconstructs:
            which = f"re-execution {last.reconstructions}, lineage depth {last.lineage_depth}"
            summary += f"; executed again ({which}) as {last.reconstructs}"
        if not last.state.terminal:
            summary += await self._slowness(task_id, last.attempt)
        if last.actor_id and not last.state.terminal:
            of_actor = await self.actor(last.actor_id)
            summary = f"{summary}; {of_actor.summary}"
        return Explanation(
            subject=task_id,
            state=last.state,
            summary=summary,
            waited_s=0.0 if last.state.terminal else waited_s,
            demand=last.demand,
            phase=WaitPhase.DEPENDENCY if last.state in _BEFORE_ITS_TURN else None,
        )

    async def _slowness(self, task_id: str, attempt: int) -> str:
        """Return a clause on what a worker has noticed of an attempt that runs long."""
        where = {"subject": task_id, "kind": EventKind.TASK_SLOW.value}
        rows = await self._state.store.select(schema.EVENTS, where, limit=MAX_EVENTS)
        for row in reversed(rows):
            slow = payload_as(event_of(row), SlowTask)
            if slow is not None and slow.attempt == attempt:
                return (
                    f"; it runs much longer than its function does (p99 {slow.p99_s:.3g} s): after "
                    f"{slow.ran_s:.3g} s it was in {innermost(slow)}"
                )
        return ""

    async def _producer(self, waiting_for: str) -> str:
        """Return a clause that names the task whose result an argument is, if the history has it."""
        named = _OBJECT.search(waiting_for)
        if named is None:
            return ""
        try:
            producer = (await self._history.attempts(f"t_{named[1]}"))[-1]
        except NotFoundError:
            return ""
        return f", which task {producer.task_id} ({producer.name}) makes; that is {producer.state}"

    async def _events_of(self, subject: str) -> tuple[Event, ...]:
        where: dict[str, Condition] = {"subject": subject, "kind": TOLD}
        rows = await self._state.store.select(schema.EVENTS, where, limit=MAX_EVENTS)
        return tuple(msgspec.structs.replace(event_of(row), payload={}) for row in rows)

    async def _waiting(
        self,
        subject: str,
        state: str,
        demand: Demand | None,
        waited_s: float,
        events: tuple[Event, ...],
        note: str,
        ask: tuple[str, RequestBundles] | None = None,
    ) -> Explanation:
        path, body = ("/v1/explain", demand) if ask is None else ask
        try:
            explanation = await self._peers.call_scheduler(
                "POST", path, body, reply=Explanation, query={"remedies": True}
            )
        except StokerError as error:
            return Explanation(
                subject=subject,
                state=state,
                summary=f"it waits ({note or 'no reason was reported'}), and why cannot be asked: {error}",
                remedy="start a scheduler" if error.retryable else "",
                waited_s=waited_s,
                events=events,
                demand=demand,
            )
        return msgspec.structs.replace(
            explanation,
            subject=subject,
            state=state,
            waited_s=waited_s,
            events=events,
            demand=demand,
            cause=cause_of(explanation) if ask is None else explanation.summary,
            holders=await self._with_ends(explanation.holders),
        )

    async def _with_ends(self, holders: Sequence[Holder]) -> tuple[Holder, ...]:
        """Return ``holders`` with the time at which the timeouts of their jobs end them."""
        jobs = {job_id: await self._find_job(job_id) for job_id in {one.job_id for one in holders}}
        return tuple(_with_end(one, jobs[one.job_id]) for one in holders)


def _with_end(holder: Holder, job: Job | None) -> Holder:
    if holder.until or job is None or job.timeout_s is None or job.started_at_s is None:
        return holder
    until_s = job.started_at_s + job.timeout_s
    return msgspec.structs.replace(holder, until_s=until_s, until="the timeout of its job")


def _tries(job: Job) -> str:
    """Return a clause on the attempts of a job that was retried."""
    if not job.attempts:
        return ""
    if job.state.terminal:
        return f" after {job.attempt} attempts"
    last = job.attempts[-1]
    return (
        f", in attempt {job.attempt} of {job.max_attempts} "
        f"as attempt {last.attempt} failed ({last.cause})"
    )
