"""Fixtures of the scheduler's tests: a service that is ready to lead."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from tests.unit.scheduler.service_setup import Setup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        made = Setup(stack)
        await made.gcs.start()
        stack.push_async_callback(made.gcs.service.stop, 0.1)
        yield made
