"""The measurement of GPUs, again and again: NVML's calls in a thread, their outcome as events of the core."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from stoker_nodelet.core.events import GpusRead

if TYPE_CHECKING:
    from stoker_nodelet.devices.inventory import GpuLibrary, Sample
    from stoker_nodelet.workers.workers import Workers

_EVERY_S = 2.0
_EVERY_WHILE_LEFT_S = 0.2


class GpuMonitor:
    """The GPUs of a node that ``library`` can measure."""

    def __init__(self, library: GpuLibrary, workers: Workers) -> None:
        self._library = library
        self._workers = workers

    def begin(self) -> None:
        """Measure once, before there are leases: whoever uses a GPU now is none of ours."""
        began_s = time.monotonic()
        self._apply(began_s, self._library.sample(self._workers.state.gpus))

    async def run(self) -> None:
        """Measure until cancelled, and at once when a worker has left a GPU."""
        wanted = self._workers.gpus.wanted
        while True:
            gpus = self._workers.state.gpus
            left = any(gpu.left_at_s is not None for gpu in gpus.values())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EVERY_WHILE_LEFT_S if left else _EVERY_S):
                    await wanted.wait()
            wanted.clear()
            # A GPU that hangs holds up its own measurement alone.
            began_s = time.monotonic()
            self._apply(began_s, await asyncio.to_thread(self._library.sample, tuple(gpus)))

    def _apply(self, began_s: float, sample: Sample) -> None:
        self._workers.gpus.usage = sample.usage
        self._workers.dispatch(GpusRead(at_s=began_s, readings=sample.readings))
        self._workers.gpus.was_read()
