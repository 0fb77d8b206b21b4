"""The leases of this process: requested, listed and returned here, for the class queues.

One request per scheduling class is under way while tasks of it wait; one poll per process lists all
leases and brings preemptions. A lease that was not used for ``lease_idle_s`` is returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from stoker.exceptions import StokerError, WorkerDiedError
from stoker.runtime.tasks.task_spec import locality_of
from stoker_wire.data.channel import Channel
from stoker_wire.errors import ConflictError, DeadlineExceededError
from stoker_wire.ids import Prefix, is_id, new_id
from stoker_wire.messages.cluster import (
    Demand,
    GrantedLease,
    LeaseReply,
    LeaseRequest,
    LeaseUpdates,
    OwnerPoll,
    ReleaseLeases,
)

if TYPE_CHECKING:
    from stoker.runtime.net.channels import Channels
    from stoker.runtime.net.clients import ClusterClients
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.tasks.dispatch import ClassQueue, Slot
    from stoker.runtime.tasks.task_spec import PendingTask
    from stoker_wire.messages.common import Address

_REQUEST_WAIT_S = 1.5
_ANSWER_S = 0.8
"""How much later the scheduler may answer: one that is frozen never does, and another may lead by then."""
_POLL_WAIT_S = 2.0
_RELEASE_S = 10.0
_RELEASE_AGAIN_S = 1.0
_LIST_ON_S = 20.0
"""For so long an owner without leases says so, after a release, or a request without an answer: a leader
that is lost may take a release with it, and a request may be granted late. It must hear that twice."""
_REPORT_IDLE_S = 0.03
_EXAMPLES = 8
_MAX_BACKOFF_S = 5.0
"""How long to wait at most, after a worker could not be reached, before another is requested."""


class _ClassLeases:
    """The demand of one scheduling class, and why it waits."""

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self.requesting = False
        self.status_text = ""
        self.connection_error = ""
        """Why the scheduler, or the worker of a lease, cannot be reached; or ''."""
        self.failures = 0
        """How many workers in a row could not be reached."""


class _Tasks(Protocol):
    """The owner of the tasks that leases are for."""

    queues: dict[bytes, ClassQueue[PendingTask]]

    def dispatch(self, key: bytes) -> None: ...
    def fail_class(self, key: bytes, error: StokerError) -> None: ...
    def on_returned(self, channel: Channel, task_ids: list[str]) -> None: ...
    async def on_worker_lost(self, key: bytes, lease_id: str, cause: StokerError) -> None: ...


class Leases:
    """The leases of this process, by scheduling class."""

    def __init__(
        self,
        address: Address,
        io: IoThread,
        channels: Channels,
        clients: ClusterClients,
        tasks: _Tasks,
        *,
        idle_s: float,
    ) -> None:
        self._peer_id = address.peer_id
        # A worker ends with its node; a driver with its job, wherever it runs.
        self._node_id = address.node_id if is_id(address.peer_id, Prefix.WORKER) else ""
        self._io = io
        self._channels = channels
        self._clients = clients
        self._idle_s = idle_s
        self._tasks = tasks
        self._classes: dict[bytes, _ClassLeases] = {}
        self._granted: dict[str, tuple[bytes, GrantedLease]] = {}
        """The scheduling class and the grant of each lease that this process holds."""
        self._numbers = itertools.count(1)
        self._polling = False
        self._lost_at_s = 0.0
        self._epoch = 0
        """That of the leader that answered the last poll."""
        self._closing = False
        self._reporting_idle = False
        self._reported_idle: tuple[str, ...] = ()

    def add_class(self, key: bytes, demand: Demand) -> None:
        """Add a scheduling class."""
        self._classes[key] = _ClassLeases(demand)

    def connection_error(self, key: bytes) -> str:
        """Return why the scheduler or a class's workers cannot be reached, or ''."""
        leases = self._classes.get(key)
        return leases.connection_error if leases else ""

    def describe(self, key: bytes) -> str:
        """Return why a class waits, in words."""
        leases = self._classes.get(key)
        resources = leases.demand.resources if leases else {}
        need = ", ".join(f"{v:g} {k}" for k, v in resources.items()) or "a worker"
        why = (leases.connection_error or leases.status_text) if leases else ""
        return f"it waits for a lease of {need}" + (f" ({why})" if why else "")

    def request(self, key: bytes) -> None:
        """Request leases if more would help, unless a request is under way."""
        leases = self._classes[key]
        if not leases.requesting and self._tasks.queues[key].leases_wanted:
            leases.requesting = True
            self._io.background.spawn(self._request(key, leases), name="lease")

    async def _request(self, key: bytes, leases: _ClassLeases) -> None:
        queue = self._tasks.queues[key]
        request_id, unanswered = new_id(Prefix.REQUEST), 0
        try:
            # What a lost answer has granted is there until it is asked for again.
            while (count := queue.leases_wanted or unanswered) and self._io.running:
                first = list(itertools.islice(queue.ready, _EXAMPLES))
                request = LeaseRequest(
                    request_id=request_id,
                    owner_id=self._peer_id,
                    demand=replace(leases.demand, locality=locality_of(first)),
                    count=count,
                    wait_s=_REQUEST_WAIT_S if queue.leases_wanted else 0.0,
                    task_ids=tuple(t.task_id for t in first),
                    owner_node_id=self._node_id,
                )
                try:
                    reply = await self._clients.scheduler_call(
                        "/v1/leases",
                        request,
                        LeaseReply,
                        timeout_s=_REQUEST_WAIT_S + _ANSWER_S,
                        retry=False,
                    )
                except StokerError as error:
                    # Of a node that is taken for lost all processes end: what this one says of its
                    # tasks until then would be heard, and is not so.
                    ends = isinstance(error, ConflictError) and self._node_id
                    if not (error.retryable or isinstance(error, DeadlineExceededError) or ends):
                        self._tasks.fail_class(key, error)
                        return
                    unanswered = count
                    self._list_on()
                    leases.connection_error = f"the scheduler does not answer: {error.one_line}"
                    await asyncio.sleep(0.2)
                    continue
                request_id, unanswered = new_id(Prefix.REQUEST), 0
                leases.status_text = reply.note
                if leases.connection_error and not leases.failures:
                    leases.connection_error = ""
                if reply.granted:
                    await asyncio.gather(*(self._accept(key, queue, g) for g in reply.granted))
        finally:
            leases.requesting = False

    async def _accept(
        self, key: bytes, queue: ClassQueue[PendingTask], granted: GrantedLease
    ) -> None:
        lease_id = granted.lease.lease_id
        if not queue.ready:
            await self._release([lease_id])
            return
        try:
            channel = await self._channels.channel(granted.address)
        except StokerError as error:
            leases = self._classes[key]
            leases.failures += 1
            leases.connection_error = (
                f"its worker on node {granted.lease.node_id} cannot be reached from here: "
                f"{error.one_line}; a driver must reach the nodes, see STOKER_ADVERTISE_HOST"
            )
            await self._release([lease_id], kill=True, reason=str(error))
            await asyncio.sleep(min(_MAX_BACKOFF_S, 0.1 * 2.0 ** min(leases.failures, 10)))
            return
        self._classes[key].failures, self._classes[key].connection_error = 0, ""
        self._granted[lease_id] = (key, granted)
        queue.add_slot(lease_id, channel, self._io.loop.time())
        self._begin_polling()
        self._tasks.dispatch(key)

    def _begin_polling(self) -> None:
        if not self._polling:
            self._polling = True
            self._io.background.spawn(self._poll(), name="poll")

    async def _poll(self) -> None:
        try:
            listing = True
            while listing and self._io.running:
                began_s = self._io.loop.time()
                try:
                    await self._poll_once(self._idle(_REPORT_IDLE_S), _POLL_WAIT_S)
                except StokerError:
                    self._list_on()  # another leader hears for the first time what this process has
                    await asyncio.sleep(0.5)
                else:
                    listing = bool(self._granted) or began_s < self._lost_at_s + _LIST_ON_S
        finally:
            self._polling = False

    async def _poll_once(self, idle: tuple[str, ...], wait_s: float) -> None:
        self._reported_idle = idle
        orders = await self._clients.scheduler_call(
            f"/v1/owners/{self._peer_id}/poll",
            OwnerPoll(
                lease_ids=tuple(self._granted),
                idle_lease_ids=idle,
                wait_s=wait_s,
                number=next(self._numbers),
            ),
            LeaseUpdates,
            timeout_s=wait_s + _ANSWER_S,
        )
        if self._epoch not in (0, orders.epoch):
            # A leader that did not know of its end may have answered the polls, and taken releases with it.
            self._list_on()
        self._epoch = orders.epoch
        self._apply_updates(orders)

    def _idle(self, for_s: float) -> tuple[str, ...]:
        """Return the leases that were not used for so long."""
        before_s = self._io.loop.time() - for_s
        return tuple(
            lease_id
            for lease_id, (key, _) in self._granted.items()
            if (slot := self._tasks.queues[key].slots.get(lease_id))
            and not slot.inflight
            and slot.last_used_s <= before_s
        )

    def report_idle(self) -> None:
        """Report idle leases to the scheduler at once: another owner may wait for just these.

        The poll that is under way reported those that were idle when it began.
        """
        idle = self._idle(_REPORT_IDLE_S)
        if idle and not self._reporting_idle and not set(idle) <= set(self._reported_idle):
            self._reporting_idle = True
            self._io.background.spawn(self._report_idle(idle), name="idle")

    async def _report_idle(self, idle: tuple[str, ...]) -> None:
        try:
            with contextlib.suppress(StokerError):
                await self._poll_once(idle, 0.0)
        finally:
            self._reporting_idle = False

    def _apply_updates(self, updates: LeaseUpdates) -> None:
        drained = []
        for lease_id in updates.preempted:
            if lease_id not in self._granted:
                continue
            key, _ = self._granted[lease_id]
            slot = self._tasks.queues[key].slots.get(lease_id)
            if slot is None:
                continue
            slot.closing = True
            if not slot.inflight:
                drained.append(lease_id)
        for lease_id in updates.lost:
            if lease_id in self._granted:
                key, granted = self._granted.pop(lease_id)
                slot = self._tasks.queues[key].slots.get(lease_id)
                if slot is not None:
                    slot.closing = True  # no call is sent there in this turn of the loop
                self._io.background.spawn(
                    self._on_lease_lost(key, granted, "the scheduler took the lease back"),
                    name="lost",
                )
        self._return_leases(drained)

    def return_if_closing(self, slot: Slot[PendingTask]) -> None:
        """Return a closing lease whose last call came back."""
        if slot.closing and not slot.inflight:
            self._return_leases([slot.lease_id])

    def _return_leases(self, lease_ids: list[str], *, kill: bool = False, reason: str = "") -> None:
        # Of one that is not held any more the worker is being killed: a return would spare it.
        held = [lease_id for lease_id in lease_ids if lease_id in self._granted]
        for lease_id in held:
            key, _ = self._granted.pop(lease_id)
            self._tasks.queues[key].slots.pop(lease_id, None)
        if held:
            self._io.background.spawn(self._release(held, kill=kill, reason=reason), name="release")

    async def _release(self, lease_ids: list[str], *, kill: bool = False, reason: str = "") -> None:
        body = ReleaseLeases(lease_ids=tuple(lease_ids), kill=kill, reason=reason)
        while True:
            try:
                await self._clients.scheduler_call(
                    "/v1/leases/release", body, None, timeout_s=_RELEASE_S
                )
            except StokerError as error:
                again = error.retryable or isinstance(error, DeadlineExceededError)
                if again and not self._closing:
                    await asyncio.sleep(_RELEASE_AGAIN_S)
                    continue
            self._list_on()
            return

    def _list_on(self) -> None:
        """Say for a while what this process has: of what was lost on the way nobody else can tell."""
        if not self._closing:
            self._lost_at_s = self._io.loop.time()
            self._begin_polling()

    def tick(self, key: bytes, queue: ClassQueue[PendingTask], now_s: float) -> None:
        """Return the leases that are idle, or closing and done; request more if tasks wait."""
        idle = [s.lease_id for s in queue.idle_slots(now_s, self._idle_s)]
        idle += [
            s.lease_id
            for s in queue.slots.values()
            if s.closing and not s.inflight and s.lease_id not in idle
        ]
        if idle:
            self._return_leases(idle)
        if queue.ready:
            self.request(key)

    def retire(self, channel: Channel) -> None:
        """Return the lease of a worker that takes no more calls.

        Its nodelet ends it when nobody needs the objects that it owns.
        """
        for lease_id, (key, _) in list(self._granted.items()):
            slot = self._tasks.queues[key].slots.get(lease_id)
            if slot is not None and slot.channel is channel:
                slot.closing = True  # before its calls are dispatched anew
                self._tasks.on_returned(channel, list(slot.inflight))
                self._return_leases([lease_id], reason="max_calls reached")

    def on_channel_closed(self, channel: Channel) -> None:
        """Handle the death of a lease's worker, if one was behind this channel."""
        for lease_id, (key, granted) in list(self._granted.items()):
            slot = self._tasks.queues[key].slots.get(lease_id)
            if slot is not None and slot.channel is channel:
                slot.closing = True
                del self._granted[lease_id]
                self._io.background.spawn(
                    self._on_lease_lost(key, granted, "its connection closed"), name="worker-lost"
                )

    def kill(self, slot: Slot[PendingTask], reason: str) -> None:
        """Have the worker of a lease killed, which does not answer; its other calls are lost with it."""
        slot.closing = True
        known = self._granted.pop(slot.lease_id, None)
        if known is not None:
            self._io.background.spawn(self._kill(*known, reason), name="kill")

    async def _kill(self, key: bytes, granted: GrantedLease, reason: str) -> None:
        lease = granted.lease
        if not await self._clients.kill_worker(
            lease.node_id, granted.worker_id, lease.lease_id, reason
        ):
            await self._release([lease.lease_id], kill=True, reason=reason)
        await self._on_lease_lost(key, granted, reason)

    async def _on_lease_lost(self, key: bytes, granted: GrantedLease, how: str) -> None:
        lease_id = granted.lease.lease_id
        slot = self._tasks.queues[key].slots.get(lease_id)
        if slot is not None:
            slot.closing = True
            assert isinstance(slot.channel, Channel)
            slot.channel.receive_now()  # results that came before the end
        cause: StokerError = WorkerDiedError("its worker was not used")
        if slot is not None and slot.inflight:
            cause = await self._clients.death_of(
                granted.lease.node_id,
                granted.worker_id,
                how,
                patient=self._classes[key].demand.preemptible
                or any(task.retries_left == 0 for task in slot.inflight.values()),
            )
        await self._tasks.on_worker_lost(key, lease_id, cause)
        await self._release([lease_id], kill=True, reason=how)

    async def close(self) -> None:
        """Return all leases (the end of this process's work)."""
        self._closing = True
        lease_ids, self._granted = list(self._granted), {}
        if lease_ids:
            await self._release(lease_ids)
