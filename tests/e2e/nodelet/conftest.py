"""A nodelet that joins what tests have for a gcs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.nodelet.nodelet_harness import FakeGcs, Nodelet, start_nodelet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


@pytest.fixture
async def gcs() -> AsyncIterator[FakeGcs]:
    """What the tests of the nodelet have for a gcs."""
    fake = FakeGcs()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def start(gcs: FakeGcs, tmp_path: Path) -> AsyncIterator[Callable[..., object]]:
    """Start nodelets that join ``gcs``; they are stopped at the end."""
    started: list[Nodelet] = []

    async def start(*args: str, **kwargs: object) -> Nodelet:
        one = await start_nodelet(gcs, tmp_path / "session", *args, **kwargs)  # type: ignore[arg-type]
        started.append(one)
        return one

    yield start
    for one in started:
        await one.stop()
