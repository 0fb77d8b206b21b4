"""What the calls of a world do, and the executor of a worker that does it.

Taking, returning, cancelling and answering calls, and the refs pinned in results, are the product's
(:class:`stoker.runtime.worker.execute.CallExecutor`); the code of users is made here, as are their threads.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.runtime.serialization.exceptions import encode_error
from stoker.runtime.worker.blocking import WorkerWaits
from stoker.runtime.worker.call import CallTable, Outcome
from stoker.runtime.worker.execute import CallExecutor
from stoker_wire.errors import TaskError
from stoker_wire.ids import return_id
from stoker_wire.messages.data import Failed, Inline, Result, Stored
from tests.sim.world.runtime.runtime import Unused

if TYPE_CHECKING:
    from stoker.runtime.objects.refs import ObjectRef
    from stoker.runtime.worker.call import ReceivedCall
    from stoker_wire.messages.data import Dep
    from tests.sim.world.node import Worker
    from tests.sim.world.runtime.runtime import Runtime


@dataclass(slots=True, eq=False)
class CallPlan:
    """What a call does each time that it runs."""

    retries: int = 0
    quick: bool = False
    num_returns: int = 0
    large: bool = False
    """Its result is stored on its node."""
    fails: bool = False
    stubborn: bool = False
    """It does not stop when it is interrupted."""
    length_s: float | None = None
    keeps_s: float = 0.0
    """It keeps the refs of its arguments for so long, and reads them then."""
    returns: bool = False
    """It returns the refs of its arguments."""
    children: int = 0
    """It submits so many calls, and returns their refs."""
    has_arguments: bool = False
    is_method: bool = False
    cancelled: bool = False
    certain: bool = False
    """Nothing but the end of its owner can keep its result from its reader."""
    owner: Any = None
    """The runtime that has submitted it."""


class _Actor:
    """The actor that a worker hosts, as the executor sees it."""

    exit = instance = None
    is_up = True

    def __init__(self, executor: Executor, spec: Any) -> None:
        self._executor, self.spec = executor, spec

    def submit(self, batch: list[ReceivedCall]) -> None:
        for received in batch:
            self._executor.enqueue(received)

    def interrupt(self, _: ReceivedCall) -> bool:
        return True


class Executor(CallExecutor):
    """The real executor, with coroutines of the world's loop in place of a main thread."""

    def __init__(self, worker: Worker, runtime: Runtime) -> None:
        unused: Any = Unused()
        table = CallTable()
        waits = WorkerWaits(runtime.io, runtime.clients, runtime.job, table)
        super().__init__(
            runtime.identity,
            runtime.address,
            runtime.io,
            unused,
            runtime.clients,
            unused,
            runtime.job,
            runtime.objects,
            runtime.pending,
            table,
            waits,
        )
        self._worker, self._runtime = worker, runtime
        self._ids: deque[str] = deque()
        self._is_running = False
        self._sleeper: asyncio.Future[None] | None = None
        self.cancellation._interrupt_main = self._interrupt  # type: ignore[method-assign]

    def host(self, spec: Any) -> None:
        """Host an actor from now on."""
        self.actor = self._job.actor = _Actor(self, spec)  # type: ignore[assignment]

    def enqueue(self, received: ReceivedCall) -> None:
        self._ids.append(received.call.task_id)
        self.run_next()

    def report(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._wake()

    def run_next(self) -> None:
        """Run the next call, if none runs."""
        worker = self._worker
        if worker.actor_id and not worker.alive_actor:
            return
        while self._ids and not self._is_running:
            task_id = self._ids.popleft()
            received = None if self._retiring else self.calls.queued.pop(task_id, None)
            if received is not None:
                self.calls.running[task_id] = received
                self._is_running = True
                worker.process.spawn(self._run(received))

    async def _run(self, received: ReceivedCall) -> None:
        received.started_at_s = time.time()
        outcome = await self._outcome_of(received)
        self._waits.task_ended()
        self.report(outcome)
        self._is_running = False
        self.run_next()

    def _interrupt(self, received: ReceivedCall) -> None:
        sleeper, task_id = self._sleeper, received.call.task_id
        if task_id in self.calls.running and sleeper is not None and not sleeper.done():
            sleeper.set_result(None)

    async def _pause(self, plan: CallPlan, length_s: float) -> None:
        """Run for so long, or until it is interrupted."""
        if plan.stubborn or not length_s:
            await asyncio.sleep(length_s)
            return
        self._sleeper = sleeper = self._io.loop.create_future()
        timer = self._io.loop.call_later(
            length_s, lambda: sleeper.done() or sleeper.set_result(None)
        )
        await sleeper
        timer.cancel()
        self._sleeper = None

    async def _outcome_of(self, received: ReceivedCall) -> Outcome:
        call, world = received.call, self._worker.node.world
        plan = world.calls[call.task_id]
        length_s, retry = world.call_began(self._worker, call, plan)
        failed = await self._load_arguments(call.deps)
        refs = self._runtime.import_refs(call.args)
        if received.stop_error is None and failed is None:
            await self._pause(plan, length_s)
        world.call_ended(self._worker, call)
        if received.stop_error is not None:
            failed = encode_error(received.stop_error)
        elif failed is None and (retry or plan.fails):
            failed = encode_error(TaskError("as planned"))
        if failed is not None:
            result = Result(call.task_id, call.attempt, (failed,), length_s, retry=retry)
            return Outcome(received, result, time.time())
        if plan.keeps_s and refs:
            self._io.background.spawn(self._keep(list(refs), plan.keeps_s), name="keeps")
        returned = self._children_of(plan, call.task_id)
        if plan.returns:
            returned += refs
        locations = tuple(
            self._runtime.store(
                return_id(call.task_id, index),
                returned,
                large=plan.large,
                owner_id=received.channel.peer.peer_id,
            )
            for index in range(plan.num_returns)
        )
        result = Result(call.task_id, call.attempt, locations, length_s)
        return Outcome(received, result, time.time(), 0, tuple(returned))

    async def _load_arguments(self, deps: tuple[Dep, ...]) -> Failed | None:
        """Read the values of top-level refs (:meth:`ObjectStore.load_argument`)."""
        runtime = self._runtime
        for dep in deps:
            location = dep.location
            value: Failed | bytes | None = None
            if isinstance(location, Inline):
                value = location.data
            elif isinstance(location, Failed):
                return location
            elif isinstance(location, Stored):
                value = await runtime.fetch(location)
            if isinstance(value, bytes):
                runtime.world.refs.was_loaded(dep.ref.object_id, value)
                if isinstance(location, Stored):
                    self._worker.keep_copy(location, value)
                continue
            ref = runtime.objects.import_ref(dep.ref.object_id, dep.ref.owner)
            if ref._entry.location is None:
                ref._entry.location = location
            with self._waits.blocked():
                self._worker.node.world.blocked_leases.add(self._worker.lease_id)
                value = await runtime.read(ref)
            if isinstance(value, Failed):
                return value
        return None

    async def _keep(self, refs: list[ObjectRef[Any]], for_s: float) -> None:
        """Hold refs behind the call's end, and read them then."""
        await asyncio.sleep(for_s)
        for ref in refs:
            await self._runtime.read(ref)

    def _children_of(self, plan: CallPlan, task_id: str) -> list[ObjectRef[Any]]:
        children = []
        for index in range(plan.children):
            child = CallPlan(retries=3, num_returns=1, large=index % 2 == 1)
            children.append(self._runtime.submit(child, {"CPU": 0.5}, parent=task_id))
        return children
