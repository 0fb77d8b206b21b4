"""The measurement of GPUs, again and again: NVML's calls in a thread, their outcome as events of the core."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

from stoker_nodelet.core.events import GpusRead

if TYPE_CHECKING:
    from stoker_nodelet.devices.inventory import GpuLibrary, Sample
    from stoker_nodelet.workers.workers import Workers

_EVERY_S = 2.0
_EVERY_WHILE_LEFT_S = 0.2
_SLOW_S = 10.0
_log = logging.getLogger(__name__)


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
            began_s = time.monotonic()
            self._apply(began_s, await self._sample(tuple(gpus)))

    async def _sample(self, indices: tuple[int, ...]) -> Sample:
        """Measure in a thread for which nobody waits at the end: a call of a broken driver may never return.

        Until it does, what leases leave is quarantined in time, for nobody can tell whether it is free.
        """
        done: concurrent.futures.Future[Sample] = concurrent.futures.Future()

        def measure() -> None:
            try:
                done.set_result(self._library.sample(indices))
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=measure, name="gpu-monitor", daemon=True).start()
        measured = asyncio.wrap_future(done)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(measured), _SLOW_S)
        _log.warning("the driver of the GPUs has not answered for %g s", _SLOW_S)
        return await measured

    def _apply(self, began_s: float, sample: Sample) -> None:
        self._workers.gpus.usage = sample.usage
        self._workers.dispatch(GpusRead(at_s=began_s, readings=sample.readings))
        self._workers.gpus.was_read()
