"""The submission of tasks: from ``.remote()`` to the settled result.

A user thread packs the arguments and leaves a :class:`PendingTask`; the loop thread waits for the
refs among them, hands the task to the :class:`ClassQueue` of its demand, sends it to a leased worker
and settles its results. Retries, cancellation and deadlines are decided here, by the owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from stoker.exceptions import OutOfMemoryError, PreemptedError, StokerError, UnavailableError
from stoker.runtime.objects.refs import ObjectRef
from stoker.runtime.process.cells import CELLS
from stoker.runtime.process.current_task import current_task_id
from stoker.runtime.process.tracing.context import TRACES
from stoker.runtime.serialization.exceptions import encode_error
from stoker.runtime.tasks.dispatch import ClassQueue
from stoker.runtime.tasks.inbox import TaskInbox
from stoker.runtime.tasks.leases import Leases
from stoker.runtime.tasks.overdue import CANCEL_GRACE_S, TIMEOUT_GRACE_S, OverdueCalls
from stoker.runtime.tasks.result_cache import ResultCache
from stoker.runtime.tasks.task_spec import (
    OOM_DELAY_S,
    FunctionSpec,
    PendingTask,
    Phase,
    backoff_s,
    cancelled_error,
    error_for_task,
    failed_argument,
    overdue_error,
    pack_arguments,
    run_frame,
    start_deadline_error,
)
from stoker_wire.data.channel import Channel
from stoker_wire.errors import DeadlineExceededError
from stoker_wire.ids import IdSource, Prefix
from stoker_wire.messages.common import SpreadPolicy
from stoker_wire.messages.data import Cancel, Failed, Inline, Result, Revoke

if TYPE_CHECKING:
    from stoker.runtime.net.channels import Channels
    from stoker.runtime.net.clients import ClusterClients
    from stoker.runtime.objects.store import ObjectStore
    from stoker.runtime.objects.table import Entry
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.tasks.pending import PendingCalls
    from stoker_wire.messages.common import Address
    from stoker_wire.settings import Settings


_STORE_AGAIN_S = 1.0
_STORED = 10_000


class TaskSubmitter:
    """The tasks that this process submitted and that are not settled."""

    def __init__(
        self,
        address: Address,
        settings: Settings,
        io: IoThread,
        channels: Channels,
        clients: ClusterClients,
        objects: ObjectStore,
        pending: PendingCalls,
        overdue: OverdueCalls,
    ) -> None:
        self._address = address
        self._io = io
        self._clients = clients
        self._objects = objects
        self._pending = pending
        self._overdue = overdue
        self._ids = IdSource(Prefix.TASK)
        self._submitted = TaskInbox()
        self.queues: dict[bytes, ClassQueue[PendingTask]] = {}
        self.leases = Leases(address, io, channels, clients, self, idle_s=settings.lease_idle_s)
        self.cache = ResultCache()
        self._stored: dict[str, None] = {}
        """The hashes of the functions that the gcs has, as this process has seen."""

    # -- user threads ----------------------------------------------------------------------------

    def submit(self, spec: FunctionSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Submit one call; return its ref at once, or a list of refs, or a generator of them.

        Raises only for arguments that do not pickle.
        """
        if CELLS.of_caller is not None:
            spec = spec.in_cell(CELLS.of_caller())
        task_id = self._ids()
        values, address = self._objects.values, self._address
        location, deps, nested = pack_arguments(values, address, task_id, spec, args, kwargs)
        key = None
        if spec.options.cache is True and isinstance(location, Inline) and not deps and not nested:
            key = self.cache.key(spec.function, location)
            cached = self.cache.get(key)
            if cached is not None:
                return cached
        parent_task_id, fairness_key = current_task_id(), self._submitted.fairness_key(spec)
        task = PendingTask(task_id, spec, location, deps, nested, parent_task_id, fairness_key)
        if TRACES.of_caller is not None:
            task.trace = TRACES.of_caller()
        result = self._pending.add(task)
        if key is not None and isinstance(result, ObjectRef):
            self.cache.put(key, result)
        self._submitted.add(task)
        self._pending.send_soon()
        return result

    def cancel(self, task: PendingTask, *, force: bool, recursive: bool) -> None:
        """Stop a task (loop thread): drop it if it waits, tell its worker if it runs."""
        if task.phase is Phase.SENT and task.channel is not None:
            task.channel.post(Cancel(task.task_id, force, recursive))
            if force:
                self._overdue.watch(task, CANCEL_GRACE_S, self._left_s, self._stop_overdue)
        elif task.phase is not Phase.SENT:
            self._dequeue(task)
            self._pending.fail(task, encode_error(cancelled_error(task)))

    def _dequeue(self, task: PendingTask) -> None:
        if task.phase is Phase.QUEUED and task.queue is not None:
            task.queue.ready.drop(task)

    # -- the loop thread -------------------------------------------------------------------------

    def flush(self) -> None:
        """Take in what user threads submitted, and send the tasks that can go."""
        touched: dict[bytes, None] = {}
        pending = self._pending
        for task in self._submitted.take():
            if task.phase is not Phase.NEW:
                continue  # cancelled before it was taken in
            if pending.lost is not None:
                pending.fail(task, pending.lost, report=False)
                continue
            pending.status.watch(task)
            if task.spec.options.start_deadline is not None:
                self._io.loop.call_later(
                    task.spec.options.start_deadline, self._on_start_deadline, task
                )
            if self._await_arguments(task):
                self._enqueue(task, touched)
        self._dispatch_all(touched)
        if self._submitted:
            self._io.wake()

    def resubmit(self, task: PendingTask) -> None:
        """Take in a task that is executed again."""
        touched: dict[bytes, None] = {}
        self._pending.status.watch(task)
        if self._await_arguments(task):
            self._enqueue(task, touched)
        self._dispatch_all(touched)

    def _await_arguments(self, task: PendingTask) -> bool:
        """Return whether the arguments are ready; else enqueue the task, or fail it, once they are."""
        failed = failed_argument(task)
        if failed is not None:  # also while others are not there yet
            self._pending.fail(task, failed)
            return False
        waiting = [d for d in task.deps if d._entry.location is None]
        if not waiting:
            return True
        task.phase, task.waiting_deps = Phase.WAITING, len(waiting)

        def settled(entry: Entry) -> None:
            task.waiting_deps -= 1
            if task.phase is not Phase.WAITING:
                return
            if isinstance(entry.location, Failed):
                self._pending.fail(task, entry.location)
            elif task.waiting_deps == 0:
                self._on_arguments_ready(task)

        for ref in waiting:
            self._objects.when_settled(ref._entry, partial(settled, ref._entry))
        return False

    def _on_arguments_ready(self, task: PendingTask) -> None:
        failed = failed_argument(task)
        if failed is not None:
            self._pending.fail(task, failed)
            return
        touched: dict[bytes, None] = {}
        self._enqueue(task, touched)
        # Many of one batch may become ready in this turn of the loop: dispatch once, after them.
        for key in touched:
            self._io.loop.call_soon(self.dispatch, key)

    def _enqueue(self, task: PendingTask, touched: dict[bytes, None]) -> None:
        spec = task.spec
        if not spec.registered:
            self._register(task)
            return
        queue = self.queues.get(spec.demand_key)
        if queue is None:
            spread = spec.demand.strategy.policy is SpreadPolicy.SPREAD
            queue = self.queues[spec.demand_key] = ClassQueue(
                spread=spread, max_slots=spec.max_leases
            )
            self.leases.add_class(spec.demand_key, spec.demand)
        task.phase, task.queue = Phase.QUEUED, queue
        queue.ready.append(task)
        touched[spec.demand_key] = None

    def _register(self, task: PendingTask) -> None:
        """Store the function in the gcs before the first call of it is sent."""
        spec = task.spec
        task.phase = Phase.REGISTERING
        spec.awaiting_registration.append(task)
        if len(spec.awaiting_registration) == 1:
            self._io.background.spawn(self._store_function(spec), name="function")

    async def _store_function(self, spec: FunctionSpec) -> None:
        """Store a function, unless this process did so before; wait for a gcs that is away."""
        failure: Failed | None = None
        while spec.function not in self._stored and failure is None:
            try:
                await self._clients.store_function(spec.function, spec.blob)
                self._stored[spec.function] = None
            except (UnavailableError, DeadlineExceededError) as error:
                spec.storing_error = error.one_line
                if not any(task.phase is Phase.REGISTERING for task in spec.awaiting_registration):
                    break  # all were cancelled, or are too late
                await asyncio.sleep(_STORE_AGAIN_S)
            except StokerError as error:
                failure = encode_error(error)
        spec.registered = spec.function in self._stored
        while len(self._stored) > _STORED:
            del self._stored[next(iter(self._stored))]
        waiting, spec.awaiting_registration = spec.awaiting_registration, []
        touched: dict[bytes, None] = {}
        for task in waiting:
            if failure is not None:
                self._pending.fail(task, failure)
            elif task.phase is Phase.REGISTERING:
                self._enqueue(task, touched)
        self._dispatch_all(touched)

    def dispatch(self, key: bytes) -> None:
        """Send waiting tasks of a class to the workers that have room; request more leases."""
        queue = self.queues[key]
        if not queue.ready:
            return
        now = self._io.loop.time()
        for slot, batch in queue.dispatch(now):
            channel = slot.channel
            assert isinstance(channel, Channel)
            for task in batch:
                task.phase, task.slot, task.channel = Phase.SENT, slot, channel
                if timeout_s := task.spec.template.timeout_s:
                    self._overdue.watch(
                        task, timeout_s + TIMEOUT_GRACE_S, self._left_s, self._stop_overdue
                    )
            channel.post(run_frame(channel, batch, self._address))
        if queue.ready:
            self.leases.request(key)

    def _dispatch_all(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.dispatch(key)

    def on_done(self, channel: Channel, results: list[Result]) -> None:
        """Handle results of tasks: settle them, or retry."""
        now = self._io.loop.time()
        touched: dict[bytes, None] = {}
        for result in results:
            task = self._pending.by_id.get(result.task_id)
            if task is None or task.attempt != result.attempt or task.slot is None:
                continue
            assert task.queue is not None
            slot = task.slot
            task.queue.complete(slot, result.task_id, result.duration_s, now)
            self.leases.return_if_closing(slot)
            task.slot = None
            touched[task.spec.demand_key] = None
            if result.retry and not task.cancelled and task.take_retry():
                self._retry(task, delay_s=task.spec.options.retry_delay)
            else:
                self._pending.complete(task, result)
        self._dispatch_all(touched)

    def _retry(self, task: PendingTask, *, delay_s: float = 0.0) -> None:
        """Queue a task for another attempt."""
        task.slot = task.channel = None
        task.phase = Phase.WAITING
        if delay_s:
            pause_s = backoff_s(delay_s, task.attempt)
            task.retry_at_s = self._io.loop.time() + pause_s
            self._io.loop.call_later(pause_s, self._requeue, task)
        else:
            self._requeue(task)

    def _requeue(self, task: PendingTask) -> None:
        if task.phase is Phase.WAITING:
            touched: dict[bytes, None] = {}
            self._enqueue(task, touched)
            self._dispatch_all(touched)

    def on_returned(self, channel: Channel, task_ids: list[str]) -> None:
        """Requeue calls that a worker gave back unstarted: revoked, or because it waits in ``get``."""
        by_slot: dict[str, list[PendingTask]] = {}
        for task_id in task_ids:
            task = self._pending.by_id.get(task_id)
            if task is not None and task.slot is not None and task.channel is channel:
                by_slot.setdefault(task.slot.lease_id, []).append(task)
        for tasks in by_slot.values():
            queue, slot = tasks[0].queue, tasks[0].slot
            assert queue is not None
            assert slot is not None
            queue.return_unstarted(slot, [t.task_id for t in tasks])
            for task in tasks:
                task.slot = task.channel = None
                task.phase = Phase.QUEUED
                if task.cancelled:
                    queue.ready.drop(task)
                    self._pending.fail(task, encode_error(cancelled_error(task)))
            self.dispatch(tasks[0].spec.demand_key)

    def _left_s(self, task: PendingTask, limit_s: float) -> float:
        """Return how long a task cannot be overdue yet: it waits at its worker behind others."""
        slot = task.slot
        if slot is None or not slot.inflight:
            return 0.0
        if next(iter(slot.inflight)) != task.task_id:
            return limit_s
        return slot.busy_since_s + limit_s - self._io.loop.time()

    def _stop_overdue(self, task: PendingTask) -> None:
        """Fail a call whose worker neither stops it nor answers, and have that worker killed."""
        slot = task.slot
        if slot is None:
            return
        error = cancelled_error(task) if task.cancelled else overdue_error(task)
        # With others at its worker it may have ended already: a silent worker tells no results. Then all
        # are tried again, each alone.
        certain = task.cancelled or len(slot.inflight) == 1
        self.leases.kill(slot, error.one_line)
        if certain:
            self._pending.fail(task, encode_error(error))

    def on_retire(self, channel: Channel) -> None:
        """End the lease of a worker that takes no more calls."""
        self.leases.retire(channel)

    async def on_worker_lost(self, key: bytes, lease_id: str, cause: StokerError) -> None:
        """Retry or fail the calls of a lease's worker that died.

        One that was overdue fails: the nodelet names it. Else, where it had several, nobody knows which one
        ended it, nor which had begun (results may have been lost as well): all are tried again, each alone,
        so that the next death has one cause.
        """
        queue = self.queues[key]
        lost = queue.drop_slot(lease_id)
        oom = isinstance(cause, OutOfMemoryError)
        preempted = isinstance(cause, PreemptedError)
        overdue = cause.extra.get("overdue", "")
        for task in lost:
            task.slot = None
            if task.cancelled:
                self._pending.fail(task, encode_error(cancelled_error(task)))
            elif task.task_id == overdue:
                self._pending.fail(task, encode_error(overdue_error(task)))
            elif preempted or overdue or len(lost) > 1:
                # It is not known to blame: no retry is used up. It may have begun: another attempt.
                task.isolate |= not preempted and not overdue
                task.attempt += 1
                self._pending.status.ended(task, encode_error(cause), attempt=task.attempt - 1)
                self._retry(task)
            elif task.take_retry(oom=oom):
                self._pending.status.ended(task, encode_error(cause), attempt=task.attempt - 1)
                delay_s = task.spec.options.retry_delay
                self._retry(task, delay_s=max(delay_s, OOM_DELAY_S) if oom else delay_s)
            else:
                self._pending.fail(task, encode_error(error_for_task(task, cause)))
        if queue.ready:
            self.dispatch(key)

    def fail_class(self, key: bytes, error: StokerError) -> None:
        """Fail all tasks of a class for which no lease will ever come."""
        queue = self.queues[key]
        for task in list(queue.ready):
            queue.ready.drop(task)
            self._pending.fail(task, encode_error(error_for_task(task, error)))

    def _on_start_deadline(self, task: PendingTask) -> None:
        if task.phase in (Phase.WAITING, Phase.REGISTERING, Phase.QUEUED):
            self._dequeue(task)
            self._pending.fail(task, encode_error(start_deadline_error(task, self.describe(task))))

    # -- status ------------------------------------------------------------------------------------

    def describe(self, task: PendingTask) -> str:
        """Return what a task waits for, in words."""
        match task.phase:
            case Phase.NEW:
                return "it is being taken in"
            case Phase.WAITING:
                missing = [d.id for d in task.deps if d._entry.location is None]
                if not missing:
                    return task.describe_retry(self._io.loop.time())
                if len(missing) == 1:
                    return f"it waits for its argument {missing[0]}"
                return f"it waits for {len(missing)} arguments, the first is {missing[0]}"
            case Phase.QUEUED:
                return self.leases.describe(task.spec.demand_key)
            case Phase.REGISTERING:
                error = task.spec.storing_error
                return "its function is being stored in the gcs" + (f" ({error})" if error else "")
            case Phase.SENT:
                where = task.channel.peer.peer_id if task.channel is not None else "a worker"
                return f"it was sent to worker {where} and has not finished"
            case Phase.ENDED:
                return "it has ended"

    def tick(self) -> None:
        """Revoke calls that are stuck behind slow ones; return or report idle leases (ten times a second)."""
        now = self._io.loop.time()
        for key, queue in self.queues.items():
            for slot, task_ids in queue.to_revoke(now):
                assert isinstance(slot.channel, Channel)
                slot.channel.post(Revoke(task_ids))
            for task, for_s in queue.long_running(now):
                self._pending.status.runs(task, for_s)
            self.leases.tick(key, queue, now)
        self.leases.report_idle()

    def on_channel_closed(self, channel: Channel) -> None:
        """Handle the end of a channel to a worker."""
        self.leases.on_channel_closed(channel)

    @property
    def busy(self) -> bool:
        """Whether anything is unfinished, or any lease is held."""
        return bool(self._pending) or any(q.slots for q in self.queues.values())

    async def close(self) -> None:
        """Return all leases."""
        await self.leases.close()
