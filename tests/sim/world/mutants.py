"""Bugs that others had, planted in the real code one at a time: the simulator has to find each.

A mutant is a patch of the product, the invariant that it breaks, the kind of world that is likely to meet it,
and the seed from which to look. ``tests/sim/test_mutants.py`` runs each with and without its patch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from stoker.runtime.actors.call_order import CallOrder
from stoker.runtime.driver import driver as driver_session
from stoker.runtime.tasks.dispatch import ClassQueue
from stoker.runtime.tasks.leases import Leases
from stoker_gcs.controllers.reconcile import Reconciler
from stoker_gcs.registry.groups import rules as group_rules
from stoker_gcs.registry.jobs.driver_processes import DriverProcesses, Seen
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_gcs.registry.jobs.sessions import SHARED_SLACK_S, Doubt, DriverSessions
from stoker_gcs.registry.nodes.probes import NodeProbes
from stoker_gcs.registry.ownership import Ownership
from stoker_gcs.state.event_log import EventLog
from stoker_gcs.state.records import RecordTable
from stoker_nodelet.core import machine as nodelet_machine
from stoker_nodelet.core.machine import step as nodelet_step
from stoker_scheduler.core import machine as scheduler_machine
from stoker_scheduler.core.leases import lifecycle
from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.queueing import cycle
from stoker_wire.messages.groups import GroupState
from stoker_wire.messages.work import JobState
from tests.sim.world.world import Plan

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A planted bug. ``origin`` says who had it; ``plan`` is the world in which it shows.

    ``finds`` is a regular expression of what the broken invariant says: any other error is no find.
    """

    name: str
    origin: str
    finds: str
    plant: Callable[[], contextlib.AbstractContextManager[Any]]
    plan: Plan
    first: int = 0


@contextlib.contextmanager
def patched(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes of the product's classes and modules."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


# The scheduler


def double_grant() -> Any:
    """A request for leases that is repeated is granted new ones: the answer is not remembered."""
    real = scheduler_machine._lease_requested

    def requested(state: Any, event: Any, outbox: Any) -> None:
        state.answers.pop(event.request_id, None)
        real(state, event, outbox)

    return patched((scheduler_machine, "_lease_requested", requested))


def leaked_bundles() -> Any:
    """A placement group that is removed while it is being placed leaves its prepared bundles."""

    def disband(state: Any, pending: Any) -> None:
        for bundles in (pending.starting, pending.ready, pending.committing):
            bundles.clear()
        pending.is_committed = False

    return patched((lifecycle, "disband", disband))


def half_a_gang() -> Any:
    """A gang of which a bundle is lost while it is placed keeps the others, and waits for all again."""

    def release_incomplete(state: Any, outbox: Any) -> None:
        state.incomplete.clear()

    return patched((scheduler_machine, "release_incomplete", release_incomplete))


def never_woken() -> Any:
    """A gang that was infeasible once is not looked at again when nodes come."""
    real_fits, real_assign = cycle.can_ever_fit, cycle._assign
    given_up: set[Any] = set()

    def can_ever_fit(state: Any, requirements: Any) -> bool:
        if isinstance(requirements, Gang) and not real_fits(state, requirements):
            given_up.add(requirements)
        return requirements not in given_up and real_fits(state, requirements)

    def assign(state: Any, pending: Any, outbox: Any) -> bool:
        return pending.requirements not in given_up and real_assign(state, pending, outbox)

    return patched((cycle, "can_ever_fit", can_ever_fit), (cycle, "_assign", assign))


def leaked_demand() -> Any:
    """The infeasible requests of a job that ends stay."""
    real = scheduler_machine._job_finished

    def job_finished(state: Any, event: Any, outbox: Any) -> None:
        kept = [
            pending
            for pending in state.pending.values()
            if pending.request.job_id == event.job_id
            and pending.requirements in state.infeasible_since_s
        ]
        for pending in kept:
            state.request_index.discard(pending.request_id, pending.belongs_to)
        real(state, event, outbox)
        for pending in kept:
            pending.deadline_s = math.inf
            state.request_index.add(pending.request_id, pending.belongs_to)

    return patched((scheduler_machine, "_job_finished", job_finished))


def drifting_resources() -> Any:
    """What a lease had that was taken back while it idled is not counted as free again."""
    real = lifecycle.remove_lease

    def remove_lease(state: Any, lease: Any) -> None:
        if lease.preempted and not lease.in_bundle:
            lease.place.allocate(lease.requirements, {}, blocked=lease.blocked)
        real(state, lease)

    return patched((lifecycle, "remove_lease", remove_lease))


# The nodelet


def started_twice() -> Any:
    """A start that is repeated while the first is still being prepared starts a second worker."""
    real = nodelet_machine._requested

    def requested(state: Any, event: Any, outbox: Any) -> None:
        lease = state.leases.get(event.lease.lease_id)
        if lease is not None and lease.phase is not nodelet_machine.LeasePhase.READY:
            del state.leases[event.lease.lease_id]
        real(state, event, outbox)

    return patched((nodelet_machine, "_requested", requested))


def zombie_leader() -> Any:
    """A scheduler that has lost its leadership without knowing still rules the nodes."""

    def step(state: Any, event: Any) -> Any:
        epoch = getattr(event, "epoch", None)
        if epoch is not None and epoch < state.epoch:
            event = replace(event, epoch=state.epoch)
        return nodelet_step(state, event)

    return mock.patch("tests.sim.world.world.nodelet_step", step)


def late_driver() -> Any:
    """The driver of a job that was stopped starts all the same, and keeps what it has."""
    real_finished = scheduler_machine._job_finished

    def job_finished(state: Any, event: Any, outbox: Any) -> None:
        starting = [
            lease
            for lease in state.leases.values()
            if lease.job_id == event.job_id and lease.phase is lifecycle.Phase.STARTING
        ]
        for lease in starting:
            state.lease_index.discard(lease.lease_id, lease.belongs_to)
        real_finished(state, event, outbox)
        for lease in starting:
            state.lease_index.add(lease.lease_id, lease.belongs_to)

    def forgotten(state: Any, event: Any, outbox: Any) -> None:
        for lease in [one for one in state.leases.values() if one.terms.job_id == event.job_id]:
            if lease.phase is nodelet_machine.LeasePhase.READY:
                nodelet_machine._end_work(state, event.job_id, "finished", event.at_s, outbox)

    return patched(
        (scheduler_machine, "_job_finished", job_finished),
        (nodelet_machine, "_job_finished", forgotten),
    )


# The gcs


def second_death() -> Any:
    """The death of another node is missed while a placement group is being placed again."""
    real = group_rules.node_lost

    def node_lost(group: Any, *rest: Any) -> Any:
        return None if group.state is GroupState.RESCHEDULING else real(group, *rest)

    return patched((group_rules, "node_lost", node_lost))


def hasty_recovery() -> Any:
    """A gcs that starts fails the jobs that have no session yet: they are just being created."""
    real = Reconciler._resume

    async def resume(self: Any, work: Any) -> None:
        await real(self, work)
        for job in await self._state.all(JOBS, {"state": JobState.RUNNING.value}):
            if not job.submitted and self._state.now() - job.created_at_s < 20.0:
                await self._jobs.end(job.job_id, JobState.FAILED, message="driver died: no session")

    return patched((Reconciler, "_resume", resume))


def growing_stream() -> Any:
    """The events for a reader of the log that is slow are kept for it, however many."""
    real_advance = EventLog._advance

    def advance(self: Any, events: Any) -> None:
        real_advance(self, events)
        for queue in getattr(self, "kept", {}).values():
            queue.extend(events)

    async def follow(self: Any, since: int) -> Any:
        if not hasattr(self, "kept"):
            self.kept = {}
        queue: list[Any] = [event for event in self._ring if event.seq > since]
        self.kept[id(queue)] = queue
        try:
            while True:
                await self.wait_beyond(since)
                batch = queue[:10]
                del queue[:10]
                if batch:
                    since = batch[-1].seq
                    yield batch
        finally:
            del self.kept[id(queue)]

    return patched((EventLog, "_advance", advance), (EventLog, "follow", follow))


def frozen_replica() -> Any:
    """D2: a driver learns late that its replica is silent; the other one gives it up without a look."""
    real = DriverSessions._doubt

    def doubt(self: Any, job: Any, session: Any, began_s: float) -> Any:
        found = real(self, job, session, began_s)
        if session is not None and self._state.now() - session.renewed_s > SHARED_SLACK_S:
            limit_s = self._settings.driver_reconnect_s + SHARED_SLACK_S
            return Doubt(max(session.renewed_s, began_s), limit_s, "its session ended {} ago")
        return found

    async def nobody_looks(self: Any, job: Any) -> Seen:
        return Seen.UNSEEN

    return patched(
        (DriverSessions, "_doubt", doubt),
        (DriverProcesses, "look", nobody_looks),
        (driver_session, "_SESSION_SILENCE_S", 22.5),
    )


def patient_restarts() -> Any:
    """D10: each gcs that starts grants every node ten seconds more, and nobody probes."""

    async def nothing(self: Any, node_id: str) -> bool:
        return True

    return patched((NodeProbes, "_probe", nothing))


def unfenced_writes() -> Any:
    """A replica writes what it decided before it was frozen: SQL does not compare the versions."""
    real = RecordTable.update

    def update(self: Any, current: Any, record: Any) -> Any:
        return replace(real(self, current, record), expect={})

    return patched((RecordTable, "update", update))


def orphaned_actor() -> Any:
    """B3: an actor that waits for its arguments outlives the process that would have given them."""

    async def lives(self: Any, owned_id: str) -> bool:
        return False

    return patched((Ownership, "end_if_orphaned", lives))


# The sdk


def late_failure() -> Any:
    """A task that its worker gave back, and that ran elsewhere, fails when that worker ends."""

    def return_unstarted(self: Any, slot: Any, task_ids: Any) -> Any:
        tasks = [t for i in task_ids if (t := slot.inflight.get(i)) is not None]
        for task in reversed(tasks):
            self.ready.appendleft(task)
        return tasks

    return patched((ClassQueue, "return_unstarted", return_unstarted))


def closed_worker() -> Any:
    """The lease of an idle worker that died stays open: tasks are sent there, and nobody runs them."""
    real = Leases.on_channel_closed

    def on_channel_closed(self: Any, channel: Any) -> None:
        for lease_id, (key, _) in list(self._granted.items()):
            slot = self._tasks.queues[key].slots.get(lease_id)
            if slot is not None and slot.channel is channel and not slot.inflight:
                del self._granted[lease_id]
                slot.last_used_s = math.inf
        real(self, channel)

    return patched((Leases, "on_channel_closed", on_channel_closed))


def blocked_retry() -> Any:
    """B1: the retry of a call waits behind a call that needs its result."""

    def requeue(self: Any, calls: Any) -> None:
        for call in calls:
            (self._blocked_groups.get(call.group) or self._requeued).append(call)

    return patched((CallOrder, "requeue", requeue))


_SMALL = Plan(messages=300, chaos_s=15.0)
MUTANTS = (
    Mutant(name="double grant", origin="Ray, fault tolerance of RPCs", plant=double_grant,
           finds=r"r_\w+ wants \d+ leases and has \d+",
           plan=replace(_SMALL, rounds=("tasks",), kinds=("noise",)), first=100),
    Mutant(name="started twice", origin="Ray, fault tolerance of RPCs", plant=started_twice,
           finds=r"nodelet: .*(is unknown|is ready but its worker is STARTING)",
           plan=replace(_SMALL, rounds=("tasks", "actor"), kinds=("noise",), noise=0.6)),
    Mutant(name="leaked bundles", origin="ray#64693", plant=leaked_bundles,
           finds=r"scheduler: l_pg_.* is in 0 collections",
           plan=replace(_SMALL, rounds=("group", "tasks")), first=20),
    Mutant(name="half a gang", origin="ray#65147", plant=half_a_gang,
           finds=r"scheduler: l_pg_.* is in 0 collections",
           plan=replace(_SMALL, rounds=("group", "tasks")), first=20),
    Mutant(name="second death", origin="ray#24875", plant=second_death,
           finds=r"bundle \d+ of pg_\S+ is on n_\d, which is gone",
           plan=Plan(rounds=("group",), kinds=("kill nodelet",), faults=16, drivers=1)),
    Mutant(name="never woken", origin="ray#62483", plant=never_woken,
           finds=r"scheduler: .* fits, and waits",
           plan=replace(_SMALL, rounds=("group",), kinds=("kill nodelet", "power off"))),
    Mutant(name="late driver", origin="ray#41437", plant=late_driver,
           finds=r"after the chaos: n_\d has l_job_\w+\.driver",
           plan=replace(_SMALL, rounds=("job",))),
    Mutant(name="hasty recovery", origin="ray#34223", plant=hasty_recovery,
           finds=r"the driver of job_\w+ lives, and its job failed: .*: no session$",
           plan=replace(_SMALL, kinds=("kill gcs",)), first=1),
    Mutant(name="leaked demand", origin="ray#29468", plant=leaked_demand,
           finds=r"after the chaos: the scheduler waits with r_a_",
           plan=replace(_SMALL, rounds=("big", "tasks"))),
    Mutant(name="late failure", origin="distributed#6689", plant=late_failure,
           finds=r"sdk: (t_\S+ is at|t_\S+ is settled and waits|the load of l_\S+ is not)",
           plan=replace(_SMALL, rounds=("quick",), kinds=("kill worker",))),
    Mutant(name="closed worker", origin="distributed#6263", plant=closed_worker,
           finds=r"sdk: p_\w+ uses l_\S+, which it does not hold",
           plan=replace(_SMALL, rounds=("tasks", "quick"), kinds=("kill worker",))),
    Mutant(name="drifting resources", origin="distributed#4446", plant=drifting_resources,
           finds=r"scheduler: \w+ of n_\d leaks",
           plan=replace(_SMALL, rounds=("tasks", "quick", "group"), drivers=2)),
    Mutant(name="zombie leader", origin="Ray, active and passive head", plant=zombie_leader,
           finds=r"a zombie leader changed a node",
           plan=replace(_SMALL, rounds=("tasks", "quick"), kinds=("freeze scheduler",))),
    Mutant(name="unfenced writes", origin="Ray, active and passive head", plant=unfenced_writes,
           finds=r"(job|actor) \S+ was [A-Z]+ and is [A-Z]+",
           plan=Plan(rounds=("job",), kinds=("freeze gcs",), faults=24, chaos_s=30.0, replicas=2), first=20),
    Mutant(name="growing stream", origin="nomad GH-27397", plant=growing_stream,
           finds=r"the event log keeps \d+ things in kept",
           plan=Plan(rounds=("job", "group", "actor"), kinds=("freeze nodelet", "freeze scheduler"))),
    Mutant(name="frozen replica", origin="review of faults, D2", plant=frozen_replica,
           finds=r"the driver of job_\w+ lives, and its job failed: .*its session ended",
           plan=replace(_SMALL, kinds=("freeze gcs",), replicas=2)),
    Mutant(name="patient restarts", origin="review of faults, D10", plant=patient_restarts,
           finds=r"n_\d is dead for [\d.]+ s in which a gcs served",
           plan=replace(_SMALL, kinds=("flap gcs", "kill nodelet"), replicas=1), first=20),
    Mutant(name="blocked retry", origin="review of behaviour, 1", plant=blocked_retry,
           finds=r"sdk: the retry of t_\S+ waits for others",
           plan=replace(_SMALL, rounds=("actor",))),
    Mutant(name="orphaned actor", origin="review of behaviour, 3", plant=orphaned_actor,
           finds=r"after the chaos: .*actor a_\S+ is \w+",
           plan=replace(_SMALL, rounds=("owned",), faults=0)),
)  # fmt: skip
