"""The workload of a world: what its drivers do, drawn from the seed, until they have made traffic enough.

A driver does rounds (calls, actors, groups, jobs), waits for its calls, and ends. One that waits long gives
up what it does not need, so that no world waits for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from stoker_wire.errors import ConflictError, NotFoundError, StokerError
from stoker_wire.messages.groups import (
    Bundle,
    CreatePlacementGroup,
    GroupState,
    GroupStrategy,
    PlacementGroup,
    Reschedule,
)
from stoker_wire.messages.work import Actor, ActorState, Job, KillActor, Owner, SubmitJob
from tests.sim.world.driver import Driver
from tests.sim.world.loop import Process
from tests.sim.world.runtime.rounds import ROUNDS as OBJECT_ROUNDS
from tests.sim.world.runtime.rounds import ObjectRounds
from tests.sim.world.wire import SimClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.world.driver import ActorCaller
    from tests.sim.world.world import World

ROUNDS = (
    "tasks", "tasks", "quick", "actor", "actor", "job", "group", "group", "owned", "big",
    *OBJECT_ROUNDS,
)  # fmt: skip
RELEASE_S = 4.0
"""A driver that waits so long gives up what it does not need."""
AGAIN_S = 0.3
ENDLESS = "endless"
"""The entrypoint of a job that ends when it is stopped."""


class WorldDriver(Driver):
    """A driver of the world; ``may_die`` is false for one that sees the run through."""

    def __init__(self, world: World, name: str, host: str, pid: int) -> None:
        self.may_die = False
        self.numbers = 0
        self.groups: list[str] = []
        """The placement groups that it has left to themselves."""
        self.in_use: set[str] = set()
        """Those that it waits for, or fills."""
        super().__init__(world, name, host, pid)

    def job_was_ended(self) -> None:
        """End at once; somebody starts the program again."""
        super().job_was_ended()
        self.world.add_driver(self.process.host, may_die=self.may_die)


class Workload:
    """The programs of the drivers of one world."""

    def __init__(self, world: World) -> None:
        self._world, self._random = world, world.random
        self._objects = ObjectRounds(world)

    async def program(self, driver: WorldDriver) -> None:
        """Run what a driver does: rounds, until enough was sent; then it waits for its calls, and ends."""
        world, random = self._world, self._random
        rounds = random.randrange(5, 10)
        while rounds > 0 or world.network.messages < world.plan.messages:
            rounds -= 1
            await self._round(driver)
            await asyncio.sleep(random.random() ** 2 * 4.0)
        await self._until(driver, lambda: not driver.in_use and not driver.runtime.left())
        await driver.finish()

    async def _until(self, driver: WorldDriver, is_over: Callable[[], bool]) -> None:
        """Wait, and give up what is not needed if that takes long."""
        loop = self._world.loop
        released_s = loop.now_s
        while not is_over():
            await asyncio.sleep(0.25)
            if loop.now_s - released_s > RELEASE_S:
                await self._release(driver)
                released_s = loop.now_s

    async def _release(self, driver: WorldDriver) -> None:
        """Give up what keeps others waiting: groups, and actors without calls."""
        groups, driver.groups = driver.groups, []
        for group_id in groups:
            await self._remove_group(driver, group_id)
        for actor_id, caller in list(driver.actors.items()):
            if not caller.calls:
                await self._kill_actor(driver, actor_id)

    async def _round(self, driver: WorldDriver) -> None:
        random = self._random
        what = random.choice(self._world.plan.rounds)
        if what == "tasks":
            self._submit_tasks(driver)
        elif what == "quick":
            retries = random.choice((0, 3))
            for _ in range(random.randrange(20, 60)):
                driver.submit({"CPU": 1.0}, max_retries=retries, quick=True)
        elif what == "big":
            if random.random() < 0.5:
                driver.submit({"CPU": 100.0}, max_retries=0)
            else:  # waits until its job ends
                caller = await driver.create_actor(
                    {"CPU": 100.0}, max_restarts=0, retries=0, waits=True
                )
                if caller is not None:
                    del driver.actors[caller.actor_id]
        elif what == "actor":
            await self._use_actor(driver)
        elif what == "job":
            await self._submit_job(driver)
        elif what == "group":
            await self._use_group(driver)
        elif what in OBJECT_ROUNDS:
            self._objects.begin(driver, what)
        else:
            await self._owned_actor(driver)

    def _submit_tasks(self, driver: WorldDriver) -> None:
        random = self._random
        resources = random.choice(
            ({"CPU": 1.0}, {"CPU": 0.5}, {"GPU": 1.0}, {"CPU": 1.0, "GPU": 0.5})
        )
        retries = random.choice((0, 3, -1))
        for _ in range(random.randrange(3, 15)):
            driver.submit(resources, max_retries=retries)

    # Actors

    async def _use_actor(self, driver: WorldDriver) -> ActorCaller | None:
        random = self._random
        caller: ActorCaller | None = None
        if driver.actors and random.random() < 0.5:
            caller = random.choice(list(driver.actors.values()))
        else:
            caller = await driver.create_actor(
                random.choice(({"CPU": 0.5}, {"GPU": 0.5}, {"CPU": 1.0})),
                max_restarts=random.choice((0, 2, -1)),
                retries=random.choice((0, 3)),
            )
        if caller is not None:
            for _ in range(random.randrange(1, 8)):
                driver.call(caller, with_last=random.random() < 0.4)
        return caller

    async def _owned_actor(self, driver: WorldDriver) -> None:
        """Create an actor that belongs to another, and waits for arguments that never come."""
        random, gcs = self._random, driver.clients.gcs
        parent = await self._use_actor(driver)
        if parent is None:
            return
        path = f"/v1/actors/{parent.actor_id}"
        try:
            record = await gcs.call("GET", path, reply=Actor, query={"wait_s": 3.0})
        except StokerError:
            return
        node = next((n for n in self._world.nodes if n.node_id == record.node_id), None)
        if record.state is not ActorState.ALIVE or node is None:
            return
        owner = Owner(
            peer_id=record.worker_id,
            node_id=record.node_id,
            node_incarnation=node.workers.state.incarnation,
            actor_id=record.actor_id,
            incarnation=record.incarnation,
        )
        child = await driver.create_actor(
            {"CPU": 0.5}, max_restarts=0, retries=0, owner=owner, awaits_arguments=True
        )
        if child is not None:
            driver.call(child, with_last=False)
            await asyncio.sleep(random.random())
            await self._kill_actor(driver, parent.actor_id)

    async def _kill_actor(self, driver: WorldDriver, actor_id: str) -> None:
        path = f"/v1/actors/{actor_id}/kill"
        while True:
            with contextlib.suppress(StokerError):
                await driver.clients.gcs.call("POST", path, KillActor(), reply=Actor)
                return
            await asyncio.sleep(AGAIN_S)

    # Jobs

    async def _submit_job(self, driver: WorldDriver) -> None:
        """Submit a job; one that is stopped would never end by itself."""
        random, world = self._random, self._world
        driver.numbers += 1
        is_stopped = random.random() < 0.5
        body = SubmitJob(
            entrypoint=ENDLESS if is_stopped else "true",
            resources=random.choice(({"CPU": 1.0}, {"GPU": 1.0}, {})),
            retries=random.choice((0, 2)),
            retry_delay_s=1.0,
        )
        key, job = f"{driver.name}.{driver.numbers}", None
        while job is None:
            with contextlib.suppress(StokerError):
                job = await driver.clients.gcs.call(
                    "POST", "/v1/jobs", body, reply=Job, idempotency_key=key
                )
        world.accepted_job(job.job_id, None)
        if not is_stopped:
            return
        driver.process.spawn(self._stop_job(driver, job.job_id, random.random() ** 3 * 2.0))

    async def stop_endless_jobs(self) -> None:
        """Stop the jobs whose drivers were to do so and have died; run when all is calm."""
        world = self._world
        process = Process("admin", "admin")
        client = SimClient(world.network, process, world.gcs_url, "admin")
        while True:
            for job in world.database.rows("jobs", Job):
                if job.entrypoint == ENDLESS and not job.state.terminal:
                    with contextlib.suppress(StokerError):
                        await client.call("POST", f"/v1/jobs/{job.job_id}/stop", reply=Job)
            await asyncio.sleep(RELEASE_S)

    async def _stop_job(self, driver: WorldDriver, job_id: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        while True:
            with contextlib.suppress(StokerError):
                path = f"/v1/jobs/{job_id}/stop"
                await driver.clients.gcs.call("POST", path, reply=Job)
                return
            await asyncio.sleep(AGAIN_S)

    # Placement groups

    async def _use_group(self, driver: WorldDriver) -> None:
        """Create a placement group; remove it at once, or use it when it is there."""
        random = self._random
        driver.numbers += 1
        resources = random.choice(({"CPU": 1.0}, {"GPU": 1.0}, {"CPU": 2.0}))
        body = CreatePlacementGroup(
            group_id=f"pg_{driver.name}.{driver.numbers}",
            job_id=driver.job_id,
            bundles=(Bundle(resources=resources),) * random.randrange(1, 4),
            strategy=random.choice(
                (GroupStrategy.PACK, GroupStrategy.SPREAD, GroupStrategy.STRICT_SPREAD)
            ),
            reschedule=random.choice((Reschedule.BUNDLES, Reschedule.GROUP)),
        )
        gcs, group_id = driver.clients.gcs, body.group_id
        while True:
            try:
                await gcs.call("POST", "/v1/placement-groups", body, reply=PlacementGroup)
                break
            except (ConflictError, NotFoundError):
                return
            except StokerError:
                await asyncio.sleep(AGAIN_S)
        is_feasible = body.strategy is not GroupStrategy.STRICT_SPREAD or len(body.bundles) <= (
            2 if "GPU" in resources else 3
        )
        if random.random() < 0.4 or not is_feasible:
            await asyncio.sleep(random.choice((0.003, 0.01, 0.5)))
            await self._remove_group(driver, group_id)
            return
        driver.process.spawn(self._use_placed_group(driver, group_id, resources))

    async def _use_placed_group(
        self, driver: WorldDriver, group_id: str, resources: dict[str, float]
    ) -> None:
        gcs, random, loop = driver.clients.gcs, self._random, self._world.loop
        path, state = f"/v1/placement-groups/{group_id}", GroupState.PENDING
        released_s = loop.now_s
        driver.in_use.add(group_id)
        while state is not GroupState.CREATED:
            with contextlib.suppress(StokerError):
                group = await gcs.call("GET", path, reply=PlacementGroup, query={"wait_s": 2.0})
                state = group.state
            if state is GroupState.REMOVED:
                break
            if loop.now_s - released_s > RELEASE_S:
                await self._release(driver)
                released_s = loop.now_s
        if state is GroupState.CREATED:
            for _ in range(random.randrange(1, 6)):
                driver.submit(resources, max_retries=random.choice((0, 3)), group_id=group_id)
            await asyncio.sleep(random.random() * 4.0)
            driver.groups.append(group_id)
        driver.in_use.discard(group_id)

    async def _remove_group(self, driver: WorldDriver, group_id: str) -> None:
        path = f"/v1/placement-groups/{group_id}"
        while True:
            with contextlib.suppress(StokerError):
                await driver.clients.gcs.call("DELETE", path, reply=PlacementGroup)
                return
            await asyncio.sleep(AGAIN_S)
