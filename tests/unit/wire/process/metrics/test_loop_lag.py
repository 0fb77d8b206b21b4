"""The lag of an event loop is seen where something holds it up."""

from __future__ import annotations

import asyncio
import time

from stoker_wire.process.metrics.loop_lag import LoopLag


def hold_up(seconds: float) -> None:
    time.sleep(seconds)


async def test_a_loop_that_is_held_up_is_late() -> None:
    lag = LoopLag()
    lag.start()
    hold_up(1.2)
    await asyncio.sleep(0.01)  # what is due runs before
    lag.stop()
    assert sum(lag.seconds.counts) == 1 and lag.seconds.total > 0.6
    await asyncio.sleep(0.6)
    assert sum(lag.seconds.counts) == 1, "it was stopped"
