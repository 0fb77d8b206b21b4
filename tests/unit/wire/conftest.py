"""Real services on free ports, and clients for them, stopped when the test ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.http.client.client import Client
from stoker_wire.http.server.service import Service
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOKEN = "correct-horse"


class Cluster:
    """Makes services and clients, and ends them all."""

    def __init__(self) -> None:
        self._ends: list[Any] = []

    def service(self, *, authority: Any = None, **changes: Any) -> Service:
        """A service without routes; ``changes`` are settings."""
        return Service("gcs", Settings(**changes), token=TOKEN, authority=authority)

    async def start(self, service: Service, **where: Any) -> Service:
        await service.start(**{"host": "127.0.0.1", **where})
        service.ready()
        self._ends.append(lambda: service.stop(grace_s=0.2))
        return service

    def client(self, service: Service, **options: Any) -> Client:
        settings = Settings(retry_initial_s=0.001, retry_max_s=0.01)
        given = {"token": TOKEN, "peer": "tester", "settings": settings, **options}
        client = Client(service.url, **given)
        self._ends.append(client.close)
        return client

    async def end(self) -> None:
        for end in reversed(self._ends):
            await end()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    yield made
    await made.end()
