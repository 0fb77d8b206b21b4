"""The gcs as a service: opens its stores, loads, listens, and runs its loops.

``serve`` returns once it is ready; the embedded head, ``python -m stoker_gcs`` and tests call it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from stoker_gcs.api.routes import ROUTES
from stoker_gcs.app import GcsApp, build_app
from stoker_gcs.controllers.leader_election import GCS, LeaderLoops, run_forever
from stoker_gcs.controllers.maintenance import Maintenance
from stoker_gcs.controllers.task_metrics import TaskMetrics
from stoker_gcs.dashboard.parts import Dashboard
from stoker_gcs.dashboard.routes import ROUTES as DASHBOARD
from stoker_gcs.ephemeral.memory import MemoryEphemeralStore
from stoker_gcs.store.opening import open_store
from stoker_wire.http.server.service import Service
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.process.background import Background
from stoker_wire.process.pauses import Pauses

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from stoker_gcs.ephemeral.redis import RedisEphemeralStore
    from stoker_gcs.store.protocol import Store
    from stoker_wire.settings import Settings

DEFAULT_PORT = 7600
LAST_WRITES_S = 5.0


class Running:
    """A gcs that listens. ``stop`` ends it in good order."""

    def __init__(
        self,
        service: Service,
        app: GcsApp,
        store: Store,
        background: Background,
        writers: Background,
        leader_loops: LeaderLoops,
    ) -> None:
        self._service = service
        self._store = store
        self._background = background
        self._writers = writers
        self._leader_loops = leader_loops
        self.app = app

    @property
    def url(self) -> str:
        """The URL at which the gcs listens."""
        return self._service.url

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._service.port

    @property
    def leads(self) -> bool:
        """Whether this replica runs the loops that run once."""
        return self._leader_loops.leads

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop answering, let writes finish, close the stores."""
        await self._service.stop(grace_s)
        if self._service.dispatcher.pauses is not None:
            self._service.dispatcher.pauses.stop()
        await self._background.close()
        self.app.presence.forget(GCS, self.app.replica_id)
        await self._leader_loops.resign()
        if len(self._writers):
            await self.app.state.writer.close(LAST_WRITES_S)
        await self._writers.close()
        await self.app.peers.close()
        await self.app.ephemeral.stop()
        await self._store.stop()


async def serve(
    settings: Settings,
    *,
    token: str | TokenSigner,
    database_url: str,
    redis_url: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
) -> Running:
    """Start a gcs; DatabaseError, PortInUseError and OpenBindError say how to mend it."""
    store = open_store(database_url)
    background, writers = Background("gcs"), Background("gcs-writers")
    pauses = Pauses() if store.shared else None
    tokens = token if isinstance(token, TokenSigner) else TokenSigner(token)
    redis = _open_redis(redis_url)
    app = build_app(store, redis or MemoryEphemeralStore(), settings, tokens, background, pauses)
    service = Service("gcs", settings, token=tokens, authority=app.access)
    service.behind = app.sessions.behind
    service.dispatcher.pauses = pauses
    service.add_routes(ROUTES, app)
    service.add_routes(DASHBOARD, Dashboard(app, service))
    service.dispatcher.on_refused = app.audit.note_refused
    app.tokens.on_revoked = service.dispatcher.end_requests_of
    leader_loops = LeaderLoops(
        app.election,
        holder=app.replica_id,
        sole_replica=not store.shared,
        loops={
            "sweep": app.nodes.sweep,
            "silence": app.probes.follow_silence,
            "drains": app.drains.run,
            "sessions": app.sessions.fail_lost,
            "reconcile": app.reconciler.run,
            "objects": app.object_controller.run,
            "schedules": app.schedule_controller.run,
            "retention": app.retention.run,
            "snapshots": app.snapshots.run,
            "keys": app.kv.sweep,
            "usage": app.usage.run,
        },
    )
    maintenance = Maintenance(
        service,
        app.state,
        nodes=app.nodes,
        jobs=app.jobs,
        history=app.history,
        leads=lambda: leader_loops.leads,
    )
    if redis is not None:
        maintenance.show_redis(redis)
    app.history.on_stored = TaskMetrics(service.metrics, settings.metrics_max_labels).count
    running = Running(service, app, store, background, writers, leader_loops)

    def note_secrets() -> None:
        if leader_loops.leads:  # each replica sees the change, one writes it
            background.spawn(app.audit.note_secrets(tokens.secret), name="secrets")

    tokens.secret.on_change(note_secrets)
    try:
        await store.start()
        if pauses is not None:
            pauses.start()
        await service.start(host, port)
        app.url = service.url
        writers.spawn(app.state.writer.changes.run(), name="changes")
        writers.spawn(app.state.writer.tasks.run(), name="tasks")
        await app.ephemeral.start(app.state.log.notify)
        await app.load()
        loops: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "follow-log": app.follow_log,
            "probes": app.probes.follow_connections,
            "sessions": app.sessions.renew,
            "audit": app.audit.run,
            "presence": partial(app.presence.run, GCS, app.replica_id, service.url),
            "leader-loops": partial(leader_loops.run, service.url),
        }
        if store.shared:
            loops |= {
                "tail": app.state.log.tail,
                "ephemeral": app.ephemeral.save,
                "database": maintenance.watch_database,
            }
        for name, loop in loops.items():
            background.spawn(run_forever(name, loop), name=name)
    except BaseException:
        await running.stop(0.0)
        raise
    service.ready()
    return running


def _open_redis(redis_url: str | None) -> RedisEphemeralStore | None:
    if not redis_url:
        return None
    from stoker_gcs.ephemeral.redis import RedisEphemeralStore

    return RedisEphemeralStore(redis_url)
