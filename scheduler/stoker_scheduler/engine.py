"""The engine runs the core: it turns calls into events, carries out commands and answers pending calls.

One engine is one term of leadership: it begins with an empty state, adopts the leases that nodelets
have, and is closed when another scheduler leads. Everything runs on one event loop; ``apply`` never waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.leases.lease import Phase
from stoker_scheduler.core.machine import step
from stoker_scheduler.core.state import SchedulingPolicy, State
from stoker_scheduler.leadership import not_leader
from stoker_scheduler.nodelet_clients import NodeletClients, StartFailedError
from stoker_scheduler.owner_mailboxes import OwnerMailboxes
from stoker_scheduler.wire_types import lease_of, request_event
from stoker_wire.errors import (
    ConflictError,
    DeadlineExceededError,
    InfeasibleError,
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
    WorkerSpec,
)

if TYPE_CHECKING:
    from stoker_wire.process.background import Background

_log = logging.getLogger(__name__)

REPLY_MARGIN_S = 5.0
"""The core answers by its own timers; after this much more a caller is sent away without an answer."""

_REJECTIONS: dict[cmd.RejectReason, type[StokerError]] = {
    cmd.RejectReason.INFEASIBLE: InfeasibleError,
    cmd.RejectReason.START_FAILED: RuntimeEnvSetupError,
    cmd.RejectReason.JOB_FINISHED: ConflictError,
    cmd.RejectReason.OWNER_LOST: ConflictError,
}


class Engine:
    """The core of one term and its IO. ``on_fenced`` is called when a nodelet knows a later leader.

    It closes ``nodelets`` and ``background`` with itself.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        *,
        epoch: int,
        nodelets: NodeletClients,
        background: Background,
        on_fenced: Callable[[], None],
    ) -> None:
        self.state = State(policy=policy, term=f"{epoch:x}")
        self.adopting = False
        """Whether leases may exist that no nodelet has reported yet."""
        self.requests: dict[str, LeaseRequest] = {}
        """Those that are not answered yet, by id."""
        self._nodelets = nodelets
        self._background = background
        self._on_fenced = on_fenced
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

    # Calls

    async def request_leases(self, request: LeaseRequest, wait_s: float) -> LeaseReply:
        """Return leases as soon as some are granted, or none when ``wait_s`` has passed.

        DeadlineExceededError: no reply yet. A repetition with the same id goes on with the wait.
        """
        check_id(request.request_id, Prefix.REQUEST, field="request_id")
        event = request_event(request, at_s=self.now(), wait_s=wait_s)
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

    async def poll(self, owner_id: str, poll: OwnerPoll, wait_s: float) -> LeaseUpdates:
        """Renew an owner's leases; return its orders, at once if there are new ones."""
        mailbox = self._mailboxes.of(owner_id)
        mailbox.read_at_s = self.now()
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
        return LeaseUpdates(preempted=preempted, lost=lost)

    # Commands

    def _execute(self, command: cmd.Command) -> None:
        match command:
            case cmd.StartWorker():
                work = self._start(command.node_id, self._start_order(command))
                self._background.spawn(work, name=f"start {command.lease_id}")
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
            case cmd.Preempt():
                self._mailboxes.preempt(command.owner_id, command.lease_ids)
            case cmd.Lost():
                self._mailboxes.lose(command.owner_id, command.lease_ids)
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
        return StartLease(
            lease=lease_of(self.state.leases[command.lease_id]),
            epoch=self._epoch,
            worker=WorkerSpec(
                runtime_env=request.demand.runtime_env, actor=request.actor, driver=request.driver
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

    def _start_failed(self, node_id: str, lease_id: str, error: StartFailedError) -> None:
        lease = self.state.leases.get(lease_id)
        awaited = lease is not None and lease.phase is Phase.STARTING
        # What was given up meanwhile, or cannot start anywhere, is its caller's concern alone.
        loud = awaited and error.failure is not ev.StartFailure.ANYWHERE and not error.ended
        level = logging.WARNING if loud else logging.INFO
        _log.log(level, "lease did not start: %s on %s: %s", lease_id, node_id, error.text)
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
