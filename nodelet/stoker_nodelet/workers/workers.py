"""Worker life cycle: fork, assign, retire, terminate, reap.

This is the shell around the lease machine: it owns the machine's state, turns messages, exits and time
into events of ``core``, and executes the commands that come back. Decisions are the core's alone; here
types of the wire become types of the core, and back.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, assert_never

from stoker_nodelet.core import (
    State,
    WorkerEntry,
    WorkerPhase,
    WorkKind,
    step,
)
from stoker_nodelet.core.commands import (
    AnnounceLease,
    AssignWorker,
    Command,
    ForkWorker,
    NotifyWorker,
    ReadGpus,
    RefuseLease,
    RefuseOrder,
    ReportGpus,
    RetireWorker,
    TerminateWorker,
)
from stoker_nodelet.core.events import (
    AttemptEnded,
    BundlesCommitted,
    BundlesRequested,
    CallbacksRegistered,
    Event,
    ForkFailed,
    GpuReleased,
    JobDeleted,
    JobFinished,
    LeaseRequested,
    LeasesReleased,
    LeasesStopped,
    NodeDrained,
    Ticked,
    WorkerExited,
    WorkerKillRequested,
    WorkerRegistered,
    WorkerSpent,
)
from stoker_nodelet.devices import limits
from stoker_nodelet.devices.isolation import Isolation
from stoker_nodelet.devices.signals import GpuSignals
from stoker_nodelet.environments.user_folders import UserFolders
from stoker_nodelet.identity import NO_ADDRESS, Identity
from stoker_nodelet.kernels.compiler import KernelCompiler
from stoker_nodelet.objects.index import ObjectIndex
from stoker_nodelet.telemetry.driver_reports import DriverReports
from stoker_nodelet.telemetry.exits import LOG_LINES, Exits, describe
from stoker_nodelet.telemetry.logs import Logs
from stoker_nodelet.telemetry.metrics.job_usage import JobUsage
from stoker_nodelet.telemetry.metrics.worker_counts import WorkerCounts
from stoker_nodelet.workers.containers import Containers, with_gpus
from stoker_nodelet.workers.fork_client import ForkExit, ForkServerPool
from stoker_nodelet.workers.launch_spec import LaunchSpec, terms_of
from stoker_nodelet.workers.processes import REPORTED_STATE, Process, Processes
from stoker_wire.errors import (
    ConflictError,
    NotFoundError,
    RuntimeEnvSetupError,
    StokerError,
    error_for,
)
from stoker_wire.ids import Prefix, new_id
from stoker_wire.messages.cluster import (
    HeldLease,
    HeldLeases,
    Lease,
    ReleaseLeases,
    StartedLease,
    StartLease,
    StopLeases,
    Worker,
    WorkerExit,
)
from stoker_wire.messages.groups import CommitBundles, CommittedBundles, HoldBundles
from stoker_wire.messages.node_api import HeldWork, RegisterWorker, WorkerSetup
from stoker_wire.process import process_tree
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from stoker_wire.messages.common import Address, MemoryUse
    from stoker_wire.messages.objects import ObjectInfo

_RELEASE_S = 5.0
_EXIT_S = 1.0
_EXIT_POLL_S = 0.02


@dataclass(slots=True)
class Workers:
    """The workers and drivers of this node.

    ``target`` is the function that forked workers run.
    """

    identity: Identity
    state: State
    target: InitVar[str]
    users: UserFolders
    kernels: KernelCompiler
    exits: Exits
    logs: Logs
    objects: ObjectIndex
    driver_reports: DriverReports
    background: Background
    containers: Containers | None = None
    isolation: InitVar[Isolation | None] = None
    forks: ForkServerPool = field(init=False)
    processes: Processes = field(init=False)
    member: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while this node is registered with the gcs, and from when it leaves."""
    leaving: bool = False
    counts: WorkerCounts = field(default_factory=WorkerCounts)
    usage: JobUsage = field(default_factory=lambda: JobUsage(0))
    gpus: GpuSignals = field(default_factory=GpuSignals)
    _waiting: dict[str, asyncio.Future[StartedLease]] = field(default_factory=dict)
    _bundles: dict[str, Lease] = field(default_factory=dict)
    _preparing: list[str] = field(default_factory=list)
    """Jobs of the leases whose environments are being built."""
    _ended_attempts: dict[str, int] = field(default_factory=dict)
    """The last attempt that was ended here, by job."""
    _oom_kills: int = field(default_factory=limits.oom_kills)

    def __post_init__(self, target: str, isolation: Isolation | None) -> None:
        identity = self.identity
        self.forks = ForkServerPool(
            target,
            identity.log_dir,
            self.on_exit,
            self.background,
            (identity.arena_dir, identity.socket_dir, self.users.root),
            isolation.without_gpus if isolation is not None else (),
            self.containers,
        )
        self.processes = Processes(
            identity,
            self.users,
            self.state,
            self.forks,
            self.logs,
            self.background,
            self.dispatch,
            isolation,
        )

    # Requests

    def leave(self) -> None:
        """Accept no more leases."""
        self.leaving = True
        self.member.set()

    async def end_in_order(self) -> None:
        """End the drivers, and whose code wants notice or saves a state; return when they have ended."""
        policy, at_s = self.state.policy, time.monotonic()
        saving = self.processes.saving()
        told = [
            worker_id
            for worker_id, worker in self.state.workers.items()
            if worker.has_callbacks or worker.kind is WorkKind.DRIVER or worker_id in saving
        ]
        for one in told:
            saves, reason = one in saving, "its node stops"
            end = WorkerKillRequested(
                at_s=at_s, worker_id=one, reason=reason, in_order=True, saves=saves
            )
            self.dispatch(end)
        until_s = at_s + policy.notice_grace_s + policy.term_grace_s + _EXIT_S
        while any(one in self.state.workers for one in told):
            if time.monotonic() > until_s:
                return
            await asyncio.sleep(_EXIT_POLL_S)

    async def start_lease(self, request: StartLease) -> StartedLease:
        """Return the worker for a lease; a repeated request returns the same one."""
        await self.member.wait()  # the scheduler may know of us before the gcs's reply is here
        try:
            if not self.leaving:
                return await self._start_lease(request)
        except StokerError:
            if not self.leaving:
                raise
        raise ConflictError(f"node {self.identity.node_id} is leaving the cluster")

    async def _start_lease(self, request: StartLease) -> StartedLease:
        wanted = request.worker.runtime_env
        job_id = request.lease.job_id
        user = await self.users.users.find(request.worker.run_as)
        folders = self.users.of(user)
        output_dir = folders.jobs.make_output_dir(job_id)
        self._preparing.append(job_id)
        try:
            environment = await folders.environments.prepare(wanted, job_id)
            if wanted.kernels and user is None:  # another user's code must not run to compile them
                environment = await self.kernels.prepare(wanted, environment, request.lease.gpus)
            environment = with_gpus(environment, request.lease, self.identity)
        finally:
            self._preparing.remove(job_id)
        folders.environments.track(environment)
        lease_id = request.lease.lease_id
        waiting = self._waiting.get(lease_id)
        if waiting is None:
            waiting = asyncio.get_running_loop().create_future()
            waiting.add_done_callback(_mark_retrieved)
            self._waiting[lease_id] = waiting
        self.processes.launches.setdefault(
            lease_id,
            LaunchSpec(request.lease, request.worker, environment, output_dir),
        )
        self.dispatch(
            LeaseRequested(
                at_s=time.monotonic(),
                lease=terms_of(request.lease),
                epoch=request.epoch,
                env_key=environment.key,
                applicable_after_fork=environment.applicable_after_fork,
                worker_id=new_id(Prefix.WORKER),
            )
        )
        return await asyncio.shield(waiting)

    async def hold_bundles(self, request: HoldBundles) -> None:
        """Hold bundles of a placement group, all or none."""
        await self.member.wait()
        if self.leaving:
            raise ConflictError(f"node {self.identity.node_id} is leaving the cluster")
        self.dispatch(
            BundlesRequested(
                at_s=time.monotonic(),
                leases=tuple(terms_of(lease) for lease in request.leases),
                epoch=request.epoch,
                prepare=request.prepare,
            )
        )
        self._bundles.update((lease.lease_id, lease) for lease in request.leases)

    def commit_bundles(self, request: CommitBundles) -> CommittedBundles:
        """Hold prepared bundles until they are released; return those that were not given up."""
        self.dispatch(BundlesCommitted(lease_ids=request.lease_ids, epoch=request.epoch))
        return CommittedBundles(
            lease_ids=tuple(i for i in request.lease_ids if i in self.state.bundles)
        )

    async def release(self, request: ReleaseLeases) -> None:
        """Release leases; return when the devices of their workers are free (or after 5 s)."""
        entries = [self.state.leases.get(lease_id) for lease_id in request.lease_ids]
        names = [entry.worker_id for entry in entries if entry is not None]
        gpus = {index for entry in entries if entry is not None for index in entry.terms.gpus}
        self.dispatch(
            LeasesReleased(
                at_s=time.monotonic(),
                lease_ids=request.lease_ids,
                epoch=request.epoch,
                kill=request.kill,
                reason=request.reason,
            )
        )
        ending = [
            self.processes.living[name].gpus_free
            for name in names
            if name in self.processes.living and self._holds_devices(name)
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RELEASE_S):
                for gpus_free in ending:
                    await gpus_free.wait()
                while self._are_left(gpus):
                    await self.gpus.wait_read()

    def _are_left(self, gpus: set[int]) -> bool:
        """Return whether the memory of some of the GPUs may not be free yet."""
        known = self.state.gpus
        return any(known[one].left_at_s is not None for one in gpus if one in known)

    def stop_leases(self, request: StopLeases) -> None:
        """Preempt leases: notice now, the end of their workers when the grace has passed."""
        self.dispatch(
            LeasesStopped(
                at_s=time.monotonic(),
                lease_ids=request.lease_ids,
                epoch=request.epoch,
                grace_s=request.grace_s,
                reason=request.reason,
            )
        )

    def _holds_devices(self, worker_id: str) -> bool:
        worker = self.state.workers.get(worker_id)
        phases = (WorkerPhase.TERMINATING, WorkerPhase.RETIRING)
        return worker is not None and worker.phase in phases and bool(worker.gpus)

    def register(self, request: RegisterWorker) -> WorkerSetup:
        """Accept a worker that is up; return its setup."""
        process = self.processes.living.get(request.worker_id)
        worker = self.state.workers.get(request.worker_id)
        if process is None or worker is None:
            raise NotFoundError(f"{request.worker_id} is not a worker of this node: it must exit")
        if worker.phase is WorkerPhase.TERMINATING:
            raise ConflictError(f"{request.worker_id} must exit: {worker.reason}")
        if worker.phase is WorkerPhase.STARTING:
            process.address = request.address
            self.counts.start_s.observe(time.monotonic() - worker.started_at_s)
        self.dispatch(
            WorkerRegistered(at_s=time.monotonic(), worker_id=request.worker_id, pid=request.pid)
        )
        return self.processes.setup_of(worker, process)

    def kill(
        self,
        worker_id: str,
        reason: str,
        *,
        memory: MemoryUse | None = None,
        in_order: bool = False,
    ) -> None:
        """End a worker and all that it started, with notice if ``in_order``; its exit will say ``reason``.

        With ``memory`` it is ended for want of it.
        """
        if worker_id not in self.state.workers:
            if self.exits.get(worker_id) is None:
                raise NotFoundError(f"{worker_id} is not a worker of this node")
            return
        if memory is not None and worker_id in self.processes.living:
            self.processes.living[worker_id].memory = memory
        self.dispatch(
            WorkerKillRequested(
                at_s=time.monotonic(), worker_id=worker_id, reason=reason, in_order=in_order
            )
        )

    def release_gpu(self, index: int) -> None:
        """Put a quarantined GPU back to use."""
        gpu = self.state.gpus.get(index)
        if gpu is None or not gpu.quarantine:
            raise NotFoundError(
                f"GPU {index} of {self.identity.node_id} is not quarantined: there is nothing to release"
            )
        self.dispatch(GpuReleased(at_s=time.monotonic(), index=index))

    def mark_spent(self, worker_id: str) -> None:
        """Give a worker no other lease: it takes no more calls."""
        self.dispatch(WorkerSpent(worker_id=worker_id))

    def mark_callbacks(self, worker_id: str) -> None:
        """Give a worker notice before its end: its code has something to save."""
        self.dispatch(CallbacksRegistered(worker_id=worker_id))

    def finish_job(self, job_id: str) -> None:
        """End the processes of a finished job and free its objects."""
        self.dispatch(JobFinished(at_s=time.monotonic(), job_id=job_id))
        self.objects.free_job(job_id, keep_owners=self._actor_owners())
        self.users.ended(job_id)
        self._ended_attempts.pop(job_id, None)

    def end_attempt(self, job_id: str, attempt: int) -> None:
        """End what an attempt of a job has left here, unless that was done before."""
        if attempt > self._ended_attempts.get(job_id, 0):
            self._ended_attempts[job_id] = attempt
            self.dispatch(AttemptEnded(at_s=time.monotonic(), job_id=job_id))
            self.objects.free_job(job_id, keep_owners=self._actor_owners())

    def forget_job(self, job_id: str) -> None:
        """Forget a job that is deleted: another may have its id."""
        self.dispatch(JobDeleted(job_id=job_id))

    def jobs_here(self) -> set[str]:
        """Return the jobs that have a process or a lease here, or are about to."""
        workers = {worker.job_id for worker in self.state.workers.values()}
        leases = {entry.terms.job_id for entry in self.state.leases.values()}
        return workers | leases | set(self._preparing)

    def has_ended(self, one: ObjectInfo) -> bool:
        """Return whether an object is of a job that has ended, and of no actor that lives on."""
        return one.job_id in self.state.finished_jobs and one.owner_id not in self._actor_owners()

    def _actor_owners(self) -> set[str]:
        owners = set()
        for worker in self.state.workers.values():
            if worker.kind is WorkKind.ACTOR and worker.lease_id:
                owners |= self._owner_ids(worker.worker_id)
        return owners

    def tick(self) -> None:
        """Let time pass: idle workers retire, a fresh one is forked ahead of need."""
        ids = tuple(new_id(Prefix.WORKER) for _ in range(self.state.policy.warm_workers))
        self.dispatch(Ticked(at_s=time.monotonic(), worker_ids=ids))

    def drained(self) -> HeldWork:
        """Keep no worker for work to come; return what is still here. Objects are counted by others."""
        self.dispatch(NodeDrained(at_s=time.monotonic()))
        return HeldWork(
            leases=self.held_leases().leases,
            workers=tuple(
                worker.worker_id
                for worker in self.state.workers.values()
                if worker.phase is not WorkerPhase.TERMINATING
                and not worker.fresh
                and not worker.lease_id
            ),
        )

    async def move(self, worker_id: str, reason: str) -> None:
        """Have an actor's worker finish what runs and end, to be started again elsewhere."""
        if worker_id not in self.state.workers:
            raise NotFoundError(f"{worker_id} is not a worker of this node")
        await self.processes.move(worker_id, reason)

    def held_leases(self) -> HeldLeases:
        """Return all leases, for a scheduler that rebuilds its view."""
        leases = [
            HeldLease(
                lease=self._bundles[lease_id],
                worker_id="",
                address=NO_ADDRESS,
                pid=0,
                prepared=bundle.prepared_at_s is not None,
            )
            for lease_id, bundle in self.state.bundles.items()
        ]
        for lease_id, entry in self.state.leases.items():
            worker = self.state.workers.get(entry.worker_id)
            leases.append(
                HeldLease(
                    lease=self.processes.launches[lease_id].lease,
                    worker_id=entry.worker_id,
                    address=self._address_of(entry.worker_id),
                    pid=worker.pid if worker else 0,
                )
            )
        return HeldLeases(
            node_id=self.identity.node_id,
            incarnation=self.state.incarnation,
            leases=tuple(leases),
        )

    def describe(self, worker: WorkerEntry) -> Worker:
        """Return a worker as the API lists it."""
        return Worker(
            worker_id=worker.worker_id,
            node_id=self.identity.node_id,
            pid=worker.pid,
            state=REPORTED_STATE[worker.phase],
            lease_id=worker.lease_id,
            job_id=worker.job_id,
            actor_id=worker.actor_id,
            started_at_s=time.time() - (time.monotonic() - worker.started_at_s),
            rss_bytes=process_tree.rss_bytes(worker.pid) if worker.pid else 0,
        )

    # Commands

    def dispatch(self, event: Event) -> None:
        """Step the lease machine and execute its commands; StokerError for an order that it refuses."""
        for command in step(self.state, event):
            self._execute(command)
        if len(self.processes.launches) > len(self.state.leases):
            self.processes.launches = {
                k: v for k, v in self.processes.launches.items() if k in self.state.leases
            }
        if len(self._bundles) > len(self.state.bundles):
            self._bundles = {k: v for k, v in self._bundles.items() if k in self.state.bundles}

    def _execute(self, command: Command) -> None:
        match command:
            case ForkWorker():
                self.counts.starts += 1
                work = self.processes.fork(
                    command.worker_id, self.processes.launches.get(command.lease_id)
                )
                self.background.spawn(work, name=f"fork-{command.worker_id}")
            case AssignWorker():
                work = self.processes.assign(command.worker_id, command.lease_id)
                self.background.spawn(work, name=f"assign-{command.worker_id}")
            case RetireWorker():
                work = self.processes.retire(command.worker_id)
                self.background.spawn(work, name=f"retire-{command.worker_id}")
            case NotifyWorker():
                work = self.processes.notify(command)
                self.background.spawn(work, name=f"notice-{command.worker_id}")
            case TerminateWorker():
                self.processes.terminate(command.worker_id, force=command.force)
            case AnnounceLease():
                self._announce(command.lease_id)
            case RefuseLease():
                waiting = self._waiting.pop(command.lease_id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_exception(error_for(command.code, command.message))
            case ReadGpus():
                self.gpus.wanted.set()
            case ReportGpus():
                self.gpus.to_report.set()
            case RefuseOrder():
                # The only command of its step, which the request has made that is to be answered.
                raise error_for(command.code, command.message)
            case _:
                assert_never(command)

    def _announce(self, lease_id: str) -> None:
        waiting = self._waiting.pop(lease_id, None)
        entry = self.state.leases.get(lease_id)
        if waiting is None or waiting.done() or entry is None:
            return
        worker = self.state.workers[entry.worker_id]
        address = self._address_of(worker.worker_id)
        waiting.set_result(
            StartedLease(worker_id=worker.worker_id, address=address, pid=worker.pid)
        )

    def _address_of(self, worker_id: str) -> Address:
        process = self.processes.living.get(worker_id)
        return (process and process.address) or NO_ADDRESS

    def _owner_ids(self, worker_id: str) -> set[str]:
        """Return the ids under which a worker owns objects: its own, and its runtime's."""
        process = self.processes.living.get(worker_id)
        peer = {process.address.peer_id} if process and process.address else set()
        return peer | {worker_id}

    # Exits

    def on_exit(self, fork_exit: ForkExit) -> None:
        """Reap a worker: forensics, events, its log, its socket and its objects."""
        worker_id = fork_exit.worker_id
        worker = self.state.workers.get(worker_id)
        process = self.processes.living.get(worker_id)
        if worker is None or process is None:
            return
        log = self.logs.get(worker_id)
        worker_exit = self._forensics(fork_exit, worker, process)
        self.counts.ended(worker_exit)
        self.usage.ended(worker, fork_exit.cpu_s)
        owner_ids = self._owner_ids(worker_id)
        self.logs.end(worker_id)
        self.processes.remove(worker_id)
        for owner_id in owner_ids:
            self.objects.free_owner(owner_id)
        cause = "\n".join((worker_exit.cause, *worker_exit.last_log_lines[-10:]))
        if worker.phase is WorkerPhase.STARTING and process.cannot_start(worker_exit):
            code, reason = RuntimeEnvSetupError.code, f"its worker cannot start\n{cause}"
            self.dispatch(ForkFailed(worker_id=worker_id, reason=reason, code=code))
        else:
            self.dispatch(WorkerExited(at_s=time.monotonic(), worker_id=worker_id, cause=cause))
        self.exits.add(worker_exit)
        if log is not None and log.attempt:
            self.driver_reports.report_exit(worker_exit, log.attempt)

    def _forensics(self, fork_exit: ForkExit, worker: WorkerEntry, process: Process) -> WorkerExit:
        oom = process.memory is not None
        preempted = worker.stop is not None and worker.stop.preempted and not oom
        ending = worker.phase is WorkerPhase.TERMINATING or preempted
        expected = ending and not oom
        killed_for = worker.reason if ending else ""
        kernel_oom = False
        if fork_exit.status == signal.SIGKILL and not killed_for:
            count = limits.oom_kills()
            kernel_oom, self._oom_kills = count > self._oom_kills, count
        how = describe(fork_exit.status, killed_for=killed_for, kernel_oom=kernel_oom)
        return WorkerExit(
            worker_id=fork_exit.worker_id,
            node_id=self.identity.node_id,
            job_id=worker.job_id,
            lease_id=worker.lease_id,
            actor_id=worker.actor_id,
            pid=fork_exit.pid,
            exit_code=how.exit_code,
            signal=how.signal,
            oom=oom or kernel_oom,
            expected=expected,
            preempted=preempted,
            peak_rss_bytes=fork_exit.peak_rss_bytes,
            at_s=time.time(),
            cause=how.cause,
            last_log_lines=self.logs.tail(fork_exit.worker_id, LOG_LINES),
            memory=process.memory,
            overdue=self.processes.overdue_task(fork_exit.worker_id),
        )


def _mark_retrieved(waiting: asyncio.Future[StartedLease]) -> None:
    """Note a refusal that nobody awaits any longer: asyncio would log it as a crash."""
    if not waiting.cancelled():
        waiting.exception()
