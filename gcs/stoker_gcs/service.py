"""The gcs as a service: opens its stores, loads, listens, and runs its loops.

``serve`` returns once it is ready; the embedded head, ``python -m stoker_gcs`` and tests call it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_gcs.api import actors, control, jobs, logs, nodes, outputs, scheduler_proxy, tasks
from stoker_gcs.app import Parts, assemble
from stoker_gcs.controllers.leader_loops import Leading, keep
from stoker_gcs.controllers.maintenance import Upkeep
from stoker_gcs.ephemeral.memory import MemoryHot
from stoker_gcs.store.opening import open_store
from stoker_wire.http.server import Service
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from stoker_gcs.ephemeral.protocol import HotStore
    from stoker_gcs.store.protocol import Store
    from stoker_wire.settings import Settings

DEFAULT_PORT = 7600
LAST_WRITES_S = 5.0


class Running:
    """A gcs that listens. ``stop`` ends it in good order."""

    def __init__(
        self,
        service: Service,
        parts: Parts,
        store: Store,
        background: Background,
        lanes: Background,
        leading: Leading,
    ) -> None:
        self._service = service
        self._store = store
        self._background = background
        self._lanes = lanes
        self._leading = leading
        self.parts = parts

    @property
    def url(self) -> str:
        """Where the gcs listens."""
        return self._service.url

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._service.port

    @property
    def leads(self) -> bool:
        """Whether this replica runs the loops that run once."""
        return self._leading.leads

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop answering, let writes finish, close the stores."""
        await self._service.stop(grace_s)
        await self._background.close()
        await self._leading.resign()
        if len(self._lanes):
            await self.parts.truth.journal.close(LAST_WRITES_S)
        await self._lanes.close()
        await self.parts.links.close()
        await self.parts.hot.stop()
        await self._store.stop()


async def serve(
    settings: Settings,
    *,
    token: str,
    database_url: str,
    redis_url: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
) -> Running:
    """Start a gcs; DatabaseError, PortInUseError and OpenBindError say how to mend it."""
    store = open_store(database_url)
    hot = _hot_store(redis_url)
    background, lanes = Background("gcs"), Background("gcs-journal")
    parts = assemble(store, hot, settings, token, background)
    service = Service("gcs", settings, token=token, authenticator=parts.tokens)
    for module in (nodes, jobs, actors, tasks, control, scheduler_proxy, logs, outputs):
        module.add_routes(service, parts)
    journal = parts.truth.journal
    upkeep = Upkeep(service, parts)
    leading = Leading(
        parts.leaders,
        holder=parts.replica_id,
        url=lambda: service.url,
        alone=not store.shared,
        loops={
            "sweep": parts.nodes.sweep,
            "sessions": parts.sessions.watch,
            "reconcile": parts.reconciler.run,
            "compact": upkeep.compact,
        },
    )
    running = Running(service, parts, store, background, lanes, leading)
    try:
        await store.start()
        await service.start(host, port)
        lanes.spawn(journal.changes.run(), name="changes")
        lanes.spawn(journal.tasks.run(), name="tasks")
        await parts.hot.start(parts.truth.log.poke)
        await parts.load()
        loops = {
            "observe": parts.observe,
            "sessions": parts.sessions.renew,
            "measure": upkeep.measure,
            "leading": leading.run,
        }
        if store.shared:
            loops |= {"tail": parts.truth.log.tail, "hot-facts": parts.hot.save}
        for name, loop in loops.items():
            background.spawn(keep(name, loop), name=name)
    except BaseException:
        await running.stop(0.0)
        raise
    service.ready()
    return running


def _hot_store(redis_url: str | None) -> HotStore:
    if not redis_url:
        return MemoryHot()
    from stoker_gcs.ephemeral.redis import RedisHot

    return RedisHot(redis_url)
