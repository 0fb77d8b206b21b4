"""The living processes of a node: the lease machine's commands applied to them, one at a time.

Owned by ``Workers``, which alone calls it. Outcomes go back to the lease machine as events through
``dispatch``; nothing is decided here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stoker_nodelet.core import Rung, State, WorkerEntry, WorkerPhase
from stoker_nodelet.core.events import (
    AssignFailed,
    Event,
    ForkFailed,
    RetireAnswered,
    StopAnswered,
    WorkerAssigned,
    WorkerForked,
    WorkerKillRequested,
)
from stoker_nodelet.devices import limits
from stoker_nodelet.devices.isolation import Isolation
from stoker_nodelet.environments.user_folders import UserFolders
from stoker_nodelet.identity import Identity
from stoker_nodelet.telemetry.logs import LogFile, Logs
from stoker_nodelet.workers.exec_worker import CANNOT_START
from stoker_nodelet.workers.fork_client import ForkServer, ForkServerPool
from stoker_nodelet.workers.launch_spec import LaunchSpec, driver_fork, worker_fork
from stoker_wire.data.output_marks import KEY_BYTES
from stoker_wire.errors import (
    ConflictError,
    NotFoundError,
    RuntimeEnvSetupError,
    StokerError,
    UnavailableError,
)
from stoker_wire.http.auth import write_private
from stoker_wire.http.client.client import Client
from stoker_wire.messages.cluster import WorkerState
from stoker_wire.messages.common import Address, Empty, MemoryUse
from stoker_wire.messages.node_api import MoveWorker, StopNotice, StopReply, WorkerSetup
from stoker_wire.process.background import Background
from stoker_wire.process.call_deadline import CallDeadline, cell_path, read_deadline

if TYPE_CHECKING:
    from stoker_nodelet.core.commands import NotifyWorker
    from stoker_wire.messages.cluster import WorkerExit

_ASSIGN_S = 10.0
_RETIRE_S = 5.0
_NOTICE_MARGIN_S = 5.0

REPORTED_STATE = {
    WorkerPhase.STARTING: WorkerState.STARTING,
    WorkerPhase.IDLE: WorkerState.IDLE,
    WorkerPhase.LEASED: WorkerState.LEASED,
    WorkerPhase.RETIRING: WorkerState.IDLE,
    WorkerPhase.TERMINATING: WorkerState.DEAD,
}
"""What a worker is in a list of workers."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Process:
    """One worker's process: the facts that the lease machine does not need."""

    server: ForkServer
    log_path: Path
    socket_path: Path | None = None
    launch: LaunchSpec | None = None
    own_token: str = ""
    """The one that it was started with, by which it and this nodelet know each other until its end."""
    served: LaunchSpec | None = None
    """What it was assigned last: it acts for that job, also when it has no lease any more."""
    job_token: str = ""
    """The token of that job which it is known to have."""
    token_file: Path | None = None
    """Where the driver of a submitted job finds that; a worker is told."""
    client: Client | None = None
    address: Address | None = None
    """The address at which the worker listens; a driver has none."""
    pid: int = 0
    in_container: bool = False
    """The engine decides then which GPUs it may open."""
    memory: MemoryUse | None = None
    """The memory as it was when this was ended for want of it."""
    overdue: CallDeadline | None = None
    """The call with a ``timeout`` for which this was ended."""
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    gpus_free: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it holds no GPU any longer: it has exited, or stays without them."""

    def cannot_start(self, worker_exit: WorkerExit) -> bool:
        """Return whether a worker with an interpreter of its own says that no other would start."""
        alone = self.launch is not None and self.launch.environment.user is not None
        return alone and worker_exit.exit_code == CANNOT_START


@dataclass(slots=True)
class Processes:
    """The living processes of this node, by worker id; ``launches`` has one entry per lease held."""

    identity: Identity
    users: UserFolders
    state: State
    forks: ForkServerPool
    logs: Logs
    background: Background
    dispatch: Callable[[Event], object]
    isolation: Isolation | None = None
    living: dict[str, Process] = field(default_factory=dict)
    launches: dict[str, LaunchSpec] = field(default_factory=dict)

    async def fork(self, worker_id: str, launch: LaunchSpec | None) -> None:
        """Start the process of a launch, or a fresh worker."""
        identity = self.identity
        mark_key = b""  # a driver marks nothing
        own_token = identity.tokens.worker(worker_id)
        try:
            environment = launch.environment if launch is not None else None
            user = environment.user if environment is not None else None
            token_file, socket_path = None, None
            if launch is not None and launch.spec.driver is not None:
                token_file = identity.token_file(worker_id)
                if user is not None:
                    token_file = self.users.token_file(user, worker_id)
                request = driver_fork(identity, worker_id, launch, token_file=token_file)
            else:
                mark_key = os.urandom(KEY_BYTES)
                request = worker_fork(
                    identity, worker_id, launch, token=own_token, mark_key=mark_key
                )
                socket_path = identity.socket_path(worker_id)
            if user is not None:
                environment = None  # no code of another user's runs in a fork server
            container = environment.container if environment is not None else None
            if self.isolation is not None and container is None:
                cgroup = self.isolation.add(worker_id, launch.lease.gpus if launch else ())
                request = replace(request, cgroup=cgroup)
            server = self.forks.get(
                environment.python if environment else identity.python,
                environment.preload if environment else (),
                container,
            )
            log_path = Path(request.log_path)
            process = Process(server, log_path, socket_path, launch, own_token)
            process.in_container = container is not None
            if token_file is not None and launch is not None:
                process.served, process.job_token = launch, launch.token(identity)
                process.token_file = token_file
                write_private(token_file, f"{process.job_token}\n")
            self.living[worker_id] = process
            self._add_log(worker_id, log_path, launch, mark_key)
            pid = await server.fork(request)
        except (StokerError, OSError) as error:
            self.remove(worker_id)
            code = error.code if isinstance(error, RuntimeEnvSetupError) else "worker_died"
            self.dispatch(ForkFailed(worker_id=worker_id, reason=str(error), code=code))
            return
        process.pid = pid
        log = self.logs.get(worker_id)
        if log is not None:
            log.pid = pid
        self.dispatch(WorkerForked(at_s=time.monotonic(), worker_id=worker_id, pid=pid))
        worker = self.state.workers.get(worker_id)
        if worker is not None and worker.phase is WorkerPhase.TERMINATING:
            self.terminate(worker_id, force=worker.stop is None or worker.stop.rung is Rung.KILL)

    def _add_log(
        self, worker_id: str, path: Path, launch: LaunchSpec | None, mark_key: bytes
    ) -> None:
        log = LogFile(worker_id, path, mark_key=mark_key)
        if launch is not None:
            log.job_id = launch.lease.job_id
            log.name = launch.name
            log.attempt = launch.spec.driver.attempt if launch.spec.driver is not None else 0
        self.logs.add(log)

    async def assign(self, worker_id: str, lease_id: str) -> None:
        """Tell a worker of the pool which lease it serves from now on."""
        worker = self.state.workers.get(worker_id)
        process = self.living.get(worker_id)
        launch = self.launches.get(lease_id)
        try:
            if worker is None or process is None or launch is None:
                raise UnavailableError(f"{worker_id} is gone")
            process.launch = None  # the environment was not applied by the fork
            setup = self.setup_of(worker, process)
            client = self.client_of(process)
            await client.call("POST", "/v1/assign", setup, reply=Empty, timeout_s=_ASSIGN_S)
            process.job_token = setup.token
        except StokerError as error:
            reason = f"{worker_id} did not accept {lease_id}: {error}"
            self.dispatch(
                AssignFailed(
                    at_s=time.monotonic(), worker_id=worker_id, lease_id=lease_id, reason=reason
                )
            )
            return
        self.dispatch(WorkerAssigned(worker_id=worker_id, lease_id=lease_id))

    def setup_of(self, worker: WorkerEntry, process: Process) -> WorkerSetup:
        """Return the setup of a worker; with the environment only if its fork did not apply it."""
        launch = self.launches.get(worker.lease_id)
        late = launch is not None and process.launch is None
        log = self.logs.get(worker.worker_id)
        if launch is not None and log is not None:
            log.job_id = launch.lease.job_id
            log.name = launch.name
        if launch is not None and self.isolation is not None and not process.in_container:
            self.isolation.grant(worker.worker_id, worker.gpus)
        environment = launch.environment if launch is not None and late else None
        token = launch.token(self.identity) if launch else ""
        if launch is not None:
            process.served, process.job_token = launch, token
        return WorkerSetup(
            worker_id=worker.worker_id,
            node_id=self.identity.node_id,
            token=token,
            lease=launch.lease if launch else None,
            actor=launch.spec.actor if launch else None,
            runtime_env=launch.spec.runtime_env if launch else None,
            capture_child_tasks=launch.spec.capture_child_tasks if launch else False,
            arena_dir=str(self.identity.arena_dir),
            env_vars=launch.variables(self.identity) if launch is not None and late else {},
            sys_path=environment.sys_path if environment else (),
            cwd=environment.cwd if environment else "",
        )

    async def retire(self, worker_id: str) -> None:
        """Ask a worker without a lease to leave; it stays while others need what it owns."""
        process = self.living.get(worker_id)
        if process is None:
            return
        try:
            client = self.client_of(process)
            await client.call("POST", "/v1/retire", reply=Empty, timeout_s=_RETIRE_S)
            leaves, uses_gpus = True, False
        except ConflictError as error:
            leaves = False
            runs = bool(error.extra.get("runs"))
            # In this order: what it has not opened by then, it cannot open any more.
            uses_gpus = runs or not self._revoke(worker_id) or limits.in_use(process.pid)
        except StokerError as error:
            if worker_id in self.state.workers:
                reason = f"idle, and it does not answer: {error}"
                self.dispatch(
                    WorkerKillRequested(at_s=time.monotonic(), worker_id=worker_id, reason=reason)
                )
            return
        self.dispatch(
            RetireAnswered(
                at_s=time.monotonic(), worker_id=worker_id, leaves=leaves, uses_gpus=uses_gpus
            )
        )
        worker = self.state.workers.get(worker_id)
        if worker is not None and not worker.gpus:
            process.gpus_free.set()

    def _revoke(self, worker_id: str) -> bool:
        """Let a worker open no GPU any more, where GPUs are isolated; return whether that is so."""
        try:
            if self.isolation is not None:  # which refuses it for one in a container
                self.isolation.grant(worker_id, ())
        except StokerError as error:
            _log.warning("%s keeps its GPUs, and is ended: %s", worker_id, error)
            return False
        return True

    def client_of(self, process: Process) -> Client:
        """Return the client of a worker's own API."""
        if process.client is None:
            process.client = Client(
                "http://localhost",
                token=process.own_token,
                peer="nodelet",
                unix_path=str(process.socket_path),
            )
        return process.client

    async def notify(self, command: NotifyWorker) -> None:
        """Give a worker notice of its end; say so when it has run its stop callbacks."""
        worker_id, process = command.worker_id, self.living.get(command.worker_id)
        if process is None:
            return
        notice = StopNotice(
            lease_id=command.lease_id,
            grace_s=command.grace_s,
            reason=command.reason,
            saves=command.saves,
        )
        try:
            reply = await self.client_of(process).call(
                "POST",
                "/v1/notice",
                notice,
                reply=StopReply,
                timeout_s=command.grace_s + _NOTICE_MARGIN_S,
                retry=False,
            )
        except StokerError as error:
            _log.info("%s does not answer its notice: %s", worker_id, error)
            return  # it ends at its time all the same
        self.dispatch(
            StopAnswered(
                at_s=time.monotonic(),
                worker_id=worker_id,
                lease_id=command.lease_id,
                callbacks=reply.callbacks,
            )
        )

    def saving(self) -> set[str]:
        """Return the workers that host an actor which saves its state, and have begun to."""
        leases = {
            lease_id
            for lease_id, launch in self.launches.items()
            if launch.spec.actor is not None and launch.spec.actor.saves_state
        }
        leased = [w for w in self.state.workers.values() if w.phase is WorkerPhase.LEASED]
        return {one.worker_id for one in leased if one.lease_id in leases}

    async def move(self, worker_id: str, reason: str) -> None:
        """Ask an actor's worker to end in order; ConflictError if it hosts none that has started."""
        process = self.living.get(worker_id)
        if process is None:
            raise NotFoundError(f"{worker_id} does not run on this node")
        await self.client_of(process).call(
            "POST", "/v1/move", MoveWorker(reason=reason), reply=Empty, timeout_s=_ASSIGN_S
        )

    def terminate(self, worker_id: str, *, force: bool) -> None:
        """Tell a worker and its descendants to end, or with ``force`` end them."""
        process = self.living.get(worker_id)
        if process is not None:
            process.server.signal(worker_id, signal.SIGKILL if force else signal.SIGTERM)

    def overdue_task(self, worker_id: str) -> str:
        """Return the call for which a process that has exited was ended, if it was still running that."""
        overdue = self.living[worker_id].overdue
        if overdue is None or overdue != read_deadline(
            cell_path(self.identity.arena_dir, worker_id)
        ):
            return ""
        return overdue.task_id

    def remove(self, worker_id: str) -> None:
        """Drop a process that has exited, with its socket and its client."""
        process = self.living.pop(worker_id, None)
        if self.isolation is not None:
            self.isolation.remove(worker_id)
        if process is None:
            return
        process.exited.set()
        process.gpus_free.set()
        if process.socket_path is not None:
            process.socket_path.unlink(missing_ok=True)
        if process.token_file is not None:
            process.token_file.unlink(missing_ok=True)
        cell_path(self.identity.arena_dir, worker_id).unlink(missing_ok=True)
        if process.client is not None:
            self.background.close_later(process.client.close(), name=worker_id)
