"""The world: its parts, its workload and one run of it from start over chaos and calm to the end.

``run(seed)`` returns what happened, or raises BrokenInvariantError or CrashError with the seed's number. All
chance comes from the seed; the hash of all messages, steps and events of the gcs's log is the same whenever
and wherever it runs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import sys
import time
import warnings
from contextvars import Context
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any
from unittest import mock

from stoker.runtime.objects.refs import CURRENT as CURRENT_RUNTIME
from stoker_gcs.ephemeral.memory import MemoryEphemeralStore
from stoker_gcs.ephemeral.redis import RedisEphemeralStore
from stoker_nodelet.core.machine import step as nodelet_step
from stoker_wire.http.codec import encode_msgpack
from stoker_wire.settings import Settings
from tests.sim.world import control, stores
from tests.sim.world.checks import LOOK_S, BrokenInvariantError, Checks, CrashError
from tests.sim.world.faults import KINDS, FaultPlan
from tests.sim.world.loop import CURRENT, Process, VirtualLoop, virtual
from tests.sim.world.network import Network
from tests.sim.world.node import Node
from tests.sim.world.runtime.refs import Refs
from tests.sim.world.workload import ENDLESS, ROUNDS, Workload, WorldDriver

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker_wire.messages.cluster import DriverSpec
    from stoker_wire.messages.control import Event
    from tests.sim.world.driver import Driver
    from tests.sim.world.node import Worker
    from tests.sim.world.runtime.calls import CallPlan
    from tests.sim.world.runtime.runtime import Runtime

CHAOS_S = 25.0
SLOW = 0.04
"""How many of the quick tasks are not."""
HOUR_S = 3600.0
END_S = 200.0
"""So long after the chaos all must have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The frame of a run; what is left out is drawn from the seed."""

    kinds: tuple[str, ...] = KINDS
    faults: int | None = None
    replicas: int = 0
    drivers: int = 0
    rounds: tuple[str, ...] = ROUNDS
    noise: float = 0.2
    """The highest rate of each fault of the network while there is noise."""
    messages: int = 1000
    """The drivers go on until so many have crossed the network."""
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
    reads: dict[str, int] = field(default_factory=dict)


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
        self.redis = stores.Redis() if replicas > 1 or random.random() < 0.5 else None
        self.database = stores.Database(random, shared=replicas > 1)
        self.database.after_commit = self.checks.committed
        self.gcs = [_Gcs(self, index) for index in range(replicas)]
        self.gcs_url = ",".join(one.url for one in self.gcs)
        if random.random() < 0.5:
            self.gcs_url = "http://gcs"
            self.network.balanced[self.gcs_url] = [one.url for one in self.gcs]
        self.schedulers = [control.Scheduler(self, index) for index in range(2)]
        kinds = ({"CPU": 4.0}, {"CPU": 4.0, "GPU": 2.0}, {"CPU": 2.0, "GPU": 1.0})
        self.nodes = [_Node(self, index, dict(kinds[index])) for index in range(3)]
        self.workers: dict[str, Worker] = {}
        self.pids: dict[tuple[str, int], Process] = {}
        self.peers: dict[str, Driver | Worker] = {}
        """Who takes channels, by URL."""
        self.peers_by_id: dict[str, Runtime] = {}
        self.runtimes: list[Runtime] = []
        self.refs = Refs(self)
        self.calls: dict[str, CallPlan] = {}
        self.blocked_leases: set[str] = set()
        """Leases whose workers have given their CPU back for a while."""
        self.jobs: dict[str, object] = {}
        self.actors: dict[str, object] = {}
        self.drivers: list[WorldDriver] = []
        self.workload = Workload(self)
        self.drivers_by_job: dict[str, Driver] = {}
        self.calm = False
        self.failure: BaseException | None = None
        self.stop: Callable[[], object] = lambda: None
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

    def record_event(self, event: Event) -> None:
        """Add an event of the gcs's log to the hash of the run, all of it."""
        self._hash.update(encode_msgpack(event))
        if self.log is not None:
            self.log.append(f"{self.loop.now_s:.6f} log {event.seq} {event.kind} {event.subject}")

    def ephemeral(self) -> Any:
        """Return the ephemeral store of a gcs, which has the world's clock."""
        if self.redis is None:
            return MemoryEphemeralStore(time.time)
        return RedisEphemeralStore("redis://redis", time.time)

    def start_later(self, part: Any, after_s: float) -> None:
        """Start a part again that has ended, unless another does so first."""
        process = part.process

        def start() -> None:
            if part.process is process:
                part.start()

        self.loop.call_later(after_s, start, context=self.context)

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
        self.peers.pop(worker.address.url, None)

    def plan_of(self, driver: DriverSpec) -> tuple[float, bool]:
        """Return how long the driver of a submitted job runs, and whether it fails."""
        random = self.random
        length_s = HOUR_S if driver.entrypoint == ENDLESS else random.random() * 4.0
        key = driver.job_id, driver.attempt
        return self._plans.setdefault(key, (length_s, random.random() < 0.4))

    def driver_began(self, job_id: str, attempt: int, worker: Worker) -> None:
        """Note that a submitted job's driver runs."""
        self.record(worker.worker_id, "drives", f"{job_id} {attempt}")

    def actor_began(self, worker: Worker) -> None:
        """Note that an actor is up."""
        self.record(worker.worker_id, "is actor", f"{worker.actor_id} {worker.incarnation}")

    def call_began(self, worker: Worker, call: Any, plan: CallPlan) -> tuple[float, bool]:
        """Count the start of a call; return how long it takes and whether it is to be retried."""
        self.record(worker.worker_id, "runs", f"{call.task_id} {call.attempt}")
        self.checks.call_began(worker, call, plan)
        raises = plan.is_method and self.random.random() < 0.1
        if plan.quick:
            return 0.0005 if self.random.random() > SLOW else 1.0, False
        if plan.length_s is not None:
            return plan.length_s, False
        return self.random.random() ** 4 * 3.0, raises

    def call_ended(self, worker: Worker, call: Any) -> None:
        """Record the end of a call."""
        self.record(worker.worker_id, "ran", f"{call.task_id} {call.attempt}")

    def call_settled(self, runtime: Runtime, task_id: str, how: str) -> None:
        """Check and record the outcome of a call."""
        self.record(runtime.process.name, how, task_id)
        self.results[how] = self.results.get(how, 0) + 1
        self.checks.settled(task_id, how, known=task_id in runtime.submitted)

    def joined(self, runtime: Runtime, peer: Driver | Worker) -> None:
        """Note a runtime, and the process that it is of."""
        self.runtimes.append(runtime)
        self.peers_by_id[runtime.address.peer_id] = runtime
        self.peers[runtime.address.url] = peer

    def task_crashed(self, name: str, error: BaseException) -> None:
        """End the run for what a task of a runtime raised."""
        if not isinstance(error, BrokenInvariantError):
            crash = AssertionError(f"{name} crashed: {error!r}")
            crash.__cause__ = error
            self._failed(crash)

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
                self.fail(BrokenInvariantError(f"scheduler: {error}"))
            self.checks.scheduler_stepped(state, event)

    def stepped_nodelet(self, state: Any, event: Any) -> Any:
        """Step a nodelet's lease machine, and check it."""
        before = (set(state.leases), set(state.bundles))
        commands = nodelet_step(state, event)
        self.checks.nodelet_stepped(state, event, before, commands)
        return commands

    def add_driver(self, host: str, *, may_die: bool) -> None:
        """Start a driver."""
        number = len(self.drivers)
        driver = WorldDriver(self, f"d{number}", host, 100 + number)
        driver.may_die = may_die
        self.drivers.append(driver)

    def fail(self, error: BaseException) -> None:
        """End the run with the first thing that was wrong."""
        self._failed(error)
        raise error

    def _failed(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.stop()

    def crashed(self, _: object, context: dict[str, Any]) -> None:
        """End the run for what a part let out of a callback or a task."""
        error = context.get("exception")
        text = f"{context.get('message')}: {error!r}"
        crash = CrashError(text)
        crash.__cause__ = error
        self._failed(crash)

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
            self.add_driver(random.choice(self.nodes).host, may_die=index > 0)
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
        stopping = asyncio.create_task(self.workload.stop_endless_jobs())
        await self._end()
        stopping.cancel()
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


def run(
    seed: int, plan: Plan | None = None, *, log: list[str] | None = None, script: Any = None
) -> Outcome:
    """Run one world; BrokenInvariantError or CrashError says what went wrong, and in which seed."""
    loop = VirtualLoop()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    collecting = gc.isenabled()
    gc.freeze()  # only this world is looked through when it has ended
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
        gc.unfreeze()


def _run(world: World, log: list[str] | None, script: Any) -> Outcome:
    loop = world.loop
    world.log = log

    try:
        with (
            control.on_world(world, world.settings),
            mock.patch("stoker_nodelet.workers.workers.step", world.stepped_nodelet),
            mock.patch("stoker_nodelet.workers.workers.limits", _NoLimits),
            mock.patch("stoker_nodelet.membership.psutil", _NoLimits),
            mock.patch.object(CURRENT_RUNTIME, "runtime", world.refs),
        ):
            asyncio.set_event_loop(loop)
            main = loop.create_task(world.go(script), context=Context())
            world.stop = main.cancel
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
        text = f"seed {world.seed}, at {loop.now_s:.1f} s: "
        if isinstance(failure, BrokenInvariantError):
            raise BrokenInvariantError(f"{text}{failure}") from failure
        raise CrashError(f"{text}{failure!r}") from failure
    return Outcome(
        seed=world.seed,
        digest=digest,
        messages=world.network.messages,
        faults=world.faults.count,
        calls=len(world.calls),
        virtual_s=loop.now_s,
        results=world.results,
        reads=world.refs.reads,
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
