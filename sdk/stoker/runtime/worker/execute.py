"""The execution of calls at a worker: taken from channels, run, their results sent back.

Three ways to run, chosen by what the worker is: tasks and sync actors one at a time on the main
thread; threaded actors on pools; async actors on one event loop on the main thread. All share
:class:`stoker.runtime.worker.invoke.Invoker` for what one call does.

:class:`~stoker.runtime.runtime.Runtime` owns the executor of a worker, and feeds it the messages of
callers. A result leaves after the task's history is written and after the owners of the refs that it
keeps know of them: its caller may end this process, or drop what it passed, as soon as it has it.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from stoker.exceptions import StokerError, TaskCancelledError
from stoker.runtime.net.task_events import nbytes_of
from stoker.runtime.objects.borrowing import GRACE_S
from stoker.runtime.process.stops import STOPS
from stoker.runtime.process.tracing.context import TRACES
from stoker.runtime.process.tracing.spans import SPANS
from stoker.runtime.serialization.exceptions import error_info
from stoker.runtime.tasks.task_spec import TEMPLATES
from stoker.runtime.worker.call import CallTable, Outcome, ReceivedCall
from stoker.runtime.worker.call_inbox import CallInbox
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
from stoker_wire.process.call_deadline import DeadlineCell

if TYPE_CHECKING:
    from stoker.runtime.job import JobContext
    from stoker.runtime.net.clients import ClusterClients
    from stoker.runtime.net.direct_reader import DirectReader
    from stoker.runtime.net.task_events import TaskEvents
    from stoker.runtime.objects.store import ObjectStore
    from stoker.runtime.process.identity import Identity
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.process.profiles.slow_tasks import SlowTasks
    from stoker.runtime.process.tracing.context import Tracer
    from stoker.runtime.tasks.pending import PendingCalls
    from stoker.runtime.worker.actor_exit import ActorExit
    from stoker.runtime.worker.actor_state.state_saver import StateSaver
    from stoker.runtime.worker.blocking import WorkerWaits
    from stoker_wire.data.channel import Channel
    from stoker_wire.messages.cluster import ActorSpec, Lease
    from stoker_wire.messages.common import Address, RuntimeEnv
    from stoker_wire.messages.work import Actor

_LONG_RUNNING_S = 0.1
_RETIRE_S = 5.0


class _Actor(Protocol):
    """The actor that this worker hosts."""

    spec: ActorSpec
    exit: ActorExit
    instance: Any
    is_up: bool
    saver: StateSaver | None

    @property
    def record(self) -> Actor: ...
    def serve(self) -> None: ...
    def submit(self, batch: list[ReceivedCall]) -> None: ...
    def interrupt(self, received: ReceivedCall) -> bool: ...


class CallExecutor:
    """The executor of all calls at this worker. Messages come in on the loop thread."""

    def __init__(
        self,
        identity: Identity,
        address: Address,
        io: IoThread,
        reader: DirectReader,
        clients: ClusterClients,
        events: TaskEvents,
        job: JobContext,
        objects: ObjectStore,
        pending: PendingCalls,
        calls: CallTable,
        waits: WorkerWaits,
    ) -> None:
        self.calls = calls
        self.reader = reader
        self.actor: _Actor | None = None
        self.slow_tasks: SlowTasks | None = None
        """The watch over calls that run long, if it is asked for."""
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
        self._inbox = CallInbox(reader)
        self._last_caller: Channel | None = None
        self._outcomes: list[Outcome] = []
        self._items: list[tuple[Channel, Item, list[Any]]] = []
        self._flush_scheduled = False
        self._before_setup: list[tuple[Channel, Run]] = []
        self._call_counts: dict[str, int] = {}
        self._retiring = False
        self._stopped = False
        self._sending: set[asyncio.Task[None]] = set()
        self._retirement: asyncio.Task[None] | None = None
        """The request to the nodelet to give this worker no other lease."""
        deadline = DeadlineCell(identity.node.arena_dir if identity.node else "", identity.peer_id)
        self.cancellation = Cancellation(io, events, pending, calls, self, deadline)
        self.invoker = Invoker(
            address,
            io,
            reader,
            clients,
            job,
            objects.values,
            objects.load_argument,
            calls,
            self.cancellation,
            self.send_item,
        )
        waits.on_blocked(self.return_queued_calls)

    # -- the main thread -------------------------------------------------------------------------

    def serve(self) -> None:
        """Run calls until :meth:`stop`. The main thread does nothing else."""
        self.cancellation.install_signal_handler()
        while (task_id := self._inbox.get(self._last_caller)) is not None:
            if task_id == _RUN_ACTOR:
                assert self.actor is not None
                self.actor.serve()
                return
            if self._retiring:
                continue  # it goes back with all that came after the last
            received = self.calls.queued.pop(task_id, None)
            if received is not None:
                self.calls.running[task_id] = received
                self._last_caller = received.channel
                if received.template.timeout_s:
                    self.cancellation.timed_task_began(received)
                self.report(self._finish_task(self.invoker.invoke(received)))
                del received  # idle workers hold no arguments and no refs

    def _finish_task(self, outcome: Outcome) -> Outcome:
        """Count a task that ended; after the last one of ``max_calls``, start nothing more."""
        self._waits.task_ended()
        self.cancellation.task_ended()
        if STOPS.registered:
            STOPS.task_ended(outcome.received.call.task_id)
        template = outcome.received.template
        if template.timeout_s:
            self.cancellation.deadline.disarm()
        if template.max_calls:
            count = self._call_counts[template.function] = (
                self._call_counts.get(template.function, 0) + 1
            )
            self._retiring = count >= template.max_calls
        return outcome

    def stop(self) -> None:
        """End :meth:`serve` and start nothing more (any thread)."""
        self._stopped = True
        self._inbox.put(None)

    def take_lease(
        self, lease: Lease, env: RuntimeEnv | None, *, capture_child_tasks: bool
    ) -> None:
        """Work for another lease, in this environment (loop thread)."""
        self._waits.lease_began()
        self._job.take_lease(lease, env, capture_child_tasks=capture_child_tasks)

    def accept_calls(self) -> None:
        """Accept calls, with those that came before the worker's setup (loop thread)."""
        waiting, self._before_setup = self._before_setup, []
        for channel, message in waiting:
            self._on_run(channel, message)

    def become_actor(self, actor: _Actor) -> None:
        """Host an actor from now on (loop thread)."""
        self.actor = actor
        self._job.actor = actor.spec
        self.invoker.on_system_exit = actor.exit.on_system_exit
        self._inbox.put(_RUN_ACTOR)

    def next_call(self) -> ReceivedCall | None:
        """Wait for the next call of a sync actor, in order; None at the end."""
        while (task_id := self._inbox.get(self._last_caller)) is not None and not self._stopped:
            received = self.calls.queued.pop(task_id, None)
            if received is not None:
                self.calls.running[task_id] = received
                self._last_caller = received.channel
                return received
        return None

    def report(self, outcome: Outcome) -> None:
        """Send the outcome of a call (any thread), together with those that come in the same moment."""
        flush_output()
        if self.slow_tasks is not None:
            self.slow_tasks.ended(outcome.received, outcome.ended_at_s)
        self._outcomes.append(outcome)
        alone = not self.calls.queued and len(self.calls.running) == 1
        if not alone or not self._io.visit(self._flush):
            self._wake()

    def send_item(self, received: ReceivedCall, item: Item, refs: list[Any]) -> None:
        """Queue a value that a generator yielded, with the refs inside it (any thread)."""
        flush_output()
        self._items.append((received.channel, item, refs))
        self._wake()

    def _wake(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._io.loop.call_soon_threadsafe(self._flush)

    # -- the loop thread -------------------------------------------------------------------------

    def has_call(self, channel: Channel, task_id: str) -> bool:
        """Return whether a call that came by ``channel`` is here and has not ended."""
        received = self.calls.get(task_id)
        return received is not None and received.channel is channel

    def on_message(self, channel: Channel, message: DataMessage) -> None:
        """Handle a message of a caller."""
        match message:
            case Run():
                self._on_run(channel, message)
            case Revoke():
                self.return_calls(channel, message.task_ids)
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
            # A caller may be quicker than the nodelet, which sends the setup.
            self._before_setup.append((channel, message))
            return
        for template in message.templates:
            channel.templates.pop(template.number, None)  # the latest is the last to be evicted
            channel.templates[template.number] = template
        batch = [
            ReceivedCall(channel, call, channel.templates[call.template]) for call in message.calls
        ]
        while len(channel.templates) > TEMPLATES:
            del channel.templates[next(iter(channel.templates))]
        for received in batch:
            self.calls.queued[received.call.task_id] = received
            if received.template.timeout_s:
                self._io.loop.call_later(
                    received.template.timeout_s, self.cancellation.on_timeout, received
                )
        if self.actor is not None:
            self.actor.submit(batch)
        elif self._retiring and self.calls.running:
            pass  # they go back with the last result
        elif self._retiring:
            returning = self._return_late_calls(channel, [r.call.task_id for r in batch])
            self._io.background.spawn(returning, name="refuse")
        elif self._waits.is_blocked:
            self.return_calls(channel, [r.call.task_id for r in batch])
        else:
            for received in batch:
                self.enqueue(received)

    def enqueue(self, received: ReceivedCall) -> None:
        """Hand a call to the main thread (any thread)."""
        self._inbox.put(received.call.task_id)

    def return_calls(self, channel: Channel, task_ids: list[str]) -> None:
        """Return calls that have not started to their caller, which sends them elsewhere."""
        if self.actor is not None:
            return  # an actor's calls have nowhere else to go
        unstarted = [i for i in task_ids if self.calls.queued.pop(i, None) is not None]
        if unstarted:
            channel.post(Returned(unstarted))

    def return_queued_calls(self) -> None:
        """Return the calls behind a task that is blocked, or is to end (loop thread)."""
        if self.actor is None:
            by_channel: dict[Channel, list[str]] = {}
            for task_id, received in list(self.calls.queued.items()):
                by_channel.setdefault(received.channel, []).append(task_id)
            for channel, task_ids in by_channel.items():
                self.return_calls(channel, task_ids)

    def fail_early(self, received: ReceivedCall, failed: Failed) -> None:
        """Send the caller the failure of a call that has not ended (loop thread)."""
        call = received.call
        self._record_state(received, failed, time.time())
        self._events.write()
        received.channel.post(Done([Result(call.task_id, call.attempt, (failed,))]))

    def _flush(self) -> None:
        self._flush_scheduled = False
        outcomes, self._outcomes = self._outcomes, []
        items, self._items = self._items, []  # taken last, sent first: before their call's end
        for channel, item, refs in items:
            if refs:
                self.pinned[return_id(item.task_id, item.index)] = (channel, refs)
            channel.post(item)
        by_channel: dict[Channel, list[Outcome]] = {}
        for outcome in outcomes:
            by_channel.setdefault(outcome.received.channel, []).append(outcome)
        for channel, batch in by_channel.items():
            if self._retiring or self._objects.borrowing.would_overtake_borrow(channel):
                # The caller releases what it passed once it has the result: owners must know before
                # of the refs that stay here. And it returns the lease: the nodelet must know
                # before that this worker takes no other.
                sending = self._io.background.spawn(
                    self._send_after_borrows(channel, batch), name="results"
                )
                self._sending.add(sending)
                sending.add_done_callback(self._sending.discard)
            else:
                self._send(channel, batch)

    async def flush_all(self) -> None:
        """Post the results of all calls that have ended, and return once that is done."""
        self._flush()
        if self._sending:
            await asyncio.wait(self._sending)

    async def _send_after_borrows(self, channel: Channel, outcomes: list[Outcome]) -> None:
        await self._objects.borrowing.wait_acknowledged(channel)
        if self._retiring:
            await self._announce_retirement()
        self._send(channel, outcomes)

    async def retire(self) -> None:
        """Start no more calls; return when the nodelet gives this worker no other lease."""
        self._retiring = True
        await self._announce_retirement()

    async def _announce_retirement(self) -> None:
        """Have the nodelet give this worker no other lease, and end it when that is safe."""
        if self._retirement is None:
            self._retirement = self._io.background.spawn(
                self._request_retirement(), name="retirement"
            )
        await asyncio.wait([self._retirement])

    async def _request_retirement(self) -> None:
        node = self._identity.node
        assert node is not None
        path = f"/v1/workers/{self._identity.peer_id}/spent"
        try:
            client = self._clients.client_of(node.url)
            await client.call("POST", path, timeout_s=_RETIRE_S)
        except StokerError:
            self._retirement = None  # asked again when another lease brings calls here

    async def _return_late_calls(self, channel: Channel, task_ids: list[str]) -> None:
        """Return calls that came after the last one that this worker takes."""
        await self._announce_retirement()
        self.return_calls(channel, task_ids)
        channel.post(Retire())

    def _send(self, channel: Channel, outcomes: list[Outcome]) -> None:
        results: list[Result] = []
        for outcome in outcomes:
            received = outcome.received
            call, result = received.call, outcome.result
            self.calls.running.pop(call.task_id, None)
            self.calls.credits.pop(call.task_id, None)
            if outcome.contained_refs:
                result.pinned = True
                self.pinned[call.task_id] = (channel, outcome.contained_refs)
            if not received.abandoned:
                failed = result.returns[-1] if result.returns else None  # generators raise late
                self._record_state(
                    received,
                    failed if isinstance(failed, Failed) else None,
                    outcome.ended_at_s,
                    outcome.result_nbytes,
                )
            if call.trace and TRACES.tracer is not None and not received.abandoned:
                self._export(TRACES.tracer, outcome)
            results.append(result)
        # Before the caller may act on it: it may read, or end this process next.
        self._objects.values.settle()
        self._events.write()
        channel.post(Done(results))
        if self._retiring and not self.calls.running:
            channel.post(Retire())
            for task_id, received in list(self.calls.queued.items()):
                self.return_calls(received.channel, [task_id])

    def _record_state(
        self,
        received: ReceivedCall,
        failed: Failed | None = None,
        ended_at_s: float | None = None,
        result_nbytes: int = 0,
    ) -> None:
        """Record in the history how a call ended, or that it runs. Called for each, so it is short."""
        if not received.template.history:
            return
        call, address = received.call, self._address
        state = TaskState.FINISHED if ended_at_s else TaskState.RUNNING
        if failed is not None:
            cancelled = failed.code == TaskCancelledError.code
            state = TaskState.CANCELLED if cancelled else TaskState.FAILED
        cpus, gpus, group_id = self._job.held
        facts = TaskFacts(
            call.parent_task_id,
            call.submitted_at_s,
            received.started_at_s or None,
            ended_at_s,
            address.peer_id,
            nbytes_of(call.args),
            result_nbytes,
            error_info(failed) if failed is not None else None,
            cpus=cpus,
            gpus=gpus,
            group_id=group_id,
        )
        if SPANS.by_task and ended_at_s:
            facts = msgspec.structs.replace(facts, spans=SPANS.take(call.task_id))
        row = (
            call.task_id,
            call.attempt,
            received.channel.job_id or self._job.job_id,
            state,
            received.template.name,
            address.node_id,
            self._job.lease.actor_id if self._job.lease is not None else "",
            RANKS[state],
            pack_facts(facts),
        )
        self._events.add_row(row)

    def _export(self, tracer: Tracer, outcome: Outcome) -> None:
        """Export the span of an attempt that has ended."""
        received, returns = outcome.received, outcome.result.returns
        call, failed = received.call, returns[-1] if returns else None
        tracer.ran(
            call.trace,
            call.task_id,
            call.attempt,
            received.template.name,
            received.started_at_s or outcome.ended_at_s,
            outcome.ended_at_s,
            received.channel.job_id or self._job.job_id,
            self._job.lease.actor_id if self._job.lease is not None else "",
            failed if isinstance(failed, Failed) else None,
        )

    def tick(self) -> None:
        """Record the calls that run long while they run. Called ten times a second."""
        if self.slow_tasks is not None:
            self.slow_tasks.tick()
        horizon = time.time() - _LONG_RUNNING_S
        for received in list(self.calls.running.values()):
            if (
                not received.running_reported
                and not received.abandoned
                and 0 < received.started_at_s < horizon
            ):
                received.running_reported = True
                self._record_state(received)
        self._events.write_rows()

    def on_channel_closed(self, channel: Channel) -> None:
        """Drop the calls of a lost caller that have not started: nobody waits for them."""
        for task_id, received in list(self.calls.queued.items()):
            if received.channel is channel:
                self.calls.queued.pop(task_id, None)
        # Its channel alone may be cut: it then borrows, over another one, what it was given.
        self._io.loop.call_later(GRACE_S, self._unpin, channel)

    def _unpin(self, channel: Channel) -> None:
        for task_id, (caller, _) in list(self.pinned.items()):
            if caller is channel:
                del self.pinned[task_id]

    @property
    def has_calls(self) -> bool:
        """Whether this worker has calls that have not ended."""
        return bool(self.calls.running or self.calls.queued)

    @property
    def busy(self) -> bool:
        """Whether this worker runs calls or pins refs that others need."""
        return bool(self.calls.running or self.calls.queued or self.pinned)


_RUN_ACTOR = "become-actor"
