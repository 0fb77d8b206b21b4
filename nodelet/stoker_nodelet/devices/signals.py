"""The signals between the lease machine, the measurement of GPUs and the node's membership."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class GpuSignals:
    """``wanted`` is set to have GPUs measured now, ``to_report`` to have a change of them reported now."""

    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    to_report: asyncio.Event = field(default_factory=asyncio.Event)
    usage: Mapping[str, float] = field(default_factory=dict)
    """The last measurement, for the heartbeat."""
    _read: asyncio.Event = field(default_factory=asyncio.Event)

    def was_read(self) -> None:
        """Wake those who wait for a measurement."""
        self._read.set()
        self._read = asyncio.Event()

    async def wait_read(self) -> None:
        """Wait for the next measurement."""
        await self._read.wait()
