"""The world: its parts, its workload and one run of it from start over chaos and calm to the end.

``run(seed)`` returns what happened, or raises BrokenInvariantError with the seed's number. All chance comes
from the seed; the hash of all messages and steps is the same whenever and wherever it runs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import sys
import warnings
from contextvars import Context
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any
from unittest import mock

from stoker_nodelet.core.machine import step as nodelet_step
from stoker_wire.errors import ConflictError, NotFoundError, StokerError
from stoker_wire.messages.groups import Bundle, CreatePlacementGroup, GroupStrategy, PlacementGroup
from stoker_wire.messages.work import Actor, ActorState, Job, KillActor, Owner, SubmitJob
from stoker_wire.settings import Settings
from tests.sim.world import control
from tests.sim.world.checks import LOOK_S, BrokenInvariantError, Checks
from tests.sim.world.driver import Driver
from tests.sim.world.faults import KINDS, FaultPlan
from tests.sim.world.loop import CURRENT, Process, VirtualLoop, virtual
from tests.sim.world.network import Network
from tests.sim.world.node import Node

if TYPE_CHECKING:
    from tests.sim.world.driver import ActorCaller
    from tests.sim.world.node import Worker

CHAOS_S = 25.0
RELEASE_S = 4.0
"""A driver that waits so long for its calls gives up what it does not need."""
END_S = 200.0
"""So long after the chaos all must have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The frame of a run; what is left out is drawn from the seed."""

    kinds: tuple[str, ...] = KINDS
    faults: int | None = None
    replicas: int = 0
    drivers: int = 0
    rounds: int = 0
    chaos_s: float = CHAOS_S
    check_scheduler: int = 1
    """Check the scheduler's state after every so many of its events."""


@dataclass(slots=True)
class Outcome:
    """What a run was."""

    seed: int
    digest: str
    messages: int
    faults: int
    calls: int
    virtual_s: float
    results: dict[str, int] = field(default_factory=dict)


class World:
    """All parts of one run."""

    def __init__(self, seed: int, plan: Plan, loop: VirtualLoop) -> None:
        self.seed, self.plan, self.loop = seed, plan, loop
        self.random = random = Random(seed)
        self.context = Context()
        self._hash = hashlib.blake2b(digest_size=16)
        self.log: list[str] | None = None
        self.settings = Settings()
        self.network = Network(loop, random, self.settings, self.record, self.fail)
        self.checks = Checks(self)
        replicas = plan.replicas or random.choice((1, 1, 2))
        self.redis = control.Redis() if replicas > 1 or random.random() < 0.5 else None
        self.database = control.Database(shared=replicas > 1, pause=lambda: random.random() * 0.001)
        self.database.after_commit = self.checks.committed
        self.gcs_url = "http://gcs"
        self.gcs = [_Gcs(self, index) for index in range(replicas)]
        self.network.balanced[self.gcs_url] = [one.url for one in self.gcs]
        self.schedulers = [control.Scheduler(self, index) for index in range(2)]
        kinds = ({"CPU": 4.0}, {"CPU": 4.0, "GPU": 2.0}, {"CPU": 2.0, "GPU": 1.0})
        self.nodes = [_Node(self, index, dict(kinds[index])) for index in range(3)]
        self.workers: dict[str, Worker] = {}
        self.pids: dict[tuple[str, int], Process] = {}
        self.tasks: dict[str, int] = {}
        self.jobs: dict[str, object] = {}
        self.actors: dict[str, object] = {}
        self.drivers: list[_Driver] = []
        self.drivers_by_job: dict[str, Driver] = {}
        self.calm = False
        self.failure: BaseException | None = None
        self._plans: dict[tuple[str, int], tuple[float, bool]] = {}
        self._steps = 0
        self.results: dict[str, int] = {}

    # What parts of the world ask for

    def record(self, where: str, what: str, subject: str) -> None:
        """Add a line to the log of the run, whose hash is the run's."""
        line = f"{self.loop.now_s:.6f} {where} {what} {subject}"
        self._hash.update(line.encode())
        if self.log is not None:
            self.log.append(line)

    def ephemeral(self, process: Process) -> Any:
        """Return the ephemeral store of a gcs."""
        if self.redis is None:
            return control.gcs_service.MemoryEphemeralStore()
        return control.RedisClient(self.redis, process)

    def pid_namespace(self) -> str:
        """Return the pid namespace of the host of the process that asks."""
        process = CURRENT.get()
        assert process is not None
        return f"pids of {process.host}"

    def start_time(self, pid: int) -> int:
        """Return when a process of the asking process's host started, 0 if there is none."""
        process = CURRENT.get()
        assert process is not None
        found = self.pids.get((process.host, pid))
        return 0 if found is None or found.dead else pid

    def fork_server_gone(self, workers: list[Worker]) -> None:
        """End the workers of a nodelet that died."""
        for worker in workers:
            self.loop.call_later(0.005, worker.exit, 9, context=self.context)

    def worker_gone(self, worker: Worker) -> None:
        """Forget a worker's address."""
        self.record(worker.worker_id, "exits", worker.lease_id)
        self.workers.pop(worker.address.url, None)

    def plan_of(self, job_id: str, attempt: int) -> tuple[float, bool]:
        """Return how long the driver of a submitted job runs, and whether it fails."""
        random = self.random
        return self._plans.setdefault(
            (job_id, attempt), (random.random() * 4.0, random.random() < 0.4)
        )

    def driver_began(self, job_id: str, attempt: int, worker: Worker) -> None:
        """Note that a submitted job's driver runs."""
        self.record(worker.worker_id, "drives", f"{job_id} {attempt}")

    def actor_began(self, worker: Worker) -> None:
        """Note that an actor is up."""
        self.record(worker.worker_id, "is actor", f"{worker.actor_id} {worker.incarnation}")

    def call_began(self, worker: Worker, call: Any) -> tuple[float, bool]:
        """Count the start of a call; return how long it takes and whether it raises."""
        task_id = call.task_id
        self.record(worker.worker_id, "runs", f"{task_id} {call.attempt}")
        owner = f"p_{task_id[2:].partition('.')[0]}"
        self.checks.call_began(worker, task_id, self.tasks[task_id], owner)
        raises = bool(worker.actor_id) and self.random.random() < 0.1
        return self.random.random() ** 4 * 3.0, raises

    def call_ended(self, worker: Worker, call: Any) -> None:
        """Record the end of a call."""
        self.record(worker.worker_id, "ran", f"{call.task_id} {call.attempt}")

    def call_settled(self, driver: Driver, task_id: str, how: str) -> None:
        """Check and record the outcome of a call."""
        self.record(driver.name, how, task_id)
        self.results[how] = self.results.get(how, 0) + 1
        self.checks.settled(task_id, how, known=task_id in driver.submitted)

    def accepted_job(self, job_id: str, driver: Driver | None) -> None:
        """Remember a job that the gcs has accepted."""
        self.jobs[job_id] = driver
        if driver is not None:
            self.drivers_by_job[job_id] = driver

    def accepted_actor(self, actor_id: str, driver: Driver) -> None:
        """Remember an actor that the gcs has accepted."""
        self.actors[actor_id] = driver

    def scheduler_stepped(self, state: Any, event: Any) -> None:
        """Check a scheduler's core after an event."""
        self._steps += 1
        if self._steps % self.plan.check_scheduler == 0:
            try:
                state.check()
            except AssertionError as error:
                self.fail(error)

    def stepped_nodelet(self, state: Any, event: Any) -> Any:
        """Step a nodelet's lease machine, and check it."""
        before = (set(state.leases), set(state.bundles))
        commands = nodelet_step(state, event)
        self.checks.nodelet_stepped(state, event, before, commands)
        return commands

    def fail(self, error: BaseException) -> None:
        """End the run with the first thing that was wrong."""
        self.failure = self.failure or error
        raise error

    def crashed(self, _: object, context: dict[str, Any]) -> None:
        """End the run for what a part let out of a callback or a task."""
        error = context.get("exception")
        text = f"{context.get('message')}: {error!r}"
        crash = AssertionError(text)
        crash.__cause__ = error
        self.failure = self.failure or crash

    def leader(self) -> control.Scheduler | None:
        """Return the scheduler that leads and knows it."""
        return next(
            (
                one
                for one in self.schedulers
                if not one.process.dead and one.service is not None and one.service.leads
            ),
            None,
        )

    # The workload

    async def program(self, driver: Any) -> None:
        """Run what a driver does: rounds of calls, actors, jobs and groups; then wait, and end."""
        random = self.random
        rounds = self.plan.rounds or random.randrange(5, 10)
        for _ in range(rounds):
            await self._round(driver)
            await asyncio.sleep(random.random() ** 2 * 5.0)
        released_s = self.loop.now_s
        while driver.submitted:
            await asyncio.sleep(0.25)
            if self.loop.now_s - released_s > RELEASE_S:
                released_s = self.loop.now_s
                await self._release(driver)
        await driver.finish()

    async def _release(self, driver: Any) -> None:
        """Give up what keeps others waiting: groups, and actors without calls."""
        for group_id in driver.groups:
            await self._remove_group(driver, group_id)
        driver.groups.clear()
        for actor_id, caller in driver.actors.items():
            if not caller.calls:
                await self._kill_actor(driver, actor_id)

    async def _round(self, driver: Any) -> None:
        random = self.random
        what = random.choice(("tasks", "tasks", "actor", "actor", "job", "group", "owned", "big"))
        if what == "tasks":
            resources = random.choice(
                ({"CPU": 1.0}, {"CPU": 0.5}, {"GPU": 1.0}, {"CPU": 1.0, "GPU": 0.5})
            )
            retries = random.choice((0, 3, -1))
            for _ in range(random.randrange(3, 15)):
                driver.submit(resources, max_retries=retries)
        elif what == "big":
            driver.submit({"CPU": 100.0}, max_retries=0)
        elif what == "actor":
            await self._use_actor(driver)
        elif what == "job":
            await self._submit_job(driver)
        elif what == "group":
            await self._create_group(driver)
        else:
            await self._owned_actor(driver)

    async def _use_actor(self, driver: Any) -> ActorCaller | None:
        random = self.random
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

    async def _owned_actor(self, driver: Any) -> None:
        """Create an actor that belongs to another, and waits for arguments which may never come."""
        random, gcs = self.random, driver.clients.gcs
        parent = await self._use_actor(driver)
        if parent is None:
            return
        try:
            record = await gcs.call(
                "GET", f"/v1/actors/{parent.actor_id}", reply=Actor, query={"wait_s": 3.0}
            )
        except StokerError:
            return
        node = next((n for n in self.nodes if n.node_id == record.node_id), None)
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

    async def _kill_actor(self, driver: Any, actor_id: str) -> None:
        while True:
            with contextlib.suppress(StokerError):
                await driver.clients.gcs.call(
                    "POST", f"/v1/actors/{actor_id}/kill", KillActor(), reply=Actor
                )
                return
            await asyncio.sleep(0.3)

    async def _submit_job(self, driver: Any) -> None:
        random = self.random
        number = driver.jobs = driver.jobs + 1
        body = SubmitJob(
            entrypoint="true",
            resources=random.choice(({"CPU": 1.0}, {"GPU": 1.0}, {})),
            retries=random.choice((0, 2)),
            retry_delay_s=1.0,
        )
        stop = random.random() < 0.4
        key, job = f"{driver.name}.{number}", None
        while job is None:
            with contextlib.suppress(StokerError):
                job = await driver.clients.gcs.call(
                    "POST", "/v1/jobs", body, reply=Job, idempotency_key=key
                )
        self.accepted_job(job.job_id, None)
        if stop:
            await asyncio.sleep(random.random() ** 2 * 2.0)
            while True:
                with contextlib.suppress(StokerError):
                    await driver.clients.gcs.call("POST", f"/v1/jobs/{job.job_id}/stop", reply=Job)
                    return
                await asyncio.sleep(0.3)

    async def _create_group(self, driver: Any) -> None:
        random, gcs = self.random, driver.clients.gcs
        number = driver.jobs = driver.jobs + 1
        bundle = Bundle(resources=random.choice(({"CPU": 1.0}, {"GPU": 1.0}, {"CPU": 2.0})))
        body = CreatePlacementGroup(
            group_id=f"pg_{driver.name}.{number}",
            job_id=driver.job_id,
            bundles=(bundle,) * random.randrange(1, 4),
            strategy=random.choice(
                (GroupStrategy.PACK, GroupStrategy.SPREAD, GroupStrategy.STRICT_SPREAD)
            ),
        )
        removed_after_s = random.choice((0.01, 0.5, 3.0))
        while True:
            try:
                await gcs.call("POST", "/v1/placement-groups", body, reply=PlacementGroup)
                break
            except (ConflictError, NotFoundError):
                return
            except StokerError:
                await asyncio.sleep(0.2)
        await asyncio.sleep(removed_after_s)
        if random.random() < 0.7:
            await self._remove_group(driver, body.group_id)
        else:
            driver.groups.append(body.group_id)

    async def _remove_group(self, driver: Any, group_id: str) -> None:
        path = f"/v1/placement-groups/{group_id}"
        while True:
            with contextlib.suppress(StokerError):
                await driver.clients.gcs.call("DELETE", path, reply=PlacementGroup)
                return

    # A run

    def start(self) -> None:
        """Start all parts."""
        for gcs in self.gcs:
            gcs.start()
        for scheduler in self.schedulers:
            scheduler.start()
        for node in self.nodes:
            node.start()

    async def go(self, script: Any = None) -> None:
        """Run the workload through chaos, heal, and wait until all has ended."""
        random = self.random
        self.start()
        await asyncio.sleep(0.5)
        count = self.plan.drivers or random.randrange(1, 3)
        for index in range(count):
            host = random.choice(self.nodes).host
            driver = _Driver(self, f"d{index}", host, 100 + index)
            driver.may_die = index > 0
            self.drivers.append(driver)
        looking = asyncio.create_task(self._look())
        self.faults = FaultPlan(
            self,
            self.plan.kinds,
            faults=random.randrange(6, 12) if self.plan.faults is None else self.plan.faults,
            chaos_s=self.plan.chaos_s,
        )
        if script is not None:
            await script(self)
        await self.faults.run()
        self.network.faults.stop()
        self.network.heal()
        self.calm = True
        await self._end()
        looking.cancel()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.network.keep_alive()
            self.checks.look()

    async def _end(self) -> None:
        deadline_s = self.loop.now_s + END_S
        while True:
            left = self.checks.left()
            if not left:
                return
            if self.loop.now_s > deadline_s:
                text = f"{END_S:g} s after the chaos: {'; '.join(left[:6])}"
                self.fail(BrokenInvariantError(text))
            await asyncio.sleep(0.5)

    def digest(self) -> str:
        """Return the hash of all that happened."""
        return self._hash.hexdigest()


class _Gcs(control.Gcs):
    """A gcs of the world."""

    @property
    def serves(self) -> bool:
        """Whether it answers now."""
        process = self.process
        return not process.dead and not process.frozen and self.app is not None


class _Node(Node):
    """A node of the world."""

    def held(self) -> list[Any]:
        """Return the leases that the nodelet holds, bundles among them."""
        return [one.lease for one in self.workers.held_leases().leases]


class _Driver(Driver):
    """A driver of the world; ``may_die`` is false for one that sees the run through."""

    may_die = False
    jobs = 0

    def __init__(self, world: World, name: str, host: str, pid: int) -> None:
        self.groups: list[str] = []
        super().__init__(world, name, host, pid)


def run(
    seed: int, plan: Plan | None = None, *, log: list[str] | None = None, script: Any = None
) -> Outcome:
    """Run one world; BrokenInvariantError says what went wrong, and in which seed."""
    loop = VirtualLoop()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    collecting = gc.isenabled()
    gc.disable()
    try:
        with virtual(loop, seed), warnings.catch_warnings():
            # Coroutines of killed processes never began.
            warnings.simplefilter("ignore", RuntimeWarning)
            return _run(World(seed, plan or Plan(), loop), log, script)
    finally:
        logging.disable(before)
        if collecting:
            gc.enable()
        gc.collect()


def _run(world: World, log: list[str] | None, script: Any) -> Outcome:
    loop = world.loop
    world.log = log

    def after_turn() -> None:
        with contextlib.suppress(BrokenInvariantError):
            world.checks.turn_ended()
        if world.failure is not None and not main.done():
            main.cancel()

    try:
        with (
            control.on_world(world, world.settings),
            mock.patch("stoker_nodelet.workers.workers.step", world.stepped_nodelet),
            mock.patch("stoker_nodelet.workers.workers.limits", _NoLimits),
            mock.patch("stoker_nodelet.membership.psutil", _NoLimits),
        ):
            asyncio.set_event_loop(loop)
            main = loop.create_task(world.go(script), context=Context())
            loop.after_turn = after_turn
            loop.set_exception_handler(world.crashed)
            try:
                loop.run_until_complete(main)
            except asyncio.CancelledError:
                pass
            except BaseException as error:
                world.failure = world.failure or error
            failure = world.failure
            digest = world.digest()
            _close(loop)
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    if failure is not None:
        text = f"seed {world.seed}, at {loop.now_s:.1f} s: {failure}"
        raise BrokenInvariantError(text) from failure
    return Outcome(
        seed=world.seed,
        digest=digest,
        messages=world.network.messages,
        faults=world.faults.count,
        calls=len(world.tasks),
        virtual_s=loop.now_s,
        results=world.results,
    )


class _NoLimits:
    """This machine, which does not count."""

    @staticmethod
    def oom_kills() -> int:
        return 0

    @staticmethod
    def cpu_percent() -> float:
        return 0.0


def _close(loop: VirtualLoop) -> None:
    """Drop what still runs, without a word: the world is over."""
    loop.after_turn = lambda: None
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        for task in asyncio.all_tasks(loop):
            with contextlib.suppress(BaseException):
                task.get_coro().close()  # type: ignore[union-attr]
        loop._ready.clear()  # type: ignore[attr-defined]
        loop._timers.clear()
    finally:
        sys.unraisablehook = hook
