"""Calling actors: ordered per caller, pipelined, straight to the actor's worker.

One :class:`ActorConnection` per actor that this process calls. Calls wait in it until there is a channel to
the actor (see :mod:`stoker.runtime.actors.connection`), then leave in order.
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
    StokerError,
)
from stoker.runtime.actors.connection import ActorConnection, ActorConnector
from stoker.runtime.actors.info import END_S, TERMINATE
from stoker.runtime.objects.table import describe_wait
from stoker.runtime.process.current_task import current_task_id
from stoker.runtime.serialization.exceptions import encode_error
from stoker.runtime.serialization.pickling import pack
from stoker.runtime.tasks.functions import TEMPLATE_NUMBERS
from stoker.runtime.tasks.task_spec import (
    FunctionSpec,
    PendingTask,
    Phase,
    cancelled_error,
    failed_dep,
    missing_dep,
    pack_arguments,
    run_frame,
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
    from stoker_wire.messages.common import Address

_POLL_S = 0.02
_LATE_S = 5.0
_LINKS = 1000
"""From this many actors on, those that are not called are forgotten."""


class ActorCalls:
    """All actors that this process calls."""

    def __init__(
        self,
        address: Address,
        io: IoThread,
        channels: Channels,
        gcs: Client,
        job: JobContext,
        objects: ObjectStore,
        pending: PendingCalls,
    ) -> None:
        self._address = address
        self._io = io
        self._gcs = gcs
        self._job = job
        self._objects = objects
        self._pending = pending
        self._ids = IdSource(Prefix.TASK)
        self._links: dict[str, ActorConnection] = {}
        self._many = _LINKS
        self._submitted: deque[tuple[ActorConnection, PendingTask]] = deque()
        self.lives: dict[str, str] = {}
        """The ids of the actors that this process owns, by the object that lives as their handles do."""
        self._kept: set[ObjectRef[None]] = set()
        self.connector = ActorConnector(io, channels, gcs, self)

    # -- user threads ----------------------------------------------------------------------------

    def link(self, info: HandleInfo) -> ActorConnection:
        """Return the link to the actor of a handle."""
        link = self._links.get(info.actor_id)
        if link is None:
            link = ActorConnection(
                info.actor_id, info.class_name, info.max_pending_calls, info.unordered
            )
            link.may_come = info.job_id == self._job.job_id
            link = self._links.setdefault(info.actor_id, link)
        return link

    def has_call(self, task_id: str) -> bool:
        """Whether a task is a call of an actor that this process made, and is not settled."""
        task = self._pending.by_id.get(task_id)
        return task is not None and bool(task.spec.actor_id)

    def submit(
        self,
        link: ActorConnection,
        spec: FunctionSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a method; return its refs at once."""
        if 0 <= link.max_pending <= len(link.open):
            raise PendingCallsLimitError(
                f"actor {link.name} has {len(link.open)} unfinished calls from this process\n"
                f"its max_pending_calls is {link.max_pending}: wait for some of them first",
                field="max_pending_calls",
            )
        task_id = self._ids()
        values, mine = self._objects.values, self._address
        location, deps, nested = pack_arguments(values, mine, task_id, spec, args, kwargs)
        task = PendingTask(task_id, spec, location, deps, nested, current_task_id())
        result = self._pending.add(task)
        link.open.add(task_id)
        self._submitted.append((link, task))
        self._io.wake()
        return result

    # -- the loop thread -------------------------------------------------------------------------

    def flush(self) -> None:
        """Take in new calls, and send those of each actor that can go."""
        touched: dict[str, ActorConnection] = {}
        while self._submitted:
            link, task = self._submitted.popleft()
            known = self._links.setdefault(link.actor_id, link)
            if known is not link:  # it was forgotten in between
                known.open.add(task.task_id)
                link = known
            task.phase = Phase.WAITING
            if (dead := link.dead or self._pending.lost) is not None:
                self.fail(task, dead)
                continue
            self._pending.status.watch(task)
            link.calls.append(task)
            touched[link.actor_id] = link
        for link in touched.values():
            self.send(link)
        if len(self._links) > self._many:
            self._forget_idle()

    def _forget_idle(self) -> None:
        """Let go of actors that have no calls of ours now: one that is called again is looked up."""
        for link in self.all_links():
            if link.is_idle:
                del self._links[link.actor_id]
        self._many = max(_LINKS, 2 * len(self._links))

    def known(self, actor_id: str) -> ActorConnection | None:
        """Return the link to an actor, if this process has one."""
        return self._links.get(actor_id)

    def all_links(self) -> Iterable[ActorConnection]:
        """Return the links to all actors that this process calls."""
        return list(self._links.values())  # user threads may add some meanwhile

    def owned_alive(self) -> int:
        """Return how many actors that this process created are not dead, as far as it knows."""
        return sum(link.owned and not link.is_over for link in self.all_links())

    def send(self, link: ActorConnection) -> None:
        """Send the waiting calls that can go (see :mod:`stoker.runtime.actors.call_order`)."""
        channel = link.channel
        if channel is None or channel.closed:
            if link.calls and link.dead is None:
                self.connector.open(link)
            return
        batch: list[PendingTask] = []
        failures: list[tuple[PendingTask, Failed]] = []
        for task in link.calls.take(self._is_ready):
            if task.deps and (failed := failed_dep(task)) is not None:
                failures.append((task, failed))
                continue
            task.phase, task.channel = Phase.SENT, channel
            link.sent[task.task_id] = task
            batch.append(task)
        if batch:
            channel.post(run_frame(channel, batch, self._address))
        for task, failed in failures:  # not before: it lets calls behind these go, in here
            self.fail(task, failed)

    def _is_ready(self, task: PendingTask) -> bool:
        """Whether the arguments of a call are there, or one has failed; else it is seen to again."""
        if not task.deps or missing_dep(task) is None or failed_dep(task) is not None:
            return True
        if not task.waiting_deps:
            missing = [ref._entry for ref in task.deps if ref._entry.location is None]
            task.waiting_deps = len(missing)

            def again(entry: Entry) -> None:
                task.waiting_deps -= 1
                if task.waiting_deps and not isinstance(entry.location, Failed):
                    return
                link = self._links.get(task.spec.actor_id)
                if link is not None and task.phase is Phase.WAITING:
                    link.calls.settled(task)
                    self.send(link)

            for entry in missing:
                self._objects.when_settled(entry, partial(again, entry))
        return False

    def died(self, link: ActorConnection, actor: Actor) -> None:
        """The gcs says that an actor is dead: fail its calls with the cause."""
        cause = actor.death_cause
        text = cause.message if cause else "no cause was recorded"
        self._end(link, text, dict(cause.extra) if cause else {})

    def _end(self, link: ActorConnection, why: str, extra: dict[str, Any]) -> None:
        text = f"actor {link.name} ({link.actor_id}) is dead\n{why}"
        failed = encode_error(ActorDiedError(text, extra=extra))
        link.die(failed)
        self.fail_all(link, failed)

    def fail_all(self, link: ActorConnection, failed: Failed) -> None:
        """Fail all calls of a link."""
        tasks = [*link.sent.values(), *link.calls.drain()]
        link.sent.clear()
        for task in tasks:
            self.fail(task, failed)

    def fail(self, task: PendingTask, failed: Failed) -> None:
        """Fail one call."""
        link = self._links[task.spec.actor_id]
        self._pending.fail(task, failed)
        link.settled(task.task_id)
        if link.killed:
            self._objects.unseen.seen(failed)

    def on_done(self, channel: Channel, results: list[Result]) -> list[Result]:
        """Settle results of actor calls; return those that are not of actors."""
        rest: list[Result] = []
        for result in results:
            task = self._pending.by_id.get(result.task_id)
            if task is None or not task.spec.actor_id:
                rest.append(result)
                continue
            if task.attempt != result.attempt:
                continue  # of a life that was given up
            link = self._links[task.spec.actor_id]
            link.sent.pop(result.task_id, None)
            if result.retry and not task.cancelled and task.take_retry():
                task.phase, task.channel = Phase.WAITING, None
                link.calls.again([task])
                self.send(link)
            else:
                self._pending.complete(task, result)
                link.settled(task.task_id)
        return rest

    def cancel(self, task: PendingTask, *, force: bool, recursive: bool) -> None:
        """Stop a call (loop thread): drop it if it waits, tell its actor if it runs."""
        link = self._links[task.spec.actor_id]
        if task.phase is Phase.SENT and task.channel is not None:
            # Never forced: that would end the actor and the state of all its other callers.
            task.channel.post(Cancel(task.task_id, False, recursive))
        elif task.phase is Phase.WAITING:
            link.calls.drop(task)
            self.fail(task, encode_error(cancelled_error(task)))
            self.send(link)  # it may have been what the others waited behind

    def on_channel_closed(self, channel: Channel) -> None:
        """A channel closed."""
        self.connector.lost(self.all_links(), channel)

    def try_again(
        self, link: ActorConnection, lost: list[PendingTask], how: str, why: str = ""
    ) -> None:
        """Let the calls that were under way go again before all others, or fail them."""
        retried: list[PendingTask] = []
        for task in lost:
            text = (
                f"actor {link.name} ({link.actor_id}) {how} while it had the call {task.spec.name}\n"
                "the call may or may not have run (set max_task_retries to have it tried again)"
                + (f"\n{why}" if why else "")
            )
            failed = encode_error(ActorUnavailableError(text))
            if task.cancelled:
                self.fail(task, encode_error(cancelled_error(task)))
            elif task.take_retry():
                self._pending.status.ended(task, failed, attempt=task.attempt - 1)
                task.phase, task.channel = Phase.WAITING, None
                retried.append(task)
            else:
                self.fail(task, failed)
        link.calls.again(retried)

    # -- lifetime --------------------------------------------------------------------------------

    def begin_creation(self, link: ActorConnection, work: Coroutine[Any, Any, None]) -> None:
        """Create an actor while its creator goes on (loop thread)."""
        link.created = self._io.background.spawn(self._creating(link, work), name="create")

    async def _creating(self, link: ActorConnection, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except StokerError as error:
            creation_failed(link, error)
        except asyncio.CancelledError:
            creation_failed(link, ActorDiedError("it was killed before its arguments were there"))
            raise
        finally:
            link.registered.set()
            if link.dead is not None:
                self.fail_all(link, link.dead)

    def new_life(self, actor_id: str) -> ObjectRef[None]:
        """Return the ref that all handles to a new actor share: the actor ends with its last copy.

        Each unsettled call holds one, wherever it was made.
        """
        ref = self._objects.new_mark(self.let_go)
        self.lives[ref._entry.object_id] = actor_id
        return ref

    def keep(self, alive: ObjectRef[None]) -> None:
        """Hold a ref of :meth:`new_life` as long as this process lives."""
        self._kept.add(alive)

    def let_go(self, object_id: str) -> None:
        """No process has a handle any more (loop thread)."""
        actor_id = self.lives.pop(object_id, None)
        if actor_id is not None and self._io.running:
            self._io.background.spawn(self._end_unheld(actor_id), name="actor-end")

    async def _end_unheld(self, actor_id: str) -> None:
        link = self._links.get(actor_id)
        if link is None or link.dead is None:
            reason = "no handle to it is left"
            if link is not None:
                with contextlib.suppress(StokerError):
                    await self._terminate(link, reason)
            with contextlib.suppress(StokerError):  # it ends with this process at the latest
                await self.kill(actor_id, no_restart=True, reason=reason)
        self._links.pop(actor_id, None)

    async def _terminate(self, link: ActorConnection, reason: str) -> None:
        """Have an actor that nobody calls run its hooks; returns when it leaves, or is late."""
        channel = await self.connector.channel_to(link)
        if channel is None:
            return  # there is nothing to clean up
        number = next(TEMPLATE_NUMBERS)
        location = Inline(pack(([reason], {}, []), what="").data)
        template = Template(number, TERMINATE, f"{link.name}.{TERMINATE}", history=False)
        channel.post(Run([Call(self._ids(), number, location)], [template]))
        for _ in range(int((END_S + _LATE_S) / _POLL_S)):
            if channel.closed or link.dead is not None:
                return
            await asyncio.sleep(_POLL_S)

    async def kill(self, actor_id: str, *, no_restart: bool, reason: str) -> None:
        """End an actor, also one that is still being created."""
        link = self._links.get(actor_id)
        if link is not None and link.created is not None:
            await link.registered.wait()
            if link.dead is not None:
                self.fail_all(link, link.dead)
        if link is not None and link.dead is not None:
            return
        if link is not None:
            link.killed = no_restart
        await self._gcs.call(
            "POST",
            f"/v1/actors/{actor_id}/kill",
            KillActor(no_restart=no_restart, reason=reason),
        )
        if no_restart and link is not None and link.dead is None:
            # Its process may still take calls for a moment; those of the killer must not succeed.
            self._end(link, reason, {})
            if link.created is not None:
                link.created.cancel()  # it may wait for arguments

    def describe(self, task: PendingTask) -> str:
        """Say what an actor call waits for."""
        link = self._links.get(task.spec.actor_id)
        if link is None:
            return "its actor is not known here"
        if task.phase is Phase.SENT:
            return f"actor {link.name} has it and has not finished"
        if (missing := missing_dep(task)) is not None:
            return f"its argument waits for {self._describe_argument(missing)}"
        ahead = link.calls.ahead_of(task)
        if ahead is not None and (missing := missing_dep(ahead)) is not None:
            return (
                f"it waits behind the earlier call {ahead.spec.name} ({ahead.task_id}), whose "
                f"argument waits for {self._describe_argument(missing)}"
            )
        if link.held is not None and (missing := missing_dep(link.held)) is not None:
            return (
                f"it waits for actor {link.name} ({link.actor_id}), an argument of whose "
                f"constructor waits for {self._describe_argument(missing)}"
            )
        return f"it waits for actor {link.name} ({link.actor_id}): {link.note}"

    def _describe_argument(self, entry: Entry) -> str:
        """Say what will make an argument. Of a call of an actor no more is said: chains are long."""
        task = entry.task
        if isinstance(task, PendingTask) and task.spec.actor_id:
            sent = "is at its actor" if task.phase is Phase.SENT else "waits as well"
            return f"call {task.spec.name} ({task.task_id}), which {sent}"
        return describe_wait([entry])


def creation_failed(link: ActorConnection, error: StokerError) -> None:
    """Note that an actor could not be created: its calls fail with the cause."""
    if link.dead is None:
        text = f"actor {link.name} could not be created\n{error.message}"
        link.die(encode_error(ActorDiedError(text)))
