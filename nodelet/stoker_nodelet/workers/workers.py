"""The shell around the lease machine: it forks, assigns, kills and buries the node's processes.

Handlers of ``api.py`` and the loops of ``service.py`` call it; it turns what happens into events of
``core`` and carries out the commands. Decisions are the core's alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, assert_never

from stoker_nodelet import devices
from stoker_nodelet.core import State, WorkerPhase, step
from stoker_nodelet.core.events import (
    AnnounceLease,
    AssignWorker,
    Command,
    Event,
    ForkWorker,
    JobFinished,
    KillWorker,
    LeaseRequested,
    LeasesReleased,
    RefuseLease,
    RetireWorker,
    Ticked,
    WorkerCondemned,
    WorkerExited,
    WorkerRegistered,
    WorkerSpent,
)
from stoker_nodelet.environments.environments import Environments
from stoker_nodelet.environments.job_folders import JobFolders
from stoker_nodelet.identity import NO_ADDRESS, Identity
from stoker_nodelet.kernels.compiler import Kernels
from stoker_nodelet.objects.index import Objects
from stoker_nodelet.telemetry.driver_reports import Jobs
from stoker_nodelet.telemetry.exits import LOG_LINES, Exits, describe
from stoker_nodelet.telemetry.logs import Logs
from stoker_nodelet.workers import process_tree
from stoker_nodelet.workers.fork_client import ForkExit, ForkServers
from stoker_nodelet.workers.launch_spec import Order
from stoker_nodelet.workers.processes import Process, Processes
from stoker_wire.errors import (
    ConflictError,
    FencedError,
    NotFoundError,
    StokerError,
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
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from stoker_nodelet.core.state import Worker as CoreWorker

_RELEASE_S = 5.0


@dataclass(slots=True)
class Workers:
    """The processes of this node."""

    identity: InitVar[Identity]
    state: State
    forks: ForkServers
    environments: Environments
    folders: JobFolders
    kernels: Kernels
    exits: Exits
    logs: Logs
    objects: Objects
    jobs: Jobs
    background: Background
    processes: Processes = field(init=False)
    member: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the gcs counts this node in, and from when it leaves."""
    leaving: bool = False
    _waiting: dict[str, asyncio.Future[StartedLease]] = field(default_factory=dict)
    _preparing: list[str] = field(default_factory=list)
    """Jobs of the leases whose environments are being made."""
    _oom_kills: int = field(default_factory=devices.oom_kills)

    def __post_init__(self, identity: Identity) -> None:
        self.processes = Processes(
            identity, self.state, self.forks, self.logs, self.background, self.dispatch
        )

    # What others ask for

    def leave(self) -> None:
        """Take no lease any more."""
        self.leaving = True
        self.member.set()

    async def start_lease(self, asked: StartLease) -> StartedLease:
        """Return the worker for a lease; asking again gives the same one."""
        await self.member.wait()  # the scheduler may know a moment before the gcs's answer is here
        try:
            if not self.leaving:
                return await self._start_lease(asked)
        except StokerError:
            if not self.leaving:
                raise
        raise ConflictError(f"node {self.processes.identity.node_id} is leaving the cluster")

    async def _start_lease(self, asked: StartLease) -> StartedLease:
        wanted = asked.worker.runtime_env
        job_id = asked.lease.job_id
        output_dir = self.folders.make_output_dir(job_id)
        self._preparing.append(job_id)
        try:
            environment = await self.environments.prepare(wanted, job_id)
            if wanted.kernels:
                environment = await self.kernels.prepare(wanted, environment, asked.lease.gpus)
        finally:
            self._preparing.remove(job_id)
        lease_id = asked.lease.lease_id
        waiting = self._waiting.get(lease_id)
        if waiting is None:
            waiting = asyncio.get_running_loop().create_future()
            waiting.add_done_callback(_retrieved)
            self._waiting[lease_id] = waiting
        self.processes.orders.setdefault(
            lease_id,
            Order(asked.lease, asked.worker, environment, output_dir),
        )
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
        """Take leases back. Returns when the devices of their workers are free (or after 5 s)."""
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
            self.processes.living[name].gpus_free
            for name in names
            if name in self.processes.living and self._holds_devices(name)
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RELEASE_S):
                for gpus_free in dying:
                    await gpus_free.wait()

    def _holds_devices(self, worker_id: str) -> bool:
        worker = self.state.workers.get(worker_id)
        ending = (WorkerPhase.DYING, WorkerPhase.RETIRING)
        return worker is not None and worker.phase in ending and bool(worker.gpus)

    def register(self, asked: RegisterWorker) -> WorkerSetup:
        """Note that a worker is up, and tell it what it is."""
        process = self.processes.living.get(asked.worker_id)
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
        return self.processes.setup(worker, process)

    def kill(self, worker_id: str, reason: str, *, oom: bool = False) -> None:
        """End a worker and all that it started; its exit will say ``reason``."""
        if worker_id not in self.state.workers:
            if self.exits.get(worker_id) is None:
                raise NotFoundError(f"{worker_id} is not a worker of this node")
            return
        if oom and worker_id in self.processes.living:
            self.processes.living[worker_id].oom = True
        self.dispatch(WorkerCondemned(at_s=time.monotonic(), worker_id=worker_id, reason=reason))

    def spent(self, worker_id: str) -> None:
        """A worker says that it takes no more calls: it gets no other lease."""
        self.dispatch(WorkerSpent(worker_id=worker_id))

    def finish_job(self, job_id: str) -> None:
        """Clear away what a finished job has left here."""
        self.dispatch(JobFinished(at_s=time.monotonic(), job_id=job_id))
        self.objects.free_job(job_id, keep_owners=self._actor_owners())
        self.folders.ended(job_id)

    async def sweep_folders(self) -> None:
        """Remove the folders of jobs that ended long ago and have nothing here, for ever."""
        while True:
            await asyncio.sleep(self.folders.sweep_s)
            with contextlib.suppress(StokerError):  # the gcs is away, and is asked again
                await self.folders.sweep(self.jobs_here(), self.jobs.is_over)

    def jobs_here(self) -> set[str]:
        """Return the jobs that have a process or a lease here, or are about to."""
        workers = {worker.job_id for worker in self.state.workers.values()}
        leases = {held.lease.job_id for held in self.state.leases.values()}
        return workers | leases | set(self._preparing)

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
            node_id=self.processes.identity.node_id,
            incarnation=self.state.incarnation,
            leases=tuple(leases),
        )

    def describe(self, worker: CoreWorker) -> Worker:
        """Return a worker as others see it."""
        return Worker(
            worker_id=worker.worker_id,
            node_id=self.processes.identity.node_id,
            pid=worker.pid,
            state=worker.phase.reported,
            lease_id=worker.lease_id,
            job_id=worker.job_id,
            actor_id=worker.actor_id,
            started_at_s=time.time() - (time.monotonic() - worker.started_at_s),
            rss_bytes=process_tree.rss_bytes(worker.pid) if worker.pid else 0,
        )

    # Commands

    def dispatch(self, event: Event) -> list[Command]:
        """Step the core and carry out what it wants."""
        commands = step(self.state, event)
        for command in commands:
            self._carry_out(command)
        if len(self.processes.orders) > len(self.state.leases):
            self.processes.orders = {
                k: v for k, v in self.processes.orders.items() if k in self.state.leases
            }
        return commands

    def _carry_out(self, command: Command) -> None:
        match command:
            case ForkWorker():
                work = self.processes.fork(
                    command.worker_id, self.processes.orders.get(command.lease_id)
                )
                self.background.spawn(work, name=f"fork-{command.worker_id}")
            case AssignWorker():
                work = self.processes.assign(command.worker_id, command.lease_id)
                self.background.spawn(work, name=f"assign-{command.worker_id}")
            case RetireWorker():
                work = self.processes.retire(command.worker_id)
                self.background.spawn(work, name=f"retire-{command.worker_id}")
            case KillWorker():
                self.processes.kill(command.worker_id)
            case AnnounceLease():
                self._announce(command.lease_id)
            case RefuseLease():
                waiting = self._waiting.pop(command.lease_id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_exception(error_for(command.code, command.message))
            case _:
                assert_never(command)

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
        process = self.processes.living.get(told.worker_id)
        if worker is None or process is None:
            return
        one = self._forensics(told, worker, process)
        self.logs.end(told.worker_id)
        self.processes.forget(told.worker_id)
        for owner_id in _owner_ids(worker):
            self.objects.free_owner(owner_id)
        cause = "\n".join((one.cause, *one.last_log_lines[-10:]))
        self.dispatch(WorkerExited(at_s=time.monotonic(), worker_id=told.worker_id, cause=cause))
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
            node_id=self.processes.identity.node_id,
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


def _owner_ids(worker: CoreWorker) -> set[str]:
    peer = {worker.address.peer_id} if worker.address else set()
    return peer | {worker.worker_id}


def _retrieved(waiting: asyncio.Future[StartedLease]) -> None:
    """A refusal that nobody waits for any more is no crash."""
    if not waiting.cancelled():
        waiting.exception()
