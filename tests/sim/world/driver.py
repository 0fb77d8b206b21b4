"""A driver of a world: the sdk's real submitter, leases and retries over the world's network.

Calls carry no values. A result is counted where it is settled; the world counts what ran.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Any

from stoker.runtime.actors.call_order import CallOrder
from stoker.runtime.driver import driver as driver_session
from stoker.runtime.net.clients import ClusterClients
from stoker.runtime.options.options import TaskOptions
from stoker.runtime.process.identity import Identity
from stoker.runtime.tasks.lineage import Lineage
from stoker.runtime.tasks.overdue import OverdueCalls
from stoker.runtime.tasks.pending import PendingCalls
from stoker.runtime.tasks.submitter import TaskSubmitter
from stoker.runtime.tasks.task_spec import FunctionSpec, PendingTask
from stoker_wire.data.channel import Channel
from stoker_wire.errors import ConflictError, NotFoundError, StokerError, UnavailableError
from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.common import Address, OnInfeasible, Strategy
from stoker_wire.messages.data import Call, Failed, Inline, Pong, Result, Returned, Run, Template
from stoker_wire.messages.work import (
    Actor,
    ActorState,
    AttachDriver,
    CreateActor,
    FinishJob,
    Job,
    JobState,
)
from stoker_wire.process.background import Background
from tests.sim.world.links import Link
from tests.sim.world.loop import Process

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker_wire.messages.work import Owner

_NO_ARGUMENTS = Inline(b"")
_TICK_S = 0.1
_WATCH_S = 1.0


class SimChannel(Channel):
    """A channel over a link of the world."""

    def __init__(self, link: Link, peer: Address) -> None:
        self.link, self.peer = link, peer
        self.closed = False
        self.templates_sent = set()

    def post(self, message: Any) -> None:
        if not self.closed:
            self.link.send(message)

    def receive_now(self) -> None:
        """All that has arrived was handled."""

    async def close(self) -> None:
        self.link.close()


class _Io:
    """The loop thread of a driver (:class:`stoker.runtime.process.io_thread.IoThread`)."""

    running = True

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.background = Background("driver")
        self.flush: Callable[[], None] = lambda: None

    def wake(self) -> None:
        self.loop.call_soon(self.flush)

    flush_now = wake

    def call_soon(self, callback: Callable[[], object]) -> None:
        self.loop.call_soon(callback)

    def is_current(self) -> bool:
        return True


class _Objects:
    """The objects of a driver: calls here have no values."""

    arena = None

    def __init__(self) -> None:
        self.values = self

    def free(self, *_: object) -> None:
        return None

    settle = free


class _Status:
    """The history of a driver: nobody reads it."""

    def watch(self, _: PendingTask) -> None:
        return None

    def ended(self, *_: Any, **__: Any) -> None:
        return None


class _Channels:
    """The channels of a driver, by address."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._open: dict[str, SimChannel] = {}

    async def channel(self, address: Address) -> SimChannel:
        known = self._open.get(address.url)
        if known is not None and not known.closed:
            return known
        driver = self._driver
        network = driver.world.network
        await asyncio.sleep(network.latency())
        worker = driver.world.workers.get(address.url)
        if worker is None or worker.process.dead:
            raise UnavailableError(f"cannot reach {address.url}")
        if not network.reaches(driver.process.host, worker.process.host):
            await asyncio.sleep(10.0)
            raise UnavailableError(f"{address.url} does not answer")
        mine, theirs = Link.pair(network, driver.process, worker.process)
        worker.connect(theirs)
        channel = self._open[address.url] = SimChannel(mine, address)
        mine.on_item = lambda message: driver.receive(channel, message)
        mine.on_closed = lambda: self._closed(channel)
        return channel

    def _closed(self, channel: SimChannel) -> None:
        channel.closed = True
        if self._open.get(channel.peer.url) is channel:
            del self._open[channel.peer.url]
        self._driver.on_closed(channel)


class _Pending(PendingCalls):
    """The real table of calls, which counts what is settled."""

    driver: Driver

    def complete(self, task: PendingTask, result: Result) -> None:
        failed = bool(result.returns) and isinstance(result.returns[0], Failed)
        self.driver.settled(task.task_id, "failed" if failed else "done")
        super().complete(task, result)

    def fail(self, task: PendingTask, failed: Failed, *, report: bool = True) -> None:
        if task.task_id in self.by_id:
            self.driver.settled(task.task_id, failed.code)
        super().fail(task, failed, report=report)


class _ActorCall:
    """A call of an actor; ``dep`` is the call whose result is its argument."""

    group = ""

    def __init__(self, task_id: str, dep: _ActorCall | None, retries: int) -> None:
        self.task_id, self.dep, self.retries = task_id, dep, retries
        self.attempt = 0
        self.over = False

    @property
    def deps(self) -> tuple[object, ...]:
        return () if self.dep is None else (self.dep,)


class ActorCaller:
    """The calls of one driver to one actor, in the order of the product."""

    def __init__(self, driver: Driver, actor_id: str, retries: int) -> None:
        self.driver, self.actor_id, self.retries = driver, actor_id, retries
        self.order: CallOrder[_ActorCall] = CallOrder()
        self.calls: dict[str, _ActorCall] = {}
        self.last: _ActorCall | None = None
        self._sent: dict[str, _ActorCall] = {}
        self._channel: SimChannel | None = None
        self._following = self._watching = False

    def submit(self, task_id: str, *, with_last: bool) -> None:
        """Add a call, whose argument is the result of the last one or nothing."""
        call = _ActorCall(task_id, self.last if with_last else None, self.retries)
        self.last = self.calls[task_id] = call
        self.order.append(call)
        self.go()

    def go(self) -> None:
        """Send what can go; find the actor's worker first."""
        if self._channel is None or self._channel.closed:
            if not self._following and self.calls:
                self._following = True
                self.driver.io.background.spawn(self._follow(), name="actor")
            return
        calls = self.order.take(lambda call: call.dep is None or call.dep.over)
        for call in calls:
            self._sent[call.task_id] = call
        if calls:
            if not self._watching:
                self._watching = True
                self.driver.io.background.spawn(self._watch(), name="watch")
            run = [Call(one.task_id, 0, _NO_ARGUMENTS, attempt=one.attempt) for one in calls]
            self._channel.post(Run(run))

    async def _watch(self) -> None:
        """Learn from the gcs that the worker is gone whose host does not say so."""
        try:
            while self._sent:
                await asyncio.sleep(_WATCH_S)
                with contextlib.suppress(StokerError):
                    path = f"/v1/actors/{self.actor_id}"
                    actor = await self.driver.clients.gcs.call(
                        "GET", path, reply=Actor, timeout_s=2.0
                    )
                    channel = self._channel
                    if channel is not None and (
                        actor.state is not ActorState.ALIVE
                        or actor.worker_id != channel.peer.peer_id
                    ):
                        await channel.close()
                        channel.closed = True
                        self.on_closed(channel)
        finally:
            self._watching = False

    async def _follow(self) -> None:
        """Wait until the actor is ALIVE at a worker, or DEAD."""
        try:
            while self.calls:
                try:
                    actor = await self.driver.clients.gcs.call(
                        "GET",
                        f"/v1/actors/{self.actor_id}",
                        reply=Actor,
                        query={"wait_s": 5.0},
                        timeout_s=10.0,
                    )
                    if actor.state is ActorState.DEAD:
                        self._end(actor)
                        return
                    if actor.state is ActorState.ALIVE and actor.address is not None:
                        self._channel = await self.driver.channels.channel(actor.address)
                        break
                except NotFoundError:
                    await asyncio.sleep(0.3)
                except StokerError:
                    await asyncio.sleep(0.3)
                else:
                    await asyncio.sleep(0.1)
        finally:
            self._following = False
        self.go()

    def _end(self, actor: Actor) -> None:
        for call in list(self.calls.values()):
            self._settle(call, "actor_died")
        self.order.drain()
        self._sent.clear()

    def _settle(self, call: _ActorCall, how: str) -> None:
        call.over = True
        del self.calls[call.task_id]
        self.driver.settled(call.task_id, how)

    def on_done(self, result: Result) -> bool:
        """Take a result; return whether it is of this actor."""
        call = self._sent.get(result.task_id)
        if call is None or call.attempt != result.attempt:
            return call is not None
        del self._sent[result.task_id]
        if result.retry and call.retries:
            call.retries -= 1
            call.attempt += 1
            self.order.requeue([call])
        else:
            self._settle(call, "failed" if result.returns else "done")
        self.go()
        return True

    def on_closed(self, channel: SimChannel) -> None:
        """Its worker is gone: calls that may run again wait for the next, others fail."""
        if channel is not self._channel:
            return
        self._channel = None
        lost, self._sent = self._sent, {}
        again = []
        for call in lost.values():
            if call.retries:
                call.retries -= 1
                call.attempt += 1
                again.append(call)
            else:
                self._settle(call, "worker_died")
        self.order.requeue(again)
        self.go()


class Driver:
    """A driver process that attaches, and what it submits."""

    def __init__(self, world: Any, name: str, host: str, pid: int) -> None:
        self.world, self.name, self.pid = world, name, pid
        self.process = Process(name, host)
        self.job_id = ""
        self.failed_attach = False
        self.results: dict[str, str] = {}
        self.submitted: dict[str, int] = {}
        """Calls that are not settled, and when they were submitted."""
        self.actors: dict[str, ActorCaller] = {}
        self.finished = False
        self._numbers = itertools.count()
        world.pids[host, pid] = self.process
        self.process.context.run(self._build)
        self.process.spawn(self._live())

    def _build(self) -> None:
        world = self.world
        address = Address(f"p_{self.name}", "", self.process.host, "", f"sim://{self.name}")
        self.io = io = _Io(world.loop)
        self.identity = identity = Identity(
            peer_id=address.peer_id,
            gcs_url=world.gcs_url,
            token="t",
            host_id=self.process.host,
            node=None,
            socket_path="",
        )
        objects: Any = _Objects()
        self.channels = _Channels(self)
        status: Any = _Status()
        pending = _Pending(io, self.channels, objects, status, {}, Lineage(0))  # type: ignore[arg-type]
        pending.driver = self
        self.clients = ClusterClients(identity, world.settings, io, None)  # type: ignore[arg-type]
        self.pending = pending
        self.overdue = OverdueCalls(io)  # type: ignore[arg-type]
        self.tasks = TaskSubmitter(
            address,
            world.settings,
            io,
            self.channels,
            self.clients,  # type: ignore[arg-type]
            objects,
            pending,
            self.overdue,
        )
        self.io.flush = self.tasks.flush
        self._specs: dict[Any, FunctionSpec] = {}

    async def _live(self) -> None:
        namespace = self.world.pid_namespace()
        body = AttachDriver(
            hostname=self.process.host,
            pid=self.pid,
            pid_started=self.pid,
            pid_namespace=namespace,
            entrypoint=self.name,
        )
        while not self.job_id:
            with contextlib.suppress(StokerError):
                job = await self.clients.gcs.call(
                    "POST", "/v1/jobs/attach", body, reply=Job, idempotency_key=f"k{self.name}"
                )
                self.job_id = job.job_id
                self.world.accepted_job(self.job_id, self)
        job: Any = self
        unused: Any = None
        session = driver_session.Driver(
            self.identity,
            self.io,
            self.clients.gcs,
            job,
            unused,
            unused,  # type: ignore[arg-type]
        )
        session.begin(follow_logs=False)
        self.process.spawn(self._tick())
        await self.world.workload.program(self)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.tasks.tick()
            self.world.checks.driver_stepped(self)

    # What the program does

    def submit(
        self,
        resources: dict[str, float],
        *,
        max_retries: int,
        quick: bool = False,
        group_id: str = "",
    ) -> None:
        """Submit a call of a remote function."""
        key = (tuple(resources.items()), max_retries, quick, group_id)
        spec = self._specs.get(key)
        if spec is None:
            spec = self._specs[key] = FunctionSpec(
                submitter=self.tasks,
                function=f"f{len(self._specs)}",
                blob=b"",
                name="f",
                template=Template(len(self._specs) + 1, "f", "f"),
                options=TaskOptions(max_retries=max_retries),
                demand=Demand(
                    job_id=self.job_id,
                    resources=resources,
                    strategy=Strategy(group_id=group_id),
                ),
            )
            spec.registered = True
        task_id = f"t_{self.name}.{next(self._numbers)}"
        if quick:
            self.world.quick_tasks.add(task_id)
        task = PendingTask(task_id, spec, _NO_ARGUMENTS, (), (), "", spec.function)
        self.submitted[task_id] = self.world.loop.now_s
        self.world.tasks[task_id] = max_retries
        self.pending.by_id[task_id] = task
        self.tasks._submitted.add(task)
        self.io.wake()

    async def create_actor(
        self,
        resources: dict[str, float],
        *,
        max_restarts: int,
        retries: int,
        owner: Owner | None = None,
        awaits_arguments: bool = False,
        waits: bool = False,
    ) -> ActorCaller | None:
        """Create an actor; None if its job has ended meanwhile."""
        actor_id = f"a_{self.name}.{next(self._numbers)}"
        self.actors[actor_id] = caller = ActorCaller(self, actor_id, retries)
        body = CreateActor(
            actor_id=actor_id,
            demand=Demand(
                job_id=self.job_id,
                resources=resources,
                on_infeasible=OnInfeasible.WAIT if waits else OnInfeasible.ERROR,
            ),
            class_name="A",
            payload=b"",
            max_restarts=max_restarts,
            owner=owner,
            awaits_arguments=awaits_arguments,
        )
        while True:
            try:
                await self.clients.gcs.call("POST", "/v1/actors", body, reply=Actor)
            except (ConflictError, NotFoundError):
                del self.actors[actor_id]
                return None
            except StokerError:
                continue
            self.world.accepted_actor(actor_id, self)
            return caller

    def call(self, caller: ActorCaller, *, with_last: bool) -> None:
        """Call an actor."""
        task_id = f"t_{self.name}.{next(self._numbers)}"
        self.submitted[task_id] = self.world.loop.now_s
        self.world.tasks[task_id] = caller.retries
        caller.submit(task_id, with_last=with_last)

    async def finish(self) -> None:
        """End in good order: return the leases, report the end."""
        await self.tasks.close()
        body = FinishJob(state=JobState.SUCCEEDED, exit_code=0)
        while True:
            with contextlib.suppress(StokerError):
                await self.clients.gcs.call(
                    "POST", f"/v1/jobs/{self.job_id}/finish", body, reply=Job
                )
                break
            await asyncio.sleep(0.3)
        self.finished = True
        self.process.kill()

    # What comes back

    def settled(self, task_id: str, how: str) -> None:
        """Count the outcome of a call: there is one."""
        self.world.call_settled(self, task_id, how)
        self.submitted.pop(task_id, None)
        self.results[task_id] = how

    def receive(self, channel: SimChannel, message: Any) -> None:
        """Take a message of a worker."""
        match message:
            case Result():
                if not any(one.on_done(message) for one in self.actors.values()):
                    self.tasks.on_done(channel, [message])
            case Returned():
                self.tasks.on_returned(channel, message.task_ids)
            case Pong():
                self.overdue.on_pong(message.number)
        self.world.checks.driver_stepped(self)

    def on_closed(self, channel: SimChannel) -> None:
        """Handle the end of a channel."""
        for one in self.actors.values():
            one.on_closed(channel)
        self.tasks.on_channel_closed(channel)
        self.world.checks.driver_stepped(self)
