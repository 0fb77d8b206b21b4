"""The scheduler as a service: ``serve`` starts it, and returns when it listens.

It listens first (its URL is what it campaigns with), then campaigns; ``/readyz`` turns green when
it leads and knows the nodes and their leases. A standby stays not ready and names the leader.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from stoker_scheduler.api import Api, not_loaded
from stoker_scheduler.engine import Engine, not_leader
from stoker_scheduler.gcs_feed import Cluster
from stoker_scheduler.leadership import Leadership
from stoker_wire.http.client import Client
from stoker_wire.http.server import Service
from stoker_wire.ids import Prefix, new_id
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from stoker_wire.messages.control import Leader
    from stoker_wire.settings import Settings

DEFAULT_PORT = 8266
RESIGN_TIMEOUT_S = 1.0


class Running:
    """A scheduler that listens. ``stop`` ends it in good order."""

    def __init__(self, settings: Settings, *, token: str, gcs_url: str) -> None:
        self._settings = settings
        self._token = token
        self._service = Service("scheduler", settings, token=token)
        self._gcs = Client(gcs_url, token=token, peer="scheduler", settings=settings)
        self._background = Background("scheduler.life")
        self._engine: Engine | None = None
        self._leadership: Leadership | None = None
        self._leads = asyncio.Event()
        Api(self._service, self._current, settings.lease_ttl_s)
        self._add_metrics()

    @property
    def url(self) -> str:
        """Where the scheduler listens."""
        return self._service.url

    @property
    def leads(self) -> bool:
        """Whether it leads and may be used."""
        return self._service.is_ready

    async def until_leads(self, timeout_s: float) -> None:
        """Wait until this scheduler leads; TimeoutError after ``timeout_s``."""
        async with asyncio.timeout(timeout_s):
            await self._leads.wait()

    async def start(self, host: str, port: int) -> None:
        """Listen, and campaign in the background."""
        await self._service.start(host, port)
        self._leadership = Leadership(
            self._gcs,
            holder=new_id(Prefix.PEER),
            url=self._service.url,
            ttl_s=self._settings.leader_ttl_s,
            begin=self._begin,
            renewed=self._renewed,
            end=self._end,
            log=self._service.log,
        )
        self._background.spawn(self._leadership.run(), name="campaign")

    async def stop(self) -> None:
        """Stop answering, then end the term."""
        await self._background.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()
        await self._service.stop()
        await self._gcs.close()

    def _current(self) -> Engine:
        if self._service.is_ready and self._engine is not None:
            return self._engine
        leadership = self._leadership
        if self._engine is not None or leadership is None or not leadership.leader_url:
            raise not_loaded()
        raise not_leader(leadership.leader_url)

    async def _begin(self, leader: Leader) -> None:
        engine = Engine(
            self._settings,
            token=self._token,
            epoch=leader.epoch,
            log=self._service.log,
            fenced=self._doubt,
        )
        self._engine = engine
        cluster = Cluster(self._gcs, engine, self._service.log)
        try:
            seq = await cluster.load()
        except BaseException:
            self._engine = None
            await engine.close()
            raise
        engine.background.spawn(cluster.follow(seq), name="follow the gcs")
        self._service.ready()
        self._leads.set()

    def _renewed(self, leader: Leader) -> None:
        if self._engine is not None:
            self._engine.set_epoch(leader.epoch)

    async def _end(self, leader_url: str) -> None:
        self._service.ready(False)
        self._leads.clear()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close(leader_url)

    def _doubt(self) -> None:
        if self._leadership is not None:
            self._leadership.doubt()

    def _add_metrics(self) -> None:
        metrics = self._service.metrics

        def count(name: str, meaning: str, of: str) -> None:
            def value() -> float:
                engine = self._engine
                if engine is None:
                    return 0.0
                found = getattr(engine.state, of)
                return float(found if isinstance(found, int) else len(found))

            metrics.gauge(name, meaning).set_function(value)

        count("scheduler_leases", "Leases that exist.", "leases")
        count("scheduler_requests", "Requests that are not answered yet.", "asks")
        count("scheduler_nodes", "Nodes that are known.", "nodes")
        count("scheduler_placed", "Leases placed in this term.", "placed")


async def serve(
    settings: Settings,
    *,
    token: str,
    gcs_url: str,
    host: str | None = None,
    port: int | None = None,
) -> Running:
    """Start a scheduler; returns once it listens (see ``/readyz`` for when it leads)."""
    running = Running(settings, token=token, gcs_url=gcs_url)
    try:
        await running.start(
            settings.host if host is None else host, settings.port if port is None else port
        )
    except BaseException:
        await running.stop()
        raise
    return running
