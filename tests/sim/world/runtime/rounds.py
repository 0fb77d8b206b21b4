"""What drivers do with objects: results are kept and read, refs are passed on and returned, objects are lost.

Each round runs beside the others of its driver, which ends when none has a ref any more.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from stoker.runtime.tasks.task_spec import Phase
from stoker_wire.ids import task_of
from stoker_wire.messages.data import Failed, Stored
from tests.sim.world.checks import BrokenInvariantError
from tests.sim.world.runtime.calls import CallPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.runtime.objects.refs import ObjectRef
    from tests.sim.world.workload import WorldDriver
    from tests.sim.world.world import World

ROUNDS = ("results", "borrow", "nested", "lost", "cancel")
_CPU = {"CPU": 0.5}
_CANCELLED_WITHIN_S = 8.0


class ObjectRounds:
    """The rounds with objects of one world."""

    def __init__(self, world: World) -> None:
        self._world, self._random = world, world.random
        self._rounds = {
            "results": self._results,
            "borrow": self._borrow,
            "nested": self._nested,
            "lost": self._lost,
            "cancel": self._cancel,
        }

    def begin(self, driver: WorldDriver, what: str) -> None:
        """Begin a round."""
        driver.numbers += 1
        key = f"{what} {driver.numbers}"
        driver.in_use.add(key)
        driver.process.spawn(self._run(driver, key, what))

    async def _run(self, driver: WorldDriver, key: str, what: str) -> None:
        await self._rounds[what](driver)
        driver.in_use.discard(key)

    def _submit(
        self,
        driver: WorldDriver,
        plan: CallPlan,
        *,
        deps: Sequence[ObjectRef[Any]] = (),
        nested: Sequence[ObjectRef[Any]] = (),
    ) -> Any:
        plan.num_returns = plan.num_returns or 1
        plan.has_arguments = bool(deps or nested)
        plan.certain = (
            plan.retries == -1
            and not (plan.fails or plan.cancelled or plan.children or nested)
            and all(self._is_certain(ref) for ref in deps)
        )
        return driver.runtime.submit(plan, _CPU, deps=deps, nested=nested)

    def _is_certain(self, ref: ObjectRef[Any]) -> bool:
        plan = self._world.calls.get(task_of(ref.id))
        return plan is not None and plan.certain and ref._entry.owner is None

    async def _pause(self, most_s: float) -> None:
        await asyncio.sleep(self._random.random() ** 2 * most_s)

    def _made(self, driver: WorldDriver) -> ObjectRef[Any]:
        """Return a ref to a value that was put, or that a call makes."""
        random = self._random
        if random.random() < 0.4:
            return driver.runtime.put(large=False)
        plan = CallPlan(
            retries=random.choice((0, 3, -1)),
            large=random.random() < 0.5,
            fails=random.random() < 0.05,
        )
        ref: ObjectRef[Any] = self._submit(driver, plan)
        return ref

    # The rounds

    async def _results(self, driver: WorldDriver) -> None:
        """Keep results for a while, and read them."""
        refs = [self._made(driver) for _ in range(self._random.randrange(1, 6))]
        await self._pause(4.0)
        while refs:
            await driver.runtime.read(refs.pop())

    async def _borrow(self, driver: WorldDriver) -> None:
        """Pass refs on and let go of them; their receiver keeps them, and returns some."""
        random = self._random
        nested = [self._made(driver) for _ in range(random.randrange(1, 3))]
        deps = [self._made(driver)] if random.random() < 0.5 else []
        plan = CallPlan(
            retries=random.choice((0, 3)),
            keeps_s=random.choice((0.0, 0.05, 0.5, 2.0)),
            returns=random.random() < 0.5,
        )
        result = self._submit(driver, plan, deps=deps, nested=nested)
        nested.clear()
        deps.clear()
        await self._read_all(driver, result)

    async def _nested(self, driver: WorldDriver) -> None:
        """Read the results of calls that a worker has submitted, and owns."""
        plan = CallPlan(retries=3, children=self._random.randrange(1, 3))
        await self._read_all(driver, self._submit(driver, plan))

    async def _read_all(self, driver: WorldDriver, ref: ObjectRef[Any]) -> None:
        """Read a value, and after a pause those that its refs name; or pass them on, who ever owns them."""
        runtime, random = driver.runtime, self._random
        await runtime.read(ref)
        inside = runtime.import_refs(ref._entry.location)
        del ref
        if inside and random.random() < 0.5:
            plan = CallPlan(retries=3, keeps_s=random.choice((0.05, 1.0)), length_s=0.0)
            keeper = self._submit(driver, plan, nested=inside)
            if random.random() < 0.7:
                inside.clear()
            await runtime.read(keeper)
        await self._pause(2.0)
        while inside:
            await runtime.read(inside.pop())

    async def _lost(self, driver: WorldDriver) -> None:
        """Read stored results again and again, whose nodes may die, and which stand on others."""
        random, runtime = self._random, driver.runtime
        first, second = self._submit(driver, CallPlan(retries=-1, large=True, num_returns=2))
        refs = [
            self._submit(driver, CallPlan(retries=-1, large=True), deps=(first, second)[:count])
            for count in range(random.randrange(0, 3))
        ]
        if not refs or random.random() < 0.5:
            refs += (first, second)
        del first, second
        for _ in range(random.randrange(1, 4)):
            await self._pause(6.0)
            if random.random() < 0.5:
                self._lose(refs)
            async with asyncio.TaskGroup() as group:
                for ref in refs:
                    group.create_task(runtime.read(ref))
                del ref
                if random.random() < 0.5:
                    user = self._submit(driver, CallPlan(retries=-1), deps=tuple(refs))
                    group.create_task(runtime.read(user))
                    del user

    def _lose(self, refs: list[ObjectRef[Any]]) -> None:
        """Have nodes lose what they have of these, if this world has faults."""
        if self._world.plan.faults == 0:
            return
        for ref in refs:
            location = ref._entry.location
            if isinstance(location, Stored):
                self._world.record(location.node_id, "loses", ref.id)
                for node in self._world.nodes:
                    node.objects.free([ref.id])

    async def _cancel(self, driver: WorldDriver) -> None:
        """Cancel calls that wait or run."""
        random, runtime, loop = self._random, driver.runtime, self._world.loop
        plan = CallPlan(
            retries=random.choice((0, 3)), length_s=random.choice((1.0, 30.0)), cancelled=True
        )
        plan.stubborn = plan.length_s == 1.0
        ref = self._submit(driver, plan)
        await self._pause(2.0)
        task_id, force = task_of(ref.id), random.random() < 0.4
        task = runtime.pending.by_id.get(task_id)
        was_sent = task is not None and task.phase is Phase.SENT
        cancelled_s = loop.now_s
        runtime.pending.cancel(task_id, force=force, recursive=True)
        value = await runtime.read(ref)
        late_s = loop.now_s - cancelled_s
        if self._world.plan.faults == 0:
            how = f"{task_id}, {'sent' if was_sent else 'not sent'}, forced: {force}"
            ended = isinstance(value, Failed) or plan.stubborn
            if not ended or late_s > _CANCELLED_WITHIN_S:
                error = BrokenInvariantError(f"{how}: {late_s:g} s after its cancel: {value!r}")
                self._world.fail(error)
