"""One simulation: the real core, nodes that obey at once, jobs that run as long as the trace says.

Time is virtual, so equal inputs give equal outputs. Each job is one request after the other until all of its
tasks have run; a gang is a placement group. What happens is told as :class:`Allocation` records, from which
every figure can be computed again.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from random import Random

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.machine import step
from stoker_scheduler.core.model.gangs import Gang, GangStrategy, make_gang
from stoker_scheduler.core.model.resources import to_amounts
from stoker_scheduler.core.queueing.queue import GCS_OWNER
from stoker_scheduler.core.state import SchedulingPolicy, State
from stoker_scheduler.simulation.inputs import Cluster, TraceJob

FOREVER_S = 1e15


class What(StrEnum):
    """A change of a job, or of one of its tasks."""

    SUBMITTED = "submitted"
    STARTED = "started"
    ENDED = "ended"
    PREEMPTED = "preempted"
    """It was ended for other work, and goes on later."""
    REJECTED = "rejected"
    """It can never run on this cluster."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One line of the allocation log; ``task`` is -1 for what is said of the whole job."""

    at_s: float
    what: What
    job_id: str
    task: int
    node_id: str
    resources: dict[str, float]
    queue: str
    user: str
    note: str = ""


@dataclass(slots=True)
class _Running:
    """A job that is not over."""

    job: TraceJob
    gang: Gang | None
    waiting: list[int]
    """Tasks that have no lease, the next first."""
    left: int
    """Tasks that have not ended."""
    requests: int = 0
    asked: dict[str, int] = field(default_factory=dict)
    """Request -> how many leases it is for."""
    tasks: dict[str, _Task] = field(default_factory=dict)
    """Lease -> the task that it runs."""
    left_s: dict[int, float] = field(default_factory=dict)
    """Task that was preempted -> how long it still runs."""


@dataclass(frozen=True, slots=True)
class _Task:
    """A task that runs."""

    number: int
    started_s: float
    lasts_s: float


class Simulation:
    """A cluster and a trace; :meth:`run` goes through it to the end."""

    def __init__(
        self,
        cluster: Cluster,
        jobs: Sequence[TraceJob],
        policy: SchedulingPolicy,
        *,
        seed: int = 0,
        jitter: float = 0.0,
    ) -> None:
        self.state = State(policy=policy, term="0")
        self.log: list[Allocation] = []
        self._random = Random(seed)
        self._jitter = jitter
        self._jobs = jobs
        self._to_come = len(jobs)
        self._running: dict[str, _Running] = {}
        self._job_of_request: dict[str, str] = {}
        self._job_of_lease: dict[str, str] = {}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._events: list[ev.Event] = []
        self._at_s = 0.0
        self._tick_at_s = math.inf
        self._feed(ev.QueuesChanged(at_s=0.0, queues=cluster.queues))
        for spec in cluster.nodes:
            self._feed(ev.NodeJoined(at_s=0.0, spec=spec))

    def run(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Run all jobs to their end; ``progress`` is told the number of jobs that are over."""
        over = 0
        for job in self._jobs:
            self._later(job.submit_s, partial(self._submit, job))
        while self._agenda:
            at_s, _, do = heapq.heappop(self._agenda)
            self._at_s = max(self._at_s, at_s)
            before = len(self._running)
            do()
            if len(self._running) < before:
                over += before - len(self._running)
                progress(over)

    def _later(self, at_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at_s, next(self._numbers), do))

    # Jobs

    def _submit(self, job: TraceJob) -> None:
        self._to_come -= 1
        gang = None
        if job.gang and job.tasks > 1:
            gang = make_gang([job.requirements] * job.tasks, GangStrategy.PACK)
        running = _Running(job, gang, list(range(job.tasks)), job.tasks)
        self._running[job.job_id] = running
        self._tell(What.SUBMITTED, job)
        if gang is not None:
            group = ev.GroupAdded(
                at_s=self._at_s, group_id=f"pg_{job.job_id}", job_id=job.job_id, gang=gang
            )
            self._feed(group)
        self._ask(running)

    def _ask(self, running: _Running) -> None:
        """Ask for what nobody has asked for yet."""
        job, gang = running.job, running.gang
        count = len(running.waiting) - sum(running.asked.values())
        if not count:
            return
        request_id = f"r_{job.job_id}.{running.requests}"
        running.requests += 1
        running.asked[request_id] = count
        self._job_of_request[request_id] = job.job_id
        self._feed(
            ev.LeaseRequested(
                at_s=self._at_s,
                request_id=request_id,
                owner_id=GCS_OWNER,
                job_id=job.job_id,
                requirements=gang or job.requirements,
                class_key=job.job_id,
                count=1 if gang is not None else count,
                deadline_s=FOREVER_S,
                kind=ev.Kind.TASK if gang is None else ev.Kind.BUNDLE,
                priority=job.priority,
                group_id=f"pg_{job.job_id}" if gang is not None else "",
                indices=tuple(range(job.tasks)) if gang is not None else (),
                user=job.user,
                queue=job.queue,
                preemptible=job.preemptible or job.requirements.background,
                preemption_grace_s=0.0,
            )
        )

    def _granted(self, command: cmd.Reply) -> None:
        running = self._running[self._job_of_request.pop(command.request_id)]
        del running.asked[command.request_id]
        together_s: float | None = None
        for lease_id in command.lease_ids:
            number = running.waiting.pop(0)
            self._job_of_lease[lease_id] = running.job.job_id
            self._tell(What.STARTED, running.job, number, self.state.leases[lease_id].node_id)
            lasts_s = self._lasts_s(running, number) if together_s is None else together_s
            running.tasks[lease_id] = _Task(number, self._at_s, lasts_s)
            if running.gang is not None:
                together_s = lasts_s
            else:
                self._later(self._at_s + lasts_s, partial(self._end, running, (lease_id,)))
        if together_s is not None:
            end = partial(self._end, running, command.lease_ids)
            self._later(self._at_s + together_s, end)
        self._ask(running)

    def _lasts_s(self, running: _Running, number: int) -> float:
        """Return how long a task runs from now on; one that was preempted, for what was left."""
        left_s = running.left_s.pop(number, None)
        if left_s is not None:
            return left_s
        jitter = self._random.uniform(-self._jitter, self._jitter)
        return running.job.duration_s * (1 + jitter)

    def _end(self, running: _Running, lease_ids: Sequence[str]) -> None:
        job = running.job
        if lease_ids[0] not in running.tasks:
            return  # preempted since
        for lease_id in lease_ids:
            self._tell_of_task(What.ENDED, running, lease_id)
        running.left -= len(lease_ids)
        if not running.left:
            del self._running[job.job_id]
        if running.gang is not None:
            self._feed(ev.GroupRemoved(at_s=self._at_s, group_id=f"pg_{job.job_id}"))
        else:
            self._feed(ev.LeaseReleased(at_s=self._at_s, lease_ids=tuple(lease_ids)))

    def _preempted(self, lease_ids: Sequence[str], note: str) -> None:
        """Have tasks of one job save what they have and leave their nodes, to go on with that later."""
        running = self._running[self._job_of_lease[lease_ids[0]]]
        for lease_id in lease_ids:
            task = self._tell_of_task(What.PREEMPTED, running, lease_id, note)
            running.left_s[task.number] = max(0.0, task.started_s + task.lasts_s - self._at_s)
            insort(running.waiting, task.number)
            if running.gang is None:
                self._feed(ev.WorkerExited(at_s=self._at_s, lease_id=lease_id))
        self._ask(running)

    def _tell_of_task(self, what: What, running: _Running, lease_id: str, note: str = "") -> _Task:
        task = running.tasks.pop(lease_id)
        del self._job_of_lease[lease_id]
        node_id = self.state.leases[lease_id].node_id
        self._tell(what, running.job, task.number, node_id, note)
        return task

    # The core

    def _feed(self, event: ev.Event) -> None:
        """Hand an event to the core, and what its nodes and owners answer at once."""
        self._events.append(event)
        if len(self._events) > 1:
            return  # the loop below, further up the stack, goes on with it
        while self._events:
            for command in step(self.state, self._events[0]):
                self._obey(command)
            del self._events[0]

    def _obey(self, command: cmd.Command) -> None:
        at_s = self._at_s
        match command:
            case cmd.StartWorker():
                self._feed(ev.LeaseStarted(at_s=at_s, lease_id=command.lease_id))
            case cmd.HoldBundles():
                self._feed(ev.BundlesHeld(at_s=at_s, lease_ids=command.lease_ids))
            case cmd.CommitBundles():
                self._feed(ev.BundlesCommitted(at_s=at_s, lease_ids=command.lease_ids))
            case cmd.ReleaseLease():
                self._feed(ev.LeaseEnded(at_s=at_s, lease_id=command.lease_id))
            case cmd.Reply():
                self._granted(command)
            case cmd.Reject():
                running = self._running.pop(self._job_of_request.pop(command.request_id))
                note = command.text.partition("\n")[0]
                self._tell(What.REJECTED, running.job, note=note)
            case cmd.StopLease():
                self._later(at_s, partial(self._stop, command.lease_id, command.reason))
            case cmd.PreemptGroup():
                running = self._running[command.group_id.removeprefix("pg_")]
                if running.tasks:
                    self._preempted(list(running.tasks), command.reason)
            case cmd.WakeAt() if command.at_s < FOREVER_S:
                self._tick_at_s = command.at_s
                self._later(command.at_s, partial(self._tick, command.at_s))

    def _stop(self, lease_id: str, reason: str) -> None:
        if lease_id in self._job_of_lease:  # else it has ended at the same moment
            self._preempted((lease_id,), reason)

    def _tick(self, at_s: float) -> None:
        # Not if an earlier one was asked for since, nor for nobody: the trace is over.
        if at_s == self._tick_at_s and (self._running or self._to_come):
            self._tick_at_s = math.inf
            self._feed(ev.Tick(at_s=self._at_s))

    def _tell(
        self, what: What, job: TraceJob, task: int = -1, node_id: str = "", note: str = ""
    ) -> None:
        resources = to_amounts(job.requirements.units)
        self.log.append(
            Allocation(
                self._at_s, what, job.job_id, task, node_id, resources, job.queue, job.user, note
            )
        )


def order(log: Iterable[Allocation]) -> list[Allocation]:
    """Return a log in the order of time; what happens at one time stays as it was."""
    return sorted(log, key=lambda one: one.at_s)
