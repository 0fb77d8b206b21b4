"""The control plane of a world: the real services of gcs and scheduler over the world's network and database.

Only what touches the machine is replaced: the HTTP server and clients here, the database and Redis in
:mod:`tests.sim.world.stores`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import stoker_gcs.service as gcs_service
import stoker_scheduler.service as scheduler_service
from stoker_scheduler.core.machine import step
from stoker_wire.errors import StokerError
from stoker_wire.http.server.tokens import TokenSigner
from tests.sim.world.loop import CURRENT, Process
from tests.sim.world.server import Server, watch_response
from tests.sim.world.wire import SimClient, SimClientPool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker_gcs.app import GcsApp
    from stoker_scheduler.core.state import State
    from stoker_wire.process.pauses import Pauses
    from stoker_wire.settings import Settings
    from tests.sim.world.network import Network


RING_SIZE = 16
"""So few events are kept in memory, so that readers who lag read those in the database."""
SUPERVISED_S = 1.0
"""A gcs that cannot start ends, and is started again so much later."""


class _Metrics:
    """Metrics that nobody reads."""

    def show(self, name: str, read: object) -> None:
        """Show nothing."""


class _Guard:
    """The check of requests, which takes sessions of browsers as well."""

    sessions: object = None


class _Dispatcher:
    """What services set at their dispatcher."""

    pauses: Pauses | None = None

    def end_requests_of(self, token_id: str) -> None:
        """Cut off nothing: all are the cluster's."""


class SimService:
    """An HTTP service (:class:`stoker_wire.http.server.service.Service`) on the world's network."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._tables: list[tuple[Any, Any]] = []
        self._server: Server | None = None
        self._ready = False
        self.dispatcher = _Dispatcher()
        self.metrics = _Metrics()
        self.tokens = TokenSigner("t")
        self.guard = _Guard()
        self.obstacle = ""
        self.url = ""
        self.port = 0

    @property
    def is_ready(self) -> bool:
        return self._ready

    def add_routes(self, routes: Any, owner: Any) -> None:
        self._tables.append((routes, owner))

    async def start(self, host: str, port: int) -> None:
        process = CURRENT.get()
        assert process is not None
        self.url, self.port = f"http://{host}:{port}", port
        self._server = Server(self._network, process, self.url)
        self._server.pauses = self.dispatcher.pauses
        for routes, owner in self._tables:
            self._server.add_routes(routes, owner)

    def ready(self, is_ready: bool = True) -> None:
        self._ready = is_ready
        if self._server is not None:
            self._server.is_ready = is_ready

    async def stop(self, grace_s: float | None = None) -> None:
        self.ready(False)


class Gcs:
    """One gcs: a process that may be killed and started again at the same URL."""

    def __init__(self, world: Any, index: int) -> None:
        self._world, self.index = world, index
        self.url = f"http://gcs{index}:7600"
        self.process = Process(f"gcs{index}", f"gcs{index}")
        self.app: GcsApp | None = None

    def start(self) -> None:
        """Start it, anew if it ran before."""
        self.process = Process(f"gcs{self.index}", f"gcs{self.index}")
        self.app = None
        self.process.spawn(self._serve(self.process))

    async def _serve(self, process: Process) -> None:
        try:
            running = await gcs_service.serve(
                self._world.settings, token="t", database_url="", host=f"gcs{self.index}", port=7600
            )
        except StokerError:  # its database does not answer
            process.kill()
            if self.process is process:
                self._world.start_later(self, SUPERVISED_S)
            return
        if self.process is process:
            self.app = running.app


class Scheduler:
    """One scheduler, leading or standing by."""

    def __init__(self, world: Any, index: int) -> None:
        self._world, self.index = world, index
        self.url = f"http://scheduler{index}:8266"
        self.process = Process(f"scheduler{index}", f"scheduler{index}")
        self.service: scheduler_service.SchedulerService | None = None

    def start(self) -> None:
        """Start it, anew if it ran before."""
        self.process = Process(f"scheduler{self.index}", f"scheduler{self.index}")
        self.process.spawn(self._serve())

    async def _serve(self) -> None:
        world = self._world
        self.service = service = scheduler_service.SchedulerService(
            world.settings, token="t", gcs_url=world.gcs_url
        )
        await service.start(f"scheduler{self.index}", 8266)

    @property
    def state(self) -> State | None:
        """The state of its core, while it has a term."""
        engine = self.service._engine if self.service is not None else None
        return engine.state if engine is not None else None


@contextlib.contextmanager
def on_world(world: Any, settings: Settings) -> Iterator[None]:
    """Have the services use the world's network, database and Redis."""
    network = world.network

    def service(*_: Any, **__: Any) -> SimService:
        return SimService(network)

    def client(url: str, *, peer: str, **_: Any) -> SimClient:
        return SimClient(network, _current(), url, peer)

    def pool(*, peer: str, **_: Any) -> SimClientPool:
        return SimClientPool(network, _current(), peer)

    def checked_step(state: State, event: Any) -> Any:
        commands = step(state, event)
        world.scheduler_stepped(state, event)
        return commands

    patches = {
        "stoker_gcs.service.Service": service,
        "stoker_gcs.service.open_store": lambda _: world.database,
        "stoker_gcs.service._open_redis": lambda _: world.ephemeral(),
        "stoker_gcs.ephemeral.redis.redis_client.Redis": world.redis,
        "stoker_gcs.peer_clients.ClientPool": pool,
        "stoker_gcs.state.event_log.RING_SIZE": RING_SIZE,
        "stoker_gcs.api.events.watch_response": watch_response,
        "stoker_gcs.registry.nodes.probes.refuses_connections": network.refuses,
        "stoker_gcs.controllers.leader_election.refuses_connections": network.refuses,
        "stoker_gcs.controllers.leader_election.answers": network.answers,
        "stoker_gcs.registry.jobs.driver_processes.pid_namespace": world.pid_namespace,
        "stoker_gcs.registry.jobs.driver_processes.start_time": world.start_time,
        "stoker_scheduler.service.Service": service,
        "stoker_scheduler.service.Client": client,
        "stoker_scheduler.service.ClientPool": pool,
        "stoker_scheduler.engine.step": checked_step,
        "stoker_nodelet.api.pid_namespace": world.pid_namespace,
        "stoker_nodelet.api.start_time": world.start_time,
        "stoker.runtime.net.clients.ClientPool": pool,
        "stoker.runtime.net.clients.Arena": lambda _: None,
        "stoker.runtime.worker.cancellation.os": _Os(world),
    }
    with contextlib.ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(mock.patch(name, value))
        yield


class _Os:
    """The end of a worker by itself."""

    def __init__(self, world: Any) -> None:
        self._world = world

    def _exit(self, status: int) -> None:
        process = _current()
        for worker in list(self._world.workers.values()):
            if worker.process is process:
                worker.exit(status)


def _current() -> Process:
    process = CURRENT.get()
    assert process is not None
    return process
