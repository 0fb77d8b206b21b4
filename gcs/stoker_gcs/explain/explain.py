"""Explanations of jobs, actors and tasks: records and events, and the scheduler's verdicts.

The verdicts come from the code that places, so an explanation cannot differ from the decision; when
the scheduler does not answer, the explanation says so instead of failing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.explain.causes import WaitingGroups, cause_of, short_of
from stoker_gcs.registry.actors.rules import ACTORS, lease_job, waits
from stoker_gcs.registry.jobs.placement import demand_of
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.state import schema
from stoker_gcs.store.rows import event_of
from stoker_wire.errors import NotFoundError, StokerError
from stoker_wire.messages.cluster import Demand, LeaseKind
from stoker_wire.messages.control import Event, Explanation
from stoker_wire.messages.work import ActorState, JobState, TaskState

if TYPE_CHECKING:
    from stoker_gcs.peer_clients import PeerClients
    from stoker_gcs.registry.actors.registry import ActorRegistry
    from stoker_gcs.registry.task_history import TaskHistory
    from stoker_gcs.state.records import StateStore

MAX_EVENTS = 50
_OBJECT = re.compile(r"\bo_([0-9a-f]+)\.\d+")


class Explainer:
    """The explanations that a gcs gives."""

    def __init__(
        self, state: StateStore, peers: PeerClients, actors: ActorRegistry, history: TaskHistory
    ) -> None:
        self._state = state
        self._peers = peers
        self._actors = actors
        self._history = history
        self._waiting_groups = WaitingGroups(state, peers)

    async def job(self, job_id: str) -> Explanation:
        """Explain a job: its events, what of it waits, and while it is PENDING why its driver waits."""
        job = await self._state.get(JOBS, job_id)
        events = await self._events_of(job_id)
        if job.state is JobState.PENDING:
            waited_s = self._state.now() - job.created_at_s
            return await self._waiting(
                job_id, job.state, demand_of(job), waited_s, events, job.message
            )
        summary = f"job {job_id} is {job.state}" + (f": {job.message}" if job.message else "")
        waiting = () if job.state.terminal else await self._waiting_groups.of_job(job_id)
        return Explanation(
            subject=job_id, state=job.state, summary=summary, events=events, waiting=waiting
        )

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
        return Explanation(subject=actor_id, state=actor.state, summary=summary, events=events)

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
        if last.actor_id and not last.state.terminal:
            of_actor = await self.actor(last.actor_id)
            summary = f"{summary}; {of_actor.summary}"
        return Explanation(
            subject=task_id,
            state=last.state,
            summary=summary,
            waited_s=0.0 if last.state.terminal else waited_s,
            demand=last.demand,
        )

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
        rows = await self._state.store.select(schema.EVENTS, {"subject": subject}, limit=MAX_EVENTS)
        return tuple(msgspec.structs.replace(event_of(row), payload={}) for row in rows)

    async def _waiting(
        self,
        subject: str,
        state: str,
        demand: Demand,
        waited_s: float,
        events: tuple[Event, ...],
        note: str,
    ) -> Explanation:
        try:
            explanation = await self._peers.call_scheduler(
                "POST", "/v1/explain", demand, reply=Explanation
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
            cause=cause_of(explanation),
        )
