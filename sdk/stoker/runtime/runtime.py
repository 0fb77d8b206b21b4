"""The composition root of a process, driver or worker: its parts are made and joined here only.

``stoker.init()`` makes the runtime of a driver, :mod:`stoker.runtime.worker.main` that of a worker. It
decides nothing: each part gets the few others that it uses by its constructor. From the ground up: ``net``,
``objects``, ``tasks``, ``actors``, and in a worker ``worker``.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from stoker.exceptions import StokerError
from stoker.runtime.actors.calls import ActorCalls
from stoker.runtime.actors.create import ActorCreator
from stoker.runtime.driver.notebook_output import notebook_output
from stoker.runtime.driver.wait_notices import DriverWaits, WaitNotices
from stoker.runtime.job import JobContext
from stoker.runtime.net.channels import Channels
from stoker.runtime.net.clients import ClusterClients
from stoker.runtime.net.direct_reader import DirectReader
from stoker.runtime.net.gateway_port import GatewayPort
from stoker.runtime.net.metric_reports import MetricReports
from stoker.runtime.net.process_spans import ProcessSpans
from stoker.runtime.net.task_events import TaskEvents
from stoker.runtime.objects.detached import DetachedObjects
from stoker.runtime.objects.store import ObjectStore
from stoker.runtime.objects.table import ObjectTable
from stoker.runtime.objects.unseen_errors import UnseenErrors
from stoker.runtime.objects.values import ValueStore
from stoker.runtime.process.io_thread import IoThread
from stoker.runtime.process.tracing.context import TRACES
from stoker.runtime.router import MessageRouter
from stoker.runtime.tasks.lineage import Lineage
from stoker.runtime.tasks.overdue import OverdueCalls
from stoker.runtime.tasks.pending import PendingCalls
from stoker.runtime.tasks.reconstruction import Reconstruction
from stoker.runtime.tasks.status import TaskStatus
from stoker.runtime.tasks.submitter import TaskSubmitter
from stoker.runtime.worker.blocking import WorkerWaits
from stoker.runtime.worker.call import CallTable
from stoker.runtime.worker.execute import CallExecutor
from stoker_wire.arena import Arena

if TYPE_CHECKING:
    from stoker.runtime.driver.inline import InlineCalls
    from stoker.runtime.driver.wait_bars import WaitBars
    from stoker.runtime.net.channels import Handler
    from stoker.runtime.process.identity import Identity
    from stoker.runtime.tasks.task_spec import PendingTask
    from stoker_wire.settings import Settings

_TICK_S = 0.1
_IDLE_TICK_S = 0.5
_START_S = 20.0
_STOP_S = 8.0
_FLUSH_S = 3.0


class Runtime:
    """The parts of this process that know the cluster. They exist from :meth:`start` on."""

    clients: ClusterClients
    job: JobContext
    channels: Channels
    events: TaskEvents
    spans: ProcessSpans
    objects: ObjectStore
    pending: PendingCalls
    tasks: TaskSubmitter
    actors: ActorCalls
    actor_creator: ActorCreator
    _reader: DirectReader
    _metrics: MetricReports

    def __init__(self, identity: Identity, settings: Settings, *, job_id: str = "") -> None:
        self.identity = identity
        self.settings = settings
        self.io = IoThread(identity.peer_id)
        self.worker: CallExecutor | None = None
        """The execution of others' calls, in a worker."""
        self.inline: InlineCalls | None = None
        """The calls of a driver in local mode, which run in it."""
        self._job_id = job_id
        self._notices: WaitNotices | None = None
        self._wait_bars: WaitBars | None = None
        self._port: GatewayPort | None = None

    def start(self, routes: dict[tuple[str, str], Handler] | None = None) -> None:
        """Start the loop thread and all parts; return when others can reach this process."""
        self.io.start()
        self.io.run(self._start(routes or {}), _START_S)

    async def _start(self, routes: dict[tuple[str, str], Handler]) -> None:
        identity, settings, io = self.identity, self.settings, self.io
        node = identity.node
        arena = Arena(node.arena_dir) if node is not None and not identity.is_foreign else None
        self.clients = clients = ClusterClients(identity, settings, io, arena)
        self.job = job = JobContext(identity, io, clients, self._job_id)
        if clients.gateway is not None:
            self._port = GatewayPort(clients.gateway, identity.peer_id)
            await self._port.open()
        self.channels = channels = Channels(
            identity, io, settings, clients.tls, clients.gateway, self._port
        )
        self.events = events = TaskEvents(identity, io, clients, enabled=settings.task_history)
        self.spans = ProcessSpans(identity, job, events)
        self._metrics = MetricReports(identity, io, clients, job)
        address, gcs = channels.address, clients.gcs
        calls = CallTable()
        pending_by_id: dict[str, PendingTask] = {}
        self._reader = reader = DirectReader(io, pending_by_id)
        waits: DriverWaits | WorkerWaits
        if identity.is_worker:
            waits = WorkerWaits(io, clients, job, calls)
        else:
            waits = DriverWaits(settings.wait_notice_s)
        values = ValueStore(
            identity, address, io, clients, arena, job, inline_max_bytes=settings.inline_max_bytes
        )
        table = ObjectTable()
        unseen = UnseenErrors(io.loop, enabled=settings.log_unseen_errors)
        lineage = Lineage(settings.lineage_max_bytes)
        self.objects = objects = ObjectStore(
            address,
            io,
            channels,
            reader,
            waits,
            table,
            values,
            unseen,
            clients,
            lineage,
            DetachedObjects(identity, io, clients, job, table, values),
        )
        status = TaskStatus(identity.peer_id, job, events)
        self.pending = pending = PendingCalls(io, channels, objects, status, pending_by_id, lineage)
        overdue = OverdueCalls(io)
        self.tasks = tasks = TaskSubmitter(
            address, settings, io, channels, clients, objects, pending, overdue
        )
        objects.recovery.maker = Reconstruction(
            io, objects, pending, lineage, events, tasks.resubmit
        )
        self.actors = actors = ActorCalls(
            address, io, channels, gcs, job, objects, pending, overdue
        )
        self.actor_creator = ActorCreator(address, io, clients, job, objects, actors)
        if isinstance(waits, WorkerWaits):
            self.worker = CallExecutor(
                identity, address, io, reader, clients, events, job, objects, pending, calls, waits
            )
            if settings.slow_task_stacks:
                from stoker.runtime.process.profiles.slow_tasks import SlowTasks

                self.worker.slow_tasks = SlowTasks(
                    settings.slow_task_stacks, io, clients, calls, identity.peer_id
                )
        else:
            self._notices = WaitNotices(waits, io, gcs, job, tasks.leases, actors)
            if settings.wait_notice_s and notebook_output() is not None:
                from stoker.runtime.driver.wait_bars import WaitBars

                self._wait_bars = WaitBars(waits)
        io.on_wake(tasks.flush, actors.flush, objects.flush)
        router = MessageRouter(io, reader, objects, pending, tasks, actors, overdue, self.worker)
        await channels.serve(job, self.clients.may_open, routes, router.on_messages, router.on_lost)
        io.background.spawn(events.run(), name="task-events")
        io.loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        if not self.io.running:
            return
        self.io.flush()  # a signal may have come between a thread's append and its wake-up
        self.tasks.tick()
        self.pending.status.tick()
        self._metrics.tick()
        self.spans.tick()
        self.events.tick()
        busy = self.tasks.busy
        if self._notices is not None:
            self._notices.tick()
        if self._wait_bars is not None:
            self._wait_bars.tick()
        if self.worker is not None:
            self.worker.tick()
            busy = busy or self.worker.busy
        self.io.loop.call_later(_TICK_S if busy else _IDLE_TICK_S, self._tick)

    def stop(self) -> None:
        """Return leases, send the last records, close channels, end the loop thread."""
        if not self.io.running:
            return
        self.io.running = False
        with contextlib.suppress(StokerError, TimeoutError):
            self.io.run(self._stop(), _STOP_S)
        TRACES.close(_FLUSH_S)
        self.io.stop()
        self._reader.close()

    async def _stop(self) -> None:
        self.objects.unseen.on_job_end()
        self.pending.close()
        await self.tasks.close()
        self.objects.close()
        self.objects.flush()
        self.spans.record()
        with contextlib.suppress(StokerError, TimeoutError):
            await asyncio.wait_for(self.events.flush(), _FLUSH_S)
        with contextlib.suppress(StokerError, TimeoutError):
            await asyncio.wait_for(self._metrics.flush(), _FLUSH_S)
        await self.channels.close()
        await self.io.background.close(2.0)
        self.events.close()
        await self.clients.close()
        await self.io.loop.shutdown_default_executor()

    async def forward_history(self) -> None:
        """Return once all that this process and its node have recorded so far is in the history."""
        self.spans.record()
        await self.events.forward()

    async def leave(self) -> None:
        """Send finished results and close the channels behind them: this process ends next."""
        if self.worker is not None:
            await self.worker.flush_all()
        self.io.running = False
        self.pending.close()
        await self.tasks.close()
        self.objects.flush()
        self.spans.record()
        await self.events.flush()
        await self._metrics.flush()
        await self.channels.close_channels()  # closing the server would wait for handlers
        TRACES.close(_FLUSH_S)  # nothing else has to be done here
