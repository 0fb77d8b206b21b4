"""Calls of actors: ordered per caller, pipelined, sent straight to the actor's worker.

:class:`ActorCalls` owns the calls from ``.remote()`` to their results, and one :class:`ActorConnection` per
actor that this process calls. Calls wait in it until it has a channel, then leave in order. Actors that
this process owns end here as well, when no process has a handle to them any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from stoker.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    PendingCallsLimitError,
    PreemptedError,
    StokerError,
)
from stoker.runtime.actors.connection import ActorConnection, ActorConnector
from stoker.runtime.actors.info import END_S, TERMINATE
from stoker.runtime.objects.table import describe_wait
from stoker.runtime.process.cells import CELLS
from stoker.runtime.process.current_task import current_task_id
from stoker.runtime.process.tracing.context import TRACES
from stoker.runtime.serialization.exceptions import encode_error
from stoker.runtime.serialization.pickling import pack
from stoker.runtime.tasks.functions import TEMPLATE_NUMBERS
from stoker.runtime.tasks.overdue import CANCEL_GRACE_S, TIMEOUT_GRACE_S, OverdueCalls
from stoker.runtime.tasks.task_spec import (
    FunctionSpec,
    PendingTask,
    Phase,
    backoff_s,
    cancelled_error,
    failed_argument,
    overdue_error,
    pack_arguments,
    run_frame,
    unready_argument,
)
from stoker_wire.ids import IdSource, Prefix
from stoker_wire.messages.data import Call, Cancel, Failed, Inline, Result, Run, Template
from stoker_wire.messages.work import Actor, KillActor

if TYPE_CHECKING:
    from stoker.runtime.actors.info import HandleInfo
    from stoker.runtime.job import JobContext
    from stoker.runtime.net.channels import Channels
    from stoker.runtime.objects.refs import ObjectRef
    from stoker.runtime.objects.store import ObjectStore
    from stoker.runtime.objects.table import Entry
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.tasks.pending import PendingCalls
    from stoker_wire.data.channel import Channel
    from stoker_wire.http.client.client import Client
    from stoker_wire.messages.common import Address, ErrorInfo

_POLL_S = 0.02
_END_GRACE_S = 5.0
"""How much longer than ``END_S`` an actor may take to close its channel."""
_MAX_CONNECTIONS = 1000
"""Above this many, connections to actors that are not called are forgotten."""


class ActorCalls:
    """The calls of this process to actors, and its connections to them."""

    def __init__(
        self,
        address: Address,
        io: IoThread,
        channels: Channels,
        gcs: Client,
        job: JobContext,
        objects: ObjectStore,
        pending: PendingCalls,
        overdue: OverdueCalls,
    ) -> None:
        self._address = address
        self._io = io
        self._gcs = gcs
        self._job = job
        self._objects = objects
        self._pending = pending
        self._overdue = overdue
        self._ids = IdSource(Prefix.TASK)
        self._connections: dict[str, ActorConnection] = {}
        self._max_connections = _MAX_CONNECTIONS
        self._submitted: deque[tuple[ActorConnection, PendingTask]] = deque()
        self.handle_marks: dict[str, str] = {}
        """The ids of the actors that this process owns, by the mark that lives as long as their handles."""
        self._pinned_handles: set[ObjectRef[None]] = set()
        self.connector = ActorConnector(io, channels, gcs, self)

    # -- user threads ----------------------------------------------------------------------------

    def connection_to(self, info: HandleInfo) -> ActorConnection:
        """Return the connection to the actor of a handle, a new one if it has none."""
        connection = self._connections.get(info.actor_id)
        if connection is None:
            connection = ActorConnection(
                info.actor_id, info.class_name, info.max_pending_calls, info.unordered
            )
            connection.creation_pending = info.job_id == self._job.job_id
            connection = self._connections.setdefault(info.actor_id, connection)
        return connection

    def has_call(self, task_id: str) -> bool:
        """Return whether a task is an unsettled call that this process made of an actor."""
        task = self._pending.by_id.get(task_id)
        return task is not None and bool(task.spec.actor_id)

    def submit(
        self,
        connection: ActorConnection,
        spec: FunctionSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a method; return its refs at once."""
        if 0 <= connection.max_pending <= len(connection.unsettled):
            raise PendingCallsLimitError(
                f"actor {connection.name} has {len(connection.unsettled)} unfinished calls "
                f"from this process\n"
                f"its max_pending_calls is {connection.max_pending}: wait for some of them first",
                field="max_pending_calls",
            )
        if CELLS.of_caller is not None:
            spec = spec.in_cell(CELLS.of_caller())
        task_id = self._ids()
        values, address = self._objects.values, self._address
        location, deps, nested = pack_arguments(values, address, task_id, spec, args, kwargs)
        task = PendingTask(task_id, spec, location, deps, nested, current_task_id())
        if TRACES.of_caller is not None:
            task.trace = TRACES.of_caller()
        result = self._pending.add(task)
        connection.unsettled.add(task_id)
        self._submitted.append((connection, task))
        self._pending.send_soon()
        return result

    # -- the loop thread -------------------------------------------------------------------------

    def flush(self) -> None:
        """Take in new calls, and send those of each actor that can go."""
        touched: dict[str, ActorConnection] = {}
        while self._submitted:
            connection, task = self._submitted.popleft()
            known = self._connections.setdefault(connection.actor_id, connection)
            if known is not connection:  # it was forgotten in between
                known.unsettled.add(task.task_id)
                connection = known
            task.phase = Phase.WAITING
            if (dead := connection.dead or self._pending.lost) is not None:
                self.fail(task, dead)
                continue
            self._pending.status.watch(task)
            connection.calls.append(task)
            touched[connection.actor_id] = connection
        for connection in touched.values():
            self.send(connection)
        if len(self._connections) > self._max_connections:
            self._forget_idle()

    def _forget_idle(self) -> None:
        """Forget the connections without calls: an actor that is called again is looked up."""
        for connection in self.connections():
            if connection.is_idle:
                del self._connections[connection.actor_id]
        self._max_connections = max(_MAX_CONNECTIONS, 2 * len(self._connections))

    def get(self, actor_id: str) -> ActorConnection | None:
        """Return the connection to an actor, or None if this process has none."""
        return self._connections.get(actor_id)

    def connections(self) -> Iterable[ActorConnection]:
        """Return the connections to all actors that this process calls."""
        return list(self._connections.values())  # user threads may add some meanwhile

    def owned_alive(self) -> int:
        """Return how many actors that this process created are not dead, as far as it knows."""
        return sum(connection.owned and not connection.is_dead for connection in self.connections())

    def send(self, connection: ActorConnection) -> None:
        """Send the waiting calls that can go, or open the channel that they wait for."""
        channel = connection.channel
        if channel is None or channel.closed:
            if connection.calls and connection.dead is None:
                self.connector.open(connection)
            return
        batch: list[PendingTask] = []
        failures: list[tuple[PendingTask, Failed]] = []
        is_up = connection.is_up
        for task in connection.calls.take(self._is_ready):
            if task.deps and (failed := failed_argument(task)) is not None:
                failures.append((task, failed))
                continue
            if is_up:
                self._mark_sent(task, channel)
            connection.sent[task.task_id] = task
            batch.append(task)
        if batch:
            channel.post(run_frame(channel, batch, self._address))
        for task, failed in failures:  # not before: it lets calls behind these go, in here
            self.fail(task, failed)

    def _is_ready(self, task: PendingTask) -> bool:
        """Return whether a call's arguments are ready, or one has failed; else send it when they are."""
        if not task.deps or unready_argument(task) is None or failed_argument(task) is not None:
            return True
        if not task.waiting_deps:
            missing = [ref._entry for ref in task.deps if ref._entry.location is None]
            task.waiting_deps = len(missing)

            def on_settled(entry: Entry) -> None:
                task.waiting_deps -= 1
                if task.waiting_deps and not isinstance(entry.location, Failed):
                    return
                connection = self._connections.get(task.spec.actor_id)
                if connection is not None and task.phase is Phase.WAITING:
                    connection.calls.mark_ready(task)
                    self.send(connection)

            for entry in missing:
                self._objects.when_settled(entry, partial(on_settled, entry))
        return False

    def on_actor_up(self, connection: ActorConnection) -> None:
        """Note that the calls that were sent while the constructor ran can run now."""
        for task in connection.sent.values():
            self._mark_sent(task, connection.channel)

    def _mark_sent(self, task: PendingTask, channel: Channel | None) -> None:
        """Note that a call is at an actor that is up."""
        task.phase, task.channel = Phase.SENT, channel
        if timeout_s := task.spec.template.timeout_s:
            self._connections[task.spec.actor_id].is_timed = True
            self._overdue.watch(task, timeout_s + TIMEOUT_GRACE_S, self._left_s, self._abandon)

    def _left_s(self, task: PendingTask, limit_s: float) -> float:
        """Return how long a call cannot be overdue yet: calls of its group run in order, one is before it.

        Where several run at once nobody but the actor knows which have begun.
        """
        connection = self._connections[task.spec.actor_id]
        if connection.runs_in_order(task):
            for earlier in connection.sent.values():
                if earlier is task:
                    break
                if earlier.group == task.group:
                    return limit_s
            return connection.settled_at_s + limit_s - self._io.loop.time()
        return 0.0

    def _abandon(self, task: PendingTask) -> None:
        """Fail a call of an actor that does not answer; the actor has the state of others, and goes on."""
        connection = self._connections[task.spec.actor_id]
        connection.sent.pop(task.task_id, None)
        if not task.cancelled and task.channel is not None:  # it may not have begun, and is not to
            task.channel.post(Cancel(task.task_id, False, False))
        error = cancelled_error(task) if task.cancelled else overdue_error(task)
        text = (
            f"{error.message}, but actor {connection.name} ({connection.actor_id}) does not answer\n"
            "its interpreter is busy or its process is stopped, and the call may still run: if it is "
            "not to go on, end the actor with stoker.kill()"
        )
        self.fail(task, encode_error(type(error)(text)))

    def on_actor_dead(self, connection: ActorConnection, actor: Actor) -> None:
        """Fail the calls of an actor that the gcs says is dead, with the cause."""
        cause = actor.death_cause
        text = cause.message if cause else "no cause was recorded"
        self._mark_dead(connection, text, dict(cause.extra) if cause else {})

    def _mark_dead(self, connection: ActorConnection, why: str, extra: dict[str, Any]) -> None:
        text = f"actor {connection.name} ({connection.actor_id}) is dead\n{why}"
        failed = encode_error(ActorDiedError(text, extra=extra))
        connection.mark_dead(failed)
        self.fail_all(connection, failed)

    def fail_all(self, connection: ActorConnection, failed: Failed) -> None:
        """Fail all calls of a connection."""
        tasks = [
            *connection.sent.values(),
            *connection.paused.values(),
            *connection.calls.drain(),
        ]
        connection.sent.clear()
        connection.paused.clear()
        for task in tasks:
            self.fail(task, failed)

    def fail(self, task: PendingTask, failed: Failed) -> None:
        """Fail one call."""
        connection = self._connections[task.spec.actor_id]
        self._pending.fail(task, failed)
        connection.unsettled.discard(task.task_id)
        if connection.killed:
            self._objects.unseen.mark_seen(failed)

    def on_done(self, channel: Channel, results: list[Result]) -> list[Result]:
        """Settle results of actor calls; return those that are not of actors."""
        rest: list[Result] = []
        for result in results:
            task = self._pending.by_id.get(result.task_id)
            if task is None or not task.spec.actor_id:
                rest.append(result)
                continue
            if task.attempt != result.attempt:
                continue  # of an earlier attempt, which was given up
            connection = self._connections[task.spec.actor_id]
            connection.sent.pop(result.task_id, None)
            if connection.is_timed:
                connection.settled_at_s = self._io.loop.time()
            if result.retry and not task.cancelled and task.take_retry():
                self._retry(connection, task)
            else:
                self._pending.complete(task, result)
                connection.unsettled.discard(task.task_id)
        return rest

    def _retry(self, connection: ActorConnection, task: PendingTask) -> None:
        """Send a call that raised once more, after its pause; other calls go on meanwhile."""
        task.phase, task.channel = Phase.WAITING, None
        delay_s = task.spec.options.retry_delay
        if delay_s:
            pause_s = backoff_s(delay_s, task.attempt)
            task.retry_at_s = self._io.loop.time() + pause_s
            connection.paused[task.task_id] = task
            self._io.loop.call_later(pause_s, self._resume, connection, task)
        else:
            connection.calls.requeue([task])
            self.send(connection)

    def _resume(self, connection: ActorConnection, task: PendingTask) -> None:
        if connection.paused.pop(task.task_id, None) is not None:
            connection.calls.requeue([task])
            self.send(connection)

    def cancel(self, task: PendingTask, *, force: bool, recursive: bool) -> None:
        """Stop a call (loop thread): drop it if it waits, tell its actor if it runs."""
        connection = self._connections[task.spec.actor_id]
        if task.phase is Phase.SENT and task.channel is not None:
            # Never forced: that would end the actor and the state of all its other callers.
            task.channel.post(Cancel(task.task_id, False, recursive))
            self._overdue.watch(task, CANCEL_GRACE_S, _no_time_left, self._abandon)
        elif task.phase is Phase.WAITING:
            if connection.paused.pop(task.task_id, None) is not None:
                pass
            elif connection.sent.pop(task.task_id, None) is None:
                connection.calls.drop(task)
            elif connection.channel is not None:
                # Its worker may be busy for long: its answer is not waited for.
                connection.channel.post(Cancel(task.task_id, False, recursive))
            self.fail(task, encode_error(cancelled_error(task)))
            self.send(connection)  # it may have been what the others waited behind

    def on_channel_closed(self, channel: Channel) -> None:
        """Retry or fail the calls that were sent on a channel that closed."""
        self.connector.on_channel_closed(self.connections(), channel)

    def retry_or_fail(
        self,
        connection: ActorConnection,
        lost: list[PendingTask],
        how: str,
        cause: ErrorInfo | None,
        *,
        may_have_run: bool,
        preempted: bool,
        oom: bool,
    ) -> None:
        """Requeue the calls that were under way before all others, or fail them.

        If their actor was ``preempted``, that uses up no retry. Retries for want of memory (``oom``) are
        counted apart; the pause before them is the actor's.
        """
        requeued: list[PendingTask] = []
        kind = PreemptedError if preempted else ActorUnavailableError
        option = "max_oom_retries" if oom else "max_task_retries"
        hint = "" if preempted else f" (set {option} to have it tried again)"
        for task in lost:
            text = (
                f"actor {connection.name} ({connection.actor_id}) {how} "
                f"while it had the call {task.spec.name}\n"
                f"the call may or may not have run{hint}" + (f"\n{cause.message}" if cause else "")
            )
            failed = encode_error(kind(text, extra=dict(cause.extra) if cause else None))
            if task.cancelled:
                self.fail(task, encode_error(cancelled_error(task)))
            elif not may_have_run:
                requeued.append(task)
            elif preempted or task.take_retry(oom=oom):
                task.attempt += preempted
                self._pending.status.ended(task, failed, attempt=task.attempt - 1)
                requeued.append(task)
            else:
                self.fail(task, failed)
        for task in requeued:
            task.phase, task.channel = Phase.WAITING, None
        connection.calls.requeue(requeued)

    # -- lifetime --------------------------------------------------------------------------------

    def begin_creation(self, connection: ActorConnection, work: Coroutine[Any, Any, None]) -> None:
        """Create an actor while its creator goes on (loop thread)."""
        connection.creation = self._io.background.spawn(
            self._create(connection, work), name="create"
        )

    async def _create(self, connection: ActorConnection, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except StokerError as error:
            fail_creation(connection, error)
        except asyncio.CancelledError:
            fail_creation(
                connection, ActorDiedError("it was killed before its arguments were there")
            )
            raise
        finally:
            connection.registered.set()
            if connection.dead is not None:
                self.fail_all(connection, connection.dead)

    def new_handle_mark(self, actor_id: str) -> ObjectRef[None]:
        """Return the ref that all handles to a new actor share: the actor ends with its last copy.

        Each unsettled call holds a copy, wherever it was made.
        """
        ref = self._objects.new_mark(self.on_last_handle_dropped)
        self.handle_marks[ref._entry.object_id] = actor_id
        return ref

    def pin(self, mark: ObjectRef[None]) -> None:
        """Hold a ref of :meth:`new_handle_mark` as long as this process lives."""
        self._pinned_handles.add(mark)

    def on_last_handle_dropped(self, object_id: str) -> None:
        """End the actor that no process has a handle to any more (loop thread)."""
        actor_id = self.handle_marks.pop(object_id, None)
        if actor_id is not None and self._io.running:
            self._io.background.spawn(self._end_unreferenced(actor_id), name="actor-end")

    async def _end_unreferenced(self, actor_id: str) -> None:
        connection = self._connections.get(actor_id)
        if connection is None or connection.dead is None:
            reason = "no handle to it is left"
            if connection is not None:
                with contextlib.suppress(StokerError):
                    await self._terminate(connection, reason)
            with contextlib.suppress(StokerError):  # it ends with this process at the latest
                await self.kill(actor_id, no_restart=True, reason=reason)
        self._connections.pop(actor_id, None)

    async def _terminate(self, connection: ActorConnection, reason: str) -> None:
        """Have an actor that nobody calls run its hooks; return when it leaves, or is late."""
        channel = await self.connector.channel_to(connection)
        if channel is None:
            return  # there is nothing to clean up
        number = next(TEMPLATE_NUMBERS)
        location = Inline(pack(([reason], {}, []), what="").data)
        template = Template(number, TERMINATE, f"{connection.name}.{TERMINATE}", history=False)
        channel.post(Run([Call(self._ids(), number, location)], [template]))
        for _ in range(int((END_S + _END_GRACE_S) / _POLL_S)):
            if channel.closed or connection.dead is not None:
                return
            await asyncio.sleep(_POLL_S)

    async def kill(self, actor_id: str, *, no_restart: bool, reason: str) -> None:
        """End an actor, also one that is still being created."""
        connection = self._connections.get(actor_id)
        if connection is not None and connection.creation is not None:
            await connection.registered.wait()
            if connection.dead is not None:
                self.fail_all(connection, connection.dead)
        if connection is not None and connection.dead is not None:
            return
        if connection is not None:
            connection.killed = no_restart
        await self._gcs.call(
            "POST",
            f"/v1/actors/{actor_id}/kill",
            KillActor(no_restart=no_restart, reason=reason),
        )
        if no_restart and connection is not None and connection.dead is None:
            # Its process may still take calls for a moment; those of the killer must not succeed.
            self._mark_dead(connection, reason, {})
            if connection.creation is not None:
                connection.creation.cancel()  # it may wait for arguments

    def describe(self, task: PendingTask) -> str:
        """Return what an actor call waits for, in words."""
        connection = self._connections.get(task.spec.actor_id)
        if connection is None:
            return "its actor is not known here"
        if task.phase is Phase.SENT and connection.channel is not None:
            return f"actor {connection.name} has it and has not finished"
        if task.task_id in connection.paused:
            return task.describe_retry(self._io.loop.time())
        if (missing := unready_argument(task)) is not None:
            return f"its argument waits for {self._describe_argument(missing)}"
        ahead = connection.calls.ahead_of(task)
        if ahead is not None and (missing := unready_argument(ahead)) is not None:
            return (
                f"it waits behind the earlier call {ahead.spec.name} ({ahead.task_id}), whose "
                f"argument waits for {self._describe_argument(missing)}"
            )
        if (
            connection.constructor_call is not None
            and (missing := unready_argument(connection.constructor_call)) is not None
        ):
            return (
                f"it waits for actor {connection.name} ({connection.actor_id}), an argument of whose "
                f"constructor waits for {self._describe_argument(missing)}"
            )
        return f"it waits for actor {connection.name} ({connection.actor_id}): {connection.status_text}"

    def _describe_argument(self, entry: Entry) -> str:
        """Return what will make an argument, in words; of an actor's call no more, as chains are long."""
        task = entry.task
        if isinstance(task, PendingTask) and task.spec.actor_id:
            sent = "is at its actor" if task.phase is Phase.SENT else "waits as well"
            return f"call {task.spec.name} ({task.task_id}), which {sent}"
        return describe_wait([entry])


def _no_time_left(task: PendingTask, limit_s: float) -> float:
    return 0.0


def fail_creation(connection: ActorConnection, error: StokerError) -> None:
    """Note why an actor could not be created: its calls fail with that."""
    if connection.dead is None:
        text = f"actor {connection.name} could not be created\n{error.message}"
        connection.mark_dead(encode_error(ActorDiedError(text)))
