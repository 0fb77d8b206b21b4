"""The shell around the lease machine: it forks, assigns, kills and buries the node's processes.

Handlers of ``api.py`` and the loops of ``service.py`` call it; it turns what happens into events of
``core`` and carries out the commands. Decisions are the core's alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from stoker_nodelet import devices, proctree
from stoker_nodelet.core import State, WorkerPhase, step
from stoker_nodelet.core.events import (
    AnnounceLease,
    AssignFailed,
    AssignWorker,
    Command,
    Event,
    ForkFailed,
    ForkWorker,
    JobFinished,
    KillWorker,
    LeaseRequested,
    LeasesReleased,
    RefuseLease,
    RetireAnswered,
    RetireWorker,
    Ticked,
    WorkerAssigned,
    WorkerCondemned,
    WorkerExited,
    WorkerForked,
    WorkerRegistered,
)
from stoker_nodelet.environments import Environments
from stoker_nodelet.exits import LOG_LINES, Exits, describe
from stoker_nodelet.forks import ForkExit, ForkServer, ForkServers
from stoker_nodelet.identity import NO_ADDRESS, Identity
from stoker_nodelet.jobs import Jobs
from stoker_nodelet.launching import Order, driver_request, worker_request
from stoker_nodelet.logs import LogFile, Logs
from stoker_nodelet.objects import Objects
from stoker_wire.background import Background
from stoker_wire.client import Client
from stoker_wire.errors import (
    ConflictError,
    FencedError,
    NotFoundError,
    StokerError,
    UnavailableError,
    error_for,
)
from stoker_wire.ids import Prefix, new_id
from stoker_wire.messages.cluster import (
    HeldLease,
    HeldLeases,
    LeaseKind,
    RegisterWorker,
    ReleaseLeases,
    StartedLease,
    StartLease,
    Worker,
    WorkerExit,
    WorkerSetup,
)
from stoker_wire.messages.common import Empty

if TYPE_CHECKING:
    from stoker_nodelet.core.state import Worker as CoreWorker

_ASSIGN_S = 10.0
_RETIRE_S = 5.0
_DRIVER_END_S = 3.0
_RELEASE_S = 5.0


@dataclass(slots=True)
class Process:
    """What the shell knows of a worker beyond the core's state."""

    server: ForkServer
    log_path: Path
    socket_path: Path | None = None
    order: Order | None = None
    client: Client | None = None
    pid: int = 0
    oom: bool = False
    exited: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Workers:
    """The processes of this node."""

    identity: Identity
    state: State
    forks: ForkServers
    environments: Environments
    exits: Exits
    logs: Logs
    objects: Objects
    jobs: Jobs
    background: Background
    processes: dict[str, Process] = field(default_factory=dict)
    _orders: dict[str, Order] = field(default_factory=dict)
    _waiting: dict[str, asyncio.Future[StartedLease]] = field(default_factory=dict)
    _oom_kills: int = field(default_factory=devices.oom_kills)

    # What others ask for

    async def start_lease(self, asked: StartLease) -> StartedLease:
        """Return the worker for a lease; asking again gives the same one."""
        environment = await self.environments.prepare(asked.worker.runtime_env)
        lease_id = asked.lease.lease_id
        waiting = self._waiting.get(lease_id)
        if waiting is None:
            waiting = asyncio.get_running_loop().create_future()
            waiting.add_done_callback(_retrieved)
            self._waiting[lease_id] = waiting
        self._orders.setdefault(lease_id, Order(asked.lease, asked.worker, environment))
        self.dispatch(
            LeaseRequested(
                at_s=time.monotonic(),
                lease=asked.lease,
                epoch=asked.epoch,
                env_key=environment.key,
                adoptable=environment.late,
                worker_id=new_id(Prefix.WORKER),
            )
        )
        return await asyncio.shield(waiting)

    async def release(self, asked: ReleaseLeases) -> None:
        """Take leases back. Returns when the devices of killed workers are free (or after 5 s)."""
        held = [self.state.leases.get(lease_id) for lease_id in asked.lease_ids]
        names = [one.worker_id for one in held if one is not None]
        commands = self.dispatch(
            LeasesReleased(
                at_s=time.monotonic(),
                lease_ids=asked.lease_ids,
                epoch=asked.epoch,
                kill=asked.kill,
                reason=asked.reason,
            )
        )
        for command in commands:
            if isinstance(command, RefuseLease) and command.code == FencedError.code:
                raise FencedError(command.message)
        dying = [
            self.processes[name].exited
            for name in names
            if name in self.processes and self._holds_devices(name)
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RELEASE_S):
                for exited in dying:
                    await exited.wait()

    def _holds_devices(self, worker_id: str) -> bool:
        worker = self.state.workers.get(worker_id)
        return worker is not None and worker.phase is WorkerPhase.DYING and bool(worker.gpus)

    def register(self, asked: RegisterWorker) -> WorkerSetup:
        """Note that a worker is up, and tell it what it is."""
        process = self.processes.get(asked.worker_id)
        worker = self.state.workers.get(asked.worker_id)
        if process is None or worker is None:
            raise NotFoundError(f"{asked.worker_id} is not a worker of this node: it shall exit")
        if worker.phase is WorkerPhase.DYING:
            raise ConflictError(f"{asked.worker_id} shall exit: {worker.reason}")
        self.dispatch(
            WorkerRegistered(
                at_s=time.monotonic(),
                worker_id=asked.worker_id,
                pid=asked.pid,
                address=asked.address,
            )
        )
        return self._setup(worker, process)

    def kill(self, worker_id: str, reason: str, *, oom: bool = False) -> None:
        """End a worker and all that it started; its exit will say ``reason``."""
        if worker_id not in self.state.workers:
            if self.exits.get(worker_id) is None:
                raise NotFoundError(f"{worker_id} is not a worker of this node")
            return
        if oom and worker_id in self.processes:
            self.processes[worker_id].oom = True
        self.dispatch(WorkerCondemned(at_s=time.monotonic(), worker_id=worker_id, reason=reason))

    def finish_job(self, job_id: str) -> None:
        """Clear away what a finished job has left here."""
        self.dispatch(JobFinished(at_s=time.monotonic(), job_id=job_id))
        self.objects.free_job(job_id, keep_owners=self._actor_owners())

    def _actor_owners(self) -> set[str]:
        owners = set()
        for worker in self.state.workers.values():
            if worker.kind is LeaseKind.ACTOR and worker.lease_id:
                owners |= _owner_ids(worker)
        return owners

    def tick(self) -> None:
        """Let time pass: idle workers retire, a fresh one is forked ahead of need."""
        ids = tuple(new_id(Prefix.WORKER) for _ in range(self.state.policy.warm_workers))
        self.dispatch(Ticked(at_s=time.monotonic(), worker_ids=ids))

    def held(self) -> HeldLeases:
        """Return all leases, for a scheduler that rebuilds its view."""
        leases = []
        for one in self.state.leases.values():
            worker = self.state.workers.get(one.worker_id)
            leases.append(
                HeldLease(
                    lease=one.lease,
                    worker_id=one.worker_id,
                    address=(worker and worker.address) or NO_ADDRESS,
                    pid=worker.pid if worker else 0,
                )
            )
        return HeldLeases(
            node_id=self.identity.node_id,
            incarnation=self.state.incarnation,
            leases=tuple(leases),
        )

    def describe(self, worker: CoreWorker) -> Worker:
        """Return a worker as others see it."""
        return Worker(
            worker_id=worker.worker_id,
            node_id=self.identity.node_id,
            pid=worker.pid,
            state=worker.phase.reported,
            lease_id=worker.lease_id,
            job_id=worker.job_id,
            actor_id=worker.actor_id,
            started_at_s=time.time() - (time.monotonic() - worker.started_at_s),
            rss_bytes=proctree.rss_bytes(worker.pid) if worker.pid else 0,
        )

    # Commands

    def dispatch(self, event: Event) -> list[Command]:
        """Step the core and carry out what it wants."""
        commands = step(self.state, event)
        for command in commands:
            self._carry_out(command)
        if len(self._orders) > len(self.state.leases):
            self._orders = {k: v for k, v in self._orders.items() if k in self.state.leases}
        return commands

    def _carry_out(self, command: Command) -> None:
        match command:
            case ForkWorker():
                work = self._fork(command.worker_id, self._orders.get(command.lease_id))
                self.background.spawn(work, name=f"fork-{command.worker_id}")
            case AssignWorker():
                work = self._assign(command.worker_id, command.lease_id)
                self.background.spawn(work, name=f"assign-{command.worker_id}")
            case RetireWorker():
                work = self._retire(command.worker_id)
                self.background.spawn(work, name=f"retire-{command.worker_id}")
            case KillWorker():
                self._kill(command.worker_id)
            case AnnounceLease():
                self._announce(command.lease_id)
            case RefuseLease():
                waiting = self._waiting.pop(command.lease_id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_exception(error_for(command.code, command.message))
            case _:
                assert_never(command)

    async def _fork(self, worker_id: str, order: Order | None) -> None:
        identity = self.identity
        try:
            if order is not None and order.spec.driver is not None:
                request = driver_request(identity, worker_id, order)
                socket_path = None
            else:
                request = worker_request(identity, worker_id, order)
                socket_path = identity.socket_path(worker_id)
            environment = order.environment if order else None
            server = self.forks.get(
                environment.python if environment else identity.python,
                environment.preload if environment else (),
            )
            log_path = Path(request.log_path)
            process = Process(server, log_path, socket_path, order)
            self.processes[worker_id] = process
            self._log_of(worker_id, log_path, order)
            pid = await server.fork(request)
        except (StokerError, OSError) as error:
            self._forget(worker_id)
            self.dispatch(ForkFailed(worker_id=worker_id, reason=str(error)))
            return
        process.pid = pid
        log = self.logs.get(worker_id)
        if log is not None:
            log.pid = pid
        self.dispatch(WorkerForked(at_s=time.monotonic(), worker_id=worker_id, pid=pid))
        worker = self.state.workers.get(worker_id)
        if worker is not None and worker.phase is WorkerPhase.DYING:
            self._kill(worker_id)

    def _log_of(self, worker_id: str, path: Path, order: Order | None) -> None:
        log = LogFile(worker_id, path)
        if order is not None:
            log.job_id = order.lease.job_id
            log.name = order.name
            log.driver = order.spec.driver is not None
        self.logs.add(log)

    async def _assign(self, worker_id: str, lease_id: str) -> None:
        worker = self.state.workers.get(worker_id)
        process = self.processes.get(worker_id)
        order = self._orders.get(lease_id)
        try:
            if worker is None or process is None or order is None:
                raise UnavailableError(f"{worker_id} is gone")
            process.order = None  # the environment was not applied by the fork
            setup = self._setup(worker, process)
            client = self._client(process)
            await client.call("POST", "/v1/assign", setup, reply=Empty, timeout_s=_ASSIGN_S)
        except StokerError as error:
            reason = f"{worker_id} did not take {lease_id} on: {error}"
            self.dispatch(
                AssignFailed(
                    at_s=time.monotonic(), worker_id=worker_id, lease_id=lease_id, reason=reason
                )
            )
            return
        self.dispatch(WorkerAssigned(worker_id=worker_id, lease_id=lease_id))

    def _setup(self, worker: CoreWorker, process: Process) -> WorkerSetup:
        order = self._orders.get(worker.lease_id)
        late = order is not None and process.order is None
        log = self.logs.get(worker.worker_id)
        if order is not None and log is not None:
            log.job_id = order.lease.job_id
            log.name = order.name
        environment = order.environment if order is not None and late else None
        return WorkerSetup(
            worker_id=worker.worker_id,
            node_id=self.identity.node_id,
            lease=order.lease if order else None,
            actor=order.spec.actor if order else None,
            arena_dir=str(self.objects.arena_dir),
            env_vars=order.variables(self.identity) if order is not None and late else {},
            sys_path=environment.sys_path if environment else (),
            cwd=environment.cwd if environment else "",
        )

    async def _retire(self, worker_id: str) -> None:
        process = self.processes.get(worker_id)
        if process is None:
            return
        try:
            client = self._client(process)
            await client.call("POST", "/v1/retire", reply=Empty, timeout_s=_RETIRE_S)
            leaves = True
        except ConflictError:
            leaves = False
        except StokerError as error:
            if worker_id in self.state.workers:
                self.kill(worker_id, f"idle, and it does not answer: {error}")
            return
        self.dispatch(RetireAnswered(at_s=time.monotonic(), worker_id=worker_id, leaves=leaves))

    def _client(self, process: Process) -> Client:
        if process.client is None:
            process.client = Client(
                "http://localhost",
                token=self.identity.token,
                peer="nodelet",
                unix_path=str(process.socket_path),
            )
        return process.client

    def _kill(self, worker_id: str) -> None:
        process = self.processes.get(worker_id)
        if process is None:
            return
        if process.order is not None and process.order.spec.driver is not None:
            self.background.spawn(self._stop_driver(worker_id, process), name=f"stop-{worker_id}")
        else:
            process.server.signal(worker_id, signal.SIGKILL)

    async def _stop_driver(self, worker_id: str, process: Process) -> None:
        process.server.signal(worker_id, signal.SIGTERM)
        try:
            async with asyncio.timeout(_DRIVER_END_S):
                await process.exited.wait()
        except TimeoutError:
            process.server.signal(worker_id, signal.SIGKILL)

    def _announce(self, lease_id: str) -> None:
        waiting = self._waiting.pop(lease_id, None)
        held = self.state.leases.get(lease_id)
        if waiting is None or waiting.done() or held is None:
            return
        worker = self.state.workers[held.worker_id]
        address = worker.address or NO_ADDRESS
        waiting.set_result(
            StartedLease(worker_id=worker.worker_id, address=address, pid=worker.pid)
        )

    # Exits

    def on_exit(self, told: ForkExit) -> None:
        """Bury a worker: forensics, events, its log, its socket and its objects."""
        worker = self.state.workers.get(told.worker_id)
        process = self.processes.get(told.worker_id)
        if worker is None or process is None:
            return
        one = self._forensics(told, worker, process)
        log = self.logs.get(told.worker_id)
        if log is not None:
            log.ended = True
        self._forget(told.worker_id)
        for owner_id in _owner_ids(worker):
            self.objects.free_owner(owner_id)
        self.dispatch(
            WorkerExited(at_s=time.monotonic(), worker_id=told.worker_id, cause=one.cause)
        )
        self.exits.add(one)
        if worker.kind is LeaseKind.DRIVER:
            self.jobs.driver_exited(one)

    def _forensics(self, told: ForkExit, worker: CoreWorker, process: Process) -> WorkerExit:
        expected = worker.phase is WorkerPhase.DYING and not process.oom
        killed_for = worker.reason if worker.phase is WorkerPhase.DYING else ""
        kernel_oom = False
        if told.status == signal.SIGKILL and not killed_for:
            count = devices.oom_kills()
            kernel_oom, self._oom_kills = count > self._oom_kills, count
        outcome = describe(told.status, killed_for=killed_for, kernel_oom=kernel_oom)
        return WorkerExit(
            worker_id=told.worker_id,
            node_id=self.identity.node_id,
            job_id=worker.job_id,
            lease_id=worker.lease_id,
            actor_id=worker.actor_id,
            pid=told.pid,
            exit_code=outcome.exit_code,
            signal=outcome.signal,
            oom=process.oom or kernel_oom,
            expected=expected,
            peak_rss_bytes=told.peak_rss_bytes,
            at_s=time.time(),
            cause=outcome.cause,
            last_log_lines=self.logs.tail(told.worker_id, LOG_LINES),
        )

    def _forget(self, worker_id: str) -> None:
        process = self.processes.pop(worker_id, None)
        if process is None:
            return
        process.exited.set()
        if process.socket_path is not None:
            process.socket_path.unlink(missing_ok=True)
        if process.client is not None:
            self.background.spawn(process.client.close(), name=f"close-{worker_id}")


def _owner_ids(worker: CoreWorker) -> set[str]:
    peer = {worker.address.peer_id} if worker.address else set()
    return peer | {worker.worker_id}


def _retrieved(waiting: asyncio.Future[StartedLease]) -> None:
    """A refusal that nobody waits for any more is no crash."""
    if not waiting.cancelled():
        waiting.exception()
