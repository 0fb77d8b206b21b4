"""The worker's calls: taken from channels, run on the main thread, their results sent back.

Three ways to run, chosen by what the worker is: tasks and sync actors one at a time on the main
thread; threaded actors on pools; async actors on one event loop on the main thread. All share
:class:`stoker.runtime.worker.invoke.Invoker` for what one call does.
"""

from __future__ import annotations

import asyncio
import queue
import time
from typing import TYPE_CHECKING, Any, Protocol

from stoker.exceptions import StokerError, TaskCancelledError
from stoker.runtime.net.task_events import nbytes_of
from stoker.runtime.objects.borrowing import GRACE_S
from stoker.runtime.serialization.exceptions import info_of
from stoker.runtime.tasks.task_spec import TEMPLATES
from stoker.runtime.worker.call import CallTable, Outcome, ReceivedCall
from stoker.runtime.worker.cancellation import Cancellation
from stoker.runtime.worker.invoke import Invoker
from stoker.runtime.worker.output import flush_output
from stoker_wire.data.spool import RANKS, TaskFacts, pack_facts
from stoker_wire.ids import return_id
from stoker_wire.messages.data import (
    Cancel,
    Credit,
    DataMessage,
    Done,
    Failed,
    Item,
    Release,
    Result,
    Retire,
    Returned,
    Revoke,
    Run,
)
from stoker_wire.messages.work import TaskState

if TYPE_CHECKING:
    from stoker.runtime.job import JobContext
    from stoker.runtime.net.clients import ClusterClients
    from stoker.runtime.net.task_events import TaskEvents
    from stoker.runtime.objects.store import ObjectStore
    from stoker.runtime.process.identity import Identity
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.tasks.pending import PendingCalls
    from stoker.runtime.worker.actor_exit import ActorEnd
    from stoker.runtime.worker.blocking import WorkerWaits
    from stoker_wire.data.channel import Channel
    from stoker_wire.messages.cluster import ActorSpec, Lease
    from stoker_wire.messages.common import Address, RuntimeEnv
    from stoker_wire.messages.work import Actor

_LONG_S = 0.1
_SPENT_S = 5.0


class _Actor(Protocol):
    """The actor that this worker becomes."""

    spec: ActorSpec
    end: ActorEnd
    instance: Any

    @property
    def record(self) -> Actor: ...
    def serve(self) -> None: ...
    def take(self, batch: list[ReceivedCall]) -> None: ...
    def interrupt(self, work: ReceivedCall) -> bool: ...


class Execution:
    """All calls at this worker. Messages come in on the loop thread."""

    def __init__(
        self,
        identity: Identity,
        address: Address,
        io: IoThread,
        clients: ClusterClients,
        events: TaskEvents,
        job: JobContext,
        objects: ObjectStore,
        pending: PendingCalls,
        calls: CallTable,
        waits: WorkerWaits,
    ) -> None:
        self.calls = calls
        self.actor: _Actor | None = None
        self.pinned: dict[str, tuple[Channel, Any]] = {}
        """Refs inside results, held until their callers have borrowed them."""
        self._identity = identity
        self._address = address
        self._io = io
        self._clients = clients
        self._events = events
        self._job = job
        self._objects = objects
        self._waits = waits
        self._inbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._outcomes: list[Outcome] = []
        self._items: list[tuple[Channel, Item, list[Any]]] = []
        self._outcomes_awake = False
        self._early: list[tuple[Channel, Run]] = []
        self._calls_of: dict[str, int] = {}
        self._retiring = False
        self._stopped = False
        self._sending: set[asyncio.Task[None]] = set()
        self._spent: asyncio.Task[None] | None = None
        """Tells the nodelet that this worker takes no more calls."""
        self.cancellation = Cancellation(io, events, pending, calls, self)
        self.invoker = Invoker(
            address, io, clients, job, objects.values, calls, self.cancellation, self.send_item
        )
        waits.on_blocked(self._give_all_back)

    # -- the main thread -------------------------------------------------------------------------

    def serve(self) -> None:
        """Run calls until :meth:`stop`; the main thread's whole life."""
        self.cancellation.listen()
        while (task_id := self._inbox.get()) is not None:
            if task_id == _BECOME_ACTOR:
                assert self.actor is not None
                self.actor.serve()
                return
            if self._retiring:
                continue  # it goes back with all that came too late
            work = self.calls.queued.pop(task_id, None)
            if work is not None:
                self.calls.running[task_id] = work
                self.report(self._over(self.invoker.invoke(work)))
                del work  # idle workers hold no arguments and no refs

    def _over(self, outcome: Outcome) -> Outcome:
        """A task of this worker ended: after the last one of ``max_calls``, nothing is started."""
        self._waits.task_ended()
        template = outcome.work.template
        if template.max_calls:
            count = self._calls_of[template.function] = self._calls_of.get(template.function, 0) + 1
            self._retiring = count >= template.max_calls
        return outcome

    def stop(self) -> None:
        """End :meth:`serve`: nothing more is started (any thread)."""
        self._stopped = True
        self._inbox.put(None)

    def take_lease(self, lease: Lease, env: RuntimeEnv | None) -> None:
        """Another lease, with this environment, has this worker (loop thread)."""
        self._waits.lease_began()
        self._job.take_lease(lease, env)

    def begin(self) -> None:
        """This worker knows what it is: take the calls that came before that (loop thread)."""
        early, self._early = self._early, []
        for channel, message in early:
            self._on_run(channel, message)

    def become(self, actor: _Actor) -> None:
        """From now on this worker is an actor (loop thread)."""
        self.actor = actor
        self._job.actor = actor.spec
        self.invoker.on_exit = actor.end.exited
        self._inbox.put(_BECOME_ACTOR)

    def next_call(self) -> ReceivedCall | None:
        """Wait for the next call of a sync actor, in order; None at the end."""
        while (task_id := self._inbox.get()) is not None and not self._stopped:
            work = self.calls.queued.pop(task_id, None)
            if work is not None:
                self.calls.running[task_id] = work
                return work
        return None

    def report(self, outcome: Outcome) -> None:
        """A call ended (any thread): its result leaves with all others of this moment."""
        flush_output()
        self._outcomes.append(outcome)
        self._wake()

    def send_item(self, work: ReceivedCall, item: Item, refs: list[Any]) -> None:
        """A generator yielded a value with these refs inside (any thread)."""
        flush_output()
        self._items.append((work.channel, item, refs))
        self._wake()

    def _wake(self) -> None:
        if not self._outcomes_awake:
            self._outcomes_awake = True
            self._io.loop.call_soon_threadsafe(self._flush)

    # -- the loop thread -------------------------------------------------------------------------

    def on_message(self, channel: Channel, message: DataMessage) -> None:
        """A caller sent something."""
        match message:
            case Run():
                self._on_run(channel, message)
            case Revoke():
                self.give_back(channel, message.task_ids)
            case Cancel():
                self.cancellation.on_cancel(message)
            case Credit():
                if message.task_id in self.calls.running:  # else it would stay for ever
                    with self.calls.credit_changed:
                        self.calls.credits[message.task_id] = message.consumed
                        self.calls.credit_changed.notify_all()
            case Release():
                for task_id in message.task_ids:
                    self.pinned.pop(task_id, None)
            case _:
                return

    def _on_run(self, channel: Channel, message: Run) -> None:
        if self._job.lease is None:
            # A caller may be quicker than the nodelet's word on what this worker is.
            self._early.append((channel, message))
            return
        for template in message.templates:
            channel.templates.pop(template.number, None)  # the last that came is the last to go
            channel.templates[template.number] = template
        batch = [
            ReceivedCall(channel, call, channel.templates[call.template]) for call in message.calls
        ]
        while len(channel.templates) > TEMPLATES:
            del channel.templates[next(iter(channel.templates))]
        for work in batch:
            self.calls.queued[work.call.task_id] = work
            if work.template.timeout_s:
                self._io.loop.call_later(
                    work.template.timeout_s, self.cancellation.on_timeout, work
                )
        if self.actor is not None:
            self.actor.take(batch)
        elif self._retiring and self.calls.running:
            pass  # they go back with its last result
        elif self._retiring:
            back = self._refuse(channel, [w.call.task_id for w in batch])
            self._io.background.spawn(back, name="refuse")
        elif self._waits.any:
            self.give_back(channel, [w.call.task_id for w in batch])
        else:
            for work in batch:
                self.enqueue(work)

    def enqueue(self, work: ReceivedCall) -> None:
        """Hand a call to the main thread (any thread)."""
        self._inbox.put(work.call.task_id)

    def give_back(self, channel: Channel, task_ids: list[str]) -> None:
        if self.actor is not None:
            return  # an actor's calls have nowhere else to go
        back = [i for i in task_ids if self.calls.queued.pop(i, None) is not None]
        if back:
            channel.post(Returned(back))

    def _give_all_back(self) -> None:
        """Give back what waits behind a task that waits."""
        if self.actor is None:
            by_channel: dict[Channel, list[str]] = {}
            for task_id, work in list(self.calls.queued.items()):
                by_channel.setdefault(work.channel, []).append(task_id)
            for channel, task_ids in by_channel.items():
                self.give_back(channel, task_ids)

    def answer(self, work: ReceivedCall, failed: Failed) -> None:
        """Tell the caller of a call how it ends, before it does (loop thread)."""
        call = work.call
        self._note(work, failed, time.time())
        self._events.write()
        work.channel.post(Done([Result(call.task_id, call.attempt, (failed,))]))

    def _flush(self) -> None:
        self._outcomes_awake = False
        outcomes, self._outcomes = self._outcomes, []
        items, self._items = self._items, []  # taken last, sent first: before their call's end
        for channel, item, refs in items:
            if refs:
                self.pinned[return_id(item.task_id, item.index)] = (channel, refs)
            channel.post(item)
        by_channel: dict[Channel, list[Outcome]] = {}
        for outcome in outcomes:
            by_channel.setdefault(outcome.work.channel, []).append(outcome)
        for channel, theirs in by_channel.items():
            if self._retiring or self._objects.borrowing.would_overtake_borrow(channel):
                # The caller stops holding what it passed once it has the result: owners must know
                # of the refs that were kept here before that. And it gives the lease back: the
                # nodelet must know before that what this worker is good for.
                sending = self._io.background.spawn(
                    self._send_later(channel, theirs), name="results"
                )
                self._sending.add(sending)
                sending.add_done_callback(self._sending.discard)
            else:
                self._send(channel, theirs)

    async def all_sent(self) -> None:
        """Return once the results of all calls that have ended are posted."""
        self._flush()
        if self._sending:
            await asyncio.wait(self._sending)

    async def _send_later(self, channel: Channel, outcomes: list[Outcome]) -> None:
        await self._objects.borrowing.wait_acknowledged(channel)
        if self._retiring:
            await self._tell_spent()
        self._send(channel, outcomes)

    async def _tell_spent(self) -> None:
        """Have the nodelet give this worker no other lease, and end it when that is safe."""
        if self._spent is None:
            self._spent = self._io.background.spawn(self._spend(), name="spent")
        await asyncio.wait([self._spent])

    async def _spend(self) -> None:
        node = self._identity.node
        assert node is not None
        path = f"/v1/workers/{self._identity.peer_id}/spent"
        try:
            client = self._clients.client_of(node.url)
            await client.call("POST", path, timeout_s=_SPENT_S)
        except StokerError:
            self._spent = None  # tried again when another lease brings calls here

    async def _refuse(self, channel: Channel, task_ids: list[str]) -> None:
        """Give calls back that came after the last one that this worker takes."""
        await self._tell_spent()
        self.give_back(channel, task_ids)
        channel.post(Retire())

    def _send(self, channel: Channel, outcomes: list[Outcome]) -> None:
        results: list[Result] = []
        for outcome in outcomes:
            work = outcome.work
            call, result = work.call, outcome.result
            self.calls.running.pop(call.task_id, None)
            self.calls.credits.pop(call.task_id, None)
            if outcome.contained:
                result.escaped = True
                self.pinned[call.task_id] = (channel, outcome.contained)
            if not work.answered:
                failed = result.returns[-1] if result.returns else None  # generators raise late
                self._note(
                    work,
                    failed if isinstance(failed, Failed) else None,
                    outcome.ended_at_s,
                    outcome.result_nbytes,
                )
            results.append(result)
        # Before the caller may act on it: it may end this process next.
        self._events.write()
        channel.post(Done(results))
        if self._retiring and not self.calls.running:
            channel.post(Retire())
            for task_id, work in list(self.calls.queued.items()):
                self.give_back(work.channel, [task_id])

    def _note(
        self,
        work: ReceivedCall,
        failed: Failed | None = None,
        ended_at_s: float | None = None,
        result_nbytes: int = 0,
    ) -> None:
        """Tell the history how a call ended, or that it runs; called for each, so it is short."""
        if not work.template.history:
            return
        call, address = work.call, self._address
        state = TaskState.FINISHED if ended_at_s else TaskState.RUNNING
        if failed is not None:
            cancelled = failed.code == TaskCancelledError.code
            state = TaskState.CANCELLED if cancelled else TaskState.FAILED
        facts = TaskFacts(
            call.parent_task_id,
            call.submitted_at_s,
            work.started_at_s or None,
            ended_at_s,
            address.peer_id,
            nbytes_of(call.args),
            result_nbytes,
            info_of(failed) if failed is not None else None,
        )
        row = (
            call.task_id,
            call.attempt,
            work.channel.job_id or self._job.job_id,
            state,
            work.template.name,
            address.node_id,
            self._job.lease.actor_id if self._job.lease is not None else "",
            RANKS[state],
            pack_facts(facts),
        )
        self._events.add_row(row)

    def tick(self) -> None:
        """Ten times a second: report calls that run long, while they run."""
        horizon = time.time() - _LONG_S
        for work in list(self.calls.running.values()):
            if not work.reported and not work.answered and 0 < work.started_at_s < horizon:
                work.reported = True
                self._note(work)
        self._events.write()

    def on_channel_closed(self, channel: Channel) -> None:
        """A caller is gone: nobody waits for its calls that have not started."""
        for task_id, work in list(self.calls.queued.items()):
            if work.channel is channel:
                self.calls.queued.pop(task_id, None)
        # Only its channel may be cut: it borrows what it was given on another one then.
        self._io.loop.call_later(GRACE_S, self._unpin, channel)

    def _unpin(self, channel: Channel) -> None:
        for task_id, (caller, _) in list(self.pinned.items()):
            if caller is channel:
                del self.pinned[task_id]

    @property
    def runs(self) -> bool:
        """Whether this worker has calls that have not ended."""
        return bool(self.calls.running or self.calls.queued)

    @property
    def busy(self) -> bool:
        """Whether this worker runs or holds anything that others need."""
        return bool(self.calls.running or self.calls.queued or self.pinned)


_BECOME_ACTOR = "become-actor"
