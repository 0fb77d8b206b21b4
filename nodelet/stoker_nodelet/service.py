"""The composition root of a nodelet: ``serve`` makes all parts, listens, and joins the cluster.

Called by ``__main__`` and by the composition root of a local cluster. Every part gets what it needs by
its constructor, in the order of the builders below; none is replaced afterwards. The order in
``serve`` matters: the fork server first (it imports while the rest starts), then folders and sockets,
then the cluster, which is told the URL (see ``Endpoint``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from stoker_nodelet import api, transfer
from stoker_nodelet.core import Policy, State
from stoker_nodelet.core.memory import Watermarks
from stoker_nodelet.core.state import GpuEntry
from stoker_nodelet.devices import limits
from stoker_nodelet.devices.discovery import find_gpus
from stoker_nodelet.devices.isolation import (
    Isolation,
    IsolationVerdict,
    find_isolation,
    remove_cgroups,
)
from stoker_nodelet.devices.memory import limited_cgroups, node_memory
from stoker_nodelet.devices.monitor import GpuMonitor
from stoker_nodelet.environments import user_folders
from stoker_nodelet.environments.build_reports import BuildReports
from stoker_nodelet.environments.environments import Environments
from stoker_nodelet.environments.images import Images
from stoker_nodelet.environments.job_folders import JobFolders
from stoker_nodelet.environments.retention import EnvironmentRetention
from stoker_nodelet.identity import Endpoint, Identity, Offer
from stoker_nodelet.kernels.cache import KernelCache, open_cache
from stoker_nodelet.kernels.compiler import KernelCompiler
from stoker_nodelet.kernels.tuning_tables import TuningTables
from stoker_nodelet.membership import Membership
from stoker_nodelet.objects import arena
from stoker_nodelet.objects.detached import DetachedCopies
from stoker_nodelet.objects.eviction import ArenaEvictor, create_arena
from stoker_nodelet.profiles import api as profiles
from stoker_nodelet.telemetry.driver_reports import DriverReports
from stoker_nodelet.telemetry.exits import Exits
from stoker_nodelet.telemetry.log_retention import LogRetention
from stoker_nodelet.telemetry.logs import Logs
from stoker_nodelet.telemetry.memory_monitor import MemoryMonitor
from stoker_nodelet.telemetry.metrics.job_usage import JobUsage
from stoker_nodelet.telemetry.metrics.node import NodeMetrics
from stoker_nodelet.telemetry.program_metrics import ProgramMetrics
from stoker_nodelet.telemetry.task_spool import TaskSpool
from stoker_nodelet.unix_users import UnixUser, UnixUsers, check_default
from stoker_nodelet.workers.containers import Containers
from stoker_nodelet.workers.deadlines import Deadlines
from stoker_nodelet.workers.forkserver import DEFAULT_TARGET, ForkServerHandle, start_forkserver
from stoker_nodelet.workers.token_renewals import TokenRenewals
from stoker_nodelet.workers.workers import Workers
from stoker_wire.constraints.label_selectors import ADDRESS_LABEL, NODE_ID_LABEL
from stoker_wire.constraints.taints import taints_of_setting
from stoker_wire.errors import ConflictError, NotFoundError
from stoker_wire.http.auth import private_dir
from stoker_wire.http.client.client import Client
from stoker_wire.http.server.service import Service
from stoker_wire.ids import Prefix, new_id
from stoker_wire.messages.cluster import Device, Node, RegisterNode, WorkerExit, WorkersExited
from stoker_wire.messages.common import Role
from stoker_wire.messages.groups import PREPARED_TTL_S
from stoker_wire.process.background import Background
from stoker_wire.process.host_identity import host_id
from stoker_wire.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker_nodelet.devices.inventory import GpuLibrary, Inventory
    from stoker_nodelet.telemetry.activity import ActivityLog
    from stoker_wire.http.server.tokens import TokenSigner
    from stoker_wire.settings import Settings

_TICK_S = 0.5
_STOP_S = 2.0
_REPORT_S = 5.0
_DOWNLOAD_S = 120.0
_ARENA_SHARE = 0.3
_ANSWER_S = 0.1


@dataclass(slots=True)
class Parts:
    """The parts of a nodelet, made and not yet at work."""

    identity: Identity
    service: Service
    gcs: Client
    background: Background
    workers: Workers
    exits: Exits
    spool: TaskSpool
    evictor: ArenaEvictor
    transfer: transfer.Transfer
    detached: DetachedCopies
    log_retention: LogRetention
    memory_monitor: MemoryMonitor
    deadlines: Deadlines
    renewals: TokenRenewals
    monitor: GpuMonitor | None


@dataclass(slots=True)
class Nodelet:
    """A nodelet that listens."""

    parts: Parts
    membership: Membership

    @property
    def url(self) -> str:
        return self.parts.service.url

    @property
    def identity(self) -> Identity:
        return self.parts.identity

    @property
    def node_id(self) -> str:
        return self.identity.node_id

    def begin(self, forkserver: ForkServerHandle) -> None:
        """Start to work."""
        parts = self.parts
        workers = parts.workers
        parts.spool.open()
        parts.deadlines.open()
        parts.detached.load()
        workers.forks.attach(forkserver)
        for name, work in (
            ("kernels", workers.kernels.run()),
            ("membership", self.membership.run()),
            ("watch", self.membership.watch()),
            ("exits", parts.exits.run()),
            ("spool", parts.spool.run()),
            ("eviction", parts.evictor.run()),
            ("detached", parts.detached.run()),
            ("memory", parts.memory_monitor.run()),
            ("deadlines", parts.deadlines.run()),
            ("tokens", parts.renewals.run()),
            ("ticks", _tick(workers, parts.log_retention, parts.evictor.activity)),
            (
                "folders",
                workers.users.sweep_jobs(workers.jobs_here, workers.driver_reports.has_ended),
            ),
            (
                "environments",
                workers.users.sweep_environments(workers.state.env_keys, workers.forks.forget),
            ),
        ):
            parts.background.spawn(work, name=name)
        if parts.monitor is not None:
            parts.monitor.begin()
            parts.background.spawn(parts.monitor.run(), name="gpus")

    async def joined(self, timeout_s: float = 30.0) -> None:
        """Wait until the gcs knows this node."""
        async with asyncio.timeout(timeout_s):
            await self.membership.joined.wait()

    async def stop(self) -> None:
        """Leave the cluster, end the workers, and remove its files in shared memory and its sockets."""
        parts = self.parts
        parts.service.ready(False)
        parts.workers.leave()
        await parts.workers.end_in_order()  # before others start again what it has saved
        await self.membership.leave()
        await parts.workers.forks.stop()
        # From here on nobody else flushes: two at once would count a batch twice.
        await parts.background.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await parts.exits.flush()
        await parts.spool.close(_STOP_S)
        await parts.service.stop(grace_s=0.5)
        await parts.transfer.close()
        await parts.gcs.close()
        await remove_cgroups(parts.workers.processes.isolation)
        parts.evictor.arena.close()
        arena.remove_owned(self.identity.arena_dir)
        parts.workers.users.remove()
        if self.identity.socket_dir.parent == arena.SOCKETS:
            arena.remove_owned(self.identity.socket_dir)


async def serve(
    settings: Settings,
    *,
    token: str | TokenSigner,
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
    end: Callable[[], None] | None = None,
) -> Nodelet:
    """Start a nodelet on ``host``:``port`` (0: a free one) that joins the gcs at ``gcs_url``.

    ``token`` is the cluster's secret, or what signs by it.
    ``num_cpus``, ``num_gpus`` and ``memory`` (bytes) default to the settings, then to what the
    machine has. ``forkserver`` is one that was started earlier; ``target`` is the function that
    workers run. ``end`` ends the process that this nodelet is, when its node was drained; one that is part of
    another stays, empty.
    """
    node_id = node_id or new_id(Prefix.NODE)
    end = end or _stay
    check_default(settings.run_as, node_id)
    user_folders.sweep(settings)
    session_dir, socket_dir = _make_folders(session_dir, node_id)
    kernel_cache = open_cache(settings, session_dir)
    if forkserver is None:
        forkserver = start_forkserver(
            target=target, log_path=session_dir / "logs" / f"forkserver-{node_id}.log"
        )
    arena_dir = _make_arena_folder(session_dir, node_id)
    offer = Offer(num_cpus, num_gpus, memory, resources, labels)
    gpus, gpu_library = find_gpus(settings, num_gpus)
    verdict = find_isolation(settings.gpu_isolation, gpus, node_id)
    service = Service("nodelet", settings, token=token)
    identity = Identity(
        node_id=node_id,
        host_id=host_id(),
        endpoint=Endpoint(),
        unix=str(socket_dir / f"{node_id}.sock"),
        gcs_url=gcs_url,
        credential=service.tokens.service_credential(Role.NODE, node_id),
        tokens=service.tokens,
        session_dir=session_dir,
        arena_dir=arena_dir,
        socket_dir=socket_dir,
        fake_gpus=any(device.fake for device in gpus.devices),
        gpu_uuids={
            one.index: one.uuid
            for one in gpus.devices
            if one.mig_profile or (verdict.isolation is not None and one.index in gpus.nodes)
        },
        triton_dir=str(kernel_cache.triton_dir),
    )
    parts = _build_parts(
        settings,
        identity,
        service,
        forkserver.target,
        gpus,
        gpu_library,
        verdict.isolation,
        kernel_cache,
        end,
    )
    try:
        await service.start(host, port, identity.unix)
    except BaseException:
        forkserver.sock.close()
        arena.remove_owned(arena_dir)
        if verdict.isolation is not None:
            verdict.isolation.close()
        raise
    identity.endpoint.listens_at(service.url)
    nodelet = Nodelet(
        parts, _build_membership(parts, _registration(identity, settings, offer, gpus, verdict))
    )
    nodelet.begin(forkserver)
    return nodelet


def _build_parts(
    settings: Settings,
    identity: Identity,
    service: Service,
    target: str,
    gpus: Inventory,
    gpu_library: GpuLibrary | None,
    isolation: Isolation | None,
    kernel_cache: KernelCache,
    end: Callable[[], None],
) -> Parts:
    """Make all parts but the membership, and the routes that lead to them."""
    node_id = identity.node_id
    background = Background(f"nodelet-{node_id}")
    gcs = Client(
        identity.gcs_url, token=identity.credential, peer=f"nodelet {node_id}", settings=settings
    )
    state = State(
        policy=Policy(
            worker_idle_s=settings.worker_idle_s,
            prepared_ttl_s=PREPARED_TTL_S,
            gpu_free_s=settings.gpu_free_timeout_s,
            # One that is to be another user is not forked ahead of need.
            warm_workers=settings.prestart_workers if os.geteuid() or not settings.run_as else 0,
        )
    )
    if gpu_library is not None:
        state.gpus = {device.index: GpuEntry() for device in gpus.devices}
    exits = _build_exits(gcs, state)
    evictor = _build_evictor(settings, identity, state, exits)
    spool = _build_spool(identity, gcs)
    logs = Logs(node_id)
    images = Images(background, settings.container_engine)
    workers = Workers(
        identity=identity,
        state=state,
        target=target,
        users=_build_user_folders(settings, identity, gcs, background, isolation, images),
        kernels=KernelCompiler(
            cache=kernel_cache,
            tables=TuningTables(gcs, kernel_cache),
            devices={device.index: device for device in gpus.devices},
            arch=settings.kernel_arch,
            timeout_s=settings.kernel_compile_timeout_s,
            background=background,
        ),
        exits=exits,
        logs=logs,
        objects=evictor.objects,
        driver_reports=DriverReports(gcs, background),
        background=background,
        containers=Containers.of(settings, identity, images),
        isolation=isolation,
        usage=JobUsage(settings.metrics_max_labels),
    )
    evictor.objects.has_ended = workers.has_ended
    object_transfer = transfer.Transfer(
        node_id,
        identity.endpoint,
        evictor,
        credential=identity.credential,
        settings=settings,
        gcs=gcs,
        background=background,
    )
    detached = DetachedCopies(
        evictor, Path(settings.detached_dir or identity.session_dir / "detached"), gcs
    )
    renewals = TokenRenewals(workers.processes)
    service.behind = renewals.behind
    program_metrics = ProgramMetrics()
    service.metrics.add_programs(program_metrics)
    parts = (workers, exits, evictor.objects, logs, spool, evictor, object_transfer, detached)
    handlers = api.Api(*parts, program_metrics, evictor.activity, end)
    service.add_routes(api.ROUTES, handlers)
    service.add_routes(transfer.ROUTES, object_transfer)
    service.add_routes(profiles.ROUTES, profiles.Profiles.of(workers, settings))
    watermarks = Watermarks(settings.memory_pressure_at, settings.disk_pressure_bytes)
    disks = {"session": identity.session_dir, "spill": evictor.spill_dir}
    measured = (workers, evictor, object_transfer, spool, watermarks, gpus.devices, disks)
    NodeMetrics(*measured).add_to(service.metrics)
    return Parts(
        identity=identity,
        service=service,
        gcs=gcs,
        background=background,
        workers=workers,
        exits=exits,
        spool=spool,
        evictor=evictor,
        transfer=object_transfer,
        detached=detached,
        log_retention=LogRetention(
            identity.log_dir,
            logs,
            max_bytes=settings.log_max_bytes,
            total_bytes=settings.log_total_bytes,
            max_files=settings.log_max_files,
        ),
        memory_monitor=MemoryMonitor(
            workers,
            watermarks,
            threshold=settings.memory_threshold,
            period_s=settings.memory_period_s,
            disks=tuple(disks.values()),
            on_change=workers.gpus.to_report.set,
            measure=partial(node_memory, limited_cgroups()),
        ),
        deadlines=Deadlines(workers),
        renewals=renewals,
        monitor=GpuMonitor(gpu_library, workers) if gpu_library is not None else None,
    )


def _build_exits(gcs: Client, state: State) -> Exits:
    async def report(exits: tuple[WorkerExit, ...]) -> None:
        body = WorkersExited(exits=exits, incarnation=state.incarnation)
        await gcs.call("POST", "/v1/workers/exited", body, timeout_s=_REPORT_S)

    return Exits(report)


def _build_evictor(
    settings: Settings, identity: Identity, state: State, exits: Exits
) -> ArenaEvictor:
    def has_ended(job_id: str, owner_id: str) -> bool:
        return job_id in state.finished_jobs or exits.get(owner_id) is not None

    spill_root = Path(settings.spill_dir or identity.session_dir / "spill")
    return create_arena(
        identity.arena_dir,
        identity.node_id,
        settings,
        spill_dir=spill_root / identity.arena_dir.name,
        limit_bytes=settings.arena_max_bytes or int(limits.memory_limit_bytes() * _ARENA_SHARE),
        has_ended=has_ended,
    )


def _build_spool(identity: Identity, gcs: Client) -> TaskSpool:
    async def forward(frames: bytes) -> None:
        await gcs.call("POST", "/v1/tasks/spooled", frames, timeout_s=_REPORT_S)

    async def knows_node(node_id: str) -> bool:
        try:
            await gcs.call("GET", f"/v1/nodes/{node_id}", reply=Node, retry=False)
        except NotFoundError:
            return False
        return True

    return TaskSpool(identity.session_dir, identity.node_id, forward, knows_node)


def _build_user_folders(
    settings: Settings,
    identity: Identity,
    gcs: Client,
    background: Background,
    isolation: Isolation | None,
    images: Images,
) -> user_folders.UserFolders:
    prefix = isolation.without_gpus if isolation is not None else ()

    reports = BuildReports(identity.node_id, gcs, background)

    async def download(package: str) -> bytes:
        return await gcs.call("GET", f"/v1/packages/{package}", raw=True, timeout_s=_DOWNLOAD_S)

    def make(jobs: Path, root: Path, user: UnixUser | None = None) -> user_folders.Folders:
        shared = Path(settings.job_output_root).absolute() if settings.job_output_root else None
        folders = JobFolders(jobs, settings.job_dir_keep_s, shared, user)
        limits = settings.keep_environments_s, settings.environments_max_bytes
        retention = EnvironmentRetention(root, *limits)
        environments = Environments(
            root,
            download,
            background,
            folders,
            retention,
            settings.package_max_bytes,
            user,
            prefix,
            reports,
            images if user is None else None,
        )
        return user_folders.Folders(folders, environments)

    return user_folders.UserFolders(
        user_folders.folder_of(settings, identity.node_id),
        UnixUsers(identity.node_id, settings.run_as),
        make(identity.session_dir / "jobs", identity.session_dir / "runtime_env"),
        make,
    )


def _build_membership(parts: Parts, registration: RegisterNode) -> Membership:
    service, workers = parts.service, parts.workers

    def on_member(is_member: bool) -> None:
        service.ready(is_member)
        (workers.member.set if is_member else workers.member.clear)()

    return Membership(
        registration,
        parts.gcs,
        workers,
        parts.detached,
        on_member,
        watermarks=parts.memory_monitor.watermarks,
    )


async def _tick(workers: Workers, retention: LogRetention, activity: ActivityLog) -> None:
    while True:
        leases = workers.state.leases.values()
        activity.gpus(sum(sum(entry.terms.gpus.values()) for entry in leases))
        workers.tick()
        workers.usage.tick(workers.state.workers.values(), time.monotonic())
        workers.forks.end_idle()
        workers.logs.poll()
        retention.tick()
        await asyncio.sleep(_TICK_S)


def _make_folders(session_dir: Path, node_id: str) -> tuple[Path, Path]:
    """Make the folders of the session and of the sockets; return both."""
    session_dir = session_dir.absolute()
    socket_dir = arena.socket_folder(session_dir, node_id)
    for folder in (session_dir, session_dir / "logs", session_dir / "tokens"):
        private_dir(folder)
    if socket_dir.parent == session_dir:
        socket_dir.mkdir(mode=0o700, exist_ok=True)
    else:
        arena.remove_abandoned(socket_dir)
        arena.create_owned(socket_dir)
    return session_dir, socket_dir


def _make_arena_folder(session_dir: Path, node_id: str) -> Path:
    """Remove the folders of dead nodelets; make and return that of this one."""
    arena_dir = arena.arena_path(session_dir, node_id)
    arena.sweep()
    arena.sweep(arena.SOCKETS, "stoker-sock-*")
    arena.create_owned(arena_dir)
    return arena_dir


def _registration(
    identity: Identity,
    settings: Settings,
    offer: Offer,
    gpus: Inventory,
    verdict: IsolationVerdict,
) -> RegisterNode:
    """Return the message by which the node introduces itself; it must listen by now."""
    return RegisterNode(
        node_id=identity.node_id,
        url=identity.url,
        unix=identity.unix,
        hostname=socket.gethostname(),
        host_id=identity.host_id,
        pid=os.getpid(),
        resources=_offered_resources(settings, offer, gpus.devices),
        devices=gpus.devices,
        driver_version=gpus.driver_version,
        cuda_version=gpus.cuda_version,
        gpu_error=gpus.error,
        gpu_isolation=verdict.isolation.name if verdict.isolation is not None else "",
        gpu_isolation_error=verdict.reason,
        labels={
            NODE_ID_LABEL: identity.node_id,
            ADDRESS_LABEL: urlsplit(identity.url).hostname or "",
            **gpus.labels,
            **settings.labels,
            **(offer.labels or {}),
        },
        taints=taints_of_setting(settings.taints),
        version=VERSION,
        arena_dir=str(identity.arena_dir),
        session_dir=str(identity.session_dir),
    )


def end_process() -> None:
    """End this process as SIGTERM does, once the request that asked for it is answered."""
    asyncio.get_running_loop().call_later(_ANSWER_S, os.kill, os.getpid(), signal.SIGTERM)


def _stay() -> None:
    raise ConflictError(
        "this node is part of the head, which stays\nit is empty: stop the head to end it"
    )


def _offered_resources(
    settings: Settings, offer: Offer, gpus: tuple[Device, ...]
) -> dict[str, float]:
    num_cpus = settings.num_cpus if offer.num_cpus is None else offer.num_cpus
    memory = settings.memory if offer.memory is None else offer.memory
    offered = {
        "CPU": limits.usable_cpus() if num_cpus is None else num_cpus,
        "memory": float(limits.schedulable_memory_bytes() if memory is None else memory),
        **settings.resources,
        **(offer.resources or {}),
    }
    if gpus:
        offered["GPU"] = float(len(gpus))
    return offered
