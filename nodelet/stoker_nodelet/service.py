"""Puts a nodelet together and runs it: ``serve`` returns once it listens.

Called by ``__main__`` and by the composition root. The order matters: the fork server first (it
imports while the rest starts), then the folders and sockets, then the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from stoker_nodelet import devices
from stoker_nodelet.api import Api
from stoker_nodelet.core import Policy, State
from stoker_nodelet.environments.environments import Environments
from stoker_nodelet.environments.job_folders import JobFolders
from stoker_nodelet.identity import Identity
from stoker_nodelet.kernels.cache import KernelCache, open_cache
from stoker_nodelet.kernels.compiler import Kernels
from stoker_nodelet.kernels.tuning_tables import TunedTables
from stoker_nodelet.membership import Membership
from stoker_nodelet.objects import arena
from stoker_nodelet.objects.eviction import Space, prepare
from stoker_nodelet.telemetry.driver_reports import Jobs
from stoker_nodelet.telemetry.exits import Exits
from stoker_nodelet.telemetry.logs import Logs
from stoker_nodelet.telemetry.oom_guard import MemoryGuard
from stoker_nodelet.telemetry.task_spool import Spool
from stoker_nodelet.transfer import Transfer
from stoker_nodelet.workers.fork_client import ForkServers
from stoker_nodelet.workers.forkserver import DEFAULT_TARGET, ForkServerHandle, start_forkserver
from stoker_nodelet.workers.workers import Workers
from stoker_wire.http.client import Client
from stoker_wire.http.server import Service
from stoker_wire.ids import Prefix, new_id
from stoker_wire.messages.cluster import Device, RegisterNode, WorkerExit, WorkersExited
from stoker_wire.process.background import Background
from stoker_wire.process.host_identity import host_id
from stoker_wire.version import VERSION

if TYPE_CHECKING:
    from stoker_wire.settings import Settings

_TICK_S = 0.5
_STOP_S = 2.0
_REPORT_S = 5.0


@dataclass(slots=True)
class Running:
    """A nodelet that listens."""

    service: Service
    workers: Workers
    membership: Membership
    space: Space
    transfer: Transfer
    spool: Spool
    exits: Exits
    forks: ForkServers
    gcs: Client
    background: Background

    @property
    def url(self) -> str:
        return self.service.url

    @property
    def identity(self) -> Identity:
        return self.workers.processes.identity

    @property
    def node_id(self) -> str:
        return self.identity.node_id

    def begin(self, forkserver: ForkServerHandle) -> None:
        """Start to work: the service listens, so this node's URL is known."""
        url = self.service.url
        self.transfer.listens_at(url)
        self.spool.open()
        self.workers.processes.identity = replace(self.identity, url=url)
        self.membership.registration = structs.replace(self.membership.registration, url=url)
        self.forks.adopt(forkserver)
        for name, work in (
            ("kernels", self.workers.kernels.run()),
            ("membership", self.membership.run()),
            ("watch", self.membership.watch()),
            ("exits", self.exits.run()),
            ("spool", self.spool.run()),
            ("space", self.space.run()),
            ("memory", MemoryGuard(self.workers).run()),
            ("ticks", _tick(self.workers)),
            ("folders", self.workers.sweep_folders()),
        ):
            self.background.spawn(work, name=name)

    async def joined(self, timeout_s: float = 30.0) -> None:
        """Wait until the gcs knows this node."""
        async with asyncio.timeout(timeout_s):
            await self.membership.joined.wait()

    async def stop(self) -> None:
        """Leave the cluster, kill the workers, and remove what lies in memory and sockets."""
        self.service.ready(False)
        self.workers.leave()
        await self.membership.leave()
        await self.forks.stop()
        # From here on nobody else flushes: two at once would count a batch twice.
        await self.background.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await self.exits.flush()
        await self.spool.close(_STOP_S)
        await self.service.stop(grace_s=0.5)
        await self.transfer.close()
        await self.gcs.close()
        self.space.arena.close()
        arena.remove_owned(self.identity.arena_dir)
        if self.identity.socket_dir.parent == arena.SOCKETS:
            arena.remove_owned(self.identity.socket_dir)


async def serve(
    settings: Settings,
    *,
    token: str,
    gcs_url: str,
    host: str = "127.0.0.1",
    port: int = 0,
    session_dir: Path,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    memory: int | None = None,
    resources: dict[str, float] | None = None,
    labels: dict[str, str] | None = None,
    forkserver: ForkServerHandle | None = None,
    target: str = DEFAULT_TARGET,
    node_id: str | None = None,
) -> Running:
    """Start a nodelet on ``host``:``port`` (0: a free one) that joins the gcs at ``gcs_url``.

    ``num_cpus``, ``num_gpus`` and ``memory`` (bytes) default to the settings, then to what the
    machine has. ``forkserver`` is one that was started earlier; ``target`` what workers run.
    """
    node_id = node_id or new_id(Prefix.NODE)
    session_dir, socket_dir = _make_folders(session_dir, node_id)
    kernel_cache = open_cache(settings, session_dir)
    if forkserver is None:
        forkserver = start_forkserver(
            target=target, log_path=session_dir / "logs" / f"forkserver-{node_id}.log"
        )
    arena_dir = arena.arena_path(session_dir, node_id)
    arena.sweep()
    arena.sweep(arena.SOCKETS, "stoker-sock-*")
    arena.create_owned(arena_dir)
    space = prepare(
        arena_dir,
        node_id,
        settings,
        spill_dir=Path(settings.spill_dir or session_dir / "spill") / arena_dir.name,
        limit_bytes=settings.arena_max_bytes or int(devices.memory_limit_bytes() * 0.3),
    )

    num_gpus = settings.num_gpus if num_gpus is None else num_gpus
    found = devices.find_devices(num_gpus, settings.fake_gpus)
    identity = Identity(
        node_id=node_id,
        host_id=host_id(),
        url="",
        unix=str(socket_dir / f"{node_id}.sock"),
        gcs_url=gcs_url,
        token=token,
        session_dir=session_dir,
        arena_dir=arena_dir,
        socket_dir=socket_dir,
        fake_gpus=any(device.fake for device in found),
        triton_dir=str(kernel_cache.triton_dir),
    )
    registration = RegisterNode(
        node_id=node_id,
        url="",
        unix=identity.unix,
        hostname=socket.gethostname(),
        host_id=identity.host_id,
        pid=os.getpid(),
        resources=_offered(settings, num_cpus, memory, resources, found),
        devices=found,
        labels={**devices.accelerator_labels(found), **settings.labels, **(labels or {})},
        version=VERSION,
        arena_dir=str(arena_dir),
        session_dir=str(session_dir),
    )
    running = _assemble(settings, identity, registration, forkserver.target, space, kernel_cache)
    try:
        await running.service.start(host, port, identity.unix)
    except BaseException:
        forkserver.sock.close()
        arena.remove_owned(arena_dir)
        raise
    running.begin(forkserver)
    return running


def _assemble(
    settings: Settings,
    identity: Identity,
    registration: RegisterNode,
    target: str,
    space: Space,
    kernel_cache: KernelCache,
) -> Running:
    """Make all parts and routes; nothing runs yet."""
    node_id = identity.node_id
    service = Service("nodelet", settings, token=identity.token)
    gcs = Client(
        identity.gcs_url, token=identity.token, peer=f"nodelet {node_id}", settings=settings
    )
    background = Background(f"nodelet-{node_id}")
    state = State(
        policy=Policy(worker_idle_s=settings.worker_idle_s, warm_workers=settings.prestart_workers)
    )

    async def report_exits(exits: tuple[WorkerExit, ...]) -> None:
        body = WorkersExited(exits=exits, incarnation=state.incarnation)
        await gcs.call("POST", "/v1/workers/exited", body, timeout_s=_REPORT_S)

    async def report_tasks(frames: bytes) -> None:
        await gcs.call("POST", "/v1/tasks/spooled", frames, timeout_s=_REPORT_S)

    async def download(package: str) -> bytes:
        return await gcs.call("GET", f"/v1/packages/{package}", raw=True, timeout_s=120.0)

    logs = Logs(node_id)
    exits = Exits(report_exits)
    spool = Spool(identity.session_dir, node_id, report_tasks)
    forks = ForkServers(
        target,
        identity.log_dir,
        lambda told: workers.on_exit(told),
        background,
        (identity.arena_dir, identity.socket_dir),
    )
    folders = JobFolders(
        identity.session_dir / "jobs",
        settings.job_dir_keep_s,
        Path(settings.job_output_root).absolute() if settings.job_output_root else None,
    )
    workers = Workers(
        identity=identity,
        state=state,
        forks=forks,
        environments=Environments(
            identity.session_dir / "runtime_env", download, background, folders
        ),
        folders=folders,
        kernels=Kernels(
            cache=kernel_cache,
            tables=TunedTables(gcs, kernel_cache),
            devices={device.index: device for device in registration.devices},
            arch=settings.kernel_arch,
            timeout_s=settings.kernel_compile_timeout_s,
            background=background,
        ),
        exits=exits,
        logs=logs,
        objects=space.objects,
        jobs=Jobs(gcs, background),
        background=background,
    )
    space.is_over = lambda job_id, owner_id: (
        job_id in state.finished_jobs or exits.get(owner_id) is not None
    )
    transfer = Transfer(
        node_id, space, token=identity.token, settings=settings, gcs=gcs, background=background
    )
    Api(workers, exits, space.objects, logs, spool, space, transfer).add_to(service)

    def on_member(is_member: bool) -> None:
        service.ready(is_member)
        (workers.member.set if is_member else workers.member.clear)()

    membership = Membership(registration, gcs, workers, on_member)
    return Running(
        service, workers, membership, space, transfer, spool, exits, forks, gcs, background
    )


async def _tick(workers: Workers) -> None:
    while True:
        workers.tick()
        workers.logs.look()
        await asyncio.sleep(_TICK_S)


def _make_folders(session_dir: Path, node_id: str) -> tuple[Path, Path]:
    session_dir = session_dir.absolute()
    socket_dir = arena.socket_folder(session_dir, node_id)
    for folder in (session_dir, session_dir / "logs"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if socket_dir.parent == session_dir:
        socket_dir.mkdir(mode=0o700, exist_ok=True)
    else:
        arena.create_owned(socket_dir)
    return session_dir, socket_dir


def _offered(
    settings: Settings,
    num_cpus: float | None,
    memory: int | None,
    resources: dict[str, float] | None,
    found: tuple[Device, ...],
) -> dict[str, float]:
    num_cpus = settings.num_cpus if num_cpus is None else num_cpus
    memory = settings.memory if memory is None else memory
    offered = {
        "CPU": devices.usable_cpus() if num_cpus is None else num_cpus,
        "memory": float(devices.schedulable_memory_bytes() if memory is None else memory),
        **settings.resources,
        **(resources or {}),
    }
    if found:
        offered["GPU"] = float(len(found))
    return offered
