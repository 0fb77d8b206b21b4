"""The shell of the core: turns calls into events, carries out commands, wakes who waits.

One Engine is one term of leadership: it begins with an empty state, adopts what nodelets hold, and
is closed when another scheduler leads. Everything runs on one event loop; ``apply`` never waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.machine import step
from stoker_scheduler.core.placement.scoring import ScorePolicy
from stoker_scheduler.core.state import Phase, Policy, State
from stoker_scheduler.nodelet_clients import Nodelets, StartFailedError
from stoker_scheduler.wire_types import class_key, lease_of, need_of, setup_of
from stoker_wire.errors import (
    ConflictError,
    DeadlineExceededError,
    InfeasibleError,
    NotLeaderError,
    RuntimeEnvSetupError,
    StokerError,
)
from stoker_wire.ids import Prefix, check_id
from stoker_wire.messages.cluster import (
    GrantedLease,
    LeaseReply,
    LeaseRequest,
    OwnerOrders,
    OwnerPoll,
    StartedLease,
    StartLease,
    WorkerSpec,
)
from stoker_wire.messages.common import OnInfeasible
from stoker_wire.messages.kernels import kernel_set
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from stoker_wire.settings import Settings

REPLY_MARGIN_S = 5.0
"""The core answers by its own timers; after this much more an asker is sent away without one."""
MAILBOX_LIFE_S = 60.0

_REFUSALS: dict[cmd.Refusal, type[StokerError]] = {
    cmd.Refusal.INFEASIBLE: InfeasibleError,
    cmd.Refusal.START_FAILED: RuntimeEnvSetupError,
    cmd.Refusal.JOB_FINISHED: ConflictError,
    cmd.Refusal.OWNER_LOST: ConflictError,
}


@dataclass(slots=True)
class _Mailbox:
    """Orders for one owner that no poll has carried yet."""

    news: asyncio.Event = field(default_factory=asyncio.Event)
    recalled: dict[str, None] = field(default_factory=dict)
    lost: dict[str, None] = field(default_factory=dict)
    read_at_s: float = 0.0


class Engine:
    """Runs the core for one term. ``fenced`` is called when a nodelet knows a later leader."""

    def __init__(
        self,
        settings: Settings,
        *,
        token: str,
        epoch: int,
        log: FilteringBoundLogger,
        fenced: Callable[[], None],
    ) -> None:
        policy = Policy(
            score=ScorePolicy(pack_threshold=settings.spread_threshold),
            lease_ttl_s=settings.lease_ttl_s,
            infeasible_grace_s=settings.infeasible_grace_s,
        )
        self.state = State(policy=policy, term=f"{epoch:x}")
        self.background = Background("scheduler")
        self.nodelets = Nodelets(
            settings, token=token, background=self.background, ended=self._lease_ended
        )
        self.adopting = False
        """Whether leases may exist that no nodelet has reported yet."""
        self.started: dict[str, StartedLease] = {}
        self.requests: dict[str, LeaseRequest] = {}
        """Those that are not answered yet, by id."""
        self._log = log
        self._fenced = fenced
        self._replies: dict[str, asyncio.Future[LeaseReply]] = {}
        self._mail: dict[str, _Mailbox] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._at_s = 0.0
        self._closed = False
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Act under ``epoch`` from now on."""
        self.epoch = epoch
        self.nodelets.epoch = epoch

    def now(self) -> float:
        """Return the wall clock, kept from running backwards."""
        self._at_s = max(self._at_s, time.time())
        return self._at_s

    def apply(self, event: ev.Event) -> None:
        """Take in one event and carry out what follows from it."""
        if self._closed:
            return
        for command in step(self.state, event):
            self._execute(command)

    async def close(self, leader_url: str = "") -> None:
        """End the term: whoever waits is sent to the new leader."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for future in self._replies.values():
            if not future.done():
                future.set_exception(not_leader(leader_url))
                future.exception()
        for mailbox in self._mail.values():
            mailbox.news.set()
        await self.background.close()
        await self.nodelets.close()

    # Calls

    async def ask(self, request: LeaseRequest, wait_s: float) -> LeaseReply:
        """Ask for leases; the reply comes when some are there or ``wait_s`` has passed.

        DeadlineExceededError: no reply yet. Asking again with the same id goes on with the wait.
        """
        check_id(request.request_id, Prefix.REQUEST, field="request_id")
        demand, now_s = request.demand, self.now()
        need = need_of(demand)
        future = self._replies.get(request.request_id)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self._replies[request.request_id] = future
            self.requests[request.request_id] = request
        self.apply(
            ev.LeaseAsked(
                at_s=now_s,
                request_id=request.request_id,
                owner_id=request.owner_id,
                job_id=demand.job_id,
                need=need,
                class_key=class_key(request),
                count=request.count,
                deadline_s=now_s + wait_s,
                kind=ev.Kind(demand.kind.value),
                priority=demand.priority,
                wait_if_infeasible=demand.on_infeasible is OnInfeasible.WAIT,
                locality=demand.locality,
                name=demand.name,
                actor_id=request.actor.actor_id if request.actor else "",
                kernels=kernel_set(demand.runtime_env),
                setup=setup_of(demand.runtime_env),
            )
        )
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

    async def poll(self, owner_id: str, poll: OwnerPoll, wait_s: float) -> OwnerOrders:
        """Renew an owner's leases; return its orders, at once if there are new ones."""
        mailbox = self._mail.setdefault(owner_id, _Mailbox())
        mailbox.read_at_s = self.now()
        self.apply(
            ev.OwnerPolled(
                at_s=mailbox.read_at_s,
                owner_id=owner_id,
                lease_ids=poll.lease_ids,
                idle_lease_ids=poll.idle_lease_ids,
            )
        )
        # A recall may be of a lease that the poll of that moment did not name yet.
        waits = mailbox.recalled.keys().isdisjoint(poll.lease_ids)
        if waits and not mailbox.news.is_set() and wait_s > 0:
            try:
                async with asyncio.timeout(wait_s):
                    await mailbox.news.wait()
            except TimeoutError:
                pass
        if self._closed:
            raise not_leader("")
        mailbox.news.clear()
        mailbox.read_at_s = self.now()
        lost = tuple(mailbox.lost) if not self.adopting else ()
        mailbox.lost.clear()
        self._forget_mail()
        leases = self.state.leases
        recall = tuple(i for i in poll.lease_ids if i in leases and leases[i].recalled)
        mailbox.recalled = {i: None for i in mailbox.recalled if i in leases and i not in recall}
        return OwnerOrders(recall=recall, lost=lost)

    def granted(self, lease_id: str) -> GrantedLease | None:
        """Return a living lease with its worker."""
        lease, started = self.state.leases.get(lease_id), self.started.get(lease_id)
        if lease is None or started is None:
            return None
        return GrantedLease(
            lease=lease_of(lease),
            worker_id=started.worker_id,
            address=started.address,
            pid=started.pid,
        )

    # Commands

    def _execute(self, command: cmd.Command) -> None:
        match command:
            case cmd.StartLease():
                work = self._start(command.node_id, self._order(command))
                self.background.spawn(work, name=f"start {command.lease_id}")
            case cmd.ReleaseLease():
                # It may overtake the start: a nodelet refuses a start that comes after its release.
                self.nodelets.release(
                    command.node_id, command.lease_id, kill=command.kill, reason=command.reason
                )
            case cmd.Reply():
                granted = [self.granted(lease_id) for lease_id in command.lease_ids]
                reply = LeaseReply(
                    granted=tuple(lease for lease in granted if lease is not None),
                    queue_position=command.queue_position,
                    note=command.note,
                )
                future = self._answered(command.request_id)
                if future is not None:
                    future.set_result(reply)
            case cmd.Reject():
                future = self._answered(command.request_id)
                if future is not None:
                    future.set_exception(_REFUSALS[command.refusal](command.text))
                    future.exception()  # its asker may be gone; that is no crash
            case cmd.Recall():
                mailbox = self._mail.setdefault(command.owner_id, _Mailbox())
                mailbox.recalled.update(dict.fromkeys(command.lease_ids))
                mailbox.news.set()
            case cmd.Lost():
                mailbox = self._mail.setdefault(command.owner_id, _Mailbox())
                mailbox.lost.update(dict.fromkeys(command.lease_ids))
                mailbox.news.set()
            case cmd.WakeAt():
                self._wake_at(command.at_s)

    def _answered(self, request_id: str) -> asyncio.Future[LeaseReply] | None:
        self.requests.pop(request_id, None)
        future = self._replies.pop(request_id, None)
        return None if future is None or future.done() else future

    def _order(self, command: cmd.StartLease) -> StartLease:
        request = self.requests[command.request_id]
        return StartLease(
            lease=lease_of(self.state.leases[command.lease_id]),
            epoch=self.epoch,
            worker=WorkerSpec(
                runtime_env=request.demand.runtime_env, actor=request.actor, driver=request.driver
            ),
        )

    async def _start(self, node_id: str, order: StartLease) -> None:
        lease_id = order.lease.lease_id
        try:
            started = await self.nodelets.start(node_id, order)
        except StartFailedError as error:
            # What was given up meanwhile, or cannot start anywhere, is its asker's concern alone.
            lease = self.state.leases.get(lease_id)
            awaited = lease is not None and lease.phase is Phase.STARTING
            ours = awaited and error.failure is not ev.StartFailure.ANYWHERE and not error.ended
            say = self._log.warning if ours else self._log.info
            say("lease did not start", lease_id=lease_id, node_id=node_id, why=error.text)
            self.apply(
                ev.LeaseStartFailed(
                    at_s=self.now(), lease_id=lease_id, failure=error.failure, text=error.text
                )
            )
            if error.fenced:
                self._fenced()
            return
        if lease_id not in self.state.leases:
            # Given up meanwhile, and perhaps released before it started: end it for certain.
            self.nodelets.release(node_id, lease_id, kill=True, reason="given up while it started")
            return
        self.started[lease_id] = started
        self.apply(ev.LeaseStarted(at_s=self.now(), lease_id=lease_id))
        if len(self.started) > 2 * len(self.state.leases) + 64:
            self.started = {i: s for i, s in self.started.items() if i in self.state.leases}

    def _lease_ended(self, lease_id: str) -> None:
        lease = self.state.leases.get(lease_id)
        if lease is not None and lease.phase is Phase.RELEASING:
            self.apply(ev.LeaseEnded(at_s=self.now(), lease_id=lease_id))
        self.started.pop(lease_id, None)

    def _wake_at(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, at_s - self.now()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.apply(ev.Tick(at_s=self.now()))

    def _forget_mail(self) -> None:
        if len(self._mail) < 1024:
            return
        oldest_s = self.now() - MAILBOX_LIFE_S
        self._mail = {o: m for o, m in self._mail.items() if m.read_at_s >= oldest_s}


def not_leader(leader_url: str) -> NotLeaderError:
    """Return the error that sends a caller to the scheduler that leads."""
    where = f"\nask {leader_url}" if leader_url else "\nask the gcs who does"
    return NotLeaderError(f"this scheduler does not lead{where}", extra={"leader": leader_url})
