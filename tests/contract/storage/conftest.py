"""Stores for the tests of keys."""

from __future__ import annotations

import pytest

from tests.contract.gcs_support import migrate


@pytest.fixture(params=["sqlite", "postgres"])
async def durable_url(request: pytest.FixtureRequest) -> str:
    """The URL of each store that a restart does not empty."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    await migrate(url)
    return url
