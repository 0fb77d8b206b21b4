"""The control plane of a world: the real services of gcs and scheduler over the world's network and database.

Only what touches the machine is replaced: the HTTP server, clients, the database and Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec

import stoker_gcs.service as gcs_service
import stoker_scheduler.service as scheduler_service
from stoker_gcs.state.schema import EVENTS
from stoker_gcs.store.memory import MemoryStore
from stoker_scheduler.core.machine import step
from tests.sim.world.loop import CURRENT, Process
from tests.sim.world.server import Server, watch_response
from tests.sim.world.wire import SimClient, SimClientPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from random import Random

    from stoker_gcs.app import GcsApp
    from stoker_gcs.store.changes import Change, Condition, Row
    from stoker_scheduler.core.state import State
    from stoker_wire.process.pauses import Pauses
    from stoker_wire.settings import Settings
    from tests.sim.world.network import Network


RING_SIZE = 16
"""So few events are kept in memory, so that readers who lag read those in the database."""
COMMIT_S = 0.002
"""How long a commit takes at most."""
LATE_ANSWERS = 0.3
"""How often the answer of a commit comes later than what it wrote is seen."""


class _Gauge:
    """A metric that nobody reads."""

    def labels(self, *_: str) -> _Gauge:
        return self

    def set(self, _: float) -> None:
        return None

    def set_function(self, _: Callable[[], float]) -> None:
        return None


class _Metrics:
    """Metrics that nobody reads."""

    def gauge(self, *_: Any) -> _Gauge:
        return _Gauge()


class _Dispatcher:
    """What services set at their dispatcher."""

    pauses: Pauses | None = None


class SimService:
    """An HTTP service (:class:`stoker_wire.http.server.service.Service`) on the world's network."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._tables: list[tuple[Any, Any]] = []
        self._server: Server | None = None
        self._ready = False
        self.dispatcher = _Dispatcher()
        self.metrics = _Metrics()
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


class Database(MemoryStore):
    """The SQL database of a world: it outlives every gcs, and takes a moment for each commit."""

    def __init__(self, random: Random, *, shared: bool) -> None:
        super().__init__()
        self.shared = shared  # type: ignore[misc]
        self._random = random
        self.after_commit: Callable[[], None] = lambda: None

    async def commit(self, changes: Sequence[Change]) -> Any:
        random = self._random.random
        await asyncio.sleep(random() * COMMIT_S)
        results = await super().commit(changes)
        self.after_commit()
        if random() < LATE_ANSWERS:
            await asyncio.sleep(random() * COMMIT_S)
        return results

    async def select(  # type: ignore[override]
        self, table: Any, where: Mapping[str, Condition] | None = None, **more: Any
    ) -> list[Row]:
        if table is EVENTS and where and "subject" in where:
            # As by an index: the log is long.
            wanted = where["subject"]
            subjects = wanted if isinstance(wanted, tuple) else (wanted,)
            every, self._events = self._events, [e for e in self._events if e.subject in subjects]
            try:
                return await super().select(table, where, **more)
            finally:
                self._events = every
        return await super().select(table, where, **more)

    def rows(self, name: str, record: type[Any]) -> list[Any]:
        """Return all records of a table."""
        decode = _decoder(record).decode
        return [decode(row["record"]) for row in self._tables[name].values()]


@functools.cache
def _decoder(record: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(record)


class Redis:
    """The ephemeral entries of a world, which outlive every gcs."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, tuple[bytes, float]]] = {}
        self.listeners: list[tuple[Process, Callable[[int], None]]] = []


class RedisClient:
    """One gcs's client of Redis (:class:`stoker_gcs.ephemeral.protocol.EphemeralStore`)."""

    shared = subscribed = True
    degraded = False

    def __init__(self, redis: Redis, process: Process) -> None:
        self._redis, self._process = redis, process

    async def start(self, on_announce: Callable[[int], None]) -> None:
        self._redis.listeners.append((self._process, on_announce))

    async def stop(self) -> None:
        return None

    def put(self, kind: str, key: str, value: bytes, ttl_s: float) -> None:
        self._redis.entries.setdefault(kind, {})[key] = (value, time.time() + ttl_s)

    def remove(self, kind: str, key: str) -> None:
        self._redis.entries.get(kind, {}).pop(key, None)

    async def all(self, kind: str) -> dict[str, bytes]:
        now_s = time.time()
        entries = self._redis.entries.get(kind, {})
        return {key: value for key, (value, until_s) in entries.items() if until_s > now_s}

    def announce(self, seq: int) -> None:
        loop = asyncio.get_running_loop()
        for process, listener in self._redis.listeners:
            if process is not self._process and not process.dead:
                loop.call_later(0.001, listener, seq, context=process.context)


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
        running = await gcs_service.serve(
            self._world.settings, token="t", database_url="", host=f"gcs{self.index}", port=7600
        )
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
        "stoker_gcs.service._ephemeral_store": lambda _: world.ephemeral(_current()),
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
    }
    with contextlib.ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(mock.patch(name, value))
        yield


def _current() -> Process:
    process = CURRENT.get()
    assert process is not None
    return process
