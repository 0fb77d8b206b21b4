"""Calling actors: ordered per caller, pipelined, straight to the actor's worker.

One :class:`ActorLink` per actor that this process calls. Calls wait in it until the actor's address
is known, then leave in order; when the actor's process ends, the gcs says whether it comes back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from stoker.exceptions import ActorDiedError, ActorUnavailableError, StokerError
from stoker.runtime.actor_link import ActorLink, look_up
from stoker.runtime.calls import (
    FunctionSpec,
    PendingTask,
    Phase,
    cancelled_error,
    failed_dep,
    make_refs,
    pack_arguments,
    run_frame,
)
from stoker.runtime.failures import failed_with
from stoker.runtime.news import ActorNews
from stoker_wire.errors import BadRequestError
from stoker_wire.ids import IdSource, Prefix
from stoker_wire.messages.data import Cancel, Failed, Item, Result
from stoker_wire.messages.work import Actor, ActorState, KillActor

if TYPE_CHECKING:
    from stoker.runtime.runtime import Runtime
    from stoker_wire.channel import Channel

_REQUESTS = 12
"""How many actors may be created or looked up at once: each takes a connection to the gcs."""
_UNTOLD_S = 5.0
"""How long to rely on the news alone."""
_SETTLE_S = 15.0
"""How long the gcs may take to notice that an actor's process ended."""
_CREATED_S = 60.0
"""A handle may travel faster than its actor is created, whose arguments may come late."""
_POLL_S = 0.03


class ActorCalls:
    """All actors that this process calls."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._ids = IdSource(Prefix.TASK)
        self._links: dict[str, ActorLink] = {}
        self._submitted: deque[tuple[ActorLink, PendingTask]] = deque()
        self.gate = asyncio.Semaphore(_REQUESTS)
        self._news = ActorNews(runtime, self._changed, self._check_all)

    # -- user threads ----------------------------------------------------------------------------

    def link(
        self, actor_id: str, name: str, max_pending: int = -1, *, job_id: str = ""
    ) -> ActorLink:
        """Return the link to an actor; ``job_id`` is that of its creator."""
        link = self._links.get(actor_id)
        if link is None:
            link = self._links.setdefault(actor_id, ActorLink(actor_id, name, max_pending))
            link.may_come = job_id == self._runtime.job_id
        return link

    def submit(
        self, link: ActorLink, spec: FunctionSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a method; return its refs at once."""
        if 0 <= link.max_pending <= len(link.open):
            raise BadRequestError(
                f"actor {link.name} has {len(link.open)} unfinished calls from this process, its "
                f"max_pending_calls is {link.max_pending}: wait for some of them first",
                field="max_pending_calls",
            )
        runtime = self._runtime
        task_id = self._ids()
        place, deps, nested = pack_arguments(runtime, task_id, spec, args, kwargs)
        task = PendingTask(task_id, spec, place, deps, nested, runtime.current_task_id())
        result = make_refs(runtime, task)
        runtime.tasks.pending[task_id] = task
        link.open.add(task_id)
        self._submitted.append((link, task))
        runtime.wake()
        return result

    # -- the loop thread -------------------------------------------------------------------------

    def flush(self) -> None:
        """Take in new calls, and send those of each actor that can go."""
        touched: dict[str, ActorLink] = {}
        while self._submitted:
            link, task = self._submitted.popleft()
            task.phase = Phase.WAITING
            if (dead := link.dead or self._runtime.lost) is not None:
                self._fail(task, dead)
                continue
            self._runtime.tasks.reports.watch(task)
            link.waiting.append(task)
            touched[link.actor_id] = link
        for link in touched.values():
            self._send(link)

    def _send(self, link: ActorLink) -> None:
        """Send the waiting calls in order, up to the first whose arguments are not there yet."""
        line = link.line
        if line is None or line.closed:
            if link.waiting and not link.connecting and link.dead is None:
                link.connecting = True
                self._runtime.background.spawn(self._connect(link), name="actor")
            return
        batch: list[PendingTask] = []
        while link.waiting:
            task = link.waiting[0]
            missing = [d for d in task.deps if d._entry.place is None]
            if missing:
                if not task.waiting_deps:
                    task.waiting_deps = 1

                    def again(task: PendingTask = task) -> None:
                        task.waiting_deps = 0
                        self._send(link)

                    self._runtime.objects.when_settled(missing[0]._entry, again)
                break
            link.waiting.popleft()
            if (failed := failed_dep(task)) is not None:
                self._fail(task, failed)
                continue
            task.phase, task.line = Phase.SENT, line
            link.sent[task.task_id] = task
            batch.append(task)
        if batch:
            line.post(run_frame(line, batch, self._runtime.address))

    async def _connect(self, link: ActorLink) -> None:
        """Find out where the actor is, and open the line to it."""
        try:
            if link.created is not None:
                await asyncio.wait([link.created])
                if link.dead is not None:
                    self._fail_all(link, link.dead)
            await self._news.begin()
            until = self._runtime.loop.time() + (_CREATED_S if link.may_come else 0.0)
            while link.waiting and link.dead is None and self._runtime.running:
                link.told.clear()
                async with self.gate:
                    actor = await self._lookup(link, wait_s=0, until=until)
                if actor is None:
                    await asyncio.sleep(_POLL_S)
                elif actor.state is ActorState.DEAD:
                    self._died(link, actor)
                elif (
                    actor.address is None
                    or actor.state is not ActorState.ALIVE
                    or actor.incarnation < link.incarnation
                ):
                    link.note = actor.pending_reason or f"it is {actor.state.value}"
                    await link.until_told(_UNTOLD_S)
                else:
                    try:
                        link.line = await self._runtime.peers.line(actor.address)
                    except StokerError as error:
                        link.note = f"its worker cannot be reached: {error.message}"
                        await asyncio.sleep(_POLL_S)
                        continue
                    link.incarnation = actor.incarnation
                    return
        finally:
            link.connecting = False
            if link.line is not None and not link.line.closed:
                self._send(link)

    async def _lookup(self, link: ActorLink, *, wait_s: float, until: float = 0.0) -> Actor | None:
        actor = await look_up(self._runtime, link, wait_s=wait_s, until=until)
        if actor is None and link.dead is not None:
            self._fail_all(link, link.dead)
        return actor

    def _died(self, link: ActorLink, actor: Actor) -> None:
        cause = actor.death_cause
        text = cause.message if cause else "no cause was recorded"
        self._end(link, text, dict(cause.extra) if cause else {})

    def _end(self, link: ActorLink, why: str, extra: dict[str, Any]) -> None:
        text = f"actor {link.name} ({link.actor_id}) is dead: {why}"
        failed = failed_with(ActorDiedError(text, extra=extra))
        link.die(failed)
        self._fail_all(link, failed)

    def _fail_all(self, link: ActorLink, failed: Failed) -> None:
        tasks = [*link.sent.values(), *link.waiting]
        link.sent.clear()
        link.waiting.clear()
        for task in tasks:
            self._fail(task, failed)

    def _fail(self, task: PendingTask, failed: Failed) -> None:
        self._runtime.tasks.fail(task, failed)
        self._links[task.spec.actor_id].settled(task.task_id)

    def on_done(self, line: Channel, results: list[Result]) -> list[Result]:
        """Settle results of actor calls; return those that are not of actors."""
        rest: list[Result] = []
        escaped: list[str] = []
        tasks = self._runtime.tasks
        for result in results:
            task = tasks.pending.get(result.task_id)
            if task is None or not task.spec.actor_id:
                rest.append(result)
                continue
            if task.attempt != result.attempt:
                continue  # of a life that was given up
            link = self._links[task.spec.actor_id]
            link.sent.pop(result.task_id, None)
            if result.escaped:
                escaped.append(result.task_id)
            if result.retry and not task.cancelled and task.take_retry():
                task.phase, task.line = Phase.WAITING, None
                link.waiting.append(task)
                self._send(link)
            else:
                tasks.complete(task, result)
                link.settled(task.task_id)
        if escaped:
            self._runtime.background.spawn(tasks.release(line, escaped), name="release")
        return rest

    def on_item(self, line: Channel, message: Item) -> bool:
        """A streaming method yielded; False if it is no actor's."""
        task = self._runtime.tasks.pending.get(message.task_id)
        if task is None or not task.spec.actor_id or task.stream is None:
            return False
        if task.attempt == message.attempt:
            task.stream.produced(line, message.index, message.place)
        return True

    def cancel(self, task_id: str, *, force: bool, recursive: bool) -> bool:
        """Stop an actor call; False if the id is no actor call's."""
        task = self._runtime.tasks.pending.get(task_id)
        if task is None or not task.spec.actor_id:
            return False
        task.cancelled = True
        link = self._links[task.spec.actor_id]
        if task.phase is Phase.SENT and task.line is not None:
            # Never forced: that would end the actor and the state of all its other callers.
            task.line.post(Cancel(task_id, False, recursive))
        elif task in link.waiting:
            link.waiting.remove(task)
            self._fail(task, failed_with(cancelled_error(task)))
            self._send(link)  # it may have been what the others waited behind
        return True

    def lost_line(self, line: Channel) -> None:
        """A line closed: the actors behind it died, restart, or moved."""
        for link in self._links.values():
            if link.line is line:
                self._lose(link)

    def _lose(self, link: ActorLink) -> None:
        link.line = None
        link.connecting = True  # calls made meanwhile go behind those that are tried again
        self._runtime.background.spawn(self._after_loss(link), name="actor-lost")

    def _changed(self, actor: Actor) -> None:
        """The gcs gave an actor up; its line may look well for long."""
        link = self._links.get(actor.actor_id)
        if link is not None:
            link.told.set()
            if link.given_up(actor):
                self._lose(link)

    def _check_all(self) -> None:
        for link in self._links.values():
            if link.line is not None:
                self._runtime.background.spawn(self._check(link), name="actor-check")

    async def _check(self, link: ActorLink) -> None:
        actor = await self._lookup(link, wait_s=0)
        if actor is not None:
            self._changed(actor)

    async def _after_loss(self, link: ActorLink) -> None:
        """Ask the gcs what became of the actor; retry or fail the calls that it had."""
        lost = list(link.sent.values())
        link.sent.clear()
        seen = link.incarnation
        deadline = self._runtime.loop.time() + _SETTLE_S
        actor: Actor | None = None
        while self._runtime.running and self._runtime.loop.time() < deadline:
            actor = await self._lookup(link, wait_s=0)
            if link.dead is not None:
                break
            if actor is not None and (
                actor.state in (ActorState.DEAD, ActorState.RESTARTING) or actor.incarnation > seen
            ):
                break
            await asyncio.sleep(_POLL_S)
        if actor is not None and actor.state is ActorState.DEAD:
            self._died(link, actor)
        link.connecting = False
        if link.dead is not None:
            for task in lost:
                self._fail(task, link.dead)
            return
        restarts = actor is not None and actor.state is ActorState.RESTARTING
        how = "ended"
        if restarts or (actor is not None and actor.incarnation > seen):
            link.incarnation = seen + 1
        else:
            how = "lost the connection to this process"
        self._try_again(
            link, lost, f"{how} ({actor.pending_reason})" if restarts and actor else how
        )
        self._send(link)

    def _try_again(self, link: ActorLink, lost: list[PendingTask], how: str) -> None:
        """Put the calls that were under way in front again, or fail them."""
        retried: list[PendingTask] = []
        for task in lost:
            if task.cancelled:
                self._fail(task, failed_with(cancelled_error(task)))
            elif task.take_retry():
                task.phase, task.line = Phase.WAITING, None
                retried.append(task)
            else:
                text = (
                    f"actor {link.name} ({link.actor_id}) {how} while it had the call "
                    f"{task.spec.name}, which may or may not have run "
                    "(set max_task_retries to have it tried again)"
                )
                self._fail(task, failed_with(ActorUnavailableError(text)))
        link.waiting.extendleft(reversed(retried))

    # -- lifetime --------------------------------------------------------------------------------

    def begin_creation(self, link: ActorLink, work: Coroutine[Any, Any, Actor]) -> None:
        """Create an actor while its creator goes on (loop thread)."""
        link.created = self._runtime.background.spawn(self._creating(link, work), name="create")

    async def _creating(self, link: ActorLink, work: Coroutine[Any, Any, Actor]) -> None:
        from stoker.runtime.creation import creation_failed

        try:
            await work
        except StokerError as error:
            creation_failed(link, error)
        except asyncio.CancelledError:
            creation_failed(link, ActorDiedError("it was killed before its arguments were there"))
            raise

    def handle_dropped(self, actor_id: str) -> None:
        """The creator's last handle went away: end the actor once its calls are done."""
        link = self._links.get(actor_id)
        if link is not None and self._runtime.running:
            self._runtime.background.spawn(self._end_when_done(link), name="actor-end")

    async def _end_when_done(self, link: ActorLink) -> None:
        # Calls submitted before the handle went away come first.
        link.drained = asyncio.Event()
        while link.open and self._runtime.running:
            link.drained.clear()
            await link.drained.wait()
        if link.dead is None and self._runtime.running:
            await self.kill(link.actor_id, no_restart=True, reason="no handle to it is left")
        self._links.pop(link.actor_id, None)

    async def kill(self, actor_id: str, *, no_restart: bool, reason: str) -> None:
        """End an actor, also one that is still being created."""
        link = self._links.get(actor_id)
        if link is not None and link.created is not None and not link.created.done():
            if link.held is not None and any(d._entry.place is None for d in link.held.deps):
                link.created.cancel()
            await asyncio.wait([link.created])
            if link.dead is not None:
                self._fail_all(link, link.dead)
        if link is not None and link.dead is not None:
            return
        await self._runtime.gcs.call(
            "POST",
            f"/v1/actors/{actor_id}/kill",
            KillActor(no_restart=no_restart, reason=reason),
        )
        if no_restart and link is not None and link.dead is None:
            # Its process may still take calls for a moment; those of the killer must not succeed.
            self._end(link, reason, {})

    def describe(self, task: PendingTask) -> str:
        """Say what an actor call waits for."""
        link = self._links.get(task.spec.actor_id)
        if link is None:
            return "its actor is not known here"
        if task.phase is Phase.SENT:
            return f"actor {link.name} has it and has not finished"
        return f"it waits for actor {link.name} ({link.actor_id}): {link.note}"
