"""Fixtures of the contract tests: a running gcs, and a fake scheduler that leads there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.contract.gcs_support import gcs, migrate, scheduler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stoker_gcs.service import Running
    from stoker_wire.http.client.client import Client
    from tests.contract.gcs_support import FakeScheduler


@pytest.fixture
async def served(sqlite_url: str) -> AsyncIterator[tuple[Running, Client]]:
    async with gcs(sqlite_url) as both:
        yield both


@pytest.fixture
def client(served: tuple[Running, Client]) -> Client:
    return served[1]


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def stored(request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """A client of a gcs on each store."""
    url = "memory://"
    if request.param != "memory":
        url = request.getfixturevalue(f"{request.param}_url")
        await migrate(url)
    async with gcs(url) as (_, made):
        yield made


@pytest.fixture
async def fake(client: Client) -> AsyncIterator[FakeScheduler]:
    async with scheduler(client) as made:
        yield made
