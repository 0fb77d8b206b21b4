"""A store of each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stoker_gcs.store.opening import open_store
from tests.contract.gcs_support import migrate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stoker_gcs.store.protocol import Store

KINDS = ("memory", "sqlite-memory", "sqlite-file", "postgres")


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    match request.param:
        case "memory":
            url = "memory://"
        case "sqlite-memory":
            url = "sqlite://"
        case "sqlite-file":
            url = request.getfixturevalue("sqlite_url")
        case _:
            url = request.getfixturevalue("postgres_url")
            await migrate(url)
    made = open_store(url)
    await made.start()
    yield made
    await made.stop()
