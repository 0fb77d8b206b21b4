"""The connections of this process to actors: one :class:`ActorConnection` for each that it calls.

The gcs alone says where an actor lives and whether it is dead; a channel is opened and given up as it says.
:class:`stoker.runtime.actors.calls.ActorCalls` owns the calls; the :class:`ActorConnector` decides when
there is a channel to send them on, and what becomes of those that were under way when it closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from stoker.exceptions import (
    ActorDiedError,
    NotFoundError,
    OutOfMemoryError,
    PreemptedError,
    StokerError,
)
from stoker.runtime.actors.call_order import CallOrder
from stoker.runtime.actors.watch import ActorWatch
from stoker.runtime.serialization.exceptions import encode_error
from stoker.runtime.tasks.task_spec import Phase
from stoker_wire.messages.data import Failed
from stoker_wire.messages.work import Actor, ActorState

if TYPE_CHECKING:
    from stoker.runtime.net.channels import Channels
    from stoker.runtime.process.io_thread import IoThread
    from stoker.runtime.tasks.task_spec import PendingTask
    from stoker_wire.data.channel import Channel
    from stoker_wire.http.client.client import Client
    from stoker_wire.messages.common import ErrorInfo

_LOOK_UP_S = 10.0
_LATE_S = 2.0
"""A gcs that has not answered by then is what the calls wait for."""
_MAX_REQUESTS = 12
"""How many actors may be created or looked up at once: each takes a connection to the gcs."""
_UPDATE_WAIT_S = 5.0
"""How long to rely on the watch alone before the gcs is asked."""
_DEATH_NOTICE_S = 15.0
"""How long the gcs may take to notice that an actor's process ended."""
_LIVES_S = 3.0
"""How long a process that is ending may take after it has closed its channels."""
_CREATION_S = 60.0
"""How long an actor may be unknown to the gcs: its handle may travel faster than it is created, and its
constructor's arguments may come late."""
_POLL_S = 0.03
_SLOW_POLL_S = 1.0


class ActorConnection:
    """The calls of this process to one actor, and what it knows of that actor."""

    def __init__(
        self, actor_id: str, name: str, max_pending: int, unordered: Collection[str] = ()
    ) -> None:
        self.actor_id = actor_id
        self.name = name
        self.max_pending = max_pending
        self.calls: CallOrder[PendingTask] = CallOrder(unordered)
        """Calls that are not under way."""
        self.sent: dict[str, PendingTask] = {}
        """Calls at the actor's worker; they wait there, and are in phase WAITING, until it is up."""
        self.paused: dict[str, PendingTask] = {}
        """Calls that raised, and are sent once more after a pause."""
        self.is_timed = False
        """Whether it had a call with a timeout: then the time of the last result is kept."""
        self.settled_at_s = 0.0
        """When the last result came, by the clock of the loop."""
        self.unsettled: set[str] = set()
        """The ids of all unsettled calls, from the moment of ``.remote()`` on."""
        self.channel: Channel | None = None
        self.incarnation = -1
        self.restarts = 0
        """How many restarts the actor had used up as this incarnation; a preemption uses up none."""
        self.oom_restarts = 0
        """How many of them for want of memory."""
        self.dead: Failed | None = None
        self.killed = False
        """Whether this process ended it: the errors of its calls surprise nobody then."""
        self.connecting = False
        self.creation_pending = False
        """Whether its creator, in this job, may not have created it yet."""
        self.status_text = "it is being created"
        self.owned = False
        """Whether this process created it, so that it lives only as long as this process."""
        self.creation: asyncio.Task[Any] | None = None
        """The requests that create it, if this process does."""
        self.registered = asyncio.Event()
        """Set once the gcs knows it, or never will, if this process creates it."""
        self.record: Actor | None = None
        """The latest record of it that came from the gcs."""
        self.updated = asyncio.Event()
        """Set when a newer record came."""
        self.constructor_call: PendingTask | None = None
        """Keeps the refs among its arguments alive, for restarts; None where others created the actor."""

    def waits_for(self, what: str) -> None:
        """Say what its calls wait for, until something else is known."""
        self.status_text = what

    @property
    def is_idle(self) -> bool:
        """Whether it may be forgotten: it has no call, and no argument for a restart."""
        creating = self.creation is not None and not self.creation.done()
        return not (
            self.unsettled
            or self.connecting
            or creating
            or (self.constructor_call and not self.dead)
        )

    @property
    def is_dead(self) -> bool:
        """Whether the actor is known to be dead for good."""
        return self.dead is not None or (
            self.record is not None and self.record.state is ActorState.DEAD
        )

    @property
    def lost_owner(self) -> str:
        """The id of its owner if that cannot be reached any more, or '': handles borrow from the owner."""
        for call in self.calls:
            for ref in call.spec.refs:
                if ref._entry.owner is not None and isinstance(ref._entry.location, Failed):
                    return ref._entry.owner.peer_id
        return ""

    def runs_in_order(self, call: PendingTask) -> bool:
        """Return whether the actor runs a call only after those of its group that were sent before it."""
        return self.calls.is_ordered(call.group)

    def mark_dead(self, failed: Failed) -> None:
        """Note why the actor will never run again, and release its constructor's arguments."""
        self.dead, self.constructor_call = failed, None

    def update(self, actor: Actor) -> None:
        """Take a record from the gcs, unless it is older than the present one."""
        if self.record is None or _progress(actor) >= _progress(self.record):
            self.record = actor
            self.updated.set()

    async def wait_for_update(self, timeout_s: float) -> bool:
        """Wait until a newer record comes; return False if the time is over first."""
        try:
            await asyncio.wait_for(self.updated.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    @property
    def is_up(self) -> bool:
        """Whether the incarnation that the channel leads to is ALIVE, as the latest record says."""
        record = self.record  # read for each call, so without a detour
        return (
            self.channel is not None
            and record is not None
            and record.incarnation == self.incarnation
            and record.state is ActorState.ALIVE
        )

    def is_starting(self, incarnation: int) -> bool:
        """Return whether this incarnation is neither up nor ended, as the latest record says."""
        return self._is(incarnation, ActorState.PENDING, ActorState.RESTARTING)

    def has_ended(self, incarnation: int) -> bool:
        """Return whether this incarnation has ended, as the latest record says."""
        later = self.record is not None and self.record.incarnation > incarnation
        return later or self._is(incarnation, ActorState.DEAD)

    def may_have_run(self, incarnation: int) -> bool:
        """Return whether a call that this incarnation had, which has ended, may have run."""
        last_alive = None if self.record is None else self.record.last_alive
        return last_alive is None or last_alive >= incarnation

    def _is(self, incarnation: int, *states: ActorState) -> bool:
        record = self.record
        return record is not None and record.incarnation == incarnation and record.state in states


def _progress(actor: Actor) -> tuple[int, int, bool]:
    """Return a key that sorts records of one actor by when they were true."""
    stage = {ActorState.ALIVE: 1, ActorState.DEAD: 2}.get(actor.state, 0)
    return actor.incarnation, stage, actor.address is not None


class _Calls(Protocol):
    """The owner of the calls that go through the connections."""

    def get(self, actor_id: str) -> ActorConnection | None: ...
    def connections(self) -> Iterable[ActorConnection]: ...
    def send(self, connection: ActorConnection) -> None: ...
    def on_actor_up(self, connection: ActorConnection) -> None: ...
    def on_actor_dead(self, connection: ActorConnection, actor: Actor) -> None: ...
    def fail(self, task: PendingTask, failed: Failed) -> None: ...
    def fail_all(self, connection: ActorConnection, failed: Failed) -> None: ...
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
    ) -> None: ...


class ActorConnector:
    """The part that opens and gives up channels to actors (loop thread)."""

    def __init__(self, io: IoThread, channels: Channels, gcs: Client, calls: _Calls) -> None:
        self._io = io
        self._channels = channels
        self._gcs = gcs
        self._calls = calls
        self.request_slots = asyncio.Semaphore(_MAX_REQUESTS)
        self.watch = ActorWatch(io, gcs, self._on_actor_update, self._check_all)

    def open(self, connection: ActorConnection) -> None:
        """Begin to open a connection's channel, unless that is under way."""
        if not connection.connecting:
            connection.connecting = True
            self._io.background.spawn(self._connect(connection), name="actor")

    async def _connect(self, connection: ActorConnection) -> None:
        """Find out where the actor is, open the channel to it, and send what waits."""
        try:
            if connection.creation is not None:
                await connection.registered.wait()
                if connection.dead is not None:
                    self._calls.fail_all(connection, connection.dead)
            await self.watch.start()
            until = self._io.loop.time() + (_CREATION_S if connection.creation_pending else 0.0)
            while connection.calls and connection.dead is None and self._io.running:
                connection.updated.clear()
                actor = connection.record or await self._look_up(connection, until=until)
                if actor is None:
                    await asyncio.sleep(_POLL_S)
                    continue
                if actor.state is ActorState.DEAD:
                    self._calls.on_actor_dead(connection, actor)
                    continue
                try:
                    if await self._open_channel(connection, actor):
                        return
                except StokerError as error:
                    connection.status_text = f"its worker cannot be reached: {error.one_line}"
                    connection.record = None
                    await asyncio.sleep(_POLL_S)
                    continue
                connection.status_text = actor.pending_reason or f"it is {actor.state.value}"
                if not await connection.wait_for_update(_UPDATE_WAIT_S):
                    connection.record = None
        finally:
            connection.connecting = False
            if connection.channel is not None and not connection.channel.closed:
                self._calls.send(connection)

    async def _open_channel(self, connection: ActorConnection, actor: Actor) -> bool:
        """Open the channel to an actor; return False if it has no worker just now.

        Its constructor may still run: its worker keeps the calls until the actor is ALIVE.
        """
        if actor.address is None or actor.incarnation < connection.incarnation:
            return False
        channel = await self._channels.channel(actor.address)
        connection.update(actor)
        if connection.has_ended(actor.incarnation):
            return False
        connection.channel, connection.incarnation = channel, actor.incarnation
        connection.restarts, connection.oom_restarts = actor.restarts, actor.oom_restarts
        connection.status_text = "its constructor has not returned"
        return True

    async def channel_to(self, connection: ActorConnection) -> Channel | None:
        """Return a channel to an actor that perhaps only others call; None if the actor is not up."""
        if connection.is_up and connection.channel is not None and not connection.channel.closed:
            return connection.channel
        if connection.dead is not None or (
            connection.creation is not None and not connection.registered.is_set()
        ):
            return None
        actor = await self._look_up(connection)
        if actor is None or actor.state is not ActorState.ALIVE or actor.address is None:
            return None
        return await self._channels.channel(actor.address)

    async def _look_up(self, connection: ActorConnection, *, until: float = 0.0) -> Actor | None:
        actor = await self._fetch_record(connection, until=until)
        if actor is None and connection.dead is not None:
            self._calls.fail_all(connection, connection.dead)
        return actor

    async def _fetch_record(self, connection: ActorConnection, *, until: float) -> Actor | None:
        """Return the gcs's record of the actor.

        None if the gcs cannot say now, or if it does not know the actor: that is the actor's end, but
        not before ``until`` on the loop's clock.
        """
        late = self._io.loop.call_later(
            _LATE_S, connection.waits_for, f"the gcs does not answer since {_LATE_S:g} s"
        )
        try:
            async with self.request_slots:
                return await self._gcs.call(
                    "GET", f"/v1/actors/{connection.actor_id}", reply=Actor, timeout_s=_LOOK_UP_S
                )
        except NotFoundError as error:
            if connection.calls and (owner := connection.lost_owner):
                text = (
                    f"actor {connection.name} was never created\n"
                    f"its owner {owner} died before it had created it"
                )
                connection.mark_dead(encode_error(ActorDiedError(text)))
                return None
            connection.status_text = "its creator has not created it yet"
            if connection.incarnation < 0 and self._io.loop.time() < until:
                return None
            connection.mark_dead(
                encode_error(
                    ActorDiedError(f"actor {connection.name} is not known\n{error.message}")
                )
            )
        except StokerError as error:
            if error.retryable or error.status >= 500:
                connection.status_text = f"the gcs does not answer: {error.one_line}"
                return None
            connection.mark_dead(
                encode_error(
                    ActorDiedError(f"actor {connection.name} is not known\n{error.message}")
                )
            )
        finally:
            late.cancel()
        return None

    # -- losing channels -------------------------------------------------------------------------

    def on_channel_closed(self, connections: Iterable[ActorConnection], channel: Channel) -> None:
        """Recover the connections of a channel that closed: their actors died, restart, or moved."""
        for connection in connections:
            if connection.channel is channel:
                self._on_disconnect(connection)

    def _on_disconnect(self, connection: ActorConnection) -> None:
        connection.channel = None
        connection.status_text = "the connection to it was lost"
        if connection.dead is None:
            # Calls made meanwhile go behind those that are retried.
            connection.connecting = True
            self._io.background.spawn(self._recover(connection), name="actor-lost")

    def _on_actor_update(self, actor: Actor) -> None:
        """Handle a record from the gcs: the channel to an actor that it gave up may look well for long."""
        connection = self._calls.get(actor.actor_id)
        if connection is not None:
            connection.update(actor)
            if connection.channel is not None and connection.has_ended(connection.incarnation):
                # An actor that ends itself answers before it tells the gcs.
                connection.channel.receive_now()
                if connection.channel is not None:  # still: it may have been closed
                    self._on_disconnect(connection)
            elif connection.is_up:
                self._calls.on_actor_up(connection)

    def _check_all(self) -> None:
        for connection in self._calls.connections():
            if connection.channel is not None:
                self._io.background.spawn(self._check(connection), name="actor-check")

    async def _check(self, connection: ActorConnection) -> None:
        actor = await self._look_up(connection)
        if actor is not None:
            self._on_actor_update(actor)

    async def _lives(self, connection: ActorConnection) -> bool:
        """Return whether the actor's process takes another channel, and keeps it: the last one broke."""
        actor = connection.record
        if actor is None or actor.address is None:
            return False
        try:
            channel = await self._channels.channel(actor.address)
        except StokerError:
            return False
        await asyncio.sleep(_LIVES_S)
        return not channel.closed

    async def _recover(self, connection: ActorConnection) -> None:
        """Find out what became of the actor; retry or fail the calls that were sent to it."""
        lost = list(connection.sent.values())
        connection.sent.clear()
        for task in lost:  # those that waited for its constructor too: they are in no queue here
            task.phase = Phase.SENT
        incarnation = connection.incarnation
        deadline = self._io.loop.time() + _DEATH_NOTICE_S
        lives: asyncio.Task[bool] | None = None
        while self._io.running:
            if (found := await self._look_up(connection)) is not None:
                connection.update(found)
            if connection.dead is not None or connection.has_ended(incarnation):
                break
            if lives is None:
                lives = self._io.background.spawn(self._lives(connection), name="actor-lives")
            # One that is starting has run none of them, and ends or comes up some time.
            late = self._io.loop.time() > deadline or (lives.done() and lives.result())
            if late and not connection.is_starting(incarnation):
                break
            await asyncio.sleep(_SLOW_POLL_S if late else _POLL_S)
        if lives is not None:
            lives.cancel()
        actor = connection.record
        if actor is not None and actor.state is ActorState.DEAD:
            self._calls.on_actor_dead(connection, actor)
        connection.connecting = False
        if connection.dead is not None:
            for task in lost:
                self._calls.fail(task, connection.dead)
            return
        how, may_have_run = "lost the connection to this process", True
        preempted = oom = False
        cause: ErrorInfo | None = None
        if actor is not None and actor.incarnation > incarnation:
            how, may_have_run = "ended", connection.may_have_run(incarnation)
            ends = actor.restarts - connection.restarts
            preempted = ends == 0
            oom = ends > 0 and actor.oom_restarts - connection.oom_restarts == ends
            connection.incarnation = incarnation + 1
            if actor.incarnation == incarnation + 1:
                cause = actor.death_cause
            if cause is not None:  # a drain's deadline uses up no restart either
                preempted = cause.code == PreemptedError.code
            if cause is not None and cause.code == OutOfMemoryError.code:
                how = "was out of memory and ended"
            if cause is not None and cause.code != PreemptedError.code:
                preempted = False  # it was moved at a deadline: its calls are as after a crash
        self._calls.retry_or_fail(
            connection,
            lost,
            how,
            cause,
            may_have_run=may_have_run,
            preempted=preempted,
            oom=oom,
        )
        self._calls.send(connection)
