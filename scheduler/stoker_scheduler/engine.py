"""The engine runs the core: it turns calls into events, carries out commands and answers pending calls.

One engine is one term of leadership: it begins with an empty state, adopts the leases that nodelets
have, and is closed when another scheduler leads. Everything runs on one event loop; ``apply`` never waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, assert_never

import msgspec

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.leases.lease import Phase
from stoker_scheduler.core.machine import step
from stoker_scheduler.core.model.extenders import ExtenderAnswer
from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.placement.feasibility import could_ever_fit
from stoker_scheduler.core.state import SchedulingPolicy, State
from stoker_scheduler.elastic.directory import ElasticDirectory
from stoker_scheduler.jobs import JobDirectory, JobFacts
from stoker_scheduler.leadership import not_leader
from stoker_scheduler.nodelet_clients import NodeletClients, StartFailedError
from stoker_scheduler.owner_mailboxes import OwnerMailboxes
from stoker_scheduler.wire_types import bundles_event, lease_of, request_event
from stoker_wire.errors import (
    ConflictError,
    DeadlineExceededError,
    IdempotencyError,
    InfeasibleError,
    JobFinishedError,
    PlacementGroupRemovedError,
    RuntimeEnvSetupError,
    StokerError,
)
from stoker_wire.ids import Prefix, check_id
from stoker_wire.messages.cluster import (
    GrantedLease,
    LeaseReply,
    LeaseRequest,
    LeaseUpdates,
    OwnerPoll,
    StartedLease,
    StartLease,
    StopLeases,
    WorkerSpec,
)
from stoker_wire.messages.common import Address
from stoker_wire.messages.groups import (
    CommitBundles,
    HoldBundles,
    PreemptGroup,
    RequestBundles,
)
from stoker_wire.process.metrics import SPAN_BOUNDS, Distribution

if TYPE_CHECKING:
    from stoker_scheduler.core.model.requirements import Requirements
    from stoker_scheduler.extenders.client import Extenders
    from stoker_wire.process.background import Background

R = TypeVar("R", "Requirements", Gang, "Requirements | Gang")
_log = logging.getLogger(__name__)

GROUP_PAUSE_S = 0.5
"""Between two tries to tell the gcs that a group is preempted."""
REPLY_MARGIN_S = 5.0
"""The core answers by its own timers; after this much more a caller is sent away without an answer."""

NO_WORKER = StartedLease(worker_id="", address=Address("", "", "", "", ""), pid=0)
_REJECTIONS: dict[cmd.RejectReason, type[StokerError]] = {
    cmd.RejectReason.INFEASIBLE: InfeasibleError,
    cmd.RejectReason.START_FAILED: RuntimeEnvSetupError,
    cmd.RejectReason.JOB_FINISHED: JobFinishedError,
    cmd.RejectReason.OWNER_LOST: ConflictError,
    cmd.RejectReason.GROUP_REMOVED: PlacementGroupRemovedError,
}


@dataclass(slots=True)
class LeaseCounts:
    """The outcomes of requests and leases, over all terms of this process."""

    granted: int = 0
    lost: int = 0
    preempted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Requests, by reason."""
    wait_s: Distribution = field(default_factory=lambda: Distribution(SPAN_BOUNDS))
    """From a request to the grant of each lease."""

    def count(self, command: cmd.Command, state: State, at_s: float) -> None:
        """Count what a command tells."""
        match command:
            case cmd.Reply():
                for lease_id in command.lease_ids:
                    lease = state.leases.get(lease_id)
                    if lease is not None:
                        self.granted += 1
                        self.wait_s.observe(max(0.0, at_s - lease.since_s))
            case cmd.Lost():
                self.lost += len(command.lease_ids)
            case cmd.StopLease():
                self.preempted += 1
            case cmd.Reject():
                self.rejected[command.reason.value] += 1


class Engine:
    """The core of one term and its IO. ``on_fenced`` is called when a nodelet knows a later leader.

    ``preempt_group`` tells the gcs that the bundles of a group are to be placed again. An answer of extenders
    holds for ``answer_s``.

    It closes ``nodelets``, ``extenders`` and ``background`` with itself.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        *,
        epoch: int,
        jobs: JobDirectory,
        nodelets: NodeletClients,
        background: Background,
        extenders: Extenders,
        answer_s: float,
        on_fenced: Callable[[], None],
        preempt_group: Callable[[str, PreemptGroup], Awaitable[object]],
        counts: LeaseCounts,
        elastic_policy: str = "stoker",
        elastic_fairness: float | None = None,
    ) -> None:
        self._counts = counts
        self.state = State(policy=policy, term=f"{epoch:x}")
        self.adopting = False
        """Whether leases may exist that no nodelet has reported yet."""
        self.requests: dict[str, LeaseRequest | RequestBundles] = {}
        """Those that are not answered yet, by id."""
        self.jobs = jobs
        self.elastic = ElasticDirectory()
        self.elastic_policy = elastic_policy
        self.elastic_fairness = elastic_fairness
        self._nodelets = nodelets
        self._background = background
        self._extenders = extenders
        self._answer_s = answer_s
        self._on_fenced = on_fenced
        self._order_group = preempt_group
        self._started: dict[str, StartedLease] = {}
        self._replies: dict[str, asyncio.Future[LeaseReply]] = {}
        self._mailboxes = OwnerMailboxes()
        self._timer: asyncio.TimerHandle | None = None
        self._at_s = 0.0
        self._closed = False
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Act under ``epoch`` from now on."""
        self._epoch = epoch
        self._nodelets.epoch = epoch

    def now(self) -> float:
        """Return the wall clock, kept from running backwards."""
        self._at_s = max(self._at_s, time.time())
        return self._at_s

    def apply(self, event: ev.Event) -> None:
        """Apply one event to the state, and carry out the commands that follow from it."""
        if self._closed:
            return
        for command in step(self.state, event):
            self._counts.count(command, self.state, self._at_s)
            self._execute(command)

    def adopt(self, event: ev.LeaseAdopted, started: StartedLease) -> None:
        """Add a lease of the leader before, with the worker that serves it."""
        self._started[event.lease_id] = started
        self.apply(event)

    async def close(self, leader_url: str = "") -> None:
        """End the term: every caller that waits is sent to the new leader."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for future in self._replies.values():
            if not future.done():
                future.set_exception(not_leader(leader_url))
                future.exception()
        self._mailboxes.wake_all()
        await self._background.close()
        await self._nodelets.close()
        await self._extenders.close()

    # Calls

    async def request_leases(self, request: LeaseRequest, wait_s: float) -> LeaseReply:
        """Return leases as soon as some are granted, or none when ``wait_s`` has passed.

        DeadlineExceededError: no reply yet. A repetition with the same id goes on with the wait.
        """
        check_id(request.request_id, Prefix.REQUEST, field="request_id")
        job = await self._job(request.demand.job_id)
        driver = request.driver
        # The gcs may ask for the driver of an attempt before the event of it is here.
        if driver is not None and self.jobs.begin_attempt(driver.job_id, driver.attempt):
            self.end_attempt(driver.job_id)
        request = await self._with_user(request)
        event = request_event(request, job, at_s=self.now(), wait_s=wait_s)
        return await self._request(request, event)

    async def request_bundles(self, request: RequestBundles, wait_s: float) -> LeaseReply:
        """Return a lease for each bundle once all are held, or none when ``wait_s`` has passed."""
        check_id(request.request_id, Prefix.REQUEST, field="request_id")
        check_id(request.group_id, Prefix.GROUP, field="group_id")
        job = await self._job(request.job_id)
        event = bundles_event(request, job, at_s=self.now(), wait_s=wait_s)
        return await self._request(request, event)

    def end_attempt(self, job_id: str) -> None:
        """End all that an attempt of a job has and waits for; what comes is of the next one."""
        self.apply(ev.JobFinished(at_s=self.now(), job_id=job_id))
        self.apply(ev.JobAdded(at_s=self.now(), job_id=job_id))

    async def _job(self, job_id: str) -> JobFacts:
        known = self.jobs.get(job_id)
        if known is None and job_id not in self.state.finished_jobs:
            known = await self.jobs.arrival(job_id)
            if known is None:
                self.apply(ev.JobFinished(at_s=self.now(), job_id=job_id))
        return known or JobFacts()

    async def _with_user(self, request: LeaseRequest) -> LeaseRequest:
        """Return a request with the Unix user of its job, whatever its sender says."""
        job_id, run_as = request.demand.job_id, ""
        if job_id not in self.state.finished_jobs:
            actor_id = request.actor.actor_id if request.actor is not None else request.acts_for
            run_as = await self.jobs.run_as(job_id, actor_id)
        if run_as == request.run_as:
            return request
        return msgspec.structs.replace(request, run_as=run_as)

    async def _request(
        self, request: LeaseRequest | RequestBundles, event: ev.LeaseRequested
    ) -> LeaseReply:
        self._check_own(event)
        extended = self._extenders.extend(event.requirements)
        if extended is not event.requirements:
            event = msgspec.structs.replace(event, requirements=extended)
        wait_s = event.deadline_s - event.at_s
        future = self._replies.get(request.request_id)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self._replies[request.request_id] = future
            self.requests[request.request_id] = request
        self.apply(event)
        limit_s = wait_s + self.state.policy.start_grace_s + REPLY_MARGIN_S
        # A reply that comes in the same turn of the loop as the limit counts.
        await asyncio.wait((future,), timeout=limit_s)
        if not future.done():
            raise DeadlineExceededError(
                f"{request.request_id} waits on after {limit_s:g} s\n"
                "it was asked again meanwhile, with a later deadline, or this scheduler is held "
                "up: ask again under the same id"
            )
        return future.result()

    def _check_own(self, event: ev.LeaseRequested) -> None:
        """Raise IdempotencyError for the id of another owner's request, whose leases it would get."""
        pending = self.state.pending.get(event.request_id)
        answer = self.state.answers.get(event.request_id)
        own = event.owner_id, event.job_id
        known = [pending.request] if pending is not None else []
        leases = [self.state.leases.get(one) for one in answer.lease_ids] if answer else []
        if any((one.owner_id, one.job_id) != own for one in (*known, *leases) if one is not None):
            raise IdempotencyError(
                "this request_id was used before by another owner\nuse a new one for a new request",
                field="request_id",
            )

    async def consult(self, requirements: R) -> R:
        """Return the requirements as they would be requested, with the answer of extenders at hand."""
        extended = self._extenders.extend(requirements)
        for kind in extended.kinds:
            if kind.extenders and kind not in self.state.extender_answers:
                await self._ask_extenders(kind)
        return extended

    async def _ask_extenders(self, requirements: Requirements) -> None:
        nodes = [n for n in self.state.nodes.values() if could_ever_fit(n, requirements)]
        gains, refusals = await self._extenders.ask(requirements, nodes)
        answer = ExtenderAnswer(gains, refusals, self.now() + self._answer_s)
        self.apply(ev.ExtendersAnswered(at_s=self.now(), requirements=requirements, answer=answer))

    async def poll(self, owner_id: str, poll: OwnerPoll, wait_s: float) -> LeaseUpdates:
        """Take an owner's list of its leases; return its orders, at once if there are new ones."""
        mailbox = self._mailboxes.of(owner_id)
        mailbox.read_at_s = self.now()
        if not 0 < poll.number < mailbox.number:
            mailbox.number = poll.number
            self.apply(
                ev.OwnerPolled(
                    at_s=mailbox.read_at_s,
                    owner_id=owner_id,
                    lease_ids=poll.lease_ids,
                    idle_lease_ids=poll.idle_lease_ids,
                )
            )
        await mailbox.wait(poll.lease_ids, wait_s)
        if self._closed:
            raise not_leader("")
        mailbox.changed.clear()
        mailbox.read_at_s = self.now()
        lost = tuple(mailbox.lost) if not self.adopting else ()
        mailbox.lost.clear()
        self._mailboxes.drop_unread(self.now())
        leases = self.state.leases
        preempted = tuple(i for i in poll.lease_ids if i in leases and leases[i].preempted)
        unnamed = (i for i in mailbox.preempted if i in leases and i not in preempted)
        mailbox.preempted = dict.fromkeys(unnamed)
        return LeaseUpdates(preempted=preempted, lost=lost, epoch=self._epoch)

    # Commands

    def _execute(self, command: cmd.Command) -> None:
        match command:
            case cmd.StartWorker():
                work = self._start(command.node_id, self._start_order(command))
                self._background.spawn(work, name=f"start {command.lease_id}")
            case cmd.HoldBundles():
                self._background.spawn(self._hold(command), name=f"hold on {command.node_id}")
            case cmd.CommitBundles():
                self._background.spawn(self._commit(command), name=f"commit on {command.node_id}")
            case cmd.ReleaseLease():
                # It may overtake the start: a nodelet refuses a start that comes after its release.
                self._release(
                    command.node_id, command.lease_id, kill=command.kill, reason=command.reason
                )
            case cmd.Reply():
                self._reply(command)
            case cmd.Reject():
                future = self._pop_waiting(command.request_id)
                if future is not None:
                    future.set_exception(_REJECTIONS[command.reason](command.text))
                    future.exception()  # its caller may be gone; that is no crash
            case cmd.StopLease():
                work = self._stop(command)
                self._background.spawn(work, name=f"stop {command.lease_id}")
            case cmd.PreemptGroup():
                body = PreemptGroup(lease_id=command.lease_id, reason=command.reason)
                work = self._preempt_group(command.group_id, body)
                self._background.spawn(work, name=f"preempt {command.group_id}")
            case cmd.Preempt():
                self._mailboxes.preempt(command.owner_id, command.lease_ids)
            case cmd.Lost():
                self._mailboxes.lose(command.owner_id, command.lease_ids)
            case cmd.AskExtenders():
                self._background.spawn(
                    self._ask_extenders(command.requirements), name="ask extenders"
                )
            case cmd.WakeAt():
                self._wake_at(command.at_s)
            case _:
                assert_never(command)

    def _reply(self, command: cmd.Reply) -> None:
        granted = [self._granted_lease(lease_id) for lease_id in command.lease_ids]
        reply = LeaseReply(
            granted=tuple(lease for lease in granted if lease is not None),
            queue_position=command.queue_position,
            note=command.note,
        )
        future = self._pop_waiting(command.request_id)
        if future is not None:
            future.set_result(reply)

    def _granted_lease(self, lease_id: str) -> GrantedLease | None:
        """Return a lease with its worker, or None if it has ended."""
        lease, started = self.state.leases.get(lease_id), self._started.get(lease_id)
        if lease is not None and lease.kind is ev.Kind.BUNDLE:
            started = NO_WORKER
        if lease is None or started is None:
            return None
        return GrantedLease(
            lease=lease_of(lease),
            worker_id=started.worker_id,
            address=started.address,
            pid=started.pid,
        )

    def _pop_waiting(self, request_id: str) -> asyncio.Future[LeaseReply] | None:
        self.requests.pop(request_id, None)
        future = self._replies.pop(request_id, None)
        return None if future is None or future.done() else future

    def _start_order(self, command: cmd.StartWorker) -> StartLease:
        request = self.requests[command.request_id]
        assert isinstance(request, LeaseRequest), "bundles have no workers"
        return StartLease(
            lease=lease_of(self.state.leases[command.lease_id]),
            epoch=self._epoch,
            worker=WorkerSpec(
                runtime_env=request.demand.runtime_env,
                actor=request.actor,
                driver=request.driver,
                capture_child_tasks=request.demand.strategy.capture_child_tasks,
                acts_for=request.acts_for,
                run_as=request.run_as,
            ),
        )

    async def _start(self, node_id: str, order: StartLease) -> None:
        lease_id = order.lease.lease_id
        try:
            started = await self._nodelets.start(node_id, order)
        except StartFailedError as error:
            self._start_failed(node_id, lease_id, error)
            return
        if lease_id not in self.state.leases:
            # Given up meanwhile, and perhaps released before it started: end it for certain.
            self._release(node_id, lease_id, kill=True, reason="given up while it started")
            return
        self._started[lease_id] = started
        self.apply(ev.LeaseStarted(at_s=self.now(), lease_id=lease_id))
        if len(self._started) > 2 * len(self.state.leases) + 64:
            self._started = {i: s for i, s in self._started.items() if i in self.state.leases}

    async def _hold(self, command: cmd.HoldBundles) -> None:
        node_id, lease_ids = command.node_id, command.lease_ids
        order = HoldBundles(
            leases=tuple(lease_of(self.state.leases[lease_id]) for lease_id in lease_ids),
            epoch=self._epoch,
            prepare=command.prepare,
        )
        try:
            await self._nodelets.hold(node_id, order)
        except StartFailedError as error:
            for lease_id in lease_ids:
                self._start_failed(node_id, lease_id, error)
            return
        self.apply(ev.BundlesHeld(at_s=self.now(), lease_ids=lease_ids))

    async def _commit(self, command: cmd.CommitBundles) -> None:
        order = CommitBundles(lease_ids=command.lease_ids, epoch=self._epoch)
        kept = await self._nodelets.commit(command.node_id, order)
        lost = tuple(lease_id for lease_id in command.lease_ids if lease_id not in kept)
        self.apply(ev.BundlesLost(at_s=self.now(), lease_ids=lost))
        self.apply(ev.BundlesCommitted(at_s=self.now(), lease_ids=kept))

    async def _stop(self, command: cmd.StopLease) -> None:
        _log.info(
            "preempts %s on %s in %g s: %s",
            command.lease_id, command.node_id, command.grace_s, command.reason,
        )  # fmt: skip
        await self._nodelets.stop(
            command.node_id,
            StopLeases(
                lease_ids=(command.lease_id,),
                grace_s=command.grace_s,
                reason=command.reason,
                epoch=self._epoch,
            ),
        )

    async def _preempt_group(self, group_id: str, body: PreemptGroup) -> None:
        """Have the gcs ask for the bundles of a group again, which gives up those that are held."""
        while body.lease_id in self.state.leases:
            try:
                await self._order_group(group_id, body)
            except StokerError as error:
                if not error.retryable:
                    _log.warning("group is not preempted: %s: %s", group_id, error)
                    return
                await asyncio.sleep(GROUP_PAUSE_S)
            else:
                return

    def _start_failed(self, node_id: str, lease_id: str, error: StartFailedError) -> None:
        lease = self.state.leases.get(lease_id)
        awaited = lease is not None and lease.phase is Phase.STARTING
        # What was given up meanwhile, or cannot start anywhere, is its caller's concern alone.
        loud = awaited and error.failure is not ev.StartFailure.ANYWHERE and not error.ended
        level = logging.WARNING if loud else logging.INFO
        _log.log(level, "lease did not start: %s on %s: %s", lease_id, node_id, error.text)
        if lease is not None and error.job_finished:
            # It had ended before this leader listed the jobs; its node is not to blame.
            self.apply(ev.JobFinished(at_s=self.now(), job_id=lease.account.job_id))
        self.apply(
            ev.LeaseStartFailed(
                at_s=self.now(), lease_id=lease_id, failure=error.failure, text=error.text
            )
        )
        if error.fenced:
            self._on_fenced()

    def _release(self, node_id: str, lease_id: str, *, kill: bool, reason: str) -> None:
        self._nodelets.release(
            node_id, lease_id, kill=kill, reason=reason, on_ended=self._lease_ended
        )

    def _lease_ended(self, lease_id: str) -> None:
        lease = self.state.leases.get(lease_id)
        if lease is not None and lease.phase is Phase.RELEASING:
            self.apply(ev.LeaseEnded(at_s=self.now(), lease_id=lease_id))
        self._started.pop(lease_id, None)

    def _wake_at(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, at_s - self.now()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.apply(ev.Tick(at_s=self.now()))
