"""A node of a world: the real nodelet (lease machine, its shell, membership, routes) over fake processes.

A worker of the world is a process that takes calls over a channel and answers after a time. It dies with its
nodelet, as its fork server does.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.runtime.process.identity import LocalNode
from stoker_nodelet.api import ROUTES, Api
from stoker_nodelet.core import Policy, State
from stoker_nodelet.core.events import (
    RetireAnswered,
    StopAnswered,
    WorkerAssigned,
    WorkerForked,
)
from stoker_nodelet.core.state import Rung, WorkerPhase
from stoker_nodelet.environments.environments import Environment
from stoker_nodelet.environments.user_folders import Folders, UserFolders
from stoker_nodelet.identity import Endpoint, Identity
from stoker_nodelet.membership import Membership
from stoker_nodelet.telemetry.exits import Exits
from stoker_nodelet.unix_users import UnixUsers
from stoker_nodelet.workers.fork_client import ForkExit
from stoker_nodelet.workers.workers import Workers
from stoker_wire.errors import FencedError, NotFoundError, StokerError
from stoker_wire.http.auth import Credential
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.messages.cluster import Device, RegisterNode, WorkerExit, WorkersExited
from stoker_wire.messages.common import Address
from stoker_wire.messages.node_api import RegisterWorker, WorkerSetup
from stoker_wire.messages.work import ActorState, ReportActor
from stoker_wire.process.background import Background
from tests.sim.world.loop import Process
from tests.sim.world.runtime.calls import Executor
from tests.sim.world.runtime.runtime import Runtime
from tests.sim.world.runtime.values import ROUTES as VALUE_ROUTES
from tests.sim.world.runtime.values import SimArena, SimIndex
from tests.sim.world.server import Server
from tests.sim.world.wire import SimClient

if TYPE_CHECKING:
    from stoker_nodelet.core.commands import NotifyWorker
    from stoker_nodelet.workers.launch_spec import LaunchSpec
    from stoker_wire.messages.cluster import Lease
    from stoker_wire.messages.data import Stored
    from tests.sim.world.links import Link

_TICK_S = 0.5
PREPARE_S = 0.01
"""How long an environment takes."""


class _Nothing:
    """A part of the nodelet that has nothing to do in a world: it takes every call, and says nothing."""

    warm: tuple[str, ...] = ()
    leaving = closing = False
    nbytes = 0

    def __len__(self) -> int:
        return 0

    def job_ids(self) -> set[str]:
        return set()

    def get(self, _: str) -> None:
        return None

    def tail(self, *_: Any) -> tuple[str, ...]:
        return ()

    def make_output_dir(self, _: str) -> str:
        return ""

    async def prepare(self, *_: Any) -> Environment:
        await asyncio.sleep(PREPARE_S)
        return _PLAIN

    def _ignore(self, *_: Any, **__: Any) -> None:
        return None

    add = ended = end = on_event = on_freed = track = _ignore

    async def report(self) -> None:
        return None


_PLAIN = Environment(python="python")


class _Workers(Workers):
    """The real shell, with processes of the world."""

    def __post_init__(self, target: str, isolation: None = None) -> None:
        self.forks = self.processes = None  # type: ignore[assignment]


class _Membership(Membership):
    """The real membership, without measurements of this machine."""

    def usage(self) -> dict[str, float]:
        return {}


class Worker:
    """A process under a nodelet: a worker, or the driver of a submitted job."""

    def __init__(self, node: Node, worker_id: str, pid: int, launch: LaunchSpec | None) -> None:
        world = node.world
        self.node, self.worker_id, self.pid, self.launch = node, worker_id, pid, launch
        self.process = Process(worker_id, node.host)
        self.memory: None = None
        self.client = None
        self.server = self
        self.exited, self.gpus_free = asyncio.Event(), asyncio.Event()
        self.address = Address(worker_id, node.node_id, node.host, "", f"sim://{worker_id}")
        self.lease_id = self.actor_id = ""
        self.lease: Lease | None = None
        self.gpus: dict[int, float] = {}
        self.incarnation = 0
        self.alive_actor = False
        self.gcs = SimClient(world.network, self.process, world.gcs_url, worker_id)
        self.runtime: Runtime | None = None
        self.executor: Executor | None = None
        self.process.at_death.append(self._gone)
        world.workers[self.address.url] = world.peers[self.address.url] = self

    # Life

    def cannot_start(self, _: WorkerExit) -> bool:
        return False

    def begin(self) -> None:
        """Run: register, or be a driver."""
        launch = self.launch
        if launch is not None and launch.spec.driver is not None:
            self.process.spawn(self._drive(launch))
        else:
            self.process.spawn(self._register())

    async def _drive(self, launch: LaunchSpec) -> None:
        driver = launch.spec.driver
        assert driver is not None
        self.node.world.driver_began(driver.job_id, driver.attempt, self)
        length_s, fails = self.node.world.plan_of(driver)
        await asyncio.sleep(length_s)
        self.exit(256 if fails else 0)

    async def _register(self) -> None:
        random = self.node.world.random
        await asyncio.sleep(0.005 + random.random() * 0.03)
        try:
            setup = await self.node.local(
                lambda: self.node.workers.register(
                    RegisterWorker(worker_id=self.worker_id, pid=self.pid, address=self.address)
                )
            )
        except StokerError:
            self.exit(0)
            return
        self.take(setup)

    def take(self, setup: WorkerSetup) -> None:
        """Serve a lease from now on."""
        self.lease = setup.lease
        if setup.lease is not None:
            self.lease_id = setup.lease.lease_id
            self.node.world.checks.worker_leased(self, setup.lease.gpus)
            self.gpus = dict(setup.lease.gpus)
            if self.executor is not None:
                self._take_lease(self.executor)
        if setup.actor is not None:
            self.actor_id, self.incarnation = setup.actor.actor_id, setup.actor.incarnation
            self.actor_spec = setup.actor
            self.process.spawn(self._construct())

    actor_spec: Any = None

    async def _construct(self) -> None:
        world = self.node.world
        await asyncio.sleep(world.random.random() * 0.1)
        body = ReportActor(
            state=ActorState.ALIVE, incarnation=self.incarnation, worker_id=self.worker_id
        )
        while True:
            try:
                await self.gcs.call("POST", f"/v1/actors/{self.actor_id}/report", body)
            except (FencedError, NotFoundError):
                self.exit(256)
                return
            except StokerError:
                await asyncio.sleep(0.2)
                continue
            break
        self.alive_actor = True
        world.actor_began(self)
        if self.executor is not None:
            self.executor.run_next()

    def exit(self, status: int) -> None:
        """End, as the process itself or as its fork server ends it."""
        if not self.process.dead:
            self.status = status
            self.process.kill()

    def signal(self, _: str, number: int) -> None:
        """Take a signal of the nodelet."""
        loop = asyncio.get_running_loop()
        status = 9 if number == signal.SIGKILL else 15
        if self.process.frozen and number != signal.SIGKILL:
            return
        loop.call_later(0.002, self.exit, status, context=self.node.world.context)

    status = 9

    def _gone(self) -> None:
        node = self.node
        node.world.worker_gone(self)
        if not node.process.dead:
            gone = ForkExit(self.worker_id, self.pid, self.status, 1)
            asyncio.get_running_loop().call_later(
                0.003, node.workers.on_exit, gone, context=node.process.context
            )

    # Calls

    def accept(self, link: Link, peer: Address) -> None:
        """Take a channel of a caller, or of a borrower; the first brings the runtime up."""
        if self.runtime is None:
            self.process.context.run(self._build)
        assert self.runtime is not None
        self.runtime.channels.accept(link, peer)

    def _build(self) -> None:
        node, world = self.node, self.node.world
        local = LocalNode(node.node_id, node.url, "")
        self.runtime = runtime = Runtime(
            world, self.process, self.address, node=local, arena=node.arena
        )
        self.executor = executor = Executor(self, runtime)
        runtime.route(_NO_ACTORS, executor)
        world.joined(runtime, self)
        if self.lease is not None:
            self._take_lease(executor)

    def _take_lease(self, executor: Executor) -> None:
        assert self.lease is not None
        if self.actor_spec is not None and executor.actor is None:
            executor.host(self.actor_spec)
        executor.take_lease(self.lease, None, capture_child_tasks=False)
        executor.accept_calls()

    def keep_copy(self, location: Stored, value: bytes) -> None:
        """Have the node keep a copy of what was read from another."""
        node = self.node
        if location.node_id != node.node_id and self.lease is not None and not node.process.dead:
            home, job_id = location.node_id, self.lease.job_id
            node.objects.add_copy(location.object_id, value, home, job_id)

    def is_needed(self) -> bool:
        """Return whether others need what it has (``retire`` of :mod:`stoker.runtime.worker.main`)."""
        runtime, executor = self.runtime, self.executor
        if runtime is None or executor is None:
            return False
        lent = any(entry.borrowers for entry in runtime.table.entries.values())
        return lent or bool(runtime.pending) or executor.busy


class _NoActors:
    """The actors of a worker: it calls none."""

    def on_done(self, _: Any, results: list[Any]) -> list[Any]:
        return results

    def on_channel_closed(self, _: Any) -> None:
        return None


_NO_ACTORS = _NoActors()


class Processes:
    """The processes of a nodelet (:class:`stoker_nodelet.workers.processes.Processes`)."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.living: dict[str, Worker] = {}
        self.launches: dict[str, LaunchSpec] = {}

    async def fork(self, worker_id: str, launch: LaunchSpec | None) -> None:
        node = self._node
        worker = self.living[worker_id] = Worker(node, worker_id, node.next_pid(), launch)
        await asyncio.sleep(0.003)
        worker.begin()
        node.workers.dispatch(
            WorkerForked(at_s=time.monotonic(), worker_id=worker_id, pid=worker.pid)
        )
        entry = node.workers.state.workers.get(worker_id)
        if entry is not None and entry.phase is WorkerPhase.TERMINATING:
            self.terminate(worker_id, force=entry.stop is None or entry.stop.rung is Rung.KILL)

    def overdue_task(self, worker_id: str) -> str:
        return ""

    async def assign(self, worker_id: str, lease_id: str) -> None:
        worker, entry = self.living.get(worker_id), self._node.workers.state.workers.get(worker_id)
        if worker is None or entry is None or lease_id not in self.launches:
            return
        setup = self.setup_of(entry, worker)
        await asyncio.sleep(0.001)
        workers, at_nodelet = self._node.workers, self._node.process.context

        async def take() -> None:
            worker.take(setup)
            assigned = WorkerAssigned(worker_id=worker_id, lease_id=lease_id)
            asyncio.get_running_loop().call_soon(workers.dispatch, assigned, context=at_nodelet)

        if not worker.process.dead:
            worker.process.spawn(take())

    def setup_of(self, entry: Any, process: Any) -> WorkerSetup:
        launch = self.launches.get(entry.lease_id)
        return WorkerSetup(
            worker_id=entry.worker_id,
            node_id=self._node.node_id,
            lease=launch.lease if launch else None,
            actor=launch.spec.actor if launch else None,
        )

    async def retire(self, worker_id: str) -> None:
        await asyncio.sleep(0.002)
        worker = self.living.get(worker_id)
        at_s = time.monotonic()
        leaves = worker is None or not worker.is_needed()
        self._node.workers.dispatch(RetireAnswered(at_s=at_s, worker_id=worker_id, leaves=leaves))
        if worker is not None and leaves:
            worker.signal("", signal.SIGTERM)

    async def notify(self, command: NotifyWorker) -> None:
        await asyncio.sleep(0.002)
        self._node.workers.dispatch(
            StopAnswered(
                at_s=time.monotonic(),
                worker_id=command.worker_id,
                lease_id=command.lease_id,
                callbacks=0,
            )
        )

    def terminate(self, worker_id: str, *, force: bool) -> None:
        worker = self.living.get(worker_id)
        if worker is not None:
            worker.signal(worker_id, signal.SIGKILL if force else signal.SIGTERM)

    def remove(self, worker_id: str) -> None:
        worker = self.living.pop(worker_id, None)
        if worker is not None:
            worker.exited.set()
            worker.gpus_free.set()


class Node:
    """A node: its host, and the nodelet that runs there, which may be killed and started again."""

    def __init__(self, world: Any, index: int, resources: dict[str, float]) -> None:
        self.world, self.index = world, index
        self.node_id, self.host = f"n_{index}", f"host{index}"
        self.url = f"http://host{index}:7700"
        self.resources = resources
        self._pids = itertools.count(1000 * (index + 1))
        self.process = Process(self.node_id, self.host)
        self.process.dead = True
        self.workers: Workers

    def next_pid(self) -> int:
        """Return a pid that no process of this host had before."""
        return next(self._pids)

    def start(self) -> None:
        """Start the nodelet."""
        world = self.world
        self.process = process = Process(self.node_id, self.host)
        process.context.run(self._build, process)
        process.at_death.append(
            lambda: world.fork_server_gone(list(workers.processes.living.values()))
        )
        workers = self.workers

    def _build(self, process: Process) -> None:
        world, nothing = self.world, _Nothing()
        background = Background(self.node_id)
        gcs = SimClient(world.network, process, world.gcs_url, f"nodelet {self.node_id}")
        self.arena = SimArena()
        self.objects = SimIndex(self.arena, self.node_id)  # type: ignore[arg-type]
        state = State(policy=Policy(prepared_ttl_s=30.0, warm_workers=1))
        endpoint = Endpoint()
        endpoint.listens_at(self.url)
        identity = Identity(
            node_id=self.node_id,
            host_id=self.host,
            endpoint=endpoint,
            unix="",
            gcs_url=world.gcs_url,
            credential=Credential("t"),
            tokens=TokenSigner("t"),
            session_dir=_NOWHERE,
            arena_dir=_NOWHERE,
            socket_dir=_NOWHERE,
        )

        async def report(exits: tuple[WorkerExit, ...]) -> None:
            body = WorkersExited(exits=exits, incarnation=state.incarnation)
            await gcs.call("POST", "/v1/workers/exited", body, timeout_s=10.0)

        part: Any = nothing
        exits = Exits(report)
        self.workers = workers = _Workers(
            identity=identity,
            state=state,
            target="",
            users=UserFolders(_NOWHERE, UnixUsers(self.node_id), Folders(part, part), part),
            kernels=part,
            exits=exits,
            logs=part,
            objects=self.objects,
            driver_reports=part,
            background=background,
            _oom_kills=0,
        )
        workers.processes = Processes(self)  # type: ignore[assignment]
        server = Server(world.network, process, self.url)
        parts = [part] * 8
        server.add_routes(ROUTES, Api(workers, exits, self.objects, *parts))
        server.add_routes(VALUE_ROUTES, self)

        def on_member(is_member: bool) -> None:
            server.is_ready = is_member
            (workers.member.set if is_member else workers.member.clear)()

        gpus = int(self.resources.get("GPU", 0))
        membership = _Membership(
            RegisterNode(
                node_id=self.node_id,
                url=self.url,
                unix="",
                hostname=self.host,
                host_id=self.host,
                pid=1,
                resources=self.resources,
                devices=tuple(
                    Device(index=i, uuid=f"{self.host}-{i}", name="gpu") for i in range(gpus)
                ),
            ),
            gcs,
            workers,
            part,
            on_member,
        )
        for work in (membership.run(), membership.watch(), exits.run(), self._tick(workers)):
            process.spawn(work)

    async def _tick(self, workers: Workers) -> None:
        while True:
            workers.tick()
            await asyncio.sleep(_TICK_S)

    async def local(self, call: Any) -> Any:
        """Call the nodelet over its Unix socket from a worker."""
        process = self.process
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def serve() -> None:
            try:
                answer = call()
            except StokerError as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(answer)

        if not process.dead:
            process.spawn(serve())
        return await done


_NOWHERE = Path("/nonexistent")
