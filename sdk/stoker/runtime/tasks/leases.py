"""Asking for leases, keeping them alive, and giving them back: the shell around the class queues.

One request per scheduling class is under way while tasks of it wait; one poll per process renews
all leases and brings recalls. A lease that nothing used for ``lease_idle_s`` goes back.
"""

from __future__ import annotations

import asyncio
import contextlib
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from stoker.exceptions import StokerError, WorkerDiedError
from stoker.runtime.tasks.task_spec import locality_of
from stoker_wire.errors import DeadlineExceededError
from stoker_wire.ids import Prefix, new_id
from stoker_wire.messages.cluster import (
    Demand,
    GrantedLease,
    LeaseReply,
    LeaseRequest,
    OwnerOrders,
    OwnerPoll,
    ReleaseLeases,
)

if TYPE_CHECKING:
    from stoker.runtime.net.channels import Channels
    from stoker.runtime.net.clients import ClusterClients
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.tasks.dispatch import ClassQueue, Slot
    from stoker.runtime.tasks.task_spec import PendingTask
    from stoker_wire.data.channel import Channel

_ASK_WAIT_S = 5.0
_POLL_WAIT_S = 2.0
_RELEASE_S = 10.0
_IDLE_S = 0.03
_EXAMPLES = 8
_APART_S = 5.0
"""How long after a worker that could not be reached another is asked for, at most."""


class _ClassLeases:
    """What is known of one class: its demand, and why it waits."""

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self.asking = False
        self.note = ""
        self.broken = ""
        """What keeps this process from the scheduler, or from the worker of a lease."""
        self.failures = 0
        """Workers in a row that could not be reached."""


class _Tasks(Protocol):
    """The tasks that leases are for."""

    queues: dict[bytes, ClassQueue[PendingTask]]

    def pump(self, key: bytes) -> None: ...
    def fail_class(self, key: bytes, error: StokerError) -> None: ...
    def on_returned(self, channel: Channel, task_ids: list[str]) -> None: ...
    async def on_worker_lost(self, key: bytes, lease_id: str, cause: StokerError) -> None: ...


class Leases:
    """The leases of this process, by scheduling class."""

    def __init__(
        self,
        peer_id: str,
        io: IoThread,
        channels: Channels,
        clients: ClusterClients,
        tasks: _Tasks,
        *,
        idle_s: float,
    ) -> None:
        self._peer_id = peer_id
        self._io = io
        self._channels = channels
        self._clients = clients
        self._idle_s = idle_s
        self._tasks = tasks
        self._classes: dict[bytes, _ClassLeases] = {}
        self._held: dict[str, tuple[bytes, GrantedLease]] = {}
        self._polling = False
        self._telling = False
        self._told_idle: tuple[str, ...] = ()

    def add_class(self, key: bytes, demand: Demand) -> None:
        """A scheduling class is met for the first time."""
        self._classes[key] = _ClassLeases(demand)

    def broken(self, key: bytes) -> str:
        """Return what keeps this process from the scheduler or a class's workers, or ''."""
        found = self._classes.get(key)
        return found.broken if found else ""

    def describe(self, key: bytes) -> str:
        """Say why a class waits."""
        found = self._classes.get(key)
        resources = found.demand.resources if found else {}
        need = ", ".join(f"{v:g} {k}" for k, v in resources.items()) or "a worker"
        note = (found.broken or found.note) if found else ""
        return f"it waits for a lease of {need}" + (f" ({note})" if note else "")

    def ask(self, key: bytes) -> None:
        """More leases would help: ask for them, unless that is under way."""
        leases = self._classes[key]
        if not leases.asking and self._tasks.queues[key].wanted:
            leases.asking = True
            self._io.background.spawn(self._ask(key, leases), name="lease")

    async def _ask(self, key: bytes, leases: _ClassLeases) -> None:
        queue = self._tasks.queues[key]
        request_id = new_id(Prefix.REQUEST)
        try:
            while (count := queue.wanted) and self._io.running:
                first = list(islice(queue.ready, _EXAMPLES))
                request = LeaseRequest(
                    request_id=request_id,
                    owner_id=self._peer_id,
                    demand=replace(leases.demand, locality=locality_of(first)),
                    count=count,
                    wait_s=_ASK_WAIT_S,
                    task_ids=tuple(t.task_id for t in first),
                )
                try:
                    reply = await self._clients.scheduler_call(
                        "/v1/leases", request, LeaseReply, timeout_s=_ASK_WAIT_S + 30, retry=False
                    )
                except StokerError as error:
                    if not (error.retryable or isinstance(error, DeadlineExceededError)):
                        self._tasks.fail_class(key, error)
                        return
                    leases.broken = f"the scheduler does not answer: {error.one_line}"
                    await asyncio.sleep(0.2)
                    continue
                request_id = new_id(Prefix.REQUEST)
                leases.note = reply.note
                if leases.broken and not leases.failures:
                    leases.broken = ""
                if reply.granted:
                    await asyncio.gather(*(self._take(key, queue, g) for g in reply.granted))
        finally:
            leases.asking = False

    async def _take(
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
            leases.broken = (
                f"its worker on node {granted.lease.node_id} cannot be reached from here: "
                f"{error.one_line}; a driver must reach the nodes, see STOKER_ADVERTISE_HOST"
            )
            await self._release([lease_id], kill=True, reason=str(error))
            await asyncio.sleep(min(_APART_S, 0.1 * 2.0 ** min(leases.failures, 10)))
            return
        self._classes[key].failures, self._classes[key].broken = 0, ""
        self._held[lease_id] = (key, granted)
        queue.add_slot(lease_id, channel, self._io.loop.time())
        if not self._polling:
            self._polling = True
            self._io.background.spawn(self._poll(), name="poll")
        self._tasks.pump(key)

    async def _poll(self) -> None:
        try:
            while self._held and self._io.running:
                try:
                    await self._poll_once(self._idle(_IDLE_S), _POLL_WAIT_S)
                except StokerError:
                    await asyncio.sleep(0.5)
        finally:
            self._polling = False

    async def _poll_once(self, idle: tuple[str, ...], wait_s: float) -> None:
        self._told_idle = idle
        orders = await self._clients.scheduler_call(
            f"/v1/owners/{self._peer_id}/poll",
            OwnerPoll(lease_ids=tuple(self._held), idle_lease_ids=idle, wait_s=wait_s),
            OwnerOrders,
            timeout_s=wait_s + 8,
        )
        self._obey(orders)

    def _idle(self, for_s: float) -> tuple[str, ...]:
        """Return the leases that nothing has used for so long."""
        before_s = self._io.loop.time() - for_s
        return tuple(
            lease_id
            for lease_id, (key, _) in self._held.items()
            if (slot := self._tasks.queues[key].slots.get(lease_id))
            and not slot.inflight
            and slot.last_used_s <= before_s
        )

    def tell_idle(self) -> None:
        """Tell the scheduler at once what it may take back: somebody may wait for just that.

        The poll that is under way told it what was idle when it began.
        """
        idle = self._idle(_IDLE_S)
        if idle and not self._telling and not set(idle) <= set(self._told_idle):
            self._telling = True
            self._io.background.spawn(self._tell_idle(idle), name="idle")

    async def _tell_idle(self, idle: tuple[str, ...]) -> None:
        try:
            with contextlib.suppress(StokerError):
                await self._poll_once(idle, 0.0)
        finally:
            self._telling = False

    def _obey(self, orders: OwnerOrders) -> None:
        give_back = []
        for lease_id in orders.recall:
            held = self._held.get(lease_id)
            slot = self._tasks.queues[held[0]].slots.get(lease_id) if held else None
            if slot is None:
                continue
            slot.closing = True
            if not slot.inflight:
                give_back.append(lease_id)
        for lease_id in orders.lost:
            held = self._held.pop(lease_id, None)
            if held is not None:
                self._io.background.spawn(
                    self._lost(held[0], held[1], "the scheduler took the lease back"), name="lost"
                )
        self._give_back(give_back)

    def on_room(self, slot: Slot[PendingTask]) -> None:
        """A call came back: if it was the last on a lease that is to end, that ends now."""
        if slot.closing and not slot.inflight:
            self._give_back([slot.lease_id])

    def _give_back(self, lease_ids: list[str], *, kill: bool = False, reason: str = "") -> None:
        for lease_id in lease_ids:
            held = self._held.pop(lease_id, None)
            if held is not None:
                self._tasks.queues[held[0]].slots.pop(lease_id, None)
        if lease_ids:
            self._io.background.spawn(
                self._release(lease_ids, kill=kill, reason=reason), name="release"
            )

    async def _release(self, lease_ids: list[str], *, kill: bool = False, reason: str = "") -> None:
        try:
            await self._clients.scheduler_call(
                "/v1/leases/release",
                ReleaseLeases(lease_ids=tuple(lease_ids), kill=kill, reason=reason),
                None,
                timeout_s=_RELEASE_S,
            )
        except StokerError:
            # The lease expires by itself when nobody renews it.
            return

    def tick(self, key: bytes, queue: ClassQueue[PendingTask], now_s: float) -> None:
        """Give back what is idle, or recalled and done."""
        idle = [s.lease_id for s in queue.idle_slots(now_s, self._idle_s)]
        idle += [
            s.lease_id
            for s in queue.slots.values()
            if s.closing and not s.inflight and s.lease_id not in idle
        ]
        if idle:
            self._give_back(idle)
        if queue.ready:
            self.ask(key)

    def retire(self, channel: Channel) -> None:
        """The worker of a channel takes no more calls: give its lease back. Its nodelet ends it when
        nobody needs what it owns."""
        for lease_id, (key, _) in list(self._held.items()):
            slot = self._tasks.queues[key].slots.get(lease_id)
            if slot is not None and slot.channel is channel:
                slot.closing = True  # before its calls look for another place
                self._tasks.on_returned(channel, list(slot.inflight))
                self._give_back([lease_id], reason="max_calls reached")

    def on_channel_closed(self, channel: Channel) -> None:
        """A channel closed: if a lease's worker was behind it, that worker died."""
        for lease_id, (key, granted) in list(self._held.items()):
            slot = self._tasks.queues[key].slots.get(lease_id)
            if slot is not None and slot.channel is channel:
                slot.closing = True
                del self._held[lease_id]
                self._io.background.spawn(
                    self._lost(key, granted, "its connection closed"), name="worker-lost"
                )

    async def _lost(self, key: bytes, granted: GrantedLease, how: str) -> None:
        lease_id = granted.lease.lease_id
        slot = self._tasks.queues[key].slots.get(lease_id)
        if slot is not None:
            slot.closing = True
        cause: StokerError = WorkerDiedError("its worker was not used")
        if slot is not None and slot.inflight:
            cause = await self._clients.death_of(
                granted.lease.node_id,
                granted.worker_id,
                how,
                patient=any(task.retries_left == 0 for task in slot.inflight.values()),
            )
        await self._tasks.on_worker_lost(key, lease_id, cause)
        await self._release([lease_id], kill=True, reason=how)

    async def close(self) -> None:
        """Give everything back (the end of this process's work)."""
        lease_ids, self._held = list(self._held), {}
        if lease_ids:
            await self._release(lease_ids)
