"""The faults of a world: each kills, freezes or cuts off something at a seeded time, and mends it later.

A fault counts if it had an effect: a part that is dead already cannot be killed, and noise in which nothing
was sent disturbs nobody. Another one is drawn in its place.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tests.sim.world.node import Node
    from tests.sim.world.world import World

KINDS = (
    "kill scheduler", "freeze scheduler", "kill gcs", "freeze gcs", "flap gcs", "kill nodelet",
    "freeze nodelet", "power off", "kill worker", "freeze worker", "kill driver", "freeze driver",
    "kill forkserver", "cut", "noise", "break links", "kill worker", "flush redis", "stop redis",
    "freeze redis", "stop database", "freeze database",
)  # fmt: skip
DRAWS = 24
"""So many faults are tried in the place of one, until one has an effect."""


class FaultPlan:
    """What goes wrong in a world, and when. ``count`` grows with each fault that had an effect."""

    def __init__(
        self, world: World, kinds: tuple[str, ...], *, faults: int, chaos_s: float
    ) -> None:
        self._world, self._random, self._kinds = world, world.random, kinds
        self.count = 0
        times = sorted(self._random.uniform(0.5, chaos_s) for _ in range(faults))
        self.times = [(at_s, self._random.choice(kinds)) for at_s in times]

    async def run(self) -> None:
        """Do the faults, and mend each; return when all is mended."""
        async with asyncio.TaskGroup() as group:
            for at_s, kind in self.times:
                await asyncio.sleep(max(0.0, at_s - self._world.loop.now_s))
                group.create_task(self._do(kind))

    async def _do(self, kind: str) -> None:
        """Do a fault, or another one if it has no effect, and mend it."""
        for _ in range(DRAWS):
            mending = self._begin(kind)
            if mending is not None:
                self._world.record("fault", kind, "")
                if await mending:
                    self.count += 1
                    return
            kind = self._random.choice(self._kinds)

    def _begin(self, kind: str) -> Coroutine[Any, Any, bool] | None:
        """Do a fault; return what mends it and says whether it had an effect, or None if it has none."""
        verb, _, what = kind.partition(" ")
        if verb == "noise":
            return self._noise()
        if verb == "cut":
            return self._cut()
        if verb == "break":
            return self._break_links()
        if verb == "power":
            return self._power_off()
        if verb == "flap":
            return self._flap()
        if what in ("redis", "database"):
            return self._disturb_store(verb, what)
        return self._kill(what) if verb == "kill" else self._freeze(what)

    # Processes

    def _kill(self, what: str) -> Coroutine[Any, Any, bool] | None:
        world, random = self._world, self._random
        if what == "scheduler":
            leader = world.leader() or random.choice(world.schedulers)
            return self._killed(leader, random.uniform(0.1, 6.0))
        if what == "gcs":
            return self._killed(random.choice(world.gcs), random.uniform(0.1, 4.0))
        if what == "nodelet":
            return self._killed(random.choice(world.nodes), random.choice((0.3, 4.0, 15.0)))
        if what == "forkserver":
            return self._kill_fork_server()
        if what == "worker":
            worker = self._worker()
            if worker is None:
                return None
            worker.exit(9)
            return _done()
        driver = random.choice(world.drivers)
        if driver.process.dead or not driver.may_die:
            return None
        driver.process.kill()
        return _done()

    def _killed(self, part: Any, down_s: float) -> Coroutine[Any, Any, bool] | None:
        """Kill a part; what is returned starts it again."""
        if part.process.dead:
            return None
        part.process.kill()
        return self._start_again(part, down_s)

    async def _start_again(self, part: Any, down_s: float) -> bool:
        await asyncio.sleep(down_s)
        if part.process.dead and part.process.host not in self._world.network.down:
            part.start()
        return True

    def _flap(self) -> Coroutine[Any, Any, bool] | None:
        """Kill a gcs again and again."""
        gcs = self._random.choice(self._world.gcs)
        first = self._killed(gcs, self._random.uniform(0.1, 1.0))
        return None if first is None else self._flap_on(gcs, first)

    async def _flap_on(self, gcs: Any, mending: Coroutine[Any, Any, bool] | None) -> bool:
        random = self._random
        for _ in range(random.randrange(3, 7)):
            if mending is not None:
                await mending
            await asyncio.sleep(random.uniform(3.0, 7.0))
            mending = self._killed(gcs, random.uniform(0.1, 1.0))
        if mending is not None:
            await mending
        return True

    def _kill_fork_server(self) -> Coroutine[Any, Any, bool] | None:
        """End all workers of a node at once; its nodelet lives, and learns it from the kernel."""
        node: Node = self._random.choice(self._world.nodes)
        workers = [w for w in self._world.workers.values() if w.node is node]
        if node.process.dead or not any(one.lease for one in workers):
            return None
        for worker in workers:
            worker.exit(9)
        return _done()

    def _freeze(self, what: str) -> Coroutine[Any, Any, bool] | None:
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
        if process is None or process.dead or process.frozen:
            return None
        process.freeze()
        return self._thaw(process, frozen_s)

    async def _thaw(self, process: Any, frozen_s: float) -> bool:
        await asyncio.sleep(frozen_s)
        if not process.dead:
            process.thaw()
        return True

    def _worker(self) -> Any:
        living = [w for w in self._world.workers.values() if not w.process.dead and w.lease]
        return self._random.choice(living) if living else None

    # Stores

    def _disturb_store(self, verb: str, what: str) -> Coroutine[Any, Any, bool] | None:
        """Empty Redis; or let it, or the database, refuse or be silent for a while."""
        store = self._world.redis if what == "redis" else self._world.database
        if store is None:
            return None
        if verb == "flush":
            assert what == "redis"
            return _done() if self._world.redis.flush() else None  # type: ignore[union-attr]
        if store.trouble.kind:
            return None
        store.trouble.begin(verb)
        return self._mend_store(store)

    async def _mend_store(self, store: Any) -> bool:
        await asyncio.sleep(self._random.choice((1.0, 3.0, 7.0, 15.0)))
        return bool(store.trouble.end())

    # The network

    def _break_links(self) -> Coroutine[Any, Any, bool] | None:
        broken = [link for link in self._world.network.links if self._random.random() < 0.5]
        for link in broken:
            self._world.network.break_link(link)
        return _done() if broken else None

    def _cut(self) -> Coroutine[Any, Any, bool] | None:
        world = self._world
        hosts = [part.process.host for part in (*world.gcs, *world.schedulers, *world.nodes)]
        one, two = self._random.sample(hosts, 2)
        if (one, two) in world.network.cuts:
            return None
        world.network.cut(one, two)
        return self._heal(one, two)

    async def _heal(self, one: str, two: str) -> bool:
        network, before = self._world.network, self._world.network.held_up
        await asyncio.sleep(self._random.choice((0.5, 3.0, 7.0, 14.0)))
        network.cuts -= {(one, two), (two, one)}
        return network.held_up > before

    def _noise(self) -> Coroutine[Any, Any, bool] | None:
        faults, random = self._world.network.faults, self._random
        if faults.loss or faults.double or faults.late:
            return None
        faults.loss, faults.double, faults.late = (
            random.random() ** 2 * self._world.plan.noise for _ in range(3)
        )
        return self._be_quiet()

    async def _be_quiet(self) -> bool:
        network, before = self._world.network, self._world.network.disturbed
        await asyncio.sleep(self._random.uniform(1.0, 10.0))
        network.faults.stop()
        return network.disturbed > before

    def _power_off(self) -> Coroutine[Any, Any, bool] | None:
        world = self._world
        node: Node = self._random.choice(world.nodes)
        if node.process.dead or any(
            not d.may_die and not d.process.dead
            for d in world.drivers
            if d.process.host == node.host
        ):
            return None
        world.network.down.add(node.host)
        node.process.kill()
        for worker in list(world.workers.values()):
            if worker.node is node:
                worker.exit(9)
        for driver in world.drivers:
            if driver.process.host == node.host:
                driver.process.kill()
        return self._power_on(node)

    async def _power_on(self, node: Node) -> bool:
        await asyncio.sleep(self._random.choice((1.0, 5.0, 15.0)))
        self._world.network.down.discard(node.host)
        if node.process.dead:
            node.start()
        return True


async def _done() -> bool:
    """Mend nothing: others do."""
    return True
