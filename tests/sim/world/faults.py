"""The faults of a world: each kills, freezes or cuts off something at a seeded time, and mends it later."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sim.world.node import Node
    from tests.sim.world.world import World

KINDS = (
    "kill scheduler", "freeze scheduler", "kill gcs", "freeze gcs", "flap gcs", "kill nodelet",
    "freeze nodelet", "power off", "kill worker", "freeze worker", "kill driver", "freeze driver",
    "cut", "noise", "break links", "kill worker",
)  # fmt: skip


class FaultPlan:
    """What goes wrong in a world, and when. ``count`` grows with each fault that was done."""

    def __init__(
        self, world: World, kinds: tuple[str, ...], *, faults: int, chaos_s: float
    ) -> None:
        self._world, self._random = world, world.random
        self.count = 0
        self._mending = 0
        times = sorted(self._random.uniform(0.5, chaos_s) for _ in range(faults))
        self.times = [(at_s, self._random.choice(kinds)) for at_s in times]

    async def run(self) -> None:
        """Do the faults, and mend each; return when all is mended."""
        async with asyncio.TaskGroup() as group:
            for at_s, kind in self.times:
                await asyncio.sleep(max(0.0, at_s - self._world.loop.now_s))
                self._world.record("fault", kind, "")
                self.count += 1
                group.create_task(self._do(kind))

    async def _do(self, kind: str) -> None:
        verb, _, what = kind.partition(" ")
        world, random = self._world, self._random
        if verb == "noise":
            await self._noise()
        elif verb == "cut":
            await self._cut()
        elif verb == "break":
            for link in list(world.network.links):
                if random.random() < 0.5:
                    world.network.break_link(link)
        elif verb == "power":
            await self._power_off()
        elif verb == "flap":
            gcs = random.choice(world.gcs)
            for _ in range(random.randrange(3, 7)):
                await self._killed(gcs, random.uniform(0.1, 1.0))
                await asyncio.sleep(random.uniform(3.0, 7.0))
        elif verb == "kill":
            await self._kill(what)
        else:
            await self._freeze(what)

    async def _kill(self, what: str) -> None:
        world, random = self._world, self._random
        if what == "scheduler":
            leader = world.leader() or random.choice(world.schedulers)
            await self._killed(leader, random.uniform(0.1, 6.0))
        elif what == "gcs":
            await self._killed(random.choice(world.gcs), random.uniform(0.1, 4.0))
        elif what == "nodelet":
            await self._killed(random.choice(world.nodes), random.choice((0.3, 4.0, 15.0)))
        elif what == "worker":
            worker = self._worker()
            if worker is not None:
                worker.exit(9)
        else:
            driver = random.choice(world.drivers)
            if not driver.process.dead and driver.may_die:
                driver.process.kill()

    async def _killed(self, part: Any, down_s: float) -> None:
        if part.process.dead:
            return
        part.process.kill()
        await asyncio.sleep(down_s)
        if part.process.dead and part.process.host not in self._world.network.down:
            part.start()

    async def _freeze(self, what: str) -> None:
        world, random = self._world, self._random
        frozen_s = random.choice((0.5, 2.0, 4.0, 8.0, 13.0))
        process: Any = None
        if what == "scheduler":
            process = (world.leader() or random.choice(world.schedulers)).process
        elif what == "gcs":
            process = random.choice(world.gcs).process
        elif what == "nodelet":
            process = random.choice(world.nodes).process
        elif what == "worker":
            worker = self._worker()
            process = worker.process if worker is not None else None
        else:
            process = random.choice(world.drivers).process
        if process is not None and not process.dead and not process.frozen:
            process.freeze()
            await asyncio.sleep(frozen_s)
            if not process.dead:
                process.thaw()

    def _worker(self) -> Any:
        living = [w for w in self._world.workers.values() if not w.process.dead and w.lease]
        return self._random.choice(living) if living else None

    async def _cut(self) -> None:
        world, random = self._world, self._random
        hosts = [part.process.host for part in (*world.gcs, *world.schedulers, *world.nodes)]
        one, two = random.sample(hosts, 2)
        world.network.cut(one, two)
        await asyncio.sleep(random.choice((0.5, 3.0, 7.0, 14.0)))
        world.network.cuts -= {(one, two), (two, one)}

    async def _noise(self) -> None:
        faults, random = self._world.network.faults, self._random
        faults.loss, faults.double, faults.late = (
            random.random() ** 2 * self._world.plan.noise for _ in range(3)
        )
        await asyncio.sleep(random.uniform(1.0, 10.0))
        faults.stop()

    async def _power_off(self) -> None:
        world = self._world
        node: Node = self._random.choice(world.nodes)
        if node.process.dead or any(
            not d.may_die and not d.process.dead
            for d in world.drivers
            if d.process.host == node.host
        ):
            return
        world.network.down.add(node.host)
        node.process.kill()
        for worker in list(world.workers.values()):
            if worker.node is node:
                worker.exit(9)
        for driver in world.drivers:
            if driver.process.host == node.host:
                driver.process.kill()
        await asyncio.sleep(self._random.choice((1.0, 5.0, 15.0)))
        world.network.down.discard(node.host)
        if node.process.dead:
            node.start()


Script = "Callable[[World], Awaitable[None]]"
