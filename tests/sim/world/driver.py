"""A driver of a world: the sdk's real runtime over the world's network, and what a program does with it.

Calls of actors are made here: of the product's only the order in which they are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from stoker.runtime.actors.call_order import CallOrder
from stoker.runtime.driver import driver as driver_session
from stoker_wire.errors import ConflictError, NotFoundError, StokerError
from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.common import Address, OnInfeasible
from stoker_wire.messages.data import Call, Inline, Result, Run, Template
from stoker_wire.messages.work import (
    Actor,
    ActorState,
    AttachDriver,
    CreateActor,
    FinishJob,
    Job,
    JobState,
)
from tests.sim.world.loop import Process
from tests.sim.world.runtime.calls import CallPlan
from tests.sim.world.runtime.runtime import Runtime

if TYPE_CHECKING:
    from stoker_wire.messages.data import Failed
    from stoker_wire.messages.work import Owner
    from tests.sim.world.links import Link
    from tests.sim.world.runtime.channels import SimChannel

_NO_ARGUMENTS = Inline(b"")
_WATCH_S = 1.0
_METHOD = Template(0, "m", "m", 0, history=False)


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
            self._channel.post(Run(run, [_METHOD]))

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
                        self.driver.channels.lose(channel)
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
        self.driver.runtime.settled(call.task_id, how)

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


class _ActorCalls:
    """The calls of a driver to all its actors, as the router sees them."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def on_done(self, _: SimChannel, results: list[Result]) -> list[Result]:
        callers = self._driver.actors.values()
        return [one for one in results if not any(caller.on_done(one) for caller in callers)]

    def on_channel_closed(self, channel: SimChannel) -> None:
        for caller in self._driver.actors.values():
            caller.on_closed(channel)


class Driver:
    """A driver process that attaches, and what it submits."""

    def __init__(self, world: Any, name: str, host: str, pid: int) -> None:
        self.world, self.name, self.pid = world, name, pid
        self.process = Process(name, host)
        self.job_id = ""
        self.actors: dict[str, ActorCaller] = {}
        self.finishes = self.finished = False
        world.pids[host, pid] = self.process
        self.process.context.run(self._build)
        self.process.spawn(self._live())

    def _build(self) -> None:
        address = Address(f"p_{self.name}", "", self.process.host, "", f"sim://{self.name}")
        self.runtime = runtime = Runtime(self.world, self.process, address)
        runtime.route(_ActorCalls(self), None)
        runtime.callers = self.actors
        self.io, self.clients, self.channels = runtime.io, runtime.clients, runtime.channels
        self.submitted = runtime.submitted
        self.world.joined(runtime, self)

    def accept(self, link: Link, peer: Address) -> None:
        """Take a channel of a borrower."""
        self.channels.accept(link, peer)

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
                self.job_id = self.runtime.job.job_id = job.job_id
                self.world.accepted_job(self.job_id, self)
        unused: Any = None
        session = driver_session.Driver(
            self.runtime.identity,
            self.io,
            self.clients.gcs,
            self.runtime.job,
            self,
            unused,
        )
        session.begin(follow_logs=False)
        await self.world.workload.program(self)

    # What the program does

    def submit(
        self,
        resources: dict[str, float],
        *,
        max_retries: int,
        quick: bool = False,
        group_id: str = "",
    ) -> None:
        """Submit a call of a remote function that returns nothing."""
        plan = CallPlan(retries=max_retries, quick=quick)
        self.runtime.submit(plan, resources, group_id=group_id)

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
        actor_id = f"a_{self.runtime.new_task_id()[2:]}"
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
        task_id = self.runtime.new_task_id()
        self.runtime.begin(task_id, CallPlan(retries=caller.retries, is_method=True))
        caller.submit(task_id, with_last=with_last)

    def lose_cluster(self, _: Failed) -> None:
        """End, as a program does whose job others have ended."""
        if not self.finishes:
            self.job_was_ended()

    def job_was_ended(self) -> None:
        """End at once."""
        self.finished = True
        self.process.kill()

    async def finish(self) -> None:
        """End in good order: return the leases, report the end."""
        self.finishes = True
        await self.runtime.tasks.close()
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
